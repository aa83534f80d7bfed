"""Device and precision, chosen by what the machine has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

NARROWEST_CHANNELS_LAST = 16
"""Below this width oneDNN's channels-last backward pass on CPU (torch 2.13) can write out of bounds: seen under 8."""

IMAGE_CHANNELS = 3


@dataclass(frozen=True)
class Device:
    """A device with the numeric precision to train in.

    On CUDA matrix products run in bfloat16 where the card has it, in float16 with loss scaling otherwise; on CPU
    everything is float32.
    """

    kind: torch.device
    half: torch.dtype | None
    memory_format: torch.memory_format = torch.contiguous_format

    @classmethod
    def best(cls) -> Device:
        """Choose CUDA where it is there."""
        if not torch.cuda.is_available():
            return cls(torch.device("cpu"), None)
        return cls(torch.device("cuda"), torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)

    def take(self, model: nn.Module) -> Device:
        """Move a model here and give the device with the memory layout that suits it.

        Channels-last is a fifth faster on CPU too, but is left out there for narrow nets.
        """
        narrow = any(_is_narrow(module) for module in model.modules() if isinstance(module, nn.Conv2d))
        format_ = torch.contiguous_format if narrow and self.kind.type == "cpu" else torch.channels_last
        model.to(self.kind, memory_format=format_)  # type: ignore[call-overload]
        return replace(self, memory_format=format_)

    def autocast(self) -> AbstractContextManager[object]:
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.kind.type, dtype=self.half)

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling, which only float16 needs."""
        return torch.amp.GradScaler(self.kind.type, enabled=self.half is torch.float16)

    def images(self, images: Tensor) -> Tensor:
        """Move images to the device, in the layout of its model."""
        return images.to(self.kind, non_blocking=True, memory_format=self.memory_format)

    def __str__(self) -> str:
        return f"{self.kind.type}, {'float32' if self.half is None else str(self.half).removeprefix('torch.')}"


def _is_narrow(layer: nn.Conv2d) -> bool:
    """Whether a convolution is too narrow for channels-last on CPU; one that reads images has no input gradient."""
    reads_images = layer.in_channels <= IMAGE_CHANNELS
    return layer.out_channels < NARROWEST_CHANNELS_LAST or (
        not reads_images and layer.in_channels < NARROWEST_CHANNELS_LAST
    )
