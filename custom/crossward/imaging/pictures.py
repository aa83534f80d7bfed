"""Images as a model takes them, and turned back into pictures to look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

_MIDDLE, _SCALE = 0.5, 0.25


def normalised(pixels: Tensor, channels: int) -> Tensor:
    """Pixels [n,c,h,w] in [0,1] as a model takes them; grey becomes colour by equal channels."""
    return ((pixels.expand(-1, channels, -1, -1) - _MIDDLE) / _SCALE).contiguous()


def pixels_of(images: Tensor) -> Tensor:
    """Undo the normalisation: pixels in [0,1]."""
    return images * _SCALE + _MIDDLE


def pictures_of(images: Tensor) -> npt.NDArray[np.uint8]:
    """Undo the normalisation: [n,c,h,w] to uint8 [n,h,w], or [n,h,w,3] for colour.

    A pixel that is not a number is black.
    """
    levels = np.nan_to_num(np.rint(pixels_of(images.cpu()).numpy() * 255))
    shades = np.clip(levels, 0, 255).astype(np.uint8)
    return shades[:, 0] if shades.shape[1] == 1 else np.ascontiguousarray(shades.transpose(0, 2, 3, 1))
