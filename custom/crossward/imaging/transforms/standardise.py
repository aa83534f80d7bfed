"""Intensities of many scanners onto [0, 1]: windows, percentiles, Nyul's landmarks, a domain's histogram, z-scores.

Every map here is monotone: it never turns a denser pixel darker than a thinner one. ``sample`` is always the pixels
that count (no padding), as a flat array; ``values`` are all of them, grey or colour. A sample is taken from the
luminance, and all colours are then treated alike, so that grey stays grey.

MONAI has cousins of these (ScaleIntensityRangePercentiles, HistogramNormalize). They look at one picture at a time and
count padding, and HistogramNormalize makes every picture's histogram flat by itself; here the histogram is the
domain's, so that one value stays one grey throughout a scanner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.scans import Table, Window
from crossward.imaging.refusals import Reason, Refused

Numbers = NDArray[np.float64]
Values = NDArray[np.float32]

LANDMARKS = (1.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 99.0)
LEVELS = 2**16
"""Greys that a domain's histogram tells apart in [0, 1]."""
_ALIKE = "all its pixels are alike"
_OTSU_BINS = 256
# Of the range up to the 99th percentile: differences below it count as noise of the air.
_SHADOW = 0.02
# A picture counts as one in its domain's histogram, however large: its shares are whole parts of this.
_WHOLE = 2**40


def between(values: NDArray[np.floating], low: float, high: float) -> Values:
    """``low`` to 0, ``high`` to 1, straight in between and clipped beyond.

    Raises:
        Refused: there is nothing between the two.
    """
    low, high = float(low), float(high)
    if not 0 < high - low < np.inf:
        raise Refused(Reason.TRANSFORM, _ALIKE)
    unit: Values = np.clip((values.astype(np.float64) - low) / (high - low), 0, 1).astype(np.float32)
    return unit


def windowed(values: NDArray[np.floating], window: Window) -> Values:
    """A VOI window by the formulas of DICOM PS3.3 C.11.2, its output range being [0, 1].

    Raises:
        Refused: the window has no width that its function allows.
    """
    narrowest = 1.0 if window.function == "LINEAR" else 0.0
    if not (
        np.isfinite(window.centre) and np.isfinite(window.width) and window.width >= narrowest and window.width > 0
    ):
        raise Refused(Reason.RESCALE, "a window without a width")
    return _FUNCTIONS[window.function](values.astype(np.float64), window.centre, window.width).astype(np.float32)


def _linear(x: Numbers, centre: float, width: float) -> Numbers:
    middle, slope = centre - 0.5, width - 1
    if slope == 0:
        return np.where(x > middle, 1.0, 0.0)
    return np.clip((x - middle) / slope + 0.5, 0, 1)


def _linear_exact(x: Numbers, centre: float, width: float) -> Numbers:
    return np.clip((x - centre) / width + 0.5, 0, 1)


def _sigmoid(x: Numbers, centre: float, width: float) -> Numbers:
    # The same as 1 / (1 + exp(-4 (x - c) / w)), and never overflows.
    return 0.5 * (1 + np.tanh(2 * (x - centre) / width))


_FUNCTIONS: dict[str, Callable[[Numbers, float, float], Numbers]] = {
    "LINEAR": _linear,
    "LINEAR_EXACT": _linear_exact,
    "SIGMOID": _sigmoid,
}


def through_table(values: NDArray[np.floating], table: Table) -> Values:
    """A VOI lookup table; inputs outside take the nearest end.

    Raises:
        Refused: the table is empty.
    """
    if not len(table.outputs):
        raise Refused(Reason.RESCALE, "an empty lookup table")
    place = np.clip(np.rint(values.astype(np.float64) - table.first), 0, len(table.outputs) - 1)
    return table.outputs[place.astype(np.intp)].astype(np.float32)


def otsu(sample: NDArray[np.floating]) -> float:
    """The threshold that parts a sample into two groups that differ most (Otsu 1979).

    Raises:
        Refused: all values are alike.
    """
    sample = sample.astype(np.float64)
    low, high = float(sample.min()), float(sample.max())
    if not 0 < high - low < np.inf:
        raise Refused(Reason.TRANSFORM, _ALIKE)
    counts, edges = np.histogram(sample, _OTSU_BINS, range=(low, high))
    centres = (edges[:-1] + edges[1:]) / 2
    below, total = np.cumsum(counts)[:-1], counts.sum()
    mass = np.cumsum(counts * centres)
    # Empty bins at the ends leave a group without members, which cannot be the best parting.
    both = (below > 0) & (below < total)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = mass[:-1] / below - (mass[-1] - mass[:-1]) / (total - below)
    spread = np.where(both, below.astype(np.float64) * (total - below) * means**2, -1)
    best = np.flatnonzero(spread == spread.max())
    # Between two far groups every bin of the gap is as good; the middle of it is the most sensible.
    return float(edges[1:-1][best].mean())


