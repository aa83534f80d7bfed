"""A hospital in a run: receives a model, trains, reports, deploys. FLARE and the in-process loop both drive it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossward.evaluate.metrics import score
from crossward.federation.contract import (
    VALIDATION,
    VALIDATION_AS_RECEIVED,
    VALIDATION_CORRECT,
    VALIDATION_COUNT,
    Payload,
    Report,
    Tally,
    Tensors,
)
from crossward.federation.errors import BadInput, PrivacyRefusal, SiteFailure
from crossward.federation.scopes import Scope, layout_digest, names_in, tensors_digest
from crossward.federation.seeds import derive
from crossward.imaging.data import SiteData, Split
from crossward.imaging.loading import batches
from crossward.methods.base import Batch, Context, Method, Model, Task
from crossward.privacy.dp.accounting import Part
from crossward.privacy.dp.lines import Shared
from crossward.privacy.dp.settings import Privacy, Unit
from crossward.site.devices import Device
from crossward.site.outbox import Outbox
from crossward.site.protection import Book, Protection
from crossward.site.record_protection import RecordProtection
from crossward.site.trainer import EVALUATION_BATCH, Training, correct_count, predict, refreshed, train_round
from crossward.site.update_protection import UpdateProtection
from crossward.site.vault import Vault

PROTECTIONS: Mapping[Unit, type[Protection]] = {
    "patient": RecordProtection,
    "image": RecordProtection,
    "site": UpdateProtection,
}
"""By whose presence is hidden."""


@dataclass(frozen=True)
class Plugs:
    """What is plugged into the model: a feature block and a head, by name; the method's own where none is named."""

    block: str | None = None
    head: str | None = None


