"""Shapes of pictures: resampling to a spacing, cropping to the body, fitting into a square.

Every change of size is one sparse matrix per axis, so pictures and volumes, grey and colour, go the same way, and no
library that takes seconds to import is needed in a worker. Arrays are [h,w] or [d,h,w], with or without a last axis of
colours; masks say how many of the axes are space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import find_objects, label
from scipy.sparse import csr_array

from crossward.imaging.refusals import Reason, Refused

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]

LARGEST = 2**26
"""Pixels that a resampled picture may have."""
LEAST_BODY = 0.005
"""A body covers at least this part of its picture; less is a marker or dust."""
BODY_PART = 0.1
"""A second part belongs to the body where it is at least this large, by the largest."""
LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Weights of red, green and blue (ITU-R BT.601, as in DICOM's YBR)."""


def luminance(values: Values, axes: int) -> Values:
    """Grey of a picture with so many axes of space; a grey one is returned as it is."""
    return values if values.ndim == axes else values @ LUMINANCE


def resample(
    values: Values, valid: Mask, spacing: Sequence[float] | None, wanted: Sequence[float], *, anti_alias: bool = True
) -> tuple[Values, Mask]:
    """Pixels of another size, edge to edge: the first pixel's outer edge stays where it is.

    Args:
        values: the picture or volume.
        valid: False where a pixel is padding; a new pixel is valid where at least half of it is.
        spacing: millimetres between pixels along each axis; None where the file does not say.
        wanted: the same for the result.
        anti_alias: a new pixel that is larger than the old ones is their mean; without, it is read at its centre.

    Raises:
        Refused: the spacing is missing or makes no sense, or the result would be empty or too large.
    """
    if spacing is None or not all(math.isfinite(step) and step > 0 for step in spacing):
        raise Refused(Reason.GEOMETRY, "resample needs the distance between pixels")
    lengths = [length * old / new for length, old, new in zip(valid.shape, spacing, wanted, strict=True)]
    if math.prod(lengths) > LARGEST or max(lengths) > LARGEST:
        raise Refused(Reason.TOO_LARGE, "after resampling")
    sizes = [round(length) for length in lengths]
    if min(sizes) < 1:
        raise Refused(Reason.TRANSFORM, "resampling leaves no pixel")
    ratios = [new / old for new, old in zip(wanted, spacing, strict=True)]
    weights = [
        _overlap(length, size, ratio) if anti_alias and ratio > 1 else _linear(length, size, ratio)
        for length, size, ratio in zip(valid.shape, sizes, ratios, strict=True)
    ]
    share = _along_axes(valid.astype(np.float32), weights)
    # The tolerance keeps a share of exactly one half from depending on rounding.
    return _along_axes(values, weights), share >= 0.5 - 1e-6


