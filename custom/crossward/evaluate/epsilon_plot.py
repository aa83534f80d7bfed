"""What differential privacy costs, as a picture: a panel for each metric, a curve for each method."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MARKERS = "osD^vPX"
_SOFT, _RULE = "#566472", "#d5dce3"
_APART = 0.04
_PANEL, _LEGEND, _HEIGHT = 4.4, 1.4, 4.4

Curve = Mapping[str, Sequence[float]]
"""By epsilon, as it was given, the values of all seeds, as parts of one."""


@dataclass(frozen=True)
class Panel:
    """One metric.

    Attributes:
        metric: its name.
        curves: of the methods.
        ground: what ignoring the images scores, where that is known.
    """

    metric: str
    curves: Mapping[str, Curve]
    ground: float | None = None


def epsilon_picture(panels: Sequence[Panel]) -> bytes:
    """A PNG of metrics against epsilon."""
    # Takes a second to import, and only a plot needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_PANEL * len(panels) + _LEGEND, _HEIGHT), dpi=120, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.supxlabel("epsilon of the whole run, at every site", fontsize=10)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _draw(axes: Any, panel: Panel) -> None:
    columns = list(next(iter(panel.curves.values())))
    for place, (name, curve) in enumerate(panel.curves.items()):
        shift = (place - (len(panel.curves) - 1) / 2) * _APART
        points = [(index + shift, values) for index, values in enumerate(curve.values()) if values]
        axes.errorbar(
            [x for x, _ in points],
            [100 * statistics.fmean(values) for _, values in points],
            yerr=[100 * statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points],
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            linewidth=1.4,
            elinewidth=1,
            capsize=2,
            label=name,
        )
    if panel.ground is not None:
        axes.axhline(100 * panel.ground, color=_SOFT, linestyle="--", linewidth=1.2, label="ignoring the image")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_title(f"{panel.metric.replace('_', ' ')} in %, average of the sites", fontsize=10, loc="left")
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
