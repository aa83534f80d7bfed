"""A small federation to attack: canaries at one site, other images at the others, trained with the product's own step.

Sampling, clipping and noise are those of ``privacy/dp``, put together as a site does in a round; an attack that fails
here fails on that code. The plain step is SGD on batches in random order, as without differential privacy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from crossward.privacy.audit.membership import Seen
from crossward.privacy.dp.accounting import Spending, calibrate, epsilon
from crossward.privacy.dp.clipping import clipper_for
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler

FEATURES, HIDDEN, CLASSES = 64, 128, 10
Train = Callable[[nn.Module], None]
"""What a site does in a round: trains a model in place."""


@dataclass(frozen=True, kw_only=True)
class Private:
    """Differential privacy of the small set-up.

    Attributes:
        noise: standard deviation, as a multiple of ``clip``.
        clip: norm of what a patient adds.
        rate: chance of a patient to be in a step.
        delta: not covered by epsilon.
        expected: patients in a step; settled before anybody is put in or left out, as their number would tell.
    """

    noise: float
    clip: float
    rate: float
    delta: float
    expected: float

    @classmethod
    def of(cls, *, claim: float, delta: float, rate: float, steps: int, expected: float, clip: float = 1.0) -> Private:
        """With the noise that a claim takes."""
        noise = calibrate(epsilon=claim, delta=delta, rate=rate, steps=steps)
        return cls(noise=noise, clip=clip, rate=rate, delta=delta, expected=expected)

    def epsilon(self, steps: int) -> float:
        """What is claimed of so many steps."""
        return epsilon([Spending(self.noise, self.rate, steps)], delta=self.delta)


@dataclass(frozen=True)
class Canaries:
    """Images that belong to no class, with labels by chance, of which each was trained on or not by a fair coin.

    Attributes:
        images: [m,...].
        labels: [m].
        included: [m].
    """

    images: Tensor
    labels: Tensor
    included: NDArray[np.bool_]

    @property
    def trained_on(self) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.flatnonzero(self.included))
        return self.images[rows], self.labels[rows]


def losses_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every image."""
    return functional.cross_entropy(model(images), labels, reduction="none")


def small_net(seed: int) -> nn.Module:
    """Two linear layers: large enough to learn a thousand canaries by heart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def canaries(count: int, seed: int) -> Canaries:
    """Draw canaries, and the coins; the coins decide who is trained on, and nothing else depends on them."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.standard_normal((count, FEATURES), dtype=np.float32))
    labels = torch.from_numpy(random.integers(CLASSES, size=count))
    return Canaries(images, labels, random.random(count) < 0.5)


def private_step(images: Tensor, labels: Tensor, *, private: Private, steps: int, rate: float) -> Train:
    """A site that trains under differential privacy: the product's sampler, clipper and noise."""
    source = NoiseSource()
    sampler = PatientSampler([str(row) for row in range(len(images))], rate=private.rate, source=source)

    def train(model: nn.Module) -> None:
        parameters = list(model.parameters())
        clipper = clipper_for(model, clip=private.clip)
        optimiser = torch.optim.SGD(parameters, lr=rate)
        for _ in range(steps):
            rows = torch.from_numpy(sampler.draw())
            clipper.backward(partial(losses_of, model, images[rows], labels[rows]))
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            source.add_to(gradients, scale=private.noise * private.clip)
            torch._foreach_div_(gradients, private.expected)
            optimiser.step()

    return train


def plain_step(images: Tensor, labels: Tensor, *, batch: int, steps: int, rate: float, seed: int) -> Train:
    """A site that trains with plain SGD."""
    random = np.random.default_rng(seed)

    def train(model: nn.Module) -> None:
        optimiser = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            rows = torch.from_numpy(random.choice(len(images), size=min(batch, len(images)), replace=False))
            optimiser.zero_grad(set_to_none=True)
            losses_of(model, images[rows], labels[rows]).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return train


@dataclass(frozen=True)
class Trail:
    """A federation that was watched.

    Attributes:
        model: in the end.
        each: what was seen of every site's updates, round by round.
        summed: of the sum over all sites, which is all that secure aggregation shows.
    """

    model: nn.Module
    each: list[list[Seen]]
    summed: list[Seen]


def federate(model: nn.Module, sites: Sequence[Train], *, rounds: int) -> Trail:
    """Train for some rounds, and keep what a server sees; every round ends with the mean of the sites' updates."""
    model = copy.deepcopy(model)
    trail = Trail(model, [[] for _ in sites], [])
    for _ in range(rounds):
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        updates = [_update(model, start, train) for train in sites]
        summed = {name: torch.stack([update[name] for update in updates]).sum(dim=0) for name in start}
        for seen, update in zip(trail.each, updates, strict=True):
            seen.append(Seen(start, update))
        trail.summed.append(Seen(start, summed))
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.add_(summed[name], alpha=1 / len(sites))
    return trail


def _update(model: nn.Module, start: dict[str, Tensor], train: Train) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    train(own)
    return {name: value.detach() - start[name] for name, value in own.named_parameters()}
