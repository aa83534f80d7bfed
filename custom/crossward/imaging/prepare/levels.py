"""Pixels in [0, 1] as they are cached; kept apart so that worker processes start without the heavy imports."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

LEVELS: Final = 65535
"""A pixel is kept as the nearest of so many steps: off by 7.6e-6 at most."""

STORED: Final = np.dtype("<u2")


def stored(pixels: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Pixels in [0, 1] as they are cached."""
    return np.rint(pixels.astype(np.float64) * LEVELS).astype(STORED)


def pixels_in(levels: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Cached pixels in [0, 1] again."""
    return levels.astype(np.float32) / np.float32(LEVELS)
