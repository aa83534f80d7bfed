"""A run's own training once more, by the code that trains at a site, on images of which a coin put half in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crossward.imaging.data import SiteData, Split
from crossward.methods.base import Batch, Context, Model
from crossward.nets.layers import at_least_single
from crossward.privacy.audit.harness import Train
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler
from crossward.privacy.dp.settings import Privacy
from crossward.site.devices import Device
from crossward.site.private_trainer import train_privately
from crossward.site.record_protection import Prices
from crossward.site.study import Study
from crossward.site.trainer import train_round

SUPPOSED = Privacy(epsilon=8.0)
"""What a run without differential privacy is attacked with for comparison."""


@dataclass(frozen=True)
class Canaries:
    """A site's images with wrong labels, one of each patient, and which of them a coin put in."""

    split: Split
    included: NDArray[np.bool_]


def canaries(site: SiteData, most: int, seed: int) -> Canaries:
    """One image of each of a site's patients, with a label that is not its own, and a coin for each."""
    random = np.random.default_rng([seed, 77])
    firsts = list({patient: row for row, patient in reversed(list(enumerate(site.train.patients)))}.values())
    split = site.train.rows(random.permutation(firsts)[:most].tolist())
    wrong = torch.from_numpy(random.integers(1, len(site.classes), size=len(split)))
    split = replace(split, labels=(split.labels + wrong) % len(site.classes), style=None)
    return Canaries(split, random.random(len(split)) < 0.5)


def train_of(
    study: Study, name: str, canary: Canaries, prices: Prices, *, expected: float, steps: int, private: bool
) -> Train:
    """A site's round, by the code that trains at a site."""
    split = canary.split.rows(canary.included)
    training = replace(study.training, steps=steps, schedule="constant", augment="none")
    source = NoiseSource()
    sampler = PatientSampler(split.patients, rate=prices.rate, source=source)
    device = Device(torch.device("cpu"), None)
    privacy = study.privacy or SUPPOSED

    def train(model: nn.Module) -> None:
        assert isinstance(model, Model)
        context = Context(name, 1, study.task.rounds, _received(model), torch.Generator())
        if private:
            train_privately(
                model,
                study.method,
                split,
                context,
                training=training,
                sampler=sampler,
                source=source,
                steps=steps,
                noise=prices.step,
                clip=privacy.clip,
                expected=expected,
                device=device,
            )
        else:
            train_round(model, study.method, split, context, training=training, device=device)

    return train


def losses_of(study: Study, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of every image, as the training has it."""
    assert isinstance(model, Model)
    context = Context("the audit", 1, study.task.rounds, _received(model), torch.Generator())
    terms = study.method.terms(model, model(images, None), Batch(images, labels), context)
    size = len(labels)
    return torch.stack([at_least_single(term).expand(size) for term in terms.values()]).sum(dim=0)


def _received(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
