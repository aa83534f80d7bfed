"""A layer in two halves, one to extract features and a cheap one to erase skew (FDSE, Eq. 2-3)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.nets.layers import MapNorm, Norm, at_least_single, make_norm, make_point_norm

RUNNING = ("running_mean", "running_var")


class Expansion(nn.Conv2d):
    """DSE's linear operation: a convolution that makes ``factor`` channels of each, from that channel alone.

    Processors have a fast path for one output per channel and none for several, so it goes one output at a time.
    """

    def __init__(self, channels: int, factor: int, *, kernel: int) -> None:
        super().__init__(channels, factor * channels, kernel, padding=kernel // 2, groups=channels, bias=False)
        self._factor = factor

    def forward(self, features: Tensor) -> Tensor:
        outputs = [
            functional.conv2d(features, self.weight[first :: self._factor], padding=self.padding, groups=self.groups)
            for first in range(self._factor)
        ]
        return torch.stack(outputs, dim=2).flatten(start_dim=1, end_dim=2)


class DecomposedConv(nn.Module):
    """A convolution or fully connected layer in two: DFE, then DSE (Eq. 2-3).

    Args:
        channels_in, channels_out, kernel, stride, padding: of the layer that is decomposed.
        factor: G, how many channels DSE makes of one.
        norm: of both halves.
        activation: whether ReLU ends it; a residual block brings its own.
        ghost: DSE adds G - 1 channels beside each one instead, without ReLU between (the released code's last version).
        point: a fully connected layer, on maps of a single point.

    Attributes:
        statistics: of DSE's output in the last training pass, [4,c]: the batch's and the running ones before it.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        factor: int = 2,
        norm: Norm = "batch",
        activation: bool = True,
        ghost: bool = False,
        point: bool = False,
    ) -> None:
        super().__init__()
        inner = math.ceil(channels_out / factor)
        cheap = 3 if kernel > 1 else 1
        normalisation = partial(make_point_norm if point else make_norm, norm)
        self.channels_out = channels_out
        self.dfe = nn.Conv2d(channels_in, inner, kernel, stride=stride, padding=padding, bias=False)
        self.norm_dse = normalisation(inner)
        self.between: nn.Module = nn.Identity() if ghost else nn.ReLU()
        self.dse = Expansion(inner, factor - 1 if ghost else factor, kernel=cheap)
        self.norm_dfe = normalisation(channels_out)
        self.activation: nn.Module = nn.ReLU() if activation else nn.Identity()
        self._ghost = ghost
        self.statistics: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        extracted = self.between(self.norm_dse(self.dfe(features)))
        erased = self.dse(extracted)
        if self._ghost:
            erased = torch.cat([extracted, erased], dim=1)
        erased = erased[:, : self.channels_out]
        if self.training and torch.is_grad_enabled() and isinstance(self.norm_dfe, MapNorm) and erased.numel():
            # Mean and biased variance of the batch (Eq. 4), and the running ones before it.
            variance, mean = torch.var_mean(at_least_single(erased), dim=(0, 2, 3), correction=0)
            self.statistics = torch.stack([mean, variance, *(self.norm_dfe.get_buffer(name) for name in RUNNING)])
        out: Tensor = self.activation(self.norm_dfe(erased))
        return out
