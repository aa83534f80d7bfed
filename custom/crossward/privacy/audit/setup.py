"""What the built-in audit attacks: a model and images on which attacks work well, and how much is tried on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.contract import Vector
from crossward.privacy.audit import harness
from crossward.privacy.audit.harness import Private
from crossward.privacy.audit.inversion import Attack
from crossward.privacy.dp.clipping import clipper_for
from crossward.privacy.dp.noise import NoiseSource

SIDE, CLASSES, SITES = 20, 10, 8

_SHADES = (0.0, 0.95, 1.0)
_KERNEL, _CHANNELS = 5, 12


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is tried.

    Attributes:
        claim: epsilon of the built-in training.
        delta: not covered by it.
        canaries: put in or left out.
        guesses: about them.
        rounds: of training.
        steps: of a round.
        rate: chance of a patient to be in a step.
        attack: of gradient inversion.
        batch: images of each site in the larger sum; no such sum where it is 0.
        labels: images whose labels are recovered.
    """

    claim: float = 2.0
    delta: float = 1e-5
    canaries: int = 2000
    guesses: int = 600
    rounds: int = 50
    steps: int = 4
    rate: float = 0.1
    attack: Attack = field(default_factory=lambda: Attack(restarts=2, sweeps=15))
    batch: int = 32
    labels: int = 100

    def private(self) -> Private:
        """The noise that the claim takes."""
        return Private.of(
            claim=self.claim,
            delta=self.delta,
            rate=self.rate,
            steps=self.rounds * self.steps,
            expected=self.rate * self.canaries / 2,
        )


QUICK = Size(claim=1.0, canaries=600, guesses=200, rounds=25, attack=Attack(restarts=1, sweeps=8), batch=0, labels=30)
FULL = Size()


def attacked_net(seed: int = 0) -> nn.Module:
    """LeNet with sigmoids, as gradient inversion was first shown on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolve = partial(nn.Conv2d, kernel_size=_KERNEL, padding=_KERNEL // 2)
        model = nn.Sequential(
            convolve(1, _CHANNELS, stride=2),
            nn.Sigmoid(),
            convolve(_CHANNELS, _CHANNELS, stride=2),
            nn.Sigmoid(),
            convolve(_CHANNELS, _CHANNELS),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(_CHANNELS * (SIDE // 4) ** 2, CLASSES),
        )
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def drawn_images(count: int, seed: int = 0) -> Tensor:
    """Discs and squares, [n,1,h,w] in [0,1]; of so much contrast that a grey guess is far off."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    images = np.full((count, 1, SIDE, SIDE), 0.05, dtype=np.float32)
    for image in images[:, 0]:
        for _ in range(3):
            across, down, width = random.uniform(0.2, 0.8), random.uniform(0.2, 0.8), random.uniform(0.12, 0.3)
            square = np.maximum(abs(x - across), abs(y - down)) < width
            disc = (x - across) ** 2 + (y - down) ** 2 < width**2
            image[disc if random.random() < 0.5 else square] = random.choice(_SHADES)
    return torch.from_numpy(images)


def mean_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of a batch."""
    return functional.cross_entropy(model(images), labels)


def private_gradient(model: nn.Module, images: Tensor, labels: Tensor, *, private: Private) -> list[Tensor]:
    """What a private step gives away at most: everybody was drawn, and the attacker knows it."""
    clipper_for(model, clip=private.clip).backward(partial(harness.losses_of, model, images, labels))
    gradient = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    NoiseSource().add_to(gradient, scale=private.noise * private.clip)
    return gradient


def flat(parts: list[Tensor]) -> NDArray[np.float32]:
    """All values of some parts, one after the other."""
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def like(values: Vector, parts: list[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of parts."""
    pieces = torch.from_numpy(values).float().split_with_sizes([part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
