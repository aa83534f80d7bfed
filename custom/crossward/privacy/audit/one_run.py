"""A lower bound on epsilon from a single training run (Steinke, Nasr and Jagielski 2023).

Each of m canaries is put into the training data or left out, by a fair coin. An attacker looks at what the training
released and guesses, for some of them, which way the coin fell. If training is (epsilon, delta)-private, guesses are
right about as often as coins with a chance of e^epsilon / (1 + e^epsilon) at most; whoever is right more often has
shown that the claim is wrong. How many guesses are made has to be settled before the coins are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from crossward.federation.contract import Vector
from crossward.federation.errors import BadInput

CONFIDENCE = 0.95
_FINEST = 1e-4
_FAR = 50.0


@dataclass(frozen=True)
class Guesses:
    """What an attacker guessed of canaries.

    Attributes:
        canaries: how many were put in or left out.
        made: guesses; of the other canaries the attacker said nothing.
        right: of the guesses.
    """

    canaries: int
    made: int
    right: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.made <= self.canaries:
            raise BadInput(f"{self.right} right ones of {self.made} guesses about {self.canaries} canaries is no count")


def guess(scores: Vector, included: NDArray[np.bool_], *, guesses: int) -> Guesses:
    """Say of the highest scores that they were in, of the lowest that they were not, half of the guesses each."""
    half = guesses // 2
    if not 0 < 2 * half <= len(scores) == len(included):
        raise BadInput(f"{guesses} guesses about {len(scores)} canaries: give at least 2, and no more than canaries")
    order = np.argsort(scores, kind="stable")
    right = int(included[order[-half:]].sum()) + int((~included[order[:half]]).sum())
    return Guesses(len(scores), 2 * half, right)


def p_value(found: Guesses, *, epsilon: float, delta: float) -> float:
    """The most likely that so many right guesses can be, if training is (epsilon, delta)-private (their Theorem 5.2).

    With W binomial of the guesses and of chance e^epsilon / (1 + e^epsilon), and v right guesses, it is
    P[W >= v] + 2 m delta max over i of P[v > W >= v - i] / i.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(found.right - 1, found.made, chance))
    lost = 0.0
    if found.right and delta:
        below = stats.binom.pmf(np.arange(found.right - 1, -1, -1), found.made, chance)
        lost = float((np.cumsum(below) / np.arange(1, found.right + 1)).max())
    return min(1.0, tail + 2 * found.canaries * delta * lost)


def lower_bound(found: Guesses, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that so many right guesses rule out; 0 where they rule out none.

    Where training is (epsilon, delta)-private, this is above epsilon with a chance of 1 - confidence at most.
    """

    def refuted(epsilon: float) -> bool:
        return p_value(found, epsilon=epsilon, delta=delta) < 1 - confidence

    if not refuted(0.0):
        return 0.0
    below, above = 0.0, _FAR
    while above - below > _FINEST:
        middle = (below + above) / 2
        below, above = (middle, above) if refuted(middle) else (below, middle)
    return below


def most_certified(canaries: int, guesses: int, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """The bound if every guess were right: what an audit of this size can show at most."""
    return lower_bound(Guesses(canaries, guesses, guesses), delta=delta, confidence=confidence)
