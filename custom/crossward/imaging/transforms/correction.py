"""Corrections that come before intensities are standardised: an MR coil's shading, and noise.

N4 is not at hand. ``bias_field`` is a homomorphic correction of low order: the logarithm of the picture is the sum of
anatomy and of a smooth field, so the field's slope is what neighbouring pixels' logarithms differ by wherever there is
no edge. A polynomial's slopes are fitted to those differences, edges being outvoted (iterated re-weighting). A field
that bends more than the polynomial can stays, and so does anatomy that is not smooth. A field that would leave the body
more uneven than it was is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Literal

import numpy as np
from numpy.polynomial import legendre
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion, gaussian_filter, median_filter

from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.transforms.geometry import resample
from crossward.imaging.transforms.standardise import air

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]
Numbers = NDArray[np.float64]

_FITTED_SIDE = 96
"""The field is smooth: it is fitted on a picture of about this side, where noise is averaged out."""
_BORDER = 2
"""Pixels of that picture which are part air at the body's border; they would make it look darker to the outside."""
_STEEPEST = 0.2
"""Step of the logarithm from pixel to pixel that is an edge, and never a field."""
_ROUNDS = 12
_LARGEST_FIELD = 3.0
"""Range of the field's logarithm over the body; stronger is no coil but a mistake."""


def bias_field(grey: Values, valid: Mask, *, order: int) -> Values:
    """The smooth field to divide a picture by; its geometric mean over the body is 1.

    Args:
        grey: [h,w] from 0 up, proportional to the signal.
        valid: False where a pixel is padding.
        order: of the polynomial, 1 (a slope) to 5.

    Raises:
        Refused: there are negative values (the picture is no magnitude), or too little body to fit a field to.
    """
    if grey[valid].min() < 0:
        raise Refused(Reason.TRANSFORM, "bias_field needs values from 0 up")
    ratio = max(1.0, max(grey.shape) / _FITTED_SIDE)
    small, inside = resample(grey, valid, (1.0, 1.0), (ratio, ratio)) if ratio > 1 else (grey, valid)
    body = binary_erosion(inside & (small > air(grey[valid])), iterations=_BORDER, border_value=1)
    log = np.log(np.maximum(small.astype(np.float64), np.finfo(np.float32).tiny))
    terms = [(i, j) for i, j in product(range(order + 1), repeat=2) if 0 < i + j <= order]
    basis = _basis(small.shape, terms)
    slopes, steps = [], []
    for axis in (0, 1):
        step = np.diff(log, axis=axis)
        both = _both(body, axis) & (np.abs(step) < _STEEPEST)
        slopes.append(np.diff(basis, axis=axis + 1)[:, both])
        steps.append(step[both])
    weights = _robust_fit(np.concatenate(slopes, axis=1).T, np.concatenate(steps))
    found = np.tensordot(weights, basis, axes=1)[body]
    if np.std(log[body] - found) >= np.std(log[body]) or np.ptp(found) > _LARGEST_FIELD:
        return np.ones_like(grey)
    # Far from the body a polynomial grows without any reason: there the field is what it is at the nearest extreme.
    field = np.clip(np.tensordot(weights, _basis(grey.shape, terms), axes=1), found.min(), found.max())
    even: Values = np.exp(field - found.mean()).astype(np.float32)
    return even


def _basis(shape: tuple[int, ...], terms: list[tuple[int, int]]) -> Numbers:
    """Products of Legendre polynomials over the picture, [terms,h,w]."""
    degree = max(max(term) for term in terms)
    # Pixel centres, so that a shrunken picture and the whole one mean the same place.
    down, across = (legendre.legvander((2 * np.arange(n) + 1) / n - 1, degree) for n in shape)
    return np.stack([np.multiply.outer(down[:, i], across[:, j]) for i, j in terms])


def _both(body: Mask, axis: int) -> Mask:
    """Where a pixel and its next neighbour along an axis are both body."""
    first, second = (
        np.take(body, range(*ends), axis=axis) for ends in ((body.shape[axis] - 1,), (1, body.shape[axis]))
    )
    both: Mask = first & second
    return both


def _robust_fit(slopes: Numbers, steps: Numbers) -> Numbers:
    """Least squares in which a step far from the rest (an edge) counts little: Geman and McClure's weights."""
    if len(steps) < 10 * slopes.shape[1]:
        raise Refused(Reason.TRANSFORM, "too little body for bias_field")
    weights = np.ones(len(steps))
    found = np.zeros(slopes.shape[1])
    for _ in range(_ROUNDS):
        # The ridge only decides where the body's shape leaves a term open.
        normal = (slopes * weights[:, None]).T @ slopes
        ridge = 1e-9 * np.trace(normal) / len(normal) * np.eye(len(normal))
        found = np.linalg.solve(normal + ridge, slopes.T @ (weights * steps))
        rest = np.abs(steps - slopes @ found)
        usual = max(1.4826 * float(np.median(rest)), 1e-9)
        weights = (1 + (rest / (2 * usual)) ** 2) ** -2
    return found


def _median(values: Values, pixels: float) -> Values:
    width = 2 * int(pixels) + 1
    smooth: Values = median_filter(values, size=width, mode="nearest", axes=(0, 1))
    return smooth


def _gaussian(values: Values, pixels: float) -> Values:
    smooth: Values = gaussian_filter(values, pixels, mode="nearest", axes=(0, 1))
    return smooth


_FILTERS: dict[str, Callable[[Values, float], Values]] = {"median": _median, "gaussian": _gaussian}


def denoise(values: Values, *, by: Literal["median", "gaussian"], pixels: float) -> Values:
    """Smooth over so many pixels to each side (median) or with that standard deviation (gaussian).

    Args:
        values: [h,w] or [h,w,c]; colours are smoothed one by one.
        by: a median keeps edges and takes out single wrong pixels; a gaussian takes out grain.
        pixels: the radius; a median takes whole ones.
    """
    return _FILTERS[by](values, pixels)
