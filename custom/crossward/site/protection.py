"""A site's differentially private side of a run: what it may spend, what it writes down, and the noise that it buys.

Everything that is worked out from images and leaves the site is paid for here: the steps of training, what a method
releases beside its update, right answers on validation images, and those on test images at the end. No patient is in
two of these parts, so each of them has the whole of epsilon.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from crossward.federation.contract import Tensors, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.imaging.data import SiteData, Split
from crossward.methods.base import Batch, Context, Method, Model
from crossward.privacy.dp.accounting import Budget, Part, Spending, calibrate
from crossward.privacy.dp.ledger import BudgetSpent, Ledger, cost, key_of
from crossward.privacy.dp.lines import Entry
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.release import noisy_sums
from crossward.privacy.dp.sampling import PatientSampler
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.dp.signing import Signer, local_signer
from crossward.site.devices import Device
from crossward.site.private_trainer import check_training, train_privately
from crossward.site.trainer import EVALUATION_BATCH, Training


class LedgerRefused(PrivacyRefusal):
    """The ledger does not hold, so that nothing may be spent."""


class NotPrivate(PrivacyRefusal):
    """The study cannot be trained image by image."""


NO_LIMIT = 1e6
"""Epsilon that no run comes near: the site's ledger is kept, and only a run's own budget ends it."""


@dataclass(frozen=True)
class Book:
    """Where a run at a site is written down.

    Attributes:
        ledger: of the site's images, for all runs.
        run: this one's name.
        budget: of the site, over all runs; only the run's own counts where it is not given.
    """

    ledger: Ledger
    run: str
    budget: Budget | None = None


def ledger_in(state: Path, *, site: str, signer: Signer) -> Ledger:
    """The ledger among a site's own files, with its anchor in a folder beside it."""
    return Ledger(state / "ledger", sign=signer.sign, verify=signer.verify, signer=signer.label, name=site)


def own_book(folder: Path, *, site: str, run: str) -> Book:
    """A ledger for a run in one process, signed with a key of its own."""
    signer = local_signer(key_of(folder / "ledger"), ledger=folder / "ledger")
    return Book(ledger_in(folder, site=site, signer=signer), run)


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


class Protection:
    """Trains, releases and counts under differential privacy.

    Args:
        data: the site's images.
        privacy: of the study.
        training: likewise.
        rounds: planned.
        releases: whether the method reports something beside its update.
        book: where spending is written down first.
        device: where to compute.
    """

    def __init__(
        self,
        data: SiteData,
        privacy: Privacy,
        training: Training,
        *,
        rounds: int,
        releases: bool,
        book: Book,
        device: Device,
    ) -> None:
        self._data, self._privacy, self._training, self._book, self._device = data, privacy, training, book, device
        self._source = NoiseSource()
        self.units = len(set(data.train.patients)) if privacy.unit == "patient" else len(data.train)
        self.prices = prices_of(privacy, training, units=self.units, rounds=rounds, releases=releases)
        self._sampler = PatientSampler(
            data.train.patients, rate=self.prices.rate, unit=privacy.unit, source=self._source
        )
        self._split = _split_of(data)
        self._checked = False

    def train(self, model: Model, method: Method, context: Context) -> dict[str, Vector]:
        """Train a round; what it costs is on disk before an image is looked at.

        Raises:
            PrivacyRefusal: the budget would be passed, or the model cannot be clipped image by image.
        """
        clip, prices = self._privacy.clip, self.prices
        if not self._checked:
            try:
                check_training(model, method, self._data.train, context, clip=clip, device=self._device)
            except PrivacyRefusal as refusal:
                raise NotPrivate(str(refusal)) from refusal
            self._checked = True
        spent = {"steps": Spending(prices.step, prices.rate, prices.steps)}
        if prices.release is not None:
            spent["release"] = Spending(prices.release, 1.0, 1)
        self._reserve(context.round_number, spent)
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
        )

    def extras(self, model: Model, method: Method, context: Context) -> Tensors:
        """What the method reports beside its update, from noisy sums; it was paid for with the round's training."""
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

        with torch.inference_mode(), self._device.autocast():
            sums = noisy_sums(parts(), noise=self.prices.release, source=self._source)
            extras = method.extras_of(sums, context)
        return {name: tensor.float().cpu().clone() for name, tensor in extras.items()}

    def counted(self, part: Part, split: Split, right: Tensor, round_number: int) -> tuple[float, float]:
        """How many units a part has, and of how many the model is right, with noise; several images are a part each.

        Args:
            part: validation or test.
            split: its images.
            right: [n], whether the answer to each is.
            round_number: of the model.
        """
        weights = _weights(split, self._privacy)
        units, noise = float(weights.sum()), self.prices.validation if part == "val" else self.prices.test
        if not units:
            return 0.0, 0.0
        self._reserve(round_number, {f"{part} counts": Spending(noise, 1.0, 1, part=part)})
        noisy = (weights * right.double()).sum().reshape(1)
        self._source.add_to([noisy], scale=noise)
        return float(round(units)), float(noisy.clamp(0.0, units))

    def spent(self) -> float:
        """Epsilon of this run so far, with what crashes wasted."""
        return self._book.ledger.spent(delta=self._privacy.delta, run=self._book.run)

    def _reserve(self, round_number: int, spendings: Mapping[str, Spending]) -> None:
        """Write down what is about to be spent: within what the run may, and what the site lets all runs together."""
        book, delta = self._book, self._privacy.delta
        entries = [
            Entry(run=book.run, round=round_number, what=what, spending=spending, split=self._split)
            for what, spending in spendings.items()
        ]
        try:
            self._check_own(entries)
            book.ledger.reserve(entries, budget=book.budget or Budget(NO_LIMIT, delta))
        except BudgetSpent:
            raise
        except PrivacyRefusal as refusal:
            raise LedgerRefused(str(refusal)) from refusal

    def _check_own(self, entries: Sequence[Entry]) -> None:
        if self._privacy.epsilon is None:
            return
        own, run = Budget(self._privacy.epsilon, self._privacy.delta), self._book.run
        before = [entry for entry in self._book.ledger.entries() if entry.run == run]
        asked = cost([*before, *entries], delta=own.delta)
        # Not "greater than": an answer that is no number must not pass.
        if not asked <= own.epsilon:
            spent = cost(before, delta=own.delta)
            raise BudgetSpent(site=self._data.name, budget=own, spent=spent, asked=asked, entry=entries[0])


def _weights(split: Split, privacy: Privacy) -> Tensor:
    """What every image counts: with patients as units, one over the number of its patient's images."""
    images = Counter(split.patients if privacy.unit == "patient" else split.ids)
    owners = split.patients if privacy.unit == "patient" else split.ids
    return torch.tensor([1 / images[owner] for owner in owners], dtype=torch.float64)


def _split_of(data: SiteData) -> str:
    """A name for who is in which part: with other parts, a patient may pay in two of them."""
    parts = [sorted(set(part.patients)) for part in (data.train, data.val, data.test)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
