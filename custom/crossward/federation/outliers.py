"""A bound on how far one round may move the shared model.

A site limits its own update, and nobody can check that it did; under masks the server sees no update at all. What it
sees in either case is what all of them together come to, and that is held against earlier rounds of the same sites: a
site with many images takes many steps, and rounds with it are as much longer. It is no proof that every update is
within a range: a site can still move the model as far as a round usually does, and personal tensors, statistics and
what is reported beside the model are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor

from crossward.federation.contract import State, Tensors
from crossward.federation.errors import BadInput, RunFailure
from crossward.federation.scopes import Layout, Scope, names_in

TIMES = 5.0
"""How many times as long as usual a round may be, unless a study says otherwise.

Rounds of honest sites get shorter, or stay as they are: in 41 runs of all methods none was twice as long as usual,
under noise, with few of the sites invited, or with a step of four images a round; at seven times the usual learning
rate one was three times as long. Of ten equal sites one that sends its update a hundredfold makes a round eleven times
as long, and more where updates differ. Where rounds get much shorter from one to the next, less of that shows: what
counts is how far the model is moved."""

ROUNDS = 3
"""The last rounds of a site, which say what is usual with it, and how many of them it takes. Updates get shorter as the
learning rate comes down: more of them would allow too much."""

_MOVED, _BY = "moved", "moved_by"
"""In the history, and so in the checkpoint and the result: how far a round moved the shared tensors, and by whom."""


class EndlessRound(RunFailure):
    """A round after which the model would not be finite any more; it is not used.

    Args:
        round_number: of the round.
    """

    def __init__(self, *, round_number: int) -> None:
        super().__init__(
            f"round {round_number}: the model would not be finite any more after it: not used, the model stays at "
            f"round {round_number - 1}. Find out what each site trained on; then start a new run with another --seed, "
            "and with a lower learning rate if all is as it should be"
        )


class OutlierRound(RunFailure):
    """A round that would move the model much further than earlier rounds of its sites; it is not used.

    Args:
        round_number: of the round.
        times: how many times as long as usual its update is.
        allowed: how many times is allowed.
        site: whose own update is as much longer than its earlier ones, where updates can be seen and one is.
    """

    def __init__(self, *, round_number: int, times: float, allowed: float, site: str | None) -> None:
        super().__init__(
            f"{f'{site}, ' if site else ''}round {round_number}: the sites' updates together are {times:.3g} times as "
            f"long as in earlier rounds of theirs, and the study allows {allowed:g}: not used, the model stays at "
            f"round {round_number - 1}. Find out what {site or 'each site'} trained on; then start a new run with "
            "another --seed and without the site at fault, or with a larger --outlier if all is as it should be"
        )
        self.round_number = round_number
        self.times = times
        self.allowed = allowed
        self.site = site


@dataclass(frozen=True)
class Step:
    """What a round does to the shared tensors.

    Attributes:
        length: how far it moves them.
        own: whose updates it is made of, and how long each is; None where that cannot be seen.
    """

    length: float
    own: Mapping[str, float | None]

    def facts(self) -> dict[str, Any]:
        """As the history has it."""
        return {_MOVED: self.length, _BY: dict(self.own)}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        """What the history has of a round."""
        return cls(entry[_MOVED], entry[_BY])

    def among(self, sites: int) -> float:
        """How long it would be at most among fewer sites: what a site adds counts for more, the fewer there are."""
        return self.length * max(1.0, len(self.own) / sites)


@dataclass(frozen=True)
class Bound:
    """How many times as long as usual the combined update of a round may be; false where it may be anything.

    Raises:
        BadInput: it would stop rounds that are as long as usual.
    """

    times: float

    def __post_init__(self) -> None:
        if self.times != 0 and not 2 <= self.times < math.inf:
            raise BadInput(f"an outlier of {self.times:g} times the usual is not 0, for none at all, or at least 2")

    def __bool__(self) -> bool:
        return self.times > 0

    def check(self, step: Step, *, earlier: Collection[Step], round_number: int) -> None:
        """Hold a round against earlier ones of its sites; against nothing where one of them has been in too few.

        Args:
            step: what it does.
            earlier: the same of the rounds before, oldest first.
            round_number: of the round.

        Raises:
            OutlierRound: it is too long.
        """
        sites = len(step.own)
        usual = max(_usual(each.among(sites) for each in earlier if site in each.own) for site in step.own)
        if step.length <= self.times * usual:
            return
        raise OutlierRound(
            round_number=round_number,
            times=step.length / usual,
            allowed=self.times,
            site=self._standing_out(step, earlier),
        )

    def _standing_out(self, step: Step, earlier: Collection[Step]) -> str | None:
        """The site whose update has grown the most, where that is beyond all bounds and beyond the others' growth."""
        growth = {
            site: length / _usual(each.own.get(site) or 0.0 for each in earlier)
            for site, length in step.own.items()
            if length is not None
        }
        if not growth:
            return None
        *others, most = sorted(growth, key=growth.__getitem__)
        usual = max(1.0, median(growth[site] for site in others)) if others else 1.0
        return most if growth[most] > self.times * usual else None


def _usual(lengths: Iterable[float]) -> float:
    """The median of the last ones; infinite where there are too few to tell."""
    # A round in which nothing moved says nothing about the next one.
    recent = [length for length in lengths if length > 0][-ROUNDS:]
    return median(recent) if len(recent) == ROUNDS else math.inf


def shared_length(layout: Layout, update: Tensors) -> float:
    """The Euclidean length of the shared tensors of a site's update."""
    return _length(update[name] for name in names_in(layout, Scope.SHARED))


def moved(layout: Layout, before: State, after: State) -> float:
    """How far a round moved the shared tensors."""
    return _length(after.tensors[name] - before.tensors[name] for name in names_in(layout, Scope.SHARED))


def _length(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
