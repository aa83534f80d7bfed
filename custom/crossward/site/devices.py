"""Device and precision, chosen by what the machine has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """A device with the numeric precision to train in.

    On CUDA matrix products run in bfloat16 where the card has it, in float16 with loss scaling otherwise; on CPU
    everything is float32.
    """

    kind: torch.device
    half: torch.dtype | None

    @classmethod
    def best(cls) -> Device:
        """Choose CUDA where it is there."""
        if not torch.cuda.is_available():
            return cls(torch.device("cpu"), None)
        return cls(torch.device("cuda"), torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)

    def autocast(self) -> AbstractContextManager[object]:
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.kind.type, dtype=self.half)

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling, which only float16 needs."""
        return torch.amp.GradScaler(self.kind.type, enabled=self.half is torch.float16)

    def images(self, images: Tensor) -> Tensor:
        """Move images to the device, channels last."""
        return images.to(self.kind, non_blocking=True, memory_format=torch.channels_last)

    def __str__(self) -> str:
        return f"{self.kind.type}, {'float32' if self.half is None else str(self.half).removeprefix('torch.')}"
