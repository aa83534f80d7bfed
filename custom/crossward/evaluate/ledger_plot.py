"""What a site has spent of its privacy budget, round by round."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_SPENT, _BUDGET, _SOFT, _RULE = "#0072b2", "#b35900", "#566472", "#d5dce3"
_LONGEST_NAME = 24


def ledger_picture(points: Sequence[Mapping[str, Any]], *, name: str, budget: float | None, delta: float) -> bytes:
    """A PNG with epsilon over the rounds of all runs, one after the other, and the budget as a line.

    Args:
        points: a row for each round with its "run" and the "epsilon" after it, oldest first.
        name: of the ledger.
        budget: epsilon that is allowed, where the site has set one.
        delta: that epsilon goes with.
    """
    # Takes a second to import, and only a plot needs it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    spent = [0.0, *(float(point["epsilon"]) for point in points)]
    axes.plot(range(len(spent)), spent, "o-", color=_SPENT, linewidth=1.8, markersize=3.5, label="spent")
    if budget is not None:
        axes.axhline(budget, color=_BUDGET, linestyle="--", linewidth=1.8, label=f"budget {budget:g}")
    _mark_runs(axes, points)
    axes.set_ylim(0, 1.12 * max(budget or 0.0, *spent) or 1.0)
    axes.set_xlim(0, max(len(points), 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds, of all runs on this data")
    axes.set_ylabel(f"epsilon at delta {delta:g}")
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Privacy spent: {name}", fontsize=12, loc="left")
    axes.legend(fontsize=9, frameon=False, loc="best")
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _mark_runs(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Where a run begins, and which it is."""
    start = 0
    for run, rounds in groupby(point["run"] for point in points):
        if start:
            axes.axvline(start, color=_RULE, linewidth=1)
        shown = run if len(run) <= _LONGEST_NAME else f"{run[: _LONGEST_NAME - 1]}…"
        axes.annotate(
            shown, (start, 1), (4, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8, color=_SOFT, va="top",
        )  # fmt: skip
        start += len(list(rounds))
