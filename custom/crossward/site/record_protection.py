"""Differential privacy of a patient, or of an image: noise in every step of training, and on every count.

Everything that is worked out from images and leaves the site is paid for here: the steps of training, what a method
releases beside its update, right answers on validation images, and those on test images at the end. No patient is in
two of these parts, so each of them has the whole of epsilon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossward.federation.contract import Payload, Tensors, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.imaging.data import SiteData, Split
from crossward.methods.base import Batch, Context, Method, Model
from crossward.privacy.dp.accounting import Part, Spending, calibrate
from crossward.privacy.dp.clipping_common import NotFinite
from crossward.privacy.dp.release import noisy_sums
from crossward.privacy.dp.sampling import PatientSampler
from crossward.privacy.dp.settings import Privacy
from crossward.site.journal import Journal
from crossward.site.private_trainer import check_training, train_privately
from crossward.site.protection import LearnedPictures, NotPrivate, Protection
from crossward.site.trainer import EVALUATION_BATCH, Training

TRAINED = ("steps", "release")
"""What training a round costs, by its names in the ledger; the release where the method has one."""

LEFT_OUT = "left-out.jsonl"
"""In a run's folder at its site: how many images of each round counted as nothing."""


@dataclass(frozen=True)
class Prices:
    """Noise of everything that a run spends on, as multiples of what one unit adds at most.

    Attributes:
        rate: chance of a unit to be in a step.
        steps: in a round.
        step: of a step of training.
        release: of what a method reports beside its update, every round; None where it reports nothing.
        validation: of right answers on validation images, every round.
        test: of right answers on test images, once.
    """

    rate: float
    steps: int
    step: float
    release: float | None
    validation: float
    test: float

    @property
    def spendings(self) -> dict[str, Spending]:
        """What is written into the ledger each time, by the name that it has there."""
        found = {
            "steps": Spending(self.step, self.rate, self.steps),
            "val counts": Spending(self.validation, 1.0, 1, part="val"),
            "test counts": Spending(self.test, 1.0, 1, part="test"),
        }
        return found if self.release is None else {**found, "release": Spending(self.release, 1.0, 1)}


def prices_of(privacy: Privacy, training: Training, *, units: int, rounds: int, releases: bool) -> Prices:
    """Work out how much noise everything takes, so that the planned rounds together stay within epsilon."""
    rate = min(1.0, training.batch_size / max(1, units))
    steps = training.steps or training.epochs * math.ceil(1 / rate)
    if privacy.epsilon is None:
        noise = float(privacy.noise or 0.0)
        return Prices(rate, steps, noise, noise if releases else None, noise, noise)
    epsilon, delta = privacy.epsilon, privacy.delta
    release = calibrate(epsilon=privacy.releases * epsilon, delta=delta, rate=1.0, steps=rounds) if releases else None
    beside = [Spending(release, 1.0, rounds)] if release is not None else []
    return Prices(
        rate,
        steps,
        calibrate(epsilon=epsilon, delta=delta, rate=rate, steps=rounds * steps, releases=beside),
        release,
        calibrate(epsilon=epsilon, delta=delta, rate=1.0, steps=rounds),
        calibrate(epsilon=epsilon, delta=delta, rate=1.0, steps=1),
    )


