"""What backbones are made of: normalisation, and layers, in whose place a method may put its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

Norm = Literal["batch", "group"]


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


def at_least_single(values: Tensor) -> Tensor:
    """Values in single precision or better, for sums and differences that half precision would spoil."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


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


def make_point_norm(norm: Norm, channels: int) -> nn.Module:
    """Make a normalisation layer for maps of a single point [b,c,1,1], as behind a fully connected layer."""
    return MapNorm(channels) if norm == "batch" else make_vector_norm(norm, channels)


@dataclass(frozen=True)
class LayerShape:
    """One layer of a backbone, without its activation.

    Attributes:
        channels_in, channels_out, kernel, stride, padding: of its convolution.
        point: the layer is fully connected, which is a 1x1 convolution on maps of a single point.
    """

    channels_in: int
    channels_out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    point: bool = False

    def convolution(self) -> nn.Conv2d:
        """The convolution; normalisation follows, so it needs no bias."""
        return nn.Conv2d(
            self.channels_in, self.channels_out, self.kernel, stride=self.stride, padding=self.padding, bias=False
        )


LayerFactory = Callable[[LayerShape], Sequence[nn.Module]]
"""Makes the modules that stand in a row for one layer; a method may bring its own."""


def plain_layers(norm: Norm) -> LayerFactory:
    """The usual layer: a convolution and normalisation."""

    def layer(shape: LayerShape) -> Sequence[nn.Module]:
        normalisation = (make_point_norm if shape.point else make_norm)(norm, shape.channels_out)
        return shape.convolution(), normalisation

    return layer


class Backbone(nn.Module):
    """From images to features: a stem, stages after which a feature block may stand, and a pool.

    Attributes:
        stem: the first layer.
        stages: in order.
        stage_channels: of the map after each stage.
        out_channels: of the pooled features.
    """

    stem: nn.Module
    stages: nn.ModuleList
    stage_channels: tuple[int, ...]
    out_channels: int

    def pool(self, features: Tensor) -> Tensor:
        """From the last feature map to vectors [b, out_channels]."""
        return features.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Give the last feature map."""
        features: Tensor = self.stem(images)
        for stage in self.stages:
            features = stage(features)
        return features
