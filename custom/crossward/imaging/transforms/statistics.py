"""What a scanner's pictures are like, gathered one by one: greys, contrast, sharpness, noise, shading, spacing.

Everything is counted in fixed bins, so memory does not grow with the pictures, counts of several workers add up, and
the order of the pictures never matters. A bin is less than 1 % wide (of its value), so that is how exact a quantile is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion, convolve

from crossward.imaging.transforms.geometry import luminance

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]

BINS = 8192
FIGURES = ("mean", "contrast", "sharpness", "noise", "shading", "row_mm", "column_mm")
"""Of one picture.

- mean and contrast: mean and standard deviation of its pixels.
- sharpness: root mean square of the slope, per pixel, over the contrast. A picture with a Gaussian autocorrelation of
  length L has the square root of 2, over L.
- noise: standard deviation of what differs from pixel to pixel, after Immerkaer (1996), by a median so that edges count
  little.
- shading: standard deviation of the plane fitted to the picture, over its mean: one side brighter than the other.
- row_mm and column_mm: millimetres between rows and between columns.
"""
# Bins are equally wide in asinh(x / _FINE): straight up to about _FINE, then ever wider, on both sides of 0.
_FINE = 1e-4
_WIDTH = 72 / BINS
_MOST_PIXELS = 2**18
_LAPLACIANS = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], dtype=np.float32)


class Tally:
    """Counts of numbers of any size in fixed bins."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, dtype=np.int64)

    def add(self, values: NDArray[np.floating] | float) -> None:
        scaled = np.arcsinh(np.asarray(values, dtype=np.float64).ravel() / _FINE)
        places = np.clip(np.rint(scaled / _WIDTH) + BINS // 2, 0, BINS - 1)
        self.counts += np.bincount(places.astype(np.intp), minlength=BINS)

    def merge(self, other: Tally) -> None:
        self.counts += other.counts

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, part: float) -> float | None:
        """The value below which this part of the numbers lies; None where there are none."""
        if not self.total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), max(part * self.total, 1)))
        return float(centres()[place])

    def as_json(self) -> dict[str, int]:
        return {str(place): int(self.counts[place]) for place in np.flatnonzero(self.counts)}

    @classmethod
    def from_json(cls, content: Mapping[str, int]) -> Tally:
        tally = cls()
        for place, count in content.items():
            tally.counts[int(place)] = count
        return tally


def centres() -> NDArray[np.float64]:
    """The value in the middle of every bin; one of them is 0."""
    middles: NDArray[np.float64] = np.sinh((np.arange(BINS) - BINS // 2) * _WIDTH) * _FINE
    return middles


@dataclass(frozen=True)
class Measured:
    """One picture's share: small, and can be sent between processes."""

    pixels: dict[str, int]
    figures: dict[str, float]


def measure(values: Values, *, valid: Mask | None = None, spacing: tuple[float, float] | None = None) -> Measured:
    """Look at one picture.

    Args:
        values: [h,w] or [h,w,3], finite, bright where there is much; units or [0, 1].
        valid: False where a pixel is padding, which does not count.
        spacing: millimetres between rows and between columns.
    """
    grey = luminance(values, 2).astype(np.float64)
    valid = np.ones(grey.shape, dtype=np.bool_) if valid is None else valid
    pixels = grey[valid]
    found = {"mean": float(pixels.mean()), "contrast": float(pixels.std())}
    inside = binary_erosion(valid, np.ones((3, 3)), border_value=0)
    if found["contrast"] > 0 and inside.any():
        down, across = ((np.roll(grey, -1, axis) - grey)[inside] for axis in (0, 1))
        found["sharpness"] = float(np.sqrt((down**2 + across**2).mean()) / found["contrast"])
        found["noise"] = _noise(grey, inside)
    if found["mean"] > 0:
        found["shading"] = _shading(grey, valid) / found["mean"]
    if spacing is not None:
        found |= {"row_mm": spacing[0], "column_mm": spacing[1]}
    tally = Tally()
    tally.add(pixels[:: -(-pixels.size // _MOST_PIXELS)])
    return Measured(tally.as_json(), {name: number for name, number in found.items() if np.isfinite(number)})


def measure_picture(picture: Values) -> Measured:
    """Look at a finished picture [c,h,w] in [0, 1].

    What is exactly dark there is margin, padding or saturated air: it does not count, unless there is nothing else.
    """
    lit: Mask = picture.max(axis=0) > 0
    values = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
    return measure(values, valid=lit if lit.any() else None)


def _noise(grey: NDArray[np.float64], inside: Mask) -> float:
    """The difference of two Laplacians ignores slopes; of white noise it has 6 times the standard deviation."""
    # What is flat to the last bit (air, a shutter, saturation) says nothing about noise.
    rest = np.abs(convolve(grey, _LAPLACIANS, mode="nearest")[inside])
    told = rest[rest > 0]
    return float(1.4826 * np.median(told) / 6) if told.size else 0.0


def _shading(grey: NDArray[np.float64], valid: Mask) -> float:
    rows, columns = np.nonzero(valid)
    plane = np.stack([np.ones(len(rows)), rows, columns], axis=1)
    normal = plane.T @ plane
    found = np.linalg.lstsq(normal, plane.T @ grey[valid], rcond=None)[0]
    return float((plane @ found).std())


class DomainStatistics:
    """Statistics of one domain's pictures."""

    def __init__(self) -> None:
        self.images = 0
        self.pixels = Tally()
        self.figures = {name: Tally() for name in FIGURES}

    def take(self, measured: Measured) -> None:
        """Add what ``measure`` gave."""
        self.images += 1
        self.pixels.merge(Tally.from_json(measured.pixels))
        for name, number in measured.figures.items():
            self.figures[name].add(number)

    def add(self, values: Values, *, valid: Mask | None = None, spacing: tuple[float, float] | None = None) -> None:
        """Add one picture."""
        self.take(measure(values, valid=valid, spacing=spacing))

    def merge(self, other: DomainStatistics) -> None:
        self.images += other.images
        self.pixels.merge(other.pixels)
        for name, tally in self.figures.items():
            tally.merge(other.figures[name])

    def as_json(self) -> dict[str, Any]:
        figures = {name: tally.as_json() for name, tally in self.figures.items()}
        return {"images": self.images, "pixels": self.pixels.as_json(), "figures": figures}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DomainStatistics:
        statistics = cls()
        statistics.images = int(content["images"])
        statistics.pixels = Tally.from_json(content["pixels"])
        statistics.figures |= {name: Tally.from_json(counts) for name, counts in content["figures"].items()}
        return statistics
