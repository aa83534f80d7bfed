"""Random changes to training images, a whole batch at once on its device; the papers crop and mirror."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Augmentation = Literal["none", "shift", "shift-flip"]

SHIFT = 8
"""Images are moved by up to an eighth of their side: 4 of 32 pixels."""


def augmented(images: Tensor, kind: Augmentation, generator: torch.Generator) -> Tensor:
    """Move every image by its own random amount, and mirror half of them left to right where ``kind`` says so.

    Args:
        images: [b,c,h,w].
        kind: ``"shift"`` suits scans, where left is not right; ``"shift-flip"`` is what the papers do to photographs.
        generator: on the images' device; decides everything that is random here.
    """
    if kind == "none" or not len(images):
        return images
    count, _, height, width = images.shape
    most = max(1, width // SHIFT)
    padded = functional.pad(images, (most,) * 4, mode="replicate")
    moves = torch.randint(0, 2 * most + 1, (2, count, 1), generator=generator, device=images.device)
    rows = moves[0] + torch.arange(height, device=images.device)
    columns = moves[1] + torch.arange(width, device=images.device)
    if kind == "shift-flip":
        mirrored = torch.rand((count, 1), generator=generator, device=images.device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count, device=images.device)
    # Channels come last where two indices stand apart from the rest, and go back to their place.
    cut = padded.permute(0, 2, 3, 1)[which[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return cut.contiguous(memory_format=torch.channels_last) if _last(images) else cut.contiguous()


def _last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
