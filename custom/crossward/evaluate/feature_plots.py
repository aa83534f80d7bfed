"""Plots of what a model learned, as inline SVG: spectra, maps of features, densities, and an average by round.

Groups differ in colour and, again, in shape or dashes: the colours are those of Okabe and Ito without the yellow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from crossward.evaluate.plots import Html, join, tag

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#56b4e9", "#e69f00")
_DASHES = ("none", "8 3", "2 3", "8 3 2 3", "5 2 1 2 1 2")
_SMALLEST_SHARE = 1e-5
"""Singular values below this part of the largest are drawn at the edge."""

# Each mark is drawn around a point, about 6 units wide.
_SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",  # disc
    "m0-3.6l3.4 6h-6.8z",  # triangle
    "m-2.7-2.7h5.4v5.4h-5.4z",  # square
    "m0-4l4 4l-4 4l-4-4z",  # diamond
    "m-1-3.6h2v2.6h2.6v2h-2.6v2.6h-2v-2.6h-2.6v-2h2.6z",  # plus
    "m0 3.6l3.4-6h-6.8z",  # triangle on its tip
    "m-3.6-1h7.2v2h-7.2z",  # bar
    "m-1-3.6h2v7.2h-2z",  # upright bar
)


def mark_key(names: Sequence[str]) -> Html:
    """What the marks of a map mean."""
    return _key([(Html(f'<path d="M15 6{_shape(i)}" fill="{_colour(i)}"/>'), name) for i, name in enumerate(names)])


def line_key(names: Sequence[str]) -> Html:
    """What the lines of a spectrum mean."""
    return _key([(_line("2,6 28,6", i), name) for i, name in enumerate(names)])


def spectrum(values: Sequence[Sequence[float]], *, title: str, threshold: float) -> Html:
    """Singular values relative to the largest on a logarithmic axis, one line each, and the threshold of use."""
    frame = _Frame(560, 240)
    decades = round(-math.log10(_SMALLEST_SHARE))

    def height(share: float) -> float:
        return 1 + math.log10(max(share, _SMALLEST_SHARE)) / decades

    labels = {10.0**-power: f"{100 / 10**power:g} %" for power in range(decades + 1)}
    parts = [frame.level(height(share), words) for share, words in labels.items()]
    at = frame.y(height(threshold))
    parts.append(tag("line", class_="threshold", x1=frame.left, x2=frame.width - frame.right, y1=at, y2=at))
    longest = max(map(len, values), default=0)
    parts += frame.ends("1", str(longest), "features in order of strength")
    for index, line in enumerate(values):
        shown = [(place / max(1, longest - 1), height(value)) for place, value in enumerate(line)]
        parts.append(_line(frame.points(shown), index))
    return frame.draw(parts, title)


def scatter(points: Sequence[Sequence[float]], groups: Sequence[int], *, title: str) -> Html:
    """Points on a plane, marked by their group; both axes have one scale, since only distances mean something."""
    side, edge = 300, 12
    middle = [(min(axis) + max(axis)) / 2 for axis in zip(*points, strict=True)]
    reach = max(max(abs(x - middle[0]), abs(y - middle[1])) for x, y in points) or 1.0
    scale = (side / 2 - edge) / reach
    drawn: dict[int, list[str]] = {}
    for (x, y), group in zip(points, groups, strict=True):
        where = f"M{side / 2 + scale * (x - middle[0]):.1f} {side / 2 - scale * (y - middle[1]):.1f}"
        drawn.setdefault(group, []).append(where + _shape(group))
    marks = [tag("path", d="".join(shapes), fill=_colour(group)) for group, shapes in sorted(drawn.items())]
    frame = tag("rect", class_="frame", x=0.5, y=0.5, width=side - 1, height=side - 1)
    return _svg(side, side, [frame, *marks], title)


def densities(clean: Sequence[float], noised: Sequence[float], *, title: str) -> Html:
    """Two histograms over [0,1] as steps: clean images drawn through, noised ones dashed."""
    frame = _Frame(280, 150)
    top = max(*clean, *noised) or 1.0
    parts = [frame.level(0.0, "0 %"), frame.level(1.0, f"{100 * top:.0f} %"), *frame.ends("0", "1", "uncertainty")]
    for shares, klass in ((clean, "own"), (noised, "received")):
        steps = [(edge / len(shares), share / top) for k, share in enumerate(shares) for edge in (k, k + 1)]
        parts.append(tag("polyline", class_=klass, points=frame.points([(0.0, 0.0), *steps, (1.0, 0.0)])))
    return frame.draw(parts, title)


def average_by_round(rounds: Sequence[Mapping[str, Any]], *, title: str) -> Html:
    """Validation accuracy by round, averaged over the hospitals that reported; as received with dashes."""
    frame = _Frame(560, 220)
    parts = [frame.level(share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    first, last = (str(rounds[index]["round"]) for index in (0, -1))
    parts += frame.ends(first, last if len(rounds) > 1 else "", "round")
    for key, klass in (("val_accuracy_as_received", "received"), ("val_accuracy", "own")):
        parts += _curve(frame, averages(rounds, key), klass)
    return frame.draw(parts, title)


def averages(rounds: Sequence[Mapping[str, Any]], key: str) -> list[float | None]:
    """The mean of a figure over the hospitals that have it, for every round."""
    known = [[site[key] for site in entry["sites"].values() if site.get(key) is not None] for entry in rounds]
    return [math.fsum(values) / len(values) if values else None for values in known]


def _curve(frame: _Frame, series: Sequence[float | None], klass: str) -> Iterator[Html]:
    """A line through what is known, with gaps; a value between two gaps becomes a short dash."""
    span = max(1, len(series) - 1)
    for known, run in groupby(enumerate(series), key=lambda entry: entry[1] is not None):
        points = [(index / span, share) for index, share in run if share is not None]
        if known:
            ends = [(max(0.0, points[0][0] - 0.005), points[0][1]), (points[0][0] + 0.005, points[0][1])]
            yield tag("polyline", class_=klass, points=frame.points(points if len(points) > 1 else ends))


class _Frame:
    """A chart's area: positions in [0,1] x [0,1], grid lines with their labels on the left, words below."""

    left, right, top, bottom = 58, 12, 10, 26

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height

    def x(self, position: float) -> str:
        return f"{self.left + (self.width - self.left - self.right) * position:.1f}"

    def y(self, position: float) -> str:
        return f"{self.top + (self.height - self.top - self.bottom) * (1 - position):.1f}"

    def points(self, positions: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in positions)

    def level(self, position: float, words: str) -> Html:
        at = self.y(position)
        return join(
            tag("line", class_="grid", x1=self.left, x2=self.width - self.right, y1=at, y2=at),
            tag("text", words, x=self.left - 6, y=f"{float(at) + 4:.1f}", text_anchor="end"),
        )

    def ends(self, first: str, last: str, words: str) -> list[Html]:
        placed = ((first, 0.0, "start"), (words, 0.5, "middle"), (last, 1.0, "end"))
        return [tag("text", text, x=self.x(x), y=self.height - 8, text_anchor=anchor) for text, x, anchor in placed]

    def draw(self, parts: Sequence[Html], title: str) -> Html:
        return _svg(self.width, self.height, parts, title)


def _svg(width: int, height: int, parts: Sequence[Html], title: str) -> Html:
    view = f"0 0 {width} {height}"
    return tag("svg", tag("title", title), *parts, class_="chart", viewBox=view, role="img", aria_label=title)


def _key(entries: Sequence[tuple[Html, str]]) -> Html:
    def drawn(mark: Html) -> Html:
        return tag("svg", mark, viewBox="0 0 30 12", aria_hidden="true")

    return tag("div", *(tag("span", drawn(mark), name) for mark, name in entries), class_="key")


def _line(points: str, index: int) -> Html:
    # Another dash with every group and another again with every turn through the colours: 35 different lines.
    dash = _DASHES[(index + index // len(COLOURS)) % len(_DASHES)]
    return tag("polyline", points=points, stroke=_colour(index), stroke_width=2, stroke_dasharray=dash)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _shape(index: int) -> str:
    return _SHAPES[index % len(_SHAPES)]
