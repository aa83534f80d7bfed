"""AlexNet with normalisation after every layer, as FedBN and FDSE train it: five convolutions, two connected layers.

It is made for photographs: three max-pools and a stem of stride 4 need images of 63 px or more. Fully connected layers
are 1x1 convolutions on maps of a single point, so that a method can replace all seven layers by the same means.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.nets.layers import Backbone, LayerFactory, LayerShape, Norm, plain_layers

SMALLEST_IMAGE = 63
STAGE_CHANNELS = (64, 192, 384, 256, 256)
HIDDEN = 1024
GRID = 6
"""The last feature map is pooled to 6 x 6 before the fully connected layers."""


class AlexNet(Backbone):
    """The stem is the first convolution, the four stages are the others, and the pool holds the fully connected layers.

    Args:
        width: factor on all layers; 1 is 64-192-384-256-256 and 1024-1024.
        norm: ``"batch"`` or ``"group"``.
        channels: colour channels of the images.
        layer: what stands for a convolution or fully connected layer with its normalisation.
    """

    def __init__(
        self, *, width: float = 1.0, norm: Norm = "batch", channels: int = 3, layer: LayerFactory | None = None
    ) -> None:
        super().__init__()
        layer = layer or plain_layers(norm)
        first, *widths = (max(1, round(base * width)) for base in STAGE_CHANNELS)
        hidden = max(1, round(HIDDEN * width))
        self.stem = nn.Sequential(
            *layer(LayerShape(channels, first, 11, stride=4, padding=2)), nn.ReLU(), nn.MaxPool2d(3, 2)
        )
        second, third, fourth, fifth = widths
        self.stages = nn.ModuleList(
            [
                nn.Sequential(*layer(LayerShape(first, second, 5, padding=2)), nn.ReLU(), nn.MaxPool2d(3, 2)),
                nn.Sequential(*layer(LayerShape(second, third, 3, padding=1)), nn.ReLU()),
                nn.Sequential(*layer(LayerShape(third, fourth, 3, padding=1)), nn.ReLU()),
                nn.Sequential(*layer(LayerShape(fourth, fifth, 3, padding=1)), nn.ReLU(), nn.MaxPool2d(3, 2)),
            ]
        )
        self.connected = nn.Sequential(
            *layer(LayerShape(fifth * GRID * GRID, hidden, 1, point=True)),
            nn.ReLU(),
            *layer(LayerShape(hidden, hidden, 1, point=True)),
            nn.ReLU(),
        )
        self.stage_channels = tuple(widths)
        self.out_channels = hidden

    def pool(self, features: Tensor) -> Tensor:
        """The grid of the last map through the fully connected layers, [b, hidden]."""
        grid = torch.flatten(functional.adaptive_avg_pool2d(features, GRID), start_dim=1)
        vectors: Tensor = self.connected(grid[:, :, None, None])
        return vectors.flatten(start_dim=1)
