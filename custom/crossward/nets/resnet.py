"""ResNet-10 and ResNet-18 for small images, with BatchNorm or GroupNorm and a width factor.

The stem is a 3x3 convolution of stride 1 and there is no max-pool, so the feature map is an eighth of the
input (32 px gives 4 x 4). ResNet-10 has one basic block per stage, ResNet-18 two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

Norm = Literal["batch", "group"]

BLOCKS_PER_STAGE = {10: 1, 18: 2}
STAGE_CHANNELS = (64, 128, 256, 512)
STAGE_STRIDES = (1, 2, 2, 2)


def is_normalisation(module: nn.Module) -> bool:
    """Tell whether a module normalises its input, judged by its type and never by its name."""
    return isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.LocalResponseNorm)


class _LoneSample(_BatchNorm):
    """BatchNorm that takes its running statistics for a single value per channel, which has no variance of its own."""

    def forward(self, features: Tensor) -> Tensor:
        if self.training and features.numel() == self.num_features:
            return functional.batch_norm(
                features, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        return super().forward(features)


class MapNorm(_LoneSample, nn.BatchNorm2d):
    """BatchNorm of feature maps [b,c,h,w]."""


class VectorNorm(_LoneSample, nn.BatchNorm1d):
    """BatchNorm of vectors [b,c]."""


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Make a normalisation layer for maps; GroupNorm takes gcd(32, channels) groups of at least two channels."""
    if norm == "batch":
        return MapNorm(channels)
    if norm == "group":
        return nn.GroupNorm(max(1, min(math.gcd(32, channels), channels // 2)), channels)
    raise ValueError(f"norm '{norm}' is neither 'batch' nor 'group'")


def make_vector_norm(norm: Norm, channels: int) -> nn.Module:
    """Make a normalisation layer for vectors.

    Without a spatial extent a group of two channels could only become +1 and -1, whatever the image: one group.
    """
    if norm == "batch":
        return VectorNorm(channels)
    if norm == "group":
        return nn.GroupNorm(1, channels)
    raise ValueError(f"norm '{norm}' is neither 'batch' nor 'group'")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; the shortcut has its own normalisation where shapes differ."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, norm: Norm) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
            make_norm(norm, channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            make_norm(norm, channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), make_norm(norm, channels_out)
            )
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.main(images) + self.shortcut(images))
        return activated


class ResNet(nn.Module):
    """A residual backbone from images to a feature map.

    Args:
        depth: 10 or 18.
        width: factor on the stage widths 64-128-256-512; 0.25 gives 16-32-64-128.
        norm: ``"batch"`` or ``"group"``.
        channels: colour channels of the images.
    """

    def __init__(self, *, depth: int = 10, width: float = 1.0, norm: Norm = "batch", channels: int = 1) -> None:
        super().__init__()
        if depth not in BLOCKS_PER_STAGE:
            raise ValueError(f"depth {depth} is not one of {sorted(BLOCKS_PER_STAGE)}")
        widths = [max(1, round(base * width)) for base in STAGE_CHANNELS]
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), make_norm(norm, widths[0]), nn.ReLU()
        )
        inputs = [widths[0], *widths[:-1]]
        self.stages = nn.ModuleList(
            nn.Sequential(*self._stage(before, after, stride=stride, count=BLOCKS_PER_STAGE[depth], norm=norm))
            for before, after, stride in zip(inputs, widths, STAGE_STRIDES, strict=True)
        )
        self.stage_channels = tuple(widths)
        self.out_channels = widths[-1]

    @staticmethod
    def _stage(before: int, after: int, *, stride: int, count: int, norm: Norm) -> Iterator[nn.Module]:
        yield BasicBlock(before, after, stride=stride, norm=norm)
        for _ in range(count - 1):
            yield BasicBlock(after, after, stride=1, norm=norm)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.stem(images)
        for stage in self.stages:
            features = stage(features)
        return features
