"""What the ways to clip per-sample gradients have in common: their result, and what none of them takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from crossward.federation.errors import PrivacyRefusal


class NotFinite(PrivacyRefusal):
    """Training gave values that are not finite, so that nothing is there to clip."""


class UnknownLayer(PrivacyRefusal):
    """A model has parameters that the fast way does not know, and Opacus may."""


@dataclass(frozen=True)
class Clipped:
    """What is known of a step's samples; none of it may leave the site.

    Attributes:
        losses: [b].
        norms: [b], of the gradients before clipping; 0 where a sample is left out.
        left_out: how many samples have a loss or a norm that is not finite. They add nothing.
    """

    losses: Tensor
    norms: Tensor
    left_out: int = 0


class ClipsSamples(Protocol):
    """One way to make sums of clipped gradients.

    Attributes:
        way: its name, for reports.
    """

    way: ClassVar[str]

    def backward(self, losses: Callable[[], Tensor]) -> Clipped:
        """Fill ``grad`` of every trainable parameter with the sum over samples of clipped gradients.

        Args:
            losses: runs the forward pass and gives the loss of every sample, [b].
        """


def check_clippable(model: nn.Module, clip: float) -> None:
    """Refuse a bound that is none, and modules that mix samples."""
    if not (math.isfinite(clip) and clip > 0):
        raise PrivacyRefusal(f"gradients are clipped to {clip}; the bound must be a finite number above 0")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise PrivacyRefusal(
                f"'{name}' is a BatchNorm: it normalises every image by the others of its batch, so that no gradient "
                "belongs to one patient alone. Use GroupNorm in the whole model (norm 'group')"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise PrivacyRefusal(
                f"'{name}' keeps running statistics of the images, which leave the site with the model without any "
                "noise. Make it with track_running_stats=False"
            )


def check_losses(losses: Tensor) -> None:
    """Refuse losses that are not one number for each sample."""
    if losses.ndim != 1:
        raise PrivacyRefusal(
            f"a loss has the shape {list(losses.shape)} instead of one number for each image: it mixes images, and "
            "its gradient cannot be clipped per image. Use a loss per image"
        )


def countable(losses: Tensor, norms: Tensor) -> Tensor:
    """Which samples count, [b]: those whose loss and norm are finite.

    The others have no direction that could be clipped. To refuse the step would show them to everybody who sees that a
    site stops, however much noise there is; so they are out of the sum, as if they were not there.
    """
    return torch.isfinite(losses.detach()) & torch.isfinite(norms)


def factors_of(norms: Tensor, clip: float) -> Tensor:
    """What every gradient is multiplied by, min(1, C / norm)."""
    return (clip / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)