def fit_square(values: Values, size: int) -> Values:
    """The longer side to ``size`` by area (enlarged smoothly where it is shorter), dark margins for the other.

    The same windows and margins as ``folder.fit_square``, which does it through MONAI.

    Args:
        values: [h,w] or [h,w,c] in [0, 1].
        size: of the result, [size,size] or [size,size,c].

    Raises:
        Refused: a strip that would be no picture.
    """
    height, width = values.shape[:2]
    if max(height, width) > size * min(height, width):
        raise Refused(Reason.TOO_NARROW, f"{height} x {width} pixels")
    longer = max(height, width)
    sizes = [round(length * (size / longer)) for length in (height, width)]
    weigh = _area if longer >= size else _stretched
    fitted = _along_axes(values, [weigh(length, new) for length, new in zip((height, width), sizes, strict=True)])
    square = np.zeros((size, size, *values.shape[2:]), dtype=np.float32)
    top, left = ((size - new) // 2 for new in sizes)
    square[top : top + sizes[0], left : left + sizes[1]] = fitted
    return square


def middle_square(valid: Mask) -> tuple[slice, ...]:
    """Where the largest square (or cube) around the middle lies."""
    side = min(valid.shape)
    starts = [(length - side) // 2 for length in valid.shape]
    return tuple(slice(start, start + side) for start in starts)


def body_box(grey: Values, valid: Mask, *, threshold: float, margin: float) -> tuple[slice, ...]:
    """The box around what is brighter than a threshold: the largest connected part, and others not much smaller.

    Others, because two thighs or two breasts are one picture; markers and the table are far smaller than a body.

    Args:
        grey: bright where the body is.
        valid: False where a pixel is padding, which is never body.
        threshold: of the body.
        margin: added on every side, as a part of the box's longer side; never beyond the picture.

    Raises:
        Refused: nothing that could be a body is found.
    """
    parts, count = label((grey > threshold) & valid)
    sizes = np.bincount(parts.ravel(), minlength=2)[1:]
    if count == 0 or sizes.max() < LEAST_BODY * valid.sum():
        raise Refused(Reason.TRANSFORM, "no body is found")
    found = find_objects(parts)
    boxes = [found[part] for part in np.flatnonzero(sizes >= BODY_PART * sizes.max())]
    ends = [(min(side.start for side in sides), max(side.stop for side in sides)) for sides in zip(*boxes, strict=True)]
    extra = round(margin * max(stop - start for start, stop in ends))
    return tuple(
        slice(max(0, start - extra), min(length, stop + extra))
        for (start, stop), length in zip(ends, grey.shape, strict=True)
    )


def _along_axes(values: Values, weights: Sequence[Any]) -> Values:
    """Apply one matrix to each of the first axes."""
    for axis, matrix in enumerate(weights):
        first = np.ascontiguousarray(np.moveaxis(values, axis, 0))
        mixed = (matrix @ first.reshape(len(first), -1)).reshape(-1, *first.shape[1:])
        values = np.moveaxis(mixed, 0, axis)
    return np.ascontiguousarray(values)


def _matrix(starts: NDArray[np.intp], counts: NDArray[np.intp], weights: NDArray[np.float64], length: int) -> Any:
    """Row ``i`` weighs ``counts[i]`` neighbours from ``starts[i]`` on; the weights are row after row."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    columns = np.arange(ends[-1]) - np.repeat(ends[:-1] - starts, counts)
    return csr_array((weights.astype(np.float32), columns, ends), shape=(len(starts), length))


def _area(length: int, size: int) -> Any:
    """The mean of every old pixel that a new one touches."""
    rows = np.arange(size)
    starts = rows * length // size
    counts = -(-(rows + 1) * length // size) - starts
    return _matrix(starts, counts, np.repeat(1.0 / counts, counts), length)


def _overlap(length: int, size: int, ratio: float) -> Any:
    """The mean over a new pixel of ``ratio`` old ones, each by how much of it is covered."""
    begin = np.arange(size) * ratio
    end = np.minimum(begin + ratio, length)
    starts = np.floor(begin).astype(np.intp)
    counts = np.maximum(np.ceil(end - 1e-9).astype(np.intp) - starts, 1)
    rows = np.repeat(np.arange(size), counts)
    ends = np.concatenate([[0], np.cumsum(counts)])
    old = np.arange(ends[-1]) - np.repeat(ends[:-1] - starts, counts)
    covered = np.maximum(np.minimum(end[rows], old + 1) - np.maximum(begin[rows], old), 0)
    return _matrix(starts, counts, covered / np.add.reduceat(covered, ends[:-1])[rows], length)


def _stretched(length: int, size: int) -> Any:
    return _linear(length, size, length / size)


def _linear(length: int, size: int, ratio: float) -> Any:
    """Between the two old pixels on either side of a new one's centre; the border's value beyond the border."""
    if length == 1:
        return csr_array(np.ones((size, 1), dtype=np.float32))
    centres = np.clip((np.arange(size) + 0.5) * ratio - 0.5, 0, length - 1)
    starts = np.minimum(centres.astype(np.intp), length - 2)
    upper = centres - starts
    return _matrix(starts, np.full(size, 2), np.stack([1 - upper, upper], axis=1).ravel(), length)