class RecordProtection(Protection):
    """The unit is a patient with all images, or one image."""

    def __init__(self, data: SiteData, privacy: Privacy, training: Training, **options: Any) -> None:
        super().__init__(data, privacy, training, **options)
        if data.learned:
            raise LearnedPictures(
                f"{data.name}: site.yaml lets pictures depend on all training images together, so that one patient "
                f"more would change every one of them: {'; '.join(data.learned)}. Give 'nyul' its scale and every step "
                "of 'augment' its most, take 'percentile' instead of 'histogram', and run crossward data prepare again"
            )
        self.units = len(set(data.train.patients)) if privacy.unit == "patient" else len(data.train)
        self.prices = prices_of(privacy, training, units=self.units, rounds=self._rounds, releases=self._releases)
        self.noise = self.prices.step
        self._sampler = PatientSampler(
            data.train.patients,
            rate=self.prices.rate,
            unit="image" if privacy.unit == "image" else "patient",
            source=self._source,
        )

    def planned(self) -> dict[str, Spending]:
        prices, rounds = self.prices, self._rounds
        spent = {"steps": Spending(prices.step, prices.rate, rounds * prices.steps)}
        if prices.release is not None:
            spent["release"] = Spending(prices.release, 1.0, rounds)
        if len(self._data.val):
            spent["val counts"] = Spending(prices.validation, 1.0, rounds, part="val")
        return {**spent, "test counts": Spending(prices.test, 1.0, 1, part="test")}

    def train(self, model: Model, method: Method, context: Context) -> dict[str, Vector]:
        clip, prices = self._privacy.clip, self.prices
        # In every round, as terms begin in later ones: prototypes are there from the second on, and ramps leave zero.
        with _the_jobs_own():
            check_training(
                model,
                method,
                context,
                shape=self._data.train.images.shape[1:],
                classes=len(self._data.classes),
                clip=clip,
                device=self._device,
            )
        spendings = prices.spendings
        self._reserve(context.round_number, {name: spendings[name] for name in TRAINED if name in spendings})
        with _the_jobs_own():
            return train_privately(
                model,
                method,
                self._data.train,
                context,
                training=self._training,
                sampler=self._sampler,
                source=self._source,
                steps=prices.steps,
                noise=prices.step,
                clip=clip,
                expected=prices.rate * self.units,
                device=self._device,
                note=partial(self._note, context.round_number),
            )

    def _note(self, round_number: int, drawn: int, left_out: int) -> None:
        """For the site alone: how many images counted as nothing. A line in every round, whatever it says."""
        Journal(self._folder / LEFT_OUT).write({"round": round_number, "drawn": drawn, "left_out": left_out})

    def extras(self, model: Model, method: Method, context: Context) -> Tensors:
        if self.prices.release is None:
            return {}
        model.eval()
        split = self._data.train
        weights = _weights(split, self._privacy)

        def parts() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for first in range(0, len(split), EVALUATION_BATCH):
                rows = torch.arange(first, min(first + EVALUATION_BATCH, len(split)))
                batch = Batch(self._device.images(split.images[rows]), split.labels[rows].to(self._device.kind))
                yield method.private_parts(model, batch, context), weights[rows].to(self._device.kind)

        with _the_jobs_own(), torch.inference_mode(), self._device.autocast():
            sums = noisy_sums(parts(), noise=self.prices.release, source=self._source)
            extras = method.extras_of(sums, context)
        return {name: tensor.float().cpu().clone() for name, tensor in extras.items()}

    def released(
        self, update: Mapping[str, Tensor], payload: Payload, *, personal: Collection[str]
    ) -> dict[str, Tensor]:
        """As they are: every step of training had its noise."""
        del payload, personal
        return dict(update)

    def units_in(self, split: Split) -> int:
        return len(set(_owners(split, self._privacy)))

    def counted(self, part: Part, split: Split, right: Tensor, round_number: int) -> tuple[float, float]:
        """With noise; of a patient with several images each is a part."""
        units, name = float(self.units_in(split)), f"{part} counts"
        if not units:
            return 0.0, 0.0
        spending = self.prices.spendings[name]
        self._reserve(round_number, {name: spending})
        noisy = (_weights(split, self._privacy) * right.double()).sum().reshape(1)
        self._source.add_to([noisy], scale=spending.noise)
        return units, float(noisy.clamp(0.0, units))


@contextmanager
def _the_jobs_own() -> Iterator[None]:
    """What cannot be told apart by image is the job's fault; that training diverged is not."""
    try:
        yield
    except NotFinite:
        raise
    except PrivacyRefusal as refusal:
        raise NotPrivate(str(refusal)) from refusal


def _owners(split: Split, privacy: Privacy) -> tuple[str, ...]:
    """The unit that each image belongs to."""
    return split.patients if privacy.unit == "patient" else split.ids


def _weights(split: Split, privacy: Privacy) -> Tensor:
    """What every image counts: with patients as units, one over the number of its patient's images."""
    owners = _owners(split, privacy)
    images = Counter(owners)
    return torch.tensor([1 / images[owner] for owner in owners], dtype=torch.float64)
