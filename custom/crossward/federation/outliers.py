"""A bound on how far one round may move the shared model.

A site limits its own update, and nobody can check that it did; under masks the server sees no update at all. What it
sees in either case is what all of them together come to, and that is held against the rounds before. It is no proof
that every update is within a range: a site can still move the model as far as a round usually does, and personal
tensors, statistics and what is reported beside the model are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

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
"""The last rounds, which say what is usual, and how many of them it takes. Updates get shorter as the learning rate
comes down: more of them would allow too much."""


class OutlierRound(RunFailure):
    """A round that would move the model much further than the rounds before it; it is not used.

    Args:
        round_number: of the round.
        times: how many times as long as usual its update is.
        allowed: how many times is allowed.
        site: whose own update stands out, where updates can be seen and one does.
    """

    def __init__(self, *, round_number: int, times: float, allowed: float, site: str | None) -> None:
        super().__init__(
            f"{f'{site}, ' if site else ''}round {round_number}: the sites' updates together are {times:.3g} times as "
            f"long as in the rounds before, and the study allows {allowed:g}: not used, the model stays at round "
            f"{round_number - 1}. Find out what {site or 'each site'} trained on; then start a new run with another "
            "--seed and without the site at fault, or with a larger --outlier if all is as it should be"
        )
        self.round_number = round_number
        self.times = times
        self.allowed = allowed
        self.site = site


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

    def check(self, length: float, *, earlier: Sequence[float], own: Mapping[str, float], round_number: int) -> None:
        """Hold a round against those before it.

        Args:
            length: of its combined update.
            earlier: the same of the rounds before, oldest first.
            own: lengths of sites' own updates, where they can be seen.
            round_number: of the round.

        Raises:
            OutlierRound: it is too long, or no number.
        """
        # A round in which nothing moved says nothing about the next one.
        recent = [each for each in earlier if each > 0][-ROUNDS:]
        usual = median(recent) if len(recent) == ROUNDS else math.inf
        if length <= self.times * usual:
            return
        raise OutlierRound(
            round_number=round_number, times=length / usual, allowed=self.times, site=self._standing_out(own)
        )

    def _standing_out(self, own: Mapping[str, float]) -> str | None:
        """The site with the longest update, where that is as far beyond the others' as a round may not be."""
        if len(own) < 2:
            return None
        *others, longest = sorted(own, key=own.__getitem__)
        usual = median(own[site] for site in others)
        return None if own[longest] <= self.times * usual else longest


def shared_length(layout: Layout, update: Tensors) -> float:
    """The Euclidean length of the shared tensors of a site's update."""
    return _length(update[name] for name in names_in(layout, Scope.SHARED))


def moved(layout: Layout, before: State, after: State) -> float:
    """How far a round moved the shared tensors."""
    return _length(after.tensors[name] - before.tensors[name] for name in names_in(layout, Scope.SHARED))


def _length(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
