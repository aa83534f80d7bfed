"""What differential privacy costs, as a picture: a curve for each method."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MARKERS = "osD^vPX"
_SOFT, _RULE = "#566472", "#d5dce3"
_APART = 0.03


def epsilon_picture(
    curves: Mapping[str, Mapping[str, Sequence[float]]], *, metric: str, ground: float | None = None
) -> bytes:
    """A PNG of a metric against epsilon.

    Args:
        curves: for each method, by epsilon as it was given, the values of all seeds, as parts of one.
        metric: its name.
        ground: what ignoring the images scores.
    """
    # Takes a second to import, and only a plot needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    columns = list(next(iter(curves.values())))
    for place, (name, curve) in enumerate(curves.items()):
        shift = (place - (len(curves) - 1) / 2) * _APART
        points = [(index + shift, values) for index, values in enumerate(curve.values()) if values]
        axes.errorbar(
            [x for x, _ in points],
            [100 * statistics.fmean(values) for _, values in points],
            yerr=[100 * statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points],
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            linewidth=1.6,
            elinewidth=1,
            capsize=2,
            label=name,
        )
    if ground is not None:
        axes.axhline(100 * ground, color=_SOFT, linestyle="--", linewidth=1.2, label="ignoring the image")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlabel("epsilon of the whole run, at every site")
    axes.set_ylabel(f"{metric.replace('_', ' ')} in %, average of the sites")
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
