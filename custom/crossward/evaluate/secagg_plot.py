"""The time of secure aggregation at a site by number of peers and by size of the model, against what is possible."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

_OURS, _FLOWER, _LIMIT = "#0072b2", "#b35900", "#566472"


def scaling_picture(rows: Sequence[Mapping[str, Any]], *, parameters: int, peers: int) -> bytes:
    """A PNG with two plots: time by peers for one size of model, and by size for one number of peers.

    Args:
        rows: of ``bench secagg``, a site's work; Flower's where it was measured.
        parameters: the size of the first plot.
        peers: their number in the second plot.
    """
    # Takes a second to import, and every bench command would wait for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(
        left,
        [row for row in rows if row["parameters"] == parameters],
        across="peers",
        title=f"{_short(parameters)} parameters",
    )
    _draw(right, [row for row in rows if row["peers"] == peers], across="parameters", title=f"{peers} peers")
    left.set_ylabel("milliseconds a round at one site")
    left.set_xlabel("other sites")
    right.set_xlabel("parameters of the model")
    figure.suptitle("Secure aggregation at a site: from its update to what it sends", fontsize=12, x=0.01, ha="left")
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], *, across: str, title: str) -> None:
    rows = sorted(rows, key=lambda row: row[across])
    flower = [row for row in rows if "flower" in row]
    if flower:
        _line(axes, flower, across, [row["flower"]["seconds"] for row in flower], "Flower SecAgg+", _FLOWER, "s-")
    _line(axes, rows, across, [row["ours"]["seconds"] for row in rows], "Crossward", _OURS, "o-")
    limit = "limit: AES-256 and adding, nothing else"
    _line(axes, rows, across, [row["limit seconds"] for row in rows], limit, _LIMIT, "--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [row[across] for row in rows]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.grid(axis="y", color="#d5dce3")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=9, frameon=False)


def _line(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    across: str,
    seconds: Sequence[float],
    label: str,
    colour: str,
    style: str,
) -> None:
    axes.plot(
        [row[across] for row in rows],
        [1e3 * each for each in seconds],
        style,
        color=colour,
        label=label,
        linewidth=1.8,
        markersize=5,
    )


def _short(number: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return str(number)
