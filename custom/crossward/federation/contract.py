"""What travels: reports, plans, shares and payloads.

A round is *totals and Gram -> plan -> sums*. A site reports an update and a tally; the plan is made from summed
tallies and from cosines between sites; every site then contributes ``coefficient * tensor``, and only those
products are ever added up. See docs/architecture.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from crossward.federation.scopes import tensors_digest

Vector = np.ndarray[Any, np.dtype[np.float64]]
Tensors = Mapping[str, Tensor]
Tally = Mapping[str, Vector]
Needs = Literal["nothing", "totals", "gram"]

SAMPLES = "n"
"""Tally key of the number of training samples, which every report has."""

LOSS = "train/loss"
SEEN = "train/seen"
CORRECT = "train/correct"

MOST_IMAGES = 1e9
"""No site has as many. Whoever says so is not believed: one count must not outweigh, or overflow, what others say."""

VALIDATION_COUNT = "validation/n"
VALIDATION_CORRECT = "validation/correct"
VALIDATION_AS_RECEIVED = "validation/as_received"
VALIDATION = (VALIDATION_COUNT, VALIDATION_CORRECT, VALIDATION_AS_RECEIVED)
"""What a site counts of a model that it received, on its validation images."""

ALL = "*"
"""The slot that every site receives; any other slot is the name of the one site that receives it."""


@dataclass(frozen=True)
class Report:
    """What a site has to say about a round, on disk in its outbox before it is answered.

    Attributes:
        site: who reports.
        round_number: from 1.
        model: digest of the model that the site received and trained from.
        update: shared and buffer tensors as trained minus received, personal tensors as they are, and extras.
        tally: numbers that may only ever be summed over sites (sample counts, losses, block norms).
        validation: counts of the model that the site received; none of the common start.
    """

    site: str
    round_number: int
    model: str
    update: Tensors
    tally: Tally
    validation: Tally = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The coefficients' public part, the same for all sites.

    Attributes:
        round_number: from 1.
        cohort: the sites whose contributions are summed, in the order that the plan's vectors use.
        values: for each group of tensors (a scope, or an extra's name) the numbers that its rule planned.
    """

    round_number: int
    cohort: tuple[str, ...]
    values: Mapping[str, Mapping[str, Vector]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write the plan as text, exactly: a float64 survives the way there and back."""
        values = {
            group: {key: value.tolist() for key, value in planned.items()} for group, planned in self.values.items()
        }
        return json.dumps([self.round_number, self.cohort, values], allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that to_json wrote."""
        round_number, cohort, values = json.loads(text)
        return cls(
            round_number,
            tuple(cohort),
            {
                group: {key: np.array(value, dtype=np.float64) for key, value in planned.items()}
                for group, planned in values.items()
            },
        )

    def digest(self) -> str:
        """Hash the plan, so that sites can tell whether all of them got the same one."""
        digest = hashlib.sha256(f"{self.round_number}\0{chr(0).join(self.cohort)}".encode())
        for group in sorted(self.values):
            for key in sorted(self.values[group]):
                value = np.ascontiguousarray(self.values[group][key], dtype=np.float64)
                digest.update(f"\0{group}\0{key}\0{value.shape}\0".encode() + value.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Share:
    """One product that a site adds to a slot: linear in the update by construction.

    Attributes:
        coefficient: a number, or one number per row of ``value`` (per class, for prototypes). A ``value`` of one row
            takes any number of them: the row goes into as many rows of the sum (a style vector into its group).
        value: the tensor from the report, not yet multiplied.
    """

    coefficient: float | Vector
    value: Tensor


Contribution = Mapping[str, Mapping[str, Share]]
"""Slot -> tensor name -> share."""


@dataclass(frozen=True)
class Summed:
    """The sum over the cohort of ``coefficient * value`` (float64), and of the coefficients alone."""

    value: Tensor
    coefficient: float | Vector


@dataclass(frozen=True)
class Sealed:
    """A site's personal tensors as the server holds them under secure aggregation: only that site can read them.

    Attributes:
        words: whole numbers under the other sites' pads, one tensor after the other.
        limits: by tensor, the end of the range that the numbers are a part of.
        coefficients: by tensor, what its sum is divided by.
        parties: how many sites the fixed point was made for.
        bits: of the ring.
    """

    words: np.ndarray[Any, np.dtype[np.uint32]]
    limits: Mapping[str, float]
    coefficients: Mapping[str, float]
    parties: int
    bits: int

    def header(self) -> str:
        """Everything but the numbers, as text."""
        return json.dumps([dict(self.limits), dict(self.coefficients), self.parties, self.bits], allow_nan=False)

    @classmethod
    def from_parts(cls, header: str, words: np.ndarray[Any, np.dtype[np.uint32]]) -> Sealed:
        """Put together what ``header`` and the numbers were."""
        limits, coefficients, parties, bits = json.loads(header)
        return cls(words, limits, coefficients, parties, bits)


@dataclass(frozen=True)
class Payload:
    """What one site receives: the model after a round, its own personal tensors included.

    Attributes:
        round_number: the round whose result this is; 0 is the common start.
        tensors: shared, buffer, extras, and the recipient's personal tensors.
        best_round: the best round so far on validation, so that a site knows which model to keep.
        plan: of that round; a method may read from it, such as which group this site is in.
        sealed: the recipient's personal tensors, where the server cannot read them.
    """

    round_number: int
    tensors: Tensors
    best_round: int | None = None
    plan: Plan | None = None
    sealed: Sealed | None = None


@dataclass
class State:
    """The server's side of a run after some round.

    Attributes:
        round_number: of the round.
        tensors: shared, buffer and extras, and the common start of personal tensors.
        personal: by site.
        plan: of the round.
        sealed: by site, where secure aggregation keeps personal tensors from the server.
        mean: of the personal tensors, which is all that the server then knows of them.
    """

    round_number: int
    tensors: dict[str, Tensor]
    personal: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    plan: Plan | None = None
    sealed: dict[str, Sealed] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)

    def payload(self, site: str, *, best_round: int | None = None) -> Payload:
        """Make what this site receives; a site without personal tensors of its own gets the common start's."""
        tensors = {**self.tensors, **self.personal.get(site, {})}
        return Payload(self.round_number, tensors, best_round, self.plan, self.sealed.get(site))

    def personal_digests(self) -> dict[str, str]:
        """Which personal tensors each site receives, as a hash."""
        sealed = {site: hashlib.sha256(own.words.data).hexdigest() for site, own in self.sealed.items()}
        return {site: tensors_digest(own) for site, own in self.personal.items()} | sealed

    def common(self) -> dict[str, Tensor]:
        """What a site that never trained can be given: personal tensors are the mean over the sites that have them."""
        held: dict[str, list[Tensor]] = {}
        for own in self.personal.values():
            for name, tensor in own.items():
                held.setdefault(name, []).append(tensor.double())
        means = {name: torch.stack(each).mean(dim=0).float() for name, each in held.items()}
        return {**self.tensors, **self.mean, **means}