class Participant:
    """One site's part of a run.

    Args:
        data: the site's images.
        method: what to train.
        task: of the study, the same at every site.
        training: how to train.
        folder: of this run at this site; holds vault and outbox.
        device: where to compute.
        plugs: feature block and head.
        privacy: differential privacy of the study.
        book: where what is spent on it is written down.
        shared: with whom the noise is shared, where it is.
    """

    def __init__(
        self,
        data: SiteData,
        method: Method,
        task: Task,
        *,
        training: Training,
        folder: Path,
        device: Device,
        plugs: Plugs,
        privacy: Privacy | None = None,
        book: Book | None = None,
        shared: Shared | None = None,
    ) -> None:
        found = (data.classes, tuple(data.train.images.shape[1:]))
        wanted = (task.classes, (task.channels, task.size, task.size))
        if found != wanted:
            raise BadInput(f"{data.name}: the site's classes and image shape are {found}, and the study's are {wanted}")
        self.data = data
        self.method = method
        self._task = task
        self._training = training
        self._model = method.build(task, block=plugs.block, head=plugs.head)
        self._device = device.take(self._model)
        self.algebra = method.algebra(task, self._model)
        self._local = names_in(self.algebra.layout, Scope.LOCAL)
        self._start = self._tensors(self._local)
        private = [asdict(privacy)] if privacy else []
        settings = json.dumps([method.name, asdict(method), asdict(task), asdict(training), asdict(plugs), *private])
        study = hashlib.sha256(f"{layout_digest(self.algebra.layout)} {settings}".encode()).hexdigest()
        self.vault = Vault(folder / "vault", study=study)
        self.outbox = Outbox(folder / "outbox", study=study)
        self.protection: Protection | None = None
        if privacy is not None:
            if book is None:
                raise PrivacyRefusal(f"{data.name}: there is no ledger to write down what differential privacy costs")
            self.protection = PROTECTIONS[privacy.unit](
                data,
                privacy,
                training,
                rounds=task.rounds,
                releases=bool(self.algebra.extras),
                shared=shared,
                book=book,
                folder=folder,
                device=self._device,
            )

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def rounds(self) -> int:
        """How many rounds the study plans."""
        return self._task.rounds

    @property
    def reach(self) -> float | None:
        """How far a value of this site's updates can be from 0, where sites share the noise."""
        return self.protection.reach if self.protection else None

    def receive(self, payload: Payload) -> Tally:
        """Take in the result of a round, keep it as a model that may be deployed, and count it on validation images."""
        self._install(payload)
        self.vault.keep_model(payload.round_number, self._tensors())
        self.vault.tidy(received=payload.round_number, best=payload.best_round)
        self.outbox.tidy(received=payload.round_number)
        if self.protection is not None:
            digest = tensors_digest(payload.tensors)
            units, right = self._noisily("val", self.data.val, payload.round_number, digest)
            return dict(zip(VALIDATION, (np.array([each]) for each in (units, right, right)), strict=True))
        fresh = self._refreshed()
        return {
            VALIDATION_COUNT: np.array([float(len(self.data.val))]),
            VALIDATION_CORRECT: np.array([float(self._correct(fresh))]),
            VALIDATION_AS_RECEIVED: np.array([float(self._correct(self._model))]),
        }

    def train(self, payload: Payload, validation: Tally | None = None) -> Report:
        """Train the next round from a received model; a report that is in the outbox already is given again.

        Args:
            payload: the model.
            validation: what was counted of it, where that is to be a part of the report.

        Raises:
            SiteFailure: training diverged; nothing was stored for the round.
        """
        round_number = payload.round_number + 1
        digest = tensors_digest(payload.tensors)
        if (earlier := self.outbox.get(round_number, digest)) is not None:
            return earlier
        self._install(payload)
        received = {name: tensor.to(self._device.kind) for name, tensor in payload.tensors.items()}
        generator = torch.Generator(self._device.kind)
        context = Context(self.name, round_number, self._task.rounds, received, generator, payload.plan)
        if self.protection is not None:
            tally = self.protection.train(self._model, self.method, context)
            extras = self.protection.extras(self._model, self.method, context)
        else:
            tally = train_round(
                self._model, self.method, self.data.train, context, training=self._training, device=self._device
            )
            extras = self._extras(context)
        update = {**self._update(payload), **extras}
        if self.protection is not None:
            update = self.protection.released(update, payload, personal=names_in(self.algebra.layout, Scope.PERSONAL))
        tally |= self.algebra.measure(update)
        report = Report(self.name, round_number, digest, update, tally, validation or {})
        self.algebra.check(report)
        self.vault.keep_local(round_number, self._tensors(self._local))
        self.outbox.put(report)
        return report

    def finish(self, best_round: int) -> dict[str, Any]:
        """Deploy the model of the best round and say how it does on the site's test images.

        Returns:
            Scores of the deployed model (statistics refreshed on site), and of the same model as it was received; and
            the digest of the personal tensors in it, to hold against what the server says it sent.
        """
        received = self.vault.model(best_round)
        own = names_in(self.algebra.layout, Scope.PERSONAL)
        self._load(received)
        as_received = self._score(self._model, best_round)
        self._model = self._refreshed()
        self.vault.promote(self._tensors())
        return {
            "n_train": len(self.data.train),
            "n_val": len(self.data.val),
            "n_test": len(self.data.test),
            "scanner": self.data.scanner,
            "personal": tensors_digest({name: received[name] for name in own}) if own else None,
            **self._score(self._model, best_round),
            "as_received": as_received,
        }

    @property
    def spent(self) -> float | None:
        """Epsilon of this run so far; none without differential privacy."""
        return self.protection.spent() if self.protection is not None else None

    @property
    def tested_on(self) -> int:
        """How many test images the site tells others of; under differential privacy how many patients, or none."""
        test = self.data.test
        return self.protection.units_in(test) if self.protection is not None else len(test)

    def tested(self, facts: Mapping[str, Any]) -> tuple[float, float]:
        """How many test images there are and how many the deployed model gets right, as may be told to others.

        Args:
            facts: what ``finish`` gave. Under differential privacy patients are counted, and with noise.
        """
        if self.protection is not None:
            return self._noisily("test", self.data.test, 0, tensors_digest(self._tensors()))
        return float(facts["n_test"]), round((facts["accuracy"] or 0.0) * facts["n_test"])

    def accuracy_on(self, split: Split) -> float | None:
        """Score the model this site deployed on another site's images: for studies on one machine only."""
        if not len(split):
            return None
        return correct_count(self._model, self.method, split, device=self._device) / len(split)

    def _install(self, payload: Payload) -> None:
        intruders = sorted(set(payload.tensors) - set(self.algebra.sent))
        if intruders:
            raise PrivacyRefusal(
                f"{self.name}, round {payload.round_number}: the server sent '{intruders[0]}', which is not shared; "
                "the site keeps its own"
            )
        for name in names_in(self.algebra.layout, *(scope for scope in Scope if scope.leaves)):
            if name not in payload.tensors or tuple(payload.tensors[name].shape) != self.algebra.sent[name].shape:
                raise PrivacyRefusal(
                    f"{self.name}, round {payload.round_number}: the server's model lacks '{name}', or has it in "
                    "another shape than the study declares"
                )
        for name, extra in self.algebra.extras.items():
            # The server may have made more rows of it, or fewer, but not another kind of vector.
            if name in payload.tensors and payload.tensors[name].shape[1:] != torch.Size(extra.shape[1:]):
                raise PrivacyRefusal(
                    f"{self.name}, round {payload.round_number}: the server sent '{name}' in another shape than the "
                    "study declares"
                )
        local = self.vault.local(before=payload.round_number + 1)
        own = {name: tensor for name, tensor in payload.tensors.items() if name in self.algebra.layout}
        self._load({**self._start, **local, **own})

    def _load(self, tensors: dict[str, Tensor]) -> None:
        self._model.load_state_dict(tensors, strict=True)

    def _tensors(self, names: list[str] | None = None) -> dict[str, Tensor]:
        state = self._model.state_dict()
        return {
            name: state[name].detach().cpu().clone(memory_format=torch.contiguous_format)
            for name in (names if names is not None else state)
        }

    def _update(self, payload: Payload) -> dict[str, Tensor]:
        """Trained minus received for what is shared; personal tensors as they are."""
        layout = self.algebra.layout
        trained = self._tensors([name for name, spec in layout.items() if spec.scope.leaves])
        return {
            name: value if layout[name].scope is Scope.PERSONAL else value - payload.tensors[name]
            for name, value in trained.items()
        }

    def _extras(self, context: Context) -> Tensors:
        self._model.eval()
        with torch.inference_mode(), self._device.autocast():
            extras = self.method.describe(self._model, self._batches(self.data.train), context)
        return {name: tensor.float().cpu().clone() for name, tensor in extras.items()}

    def _refreshed(self) -> Model:
        seed = derive(self._training.seed, self.name, "refresh")
        return refreshed(self._model, self.data.train, device=self._device, seed=seed)

    def _noisily(self, part: Part, split: Split, round_number: int, digest: str) -> tuple[float, float]:
        """Count right answers of the current model with noise, once for a model: two draws would say more than one."""
        assert self.protection is not None
        kept = self.vault.counts(part, round_number)
        if kept.get("model") != digest:
            answers = predict(self._model, self.method, split, device=self._device).probabilities.argmax(1)
            counts = self.protection.counted(part, split, answers == split.labels, round_number)
            kept = {"model": digest, "counts": list(counts)}
            self.vault.keep_counts(part, round_number, kept)
        units, right = kept["counts"]
        return float(units), float(right)

    def _correct(self, model: Model) -> int:
        return correct_count(model, self.method, self.data.val, device=self._device)

    def _score(self, model: Model, round_number: int) -> dict[str, Any]:
        answers = predict(model, self.method, self.data.test, device=self._device).probabilities
        if not torch.isfinite(answers).all():
            raise SiteFailure(
                site=self.name,
                round_number=round_number,
                cause="the model's answers to some test images are not finite numbers",
                remedy="Look for damaged images among the site's test images, and resume",
            )
        return score(answers.numpy(), self.data.test.labels.numpy(), self.data.classes)

    def _batches(self, split: Split) -> Iterator[Batch]:
        for images, labels in batches(split, batch_size=EVALUATION_BATCH, seed=None, drop_last=False):
            yield Batch(self._device.images(images), labels.to(self._device.kind))
