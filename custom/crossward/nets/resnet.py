"""ResNet-10 and ResNet-18 for small images, with BatchNorm or GroupNorm and a width factor.

The stem is a 3x3 convolution of stride 1 and there is no max-pool, so the feature map is an eighth of the
input (32 px gives 4 x 4). ResNet-10 has one basic block per stage, ResNet-18 two.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from crossward.nets.layers import Backbone, LayerFactory, LayerShape, Norm, plain_layers

BLOCKS_PER_STAGE = {10: 1, 18: 2}
STAGE_CHANNELS = (64, 128, 256, 512)
STAGE_STRIDES = (1, 2, 2, 2)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; the shortcut has its own normalisation where shapes differ."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, layer: LayerFactory) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *layer(LayerShape(channels_in, channels_out, 3, stride=stride, padding=1)),
            nn.ReLU(),
            *layer(LayerShape(channels_out, channels_out, 3, padding=1)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(*layer(LayerShape(channels_in, channels_out, 1, stride=stride)))
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.main(images) + self.shortcut(images))
        return activated


class ResNet(Backbone):
    """A residual backbone from images to a feature map.

    Args:
        depth: 10 or 18.
        width: factor on the stage widths 64-128-256-512; 0.25 gives 16-32-64-128.
        norm: ``"batch"`` or ``"group"``.
        channels: colour channels of the images.
        layer: what stands for a convolution with its normalisation; those of ``norm`` if not given.
    """

    def __init__(
        self,
        *,
        depth: int = 10,
        width: float = 1.0,
        norm: Norm = "batch",
        channels: int = 1,
        layer: LayerFactory | None = None,
    ) -> None:
        super().__init__()
        if depth not in BLOCKS_PER_STAGE:
            raise ValueError(f"depth {depth} is not one of {sorted(BLOCKS_PER_STAGE)}")
        layer = layer or plain_layers(norm)
        widths = [max(1, round(base * width)) for base in STAGE_CHANNELS]
        self.stem = nn.Sequential(*layer(LayerShape(channels, widths[0], 3, padding=1)), nn.ReLU())
        inputs = [widths[0], *widths[:-1]]
        self.stages = nn.ModuleList(
            nn.Sequential(*self._stage(before, after, stride=stride, count=BLOCKS_PER_STAGE[depth], layer=layer))
            for before, after, stride in zip(inputs, widths, STAGE_STRIDES, strict=True)
        )
        self.stage_channels = tuple(widths)
        self.out_channels = widths[-1]

    @staticmethod
    def _stage(before: int, after: int, *, stride: int, count: int, layer: LayerFactory) -> Iterator[nn.Module]:
        yield BasicBlock(before, after, stride=stride, layer=layer)
        for _ in range(count - 1):
            yield BasicBlock(after, after, stride=1, layer=layer)
