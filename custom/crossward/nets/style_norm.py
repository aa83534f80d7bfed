"""A layer that keeps what instance normalisation would take away (SAIN, in FedCode's style encoder)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.nets.layers import at_least_single

REDUCTION, FEWEST_HIDDEN = 16, 4
"""Squeeze-and-excitation has C / 16 hidden units, as in its own paper, and not fewer than four."""


class StyleAwareNorm(nn.Module):
    """SAIN: what instance normalisation removes, weighted by squeeze-and-excitation (Eq. 5-7).

    Args:
        channels: of the maps.
        eps: added to the variance.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        hidden = max(FEWEST_HIDDEN, channels // REDUCTION)
        self.squeeze = nn.Linear(channels, hidden)
        self.excite = nn.Linear(hidden, channels)
        self._eps = eps

    def forward(self, features: Tensor) -> Tensor:
        features = at_least_single(features)
        variance, mean = torch.var_mean(features, dim=(2, 3), correction=0, keepdim=True)
        style = features - (features - mean) * torch.rsqrt(variance + self._eps)
        # The mean of F_style over a map is that of F: the normalised map has none.
        attention = torch.sigmoid(self.excite(functional.relu(self.squeeze(mean.flatten(1)))))
        return attention[:, :, None, None] * style
