"""Sites of a wired run that a test can look into: real ``Release`` objects over a participant that trains nothing.

The observer knows which numbers are in every masked vector, whatever kind of sum it is for: the same count of the same
model has the same name in all of them. What every round's sums hold alike (numbers of images, which classes a site
has) is left out: two rounds with other sites show it, and no rule of a site prevents that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossward.federation.algebra import Algebra, Extra
from crossward.federation.contract import (
    ALL,
    CORRECT,
    LOSS,
    SAMPLES,
    SEEN,
    VALIDATION_AS_RECEIVED,
    VALIDATION_CORRECT,
    VALIDATION_COUNT,
    Payload,
    Report,
    Tally,
)
from crossward.federation.rules import SampleMean
from crossward.federation.scopes import Scope, TensorSpec, tensors_digest
from crossward.methods.f2dc import DomainAware
from crossward.methods.fdse import ConsensusMaximisation, SimilarityAware
from crossward.methods.fedcode import HeldPrototypes, StyleGroups
from crossward.privacy.secagg.masks import Words, keystream
from crossward.privacy.sums import PRESENT, TEST, Kind, Request
from crossward.site.messages import Message
from crossward.site.release import Release
from tests.privacy.observer import PRIME, Observer, Row, Upload, WatchedSite, _rank

CLASSES = 3
STYLE = 4
_SHARED = {"w": TensorSpec(Scope.SHARED, (3,))}
_CONSTANT = (SAMPLES, SEEN, VALIDATION_COUNT, TEST[0])
Part = dict[Any, tuple[Any, float]]
"""By what is summed: a name of the number that a site puts in, and what it is multiplied by."""


def averaging(fewest: int) -> Algebra:
    del fewest
    return Algebra(_SHARED, {Scope.SHARED: SampleMean()})


def by_domain(fewest: int) -> Algebra:
    del fewest
    return Algebra(_SHARED, {Scope.SHARED: DomainAware(domains=None, classes=CLASSES, alpha=1.0, beta=0.4)})


def prototypes(fewest: int) -> Algebra:
    """Class means of those that have a class, and styles by group, as FedCode sums them."""
    extras = {
        "prototypes": Extra((CLASSES, 2), HeldPrototypes(classes=CLASSES, holders=fewest)),
        "style": Extra((1, STYLE), StyleGroups(clusters="finch", members=fewest)),
    }
    return Algebra(_SHARED, {Scope.SHARED: SampleMean()}, extras)


def mixtures(fewest: int) -> Algebra:
    """Weights of sites and a sum for every one of them, as FDSE has them."""
    layout = {**_SHARED, "own": TensorSpec(Scope.PERSONAL, (2,))}
    rules = {
        Scope.SHARED: ConsensusMaximisation({"w": ["w"]}, cap=1 / (fewest - 1)),
        Scope.PERSONAL: SimilarityAware({"own": ["own"]}, tau=0.5, others=fewest - 2),
    }
    return Algebra(layout, rules)


ALGEBRAS: Mapping[str, tuple[Callable[[int], Algebra], int]] = {
    "averaging": (averaging, 3),
    "by domain": (by_domain, 3),
    "prototypes": (prototypes, 3),
    "mixtures": (mixtures, 4),
}
"""With the fewest sites that a sum is over."""


def values_of(*what: Any, count: int) -> Tensor:
    """Numbers that depend on nothing but what they are of."""
    seed = int.from_bytes(sha256(repr(what).encode()).digest()[:8])
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, count).astype(np.float32))


@dataclass
class MemoryVault:
    """A vault that ends with its process."""

    kept: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def keep_keys(self, round_number: int, keys: Mapping[str, Any]) -> None:
        self.kept[round_number] = keys

    def keys(self, round_number: int) -> Mapping[str, Any]:
        return self.kept.get(round_number, {})

    def latest_model(self) -> dict[str, Tensor]:
        return {}

    def secret(self) -> bytes:
        return bytes(32)


class Hospital:
    """Stands in for a participant. Its update is a matter of the model and the round, as where chances are seeded.

    Models that differ in less than a thousandth give the same update and the same counts.
    """

    reach = None

    def __init__(self, name: str, algebra: Algebra, *, classes: Collection[int] = range(CLASSES)) -> None:
        self.name = name
        self.algebra = algebra
        self.vault = MemoryVault()
        self.samples = 10.0 + 5 * float(values_of(name, "size", count=1))
        self.trained = 0
        self.scale = 1.0
        self._classes = classes

    def receive(self, payload: Payload) -> Tally:
        model = model_of(payload.tensors)
        counts = {VALIDATION_COUNT: 9.0, VALIDATION_CORRECT: model % 7, VALIDATION_AS_RECEIVED: model % 5}
        return {key: np.array([float(value)]) for key, value in counts.items()}

    def train(self, payload: Payload, validation: Tally | None = None) -> Report:
        number, model = payload.round_number + 1, model_of(payload.tensors)
        update = {
            name: self.scale
            * values_of(self.name, model, number, self.trained, name, count=spec.numel).view(spec.shape)
            for name, spec in self.algebra.sent.items()
        }
        if "prototypes" in update:
            update["prototypes"] *= torch.tensor([[float(row in self._classes)] for row in range(CLASSES)])
        counts = {SAMPLES: self.samples, LOSS: 1.5, SEEN: self.samples, CORRECT: 3.0}
        tally = {key: np.array([value]) for key, value in counts.items()} | dict(self.algebra.measure(update))
        return Report(self.name, number, tensors_digest(payload.tensors), update, tally, validation or {})


def model_of(tensors: Mapping[str, Tensor]) -> int:
    """Which of the made-up models it is, or is nearly."""
    return round(float(tensors["w"][0]))


class WatchedRelease(Release):
    """Tells the observer what is in a vector."""

    def _contribute(self, message: Mapping[str, Any]) -> Message:
        request = self._request
        if request is not None and isinstance(self._secure, WiredSite) and request.kind in self._reports:
            self._secure.parts = self._parts(request, self._reports[request.kind])
        return super()._contribute(message)

    def _parts(self, request: Request, report: Report) -> Part:
        contribution, tally = self._masked.parts(request, report)
        trained = self._digests[request.kind]
        # How large a product is depends on the plan; every other number is what it is under any.
        measured = (trained, request.plan and request.plan.digest()) if request.kind is Kind.RANGES else trained
        found: Part = {}
        for key, values in tally.items():
            if key not in _CONSTANT and key.rpartition("/")[2] != PRESENT:
                named = self._number if key in (VALIDATION_CORRECT, VALIDATION_AS_RECEIVED) else measured
                found |= {(key, place): ((key, place, named), 1.0) for place in range(values.size)}
        for slot, shares in contribution.items():
            for name, share in shares.items():
                rows = np.atleast_1d(np.asarray(share.coefficient, dtype=np.float64))
                where = name if slot == ALL else (slot, name)
                found |= {(where, row): ((name, trained), float(value)) for row, value in enumerate(rows) if value}
        return found

    def _received(self, payload: Payload) -> Payload:
        opened = super()._received(payload)
        self._number = model_of(payload.tensors)
        return opened


class WiredSite(WatchedSite):
    """A site inside a ``Release``."""

    parts: Part

    def contribute(self, inbox: Mapping[str, bytes], words: Words, **options: Any) -> bytes:
        plain = words.copy()
        message = super().contribute(inbox, words, **options)
        self.note_holds(inbox)
        upload = WiredUpload(
            self.watched_begun,
            tuple(sorted([*inbox, self.name])),
            options["update"],
            1,
            plain,
            words.copy(),
            self.parts,
        )
        for where in (options.get("slots") or {}).values():
            plain[where] = upload.without_masks()[where]
        self.observer.uploads.append(upload)
        for key in upload.masks():
            self.observer.contents[self.name, key].add(sha256(plain.tobytes()).digest())
        return message


@dataclass(eq=False)
class WiredUpload(Upload):
    """With the names of the numbers in it."""

    parts: Part

    def without_masks(self) -> Words:
        total = self.masked.copy()
        for key, sign in self.masks().items():
            total -= np.uint32(sign % 2**32) * keystream(key, len(total))
        return total


@dataclass
class WiredObserver(Observer):
    """Looks at every number of the vectors by itself; of what is for one site only, at what colluding sites get."""

    def _shown_alone(self, sums: Sequence[Sequence[Upload]]) -> Iterator[str]:
        rows: dict[Any, list[Row]] = defaultdict(list)
        for uploads in sums:
            found: dict[Any, Row] = defaultdict(lambda: defaultdict(int))
            for upload in uploads:
                assert isinstance(upload, WiredUpload)
                for where, (number, coefficient) in upload.parts.items():
                    if not isinstance(where[0], tuple) or where[0][0] in self.colluding:
                        found[where][upload.begun.site, number] += modulo(coefficient)
            for where, row in found.items():
                rows[where].append({column: value % PRIME for column, value in row.items() if value % PRIME})
        for where, each in rows.items():
            whole = _rank(each)
            for site in sorted({column[0] for row in each for column in row}):
                others = [{column: value for column, value in row.items() if column[0] != site} for row in each]
                if _rank(others) < whole:
                    yield f"P3 sums that can be opened show {where} of {site} alone"


def modulo(value: float) -> int:
    """A float, exactly, in the field in which the observer reckons."""
    exact = Fraction(value)
    return exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME


def place(name: str) -> Path:
    """Where a site's memory would be, if it were on disk."""
    return Path("/nowhere") / name
