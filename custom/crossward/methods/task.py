"""What a study trains, the same at every site: findings, images, rounds, and the net."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from crossward.federation.errors import BadInput
from crossward.nets import AlexNet, Backbone, ResNet
from crossward.nets.alexnet import SMALLEST_IMAGE
from crossward.nets.layers import LayerFactory, Norm

Net = Literal["resnet", "alexnet"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the study trains: the same at every site.

    Attributes:
        classes: the findings, in the order of the logits.
        channels: 1 for grey films, 3 for colour.
        size: side of the square images, in pixels.
        rounds: planned rounds; schedules and ramps depend on it, so it does not change on resuming.
        seed: common start of all sites.
        net: the backbone, ``crossward.nets.ResNet`` or ``AlexNet``.
        depth: of the ResNet; AlexNet has one.
        width, norm: of either.
    """

    classes: tuple[str, ...]
    channels: int
    size: int
    rounds: int
    seed: int = 0
    net: Net = "resnet"
    depth: int = 10
    width: float = 0.25
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BadInput(f"{self.rounds} rounds are not at least 1")
        if self.net == "alexnet" and self.size < SMALLEST_IMAGE:
            raise BadInput(
                f"AlexNet needs images of {SMALLEST_IMAGE} px or more, not {self.size}; use --size 64 or more"
            )

    def backbone(self, layer: LayerFactory | None = None) -> Backbone:
        """Make the backbone, with other layers than the usual ones where a method has its own; not yet marked."""
        if self.net == "alexnet":
            return AlexNet(width=self.width, norm=self.norm, channels=self.channels, layer=layer)
        return ResNet(depth=self.depth, width=self.width, norm=self.norm, channels=self.channels, layer=layer)
