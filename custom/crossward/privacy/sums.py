"""The masked sums of a run: which there are, what goes into each, and what a site checks before it takes part.

A round has up to three. TOTALS are the tallies that a plan needs; RANGES say how large the products are, once at the
start of a run; UPDATES are the products themselves. What a site measured of a model is in one of them only: two sums
over different sites that both held it would show it as their difference. What does not change with the model, such as
a site's number of images, has no such protection: it is in every round's sums, and so in the difference of two rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from crossward.federation.algebra import Algebra
from crossward.federation.contract import (
    ALL,
    VALIDATION,
    Contribution,
    Plan,
    Report,
    Share,
    Tally,
    Tensors,
    Vector,
)
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.scopes import Scope, tensors_digest
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import Malformed, digest
from crossward.privacy.secagg.ring import Bits
from crossward.privacy.secagg.vector import VectorLayout

TEST = ("test/n", "test/correct")
"""What a site counts of the model that it deploys, on its test images."""

PRESENT = "present"
"""The tally by which a rule counts the sites that add to each row of a tensor."""

_EXPONENTS = range(-40, 41)
_EXPONENT = "exponent/"
# Ranges follow the sums from round to round, slowly; where values were cut off they widen at once.
_ROOM, _MORE_ROOM, _FASTEST = 2.0, 8.0, 4.0
_SMALLEST = 2.0 ** _EXPONENTS[0]


class Kind(StrEnum):
    """What a sum is of."""

    TOTALS = "totals"
    RANGES = "ranges"
    UPDATES = "updates"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One attempt at one sum, as the server asks all sites of its cohort for it, in the same words.

    Attributes:
        kind: of sum.
        round_number: from 1.
        attempt: from 1.
        cohort: who is asked, in the order of names.
        plan: whose coefficients the products have; only for ranges and updates.
        limits: by tensor, the largest product that is not cut off; only for updates.
    """

    kind: Kind
    round_number: int
    attempt: int
    cohort: tuple[str, ...]
    plan: Plan | None = None
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all of the cohort must be in the sum: without some of them a plan's weights could leave two sites."""
        return self.plan is not None and bool(self.plan.values)

    def message(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "kind": self.kind.value,
            "round": self.round_number,
            "attempt": self.attempt,
            "cohort": list(self.cohort),
            "plan": self.plan.to_json() if self.plan else "",
            "limits": json.dumps(dict(self.limits), allow_nan=False),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Request:
        """Read what ``message`` gave.

        Raises:
            Malformed: it is something else.
        """
        try:
            limits = {str(name): float(limit) for name, limit in json.loads(message["limits"]).items()}
            request = cls(
                kind=Kind(message["kind"]),
                round_number=int(message["round"]),
                attempt=int(message["attempt"]),
                cohort=tuple(str(name) for name in message["cohort"]),
                plan=Plan.from_json(message["plan"]) if message["plan"] else None,
                limits=limits,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Malformed("a request for a sum that cannot be understood") from error
        if list(request.cohort) != sorted(set(request.cohort)):
            raise Malformed("a request that does not name every site once, in order")
        return request


class MaskedAlgebra:
    """An algebra's sums as vectors; the same at the server and at every site.

    Args:
        algebra: layout and rules.
        bits: of the ring.
        reach: where sites share the noise, how far a value of an update can be from 0 (``Study.reach``). A site's own
            numbers have less noise than it takes, so they are in no other sum than that of the updates, and no limit
            is made of them.
    """

    def __init__(self, algebra: Algebra, *, bits: Bits, reach: float | None = None) -> None:
        self.algebra = algebra
        self.bits = bits
        self.limits: dict[str, float] = {} if reach is None else dict.fromkeys(algebra.sent, reach)
        """Limits that are the same in every round, whatever sites trained; none where they follow the sums."""
        validation: dict[str, tuple[int, ...]] = dict.fromkeys(VALIDATION, (1,))
        self.totals_first = algebra.needs != "nothing"
        """Whether tallies are summed before the plan; otherwise they go with the updates."""
        # What a site counted of a model rides with its tallies, or is summed by itself: it is remembered as one.
        self._remembered = {Kind.VALIDATION: Kind.TOTALS if self.totals_first else Kind.UPDATES}
        self._tallies: dict[Kind, dict[str, tuple[int, ...]]] = {
            Kind.TOTALS: algebra.tallies | validation,
            Kind.RANGES: {_EXPONENT + name: (len(_EXPONENTS),) for name in algebra.sent},
            Kind.UPDATES: {} if self.totals_first else algebra.tallies | validation,
            Kind.VALIDATION: validation,
            Kind.TEST: dict.fromkeys(TEST, (1,)),
        }

    @property
    def rotated(self) -> list[str]:
        """Extras whose cosines the plan needs: they leave a site only rotated by a key that sites share."""
        return list(self.rotated_blocks.values())

    @property
    def rotated_blocks(self) -> dict[str, str]:
        """Which block of cosines is of which rotated extra."""
        found = self.algebra.blocks().items()
        return {block: name for block, names in found for name in names if name in self.algebra.extras}

    @property
    def sketched(self) -> dict[str, tuple[str, ...]]:
        """Blocks of the model whose cosines the plan needs, which are sketched."""
        found = self.algebra.blocks().items()
        return {block: names for block, names in found if not set(names) & set(self.algebra.extras)}

    @property
    def personal(self) -> list[str]:
        """The tensors of which every site gets a sum of its own."""
        return [name for name, spec in self.algebra.layout.items() if spec.scope is Scope.PERSONAL]

    @property
    def averaged(self) -> list[str]:
        """Those of them whose mean the server may read."""
        rule = self.algebra.rules().get(Scope.PERSONAL)
        return self.personal if rule is not None and rule.averaged else []

    def check(self, request: Request) -> None:
        """What a site demands of a request beyond its form.

        Raises:
            PrivacyRefusal: a plan that is missing, of another round or cohort, or that would show one site's part; or
                tallies by themselves, where they go with the updates.
        """
        if request.kind is Kind.TOTALS and not self.totals_first:
            raise PrivacyRefusal("tallies are to be summed twice, by themselves and with the updates")
        planned = request.kind in (Kind.RANGES, Kind.UPDATES)
        if (request.plan is not None) != planned or (set(request.limits) != set(self._limited(request))):
            raise PrivacyRefusal(f"a sum of {request.kind} with a plan or with limits that do not belong to it")
        if request.plan is None:
            return
        if self.limits and request.limits != self.limits:
            raise PrivacyRefusal("of what has a share of the noise only, no sum is made but one in the range of all")
        if (request.plan.round_number, request.plan.cohort) != (request.round_number, request.cohort):
            raise PrivacyRefusal("a plan of another round, or for other sites than those of the sum")
        self.algebra.check_plan(request.plan)
        if not all(0 < limit < math.inf for limit in request.limits.values()):
            raise PrivacyRefusal("a range of numbers without an end")

    def _limited(self, request: Request) -> Mapping[str, object]:
        return self.algebra.sent if request.kind is Kind.UPDATES else {}

    def layout(self, request: Request) -> VectorLayout:
        """What is where in the vectors of a sum."""
        template: Contribution = {}
        if request.kind is Kind.UPDATES:
            template = self._contribution(self._anybodys(request.round_number), request, 0)
        return VectorLayout(template, self._tallies[request.kind], parties=len(request.cohort), bits=self.bits)

    def binding(self, request: Request, *, study: str, model: str) -> Binding:
        """What the keys of the attempt are bound to.

        The model's digest has the kind of sum before it: what is remembered of one kind says nothing about another.
        Test images are summed once in a study, whatever the model.
        """
        kind = self._remembered.get(request.kind, request.kind)
        return Binding(
            study=study,
            round_number=request.round_number,
            attempt=request.attempt,
            cohort=request.cohort,
            model=f"{kind}:{model}" if kind is not Kind.TEST else f"{kind}",
            plan=request.plan.digest() if request.plan else "",
            layout=self.layout(request).digest(request.limits),
        )

    def parts(self, request: Request, report: Report) -> tuple[Contribution, Tally]:
        """What a site puts into a sum.

        Raises:
            PrivacyRefusal: the report does not hold what the sum is of.
        """
        me = request.cohort.index(report.site)
        if request.kind is Kind.RANGES:
            return {}, self._exponents(self._contribution(report, request, me))
        contribution = self._contribution(report, request, me) if request.kind is Kind.UPDATES else {}
        everything = {**report.tally, **report.validation}
        return contribution, {key: everything[key] for key in self._tallies[request.kind] if key in everything}

    def ways(self, request: Request, report: Report) -> dict[str, str]:
        """How each of a site's tensors goes into a sum: sums over the same sites that agree in this are one."""
        found: dict[str, list[Any]] = {name: [repr(request.limits.get(name))] for name in report.update}
        if request.plan is not None:
            slots = self._contribution(report, request, request.cohort.index(report.site))
            for slot, shares in sorted(slots.items()):
                for name, share in shares.items():
                    found[name] += [slot, np.asarray(share.coefficient, dtype=np.float64).tobytes()]
        return {name: digest("way", way).hex() for name, way in found.items()}

    def rows(self, request: Request, report: Report) -> bytes:
        """Which rows of the tensors that are summed row by row this site adds to, as bits for the other sites."""
        if request.kind is not Kind.UPDATES:
            return b""
        shares = self._contribution(report, request, request.cohort.index(report.site)).get(ALL, {})
        rows = [np.asarray(share.coefficient) != 0 for share in shares.values() if np.ndim(share.coefficient)]
        return np.packbits(np.concatenate(rows)).tobytes() if rows else b""

    @staticmethod
    def check_rows(own: str, rows: Mapping[str, bytes], *, fewest: int) -> None:
        """Refuse to add to a row that too few sites add to: a server that says otherwise could be lying.

        Args:
            own: this site's name.
            rows: by site, what ``rows`` gave.
            fewest: sites that a row is summed over.

        Raises:
            PrivacyRefusal: a row would show the part of one site, or of a few.
        """
        bits = {site: np.unpackbits(np.frombuffer(each, dtype=np.uint8)) for site, each in rows.items()}
        adding = np.sum(list(bits.values()), axis=0)
        if (adding[bits[own] == 1] < fewest).any():
            raise PrivacyRefusal(f"this site would add to a row of a sum that less than {fewest} sites add to")

    def divisors(self, plan: Plan, site: str) -> dict[str, float]:
        """What a site's own sums of personal tensors are to be divided by."""
        report = self._anybodys(plan.round_number)
        slots = [self.algebra.contribute(report, plan, me)[site] for me in range(len(plan.cohort))]
        return {name: sum(float(np.asarray(slot[name].coefficient)) for slot in slots) for name in self.personal}

    def _contribution(self, report: Report, request: Request, me: int) -> Contribution:
        """A site's products; of personal tensors also those for the mean, where the server may read it."""
        if request.plan is None:
            raise PrivacyRefusal("products without a plan")
        found = {slot: dict(shares) for slot, shares in self.algebra.contribute(report, request.plan, me).items()}
        slots = [slot for slot in found if slot != ALL]
        for name in self.averaged:
            shares = [found[slot][name] for slot in slots]
            mean = sum(float(np.asarray(share.coefficient)) for share in shares) / len(shares)
            found.setdefault(ALL, {})[name] = Share(mean, report.update[name])
        return found

    def _anybodys(self, round_number: int) -> Report:
        """A report of zeros that takes no memory: contributions have the same shape whoever makes them."""
        update = {name: torch.zeros(()).expand(spec.shape) for name, spec in self.algebra.sent.items()}
        tally = {key: np.ones(shape) for key, shape in self.algebra.tallies.items()}
        return Report("", round_number, "", update, tally)

    def _exponents(self, contribution: Contribution) -> dict[str, Vector]:
        """For every tensor which power of two its largest product reaches, as a single 1 in a row of zeros."""
        found: dict[str, Vector] = {}
        for name in self.algebra.sent:
            largest = max((_largest(shares[name]) for shares in contribution.values() if name in shares), default=0.0)
            row = np.zeros(len(_EXPONENTS))
            exponent = math.frexp(largest)[1] if largest else _EXPONENTS[0]
            row[min(max(exponent, _EXPONENTS[0]), _EXPONENTS[-1]) - _EXPONENTS[0]] = 1.0
            found[_EXPONENT + name] = row
        return found

    def first_limits(self, tallies: Tally) -> dict[str, float]:
        """Limits from the sum of RANGES: a power of two that no site's products reach."""
        return {
            name: 2.0 ** _EXPONENTS[int(np.flatnonzero(tallies[_EXPONENT + name])[-1])] for name in self.algebra.sent
        }

    def next_limits(
        self,
        limits: Mapping[str, float],
        before: Mapping[str, float],
        now: Mapping[str, float],
        numbers: Mapping[tuple[str, ...], Vector],
    ) -> dict[str, float]:
        """Limits for the round after: they grow and shrink as the sums do, and widen where values were cut off.

        Of what the server cannot read it knows only the latter; after the first round the ranges of that stay.

        Args:
            limits: of the last round; those that are the same in every round stay.
            before: by tensor, the largest value of the sum of the round before; nothing after the first round.
            now: likewise, of the last round.
            numbers: of the last sum of UPDATES.
        """
        if self.limits:
            return dict(self.limits)
        found = {}
        for name, limit in limits.items():
            change = _ROOM if name in now or not before else 1.0
            if before.get(name) and name in now:
                change = now[name] / before[name]
            steady = min(max(change, 1 / _FASTEST), _FASTEST)
            cut_off = float(numbers["outside", name]) > 0
            found[name] = max(limit * (_MORE_ROOM if cut_off else steady), _SMALLEST)
        return found


def received_digest(tensors: Tensors, plan: Plan | None) -> str:
    """Of all that every site receives alike before a round."""
    return digest("received", tensors_digest(tensors), plan.digest() if plan else "").hex()


def without(totals: Tally, missing: int) -> dict[str, Vector]:
    """Totals for a plan when some of those who were counted are gone: any of them may have been in any row."""
    return {
        key: np.maximum(value - missing, 0.0) if key.rpartition("/")[2] == PRESENT else value
        for key, value in totals.items()
    }


def tallies_of(numbers: Mapping[tuple[str, ...], Vector]) -> dict[str, Vector]:
    """The summed tallies among a sum's exact numbers."""
    return {key[1]: value for key, value in numbers.items() if key[0] == "tally"}


def _largest(share: Share) -> float:
    value, coefficient = share.value, np.abs(np.asarray(share.coefficient))
    if not coefficient.ndim or len(coefficient) != len(value):
        return float(coefficient.max()) * float(value.abs().max())
    rows = value.abs().flatten(start_dim=1).amax(dim=1).double().numpy()
    return float((coefficient * rows).max())