def air(sample: NDArray[np.floating]) -> float:
    """The threshold between air and body: Otsu's on a logarithmic scale that starts at the darkest value.

    On the plain scale a few very bright parts (fat, contrast agent, metal) would take the threshold up to themselves,
    and the rest of the body would count as air.

    Raises:
        Refused: all values are alike.
    """
    exact = sample.astype(np.float64)
    low, high = float(exact.min()), float(np.percentile(exact, 99))
    unit = _SHADOW * ((high if high > low else float(exact.max())) - low)
    if not 0 < unit < np.inf:
        raise Refused(Reason.TRANSFORM, _ALIKE)
    return low + unit * float(np.expm1(otsu(np.log1p((exact - low) / unit))))


def bright(sample: NDArray[np.floating]) -> NDArray[np.floating]:
    """The part of a sample that is not air: the body in an MR picture, without what is around it."""
    return sample[sample > air(sample)]


def percentile(values: Values, sample: Values, *, low: float, high: float) -> Values:
    """A picture's own percentiles onto [0, 1]."""
    ends = np.percentile(sample.astype(np.float64), (low, high))
    return between(values, float(ends[0]), float(ends[1]))


def zscore(values: Values, sample: Values, *, spread: float) -> Values:
    """Mean to 0.5, and so many standard deviations below and above it to 0 and 1."""
    exact = sample.astype(np.float64)
    mean, deviation = float(exact.mean()), float(exact.std())
    return between(values, mean - spread * deviation, mean + spread * deviation)


def landmarks_of(sample: Values, percentiles: Sequence[float]) -> Numbers:
    """A picture's landmarks, its first at 0 and its last at 1: what ``Mean`` makes a domain's scale of.

    Raises:
        Refused: the first and the last are alike.
    """
    marks = np.percentile(sample.astype(np.float64), percentiles)
    if not 0 < marks[-1] - marks[0] < np.inf:
        raise Refused(Reason.TRANSFORM, _ALIKE)
    scaled: Numbers = (marks - marks[0]) / (marks[-1] - marks[0])
    return scaled


def nyul(values: Values, sample: Values, *, percentiles: Sequence[float], scale: Sequence[float]) -> Values:
    """A picture's own landmarks onto a standard scale, straight in between (Nyul and Udupa 1999).

    Args:
        values: to be mapped.
        sample: where the landmarks are taken.
        percentiles: the landmarks, increasing.
        scale: where each of them goes, from 0 to 1; pixels beyond the first and the last are clipped.
    """
    marks = np.percentile(sample.astype(np.float64), percentiles)
    if not 0 < marks[-1] - marks[0] < np.inf:
        raise Refused(Reason.TRANSFORM, _ALIKE)
    return _interpolated(values, marks, scale)


class Mean:
    """The mean of many vectors; exact, so that it does not depend on which worker finished first."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Fraction] = []

    def take(self, vector: Numbers) -> None:
        self._sums = self._sums or [Fraction(0)] * len(vector)
        self._sums = [total + Fraction(number) for total, number in zip(self._sums, vector.tolist(), strict=True)]
        self.count += 1

    def value(self) -> tuple[float, ...]:
        return tuple(float(total / self.count) for total in self._sums)


def shares_of(sample: Values) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """The greys in a sample of [0, 1] and how much of it each takes, in whole parts: what ``Histogram`` adds up."""
    counts = np.bincount(np.rint(sample.astype(np.float64) * (LEVELS - 1)).astype(np.intp), minlength=LEVELS)
    greys = np.flatnonzero(counts)
    return greys, np.rint(counts[greys] * (_WHOLE / counts.sum())).astype(np.int64)


class Histogram:
    """A domain's greys, every picture counting the same; whole numbers, so the order does not matter."""

    def __init__(self) -> None:
        self.count = 0
        self._shares = np.zeros(LEVELS, dtype=np.int64)

    def take(self, shares: tuple[NDArray[np.intp], NDArray[np.int64]]) -> None:
        greys, parts = shares
        self._shares[greys] += parts
        self.count += 1

    def knots(self, bins: int) -> tuple[float, ...]:
        """The greys below which 0, 1/bins, ..., all of the domain lies."""
        below = np.cumsum(self._shares)
        wanted = np.linspace(0, 1, bins + 1) * below[-1]
        wanted[0] = 1
        places = np.minimum(np.searchsorted(below, wanted, side="left"), np.flatnonzero(self._shares)[-1])
        return tuple((places / (LEVELS - 1)).tolist())


def histogram(values: Values, *, knots: Sequence[float]) -> Values:
    """Values in [0, 1] to the part of their domain that is darker: one map for all pictures of a domain.

    Raises:
        Refused: the domain has one grey only.
    """
    if not knots[-1] > knots[0]:
        raise Refused(Reason.TRANSFORM, "its domain has one grey only")
    return _interpolated(values, np.asarray(knots), np.linspace(0, 1, len(knots)))


def _interpolated(values: Values, marks: Numbers, scale: Sequence[float] | Numbers) -> Values:
    # Where landmarks fall together (air, a shutter) the lowest place counts: air stays dark.
    distinct, first = np.unique(marks, return_index=True)
    places = np.asarray(scale, dtype=np.float64)[first]
    return np.clip(np.interp(values.astype(np.float64), distinct, places), 0, 1).astype(np.float32)
