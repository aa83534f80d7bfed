"""What noisy steps cost together, and how much noise a budget asks for.

Neighbouring data sets differ by one unit, added or removed. Every figure is an upper bound. Steps with sampling are
composed by numerical convolution of their privacy losses (Gopi, Lee and Wutschitz 2021, as Opacus has it); releases
without sampling have a closed form (Balle and Wang 2018).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from scipy.special import log_ndtr

from crossward.federation.errors import PrivacyRefusal

Part = Literal["train", "val", "test"]
_Kinds = tuple[tuple[float, float, int], ...]

_SMALLEST_DELTA, _LARGEST_DELTA = 1e-10, 0.1  # below, sums in double precision drown in their own rounding
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6
_FAR = 50.0  # no budget is that large: a bound by Rényi divergences is enough, and is quick
_NEGLIGIBLE = 1e-3
_ERROR, _RELATIVE_ERROR, _FINEST_ERROR, _COARSEST_ERROR = 0.01, 0.01, 1e-4, 0.1
_MOST_POINTS = 4_000_000  # of a convolution: seconds, and some hundred MB
_FINENESS = 1000  # steps of a calibrated noise multiplier in 1


class Unpriceable(PrivacyRefusal):
    """What something costs cannot be worked out, or no noise is enough for it; then nothing may be spent."""


@dataclass(frozen=True)
class Spending:
    """Steps that cost privacy.

    Attributes:
        noise: standard deviation of the noise as a multiple of what one unit can add.
        rate: chance of a unit to take part in a step; 1 is a release without sampling.
        steps: how many.
        part: whose patients they draw from.
    """

    noise: float
    rate: float
    steps: int
    part: Part = "train"

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise Unpriceable(f"a noise multiplier of {self.noise} cannot be accounted for; it is finite, not negative")
        if not 0 < self.rate <= 1:
            raise Unpriceable(f"a sampling rate of {self.rate} cannot be accounted for; it is above 0 and at most 1")
        if type(self.steps) is not int or self.steps < 0:
            raise Unpriceable(f"{self.steps} steps cannot be accounted for; it is a whole number, not negative")
        if self.part not in get_args(Part):
            raise Unpriceable(f"no part of the data is called '{self.part}'; there are {', '.join(get_args(Part))}")


@dataclass(frozen=True)
class Budget:
    """The most that a site lets be spent.

    Attributes:
        epsilon: of everything together.
        delta: the chance that epsilon does not cover.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise Unpriceable(f"a privacy budget of epsilon {self.epsilon} is none; it is finite and above 0")
        _check_delta(self.delta)


def epsilon(spendings: Sequence[Spending], *, delta: float) -> float:
    """An upper bound of what all spendings cost together, in whatever order they are.

    Parts have no patient in common, so that no patient pays for more than one of them: the dearest counts. The caller
    answers for that; spendings on different splits of the same patients have to be given as one part.

    Args:
        spendings: none cost 0; one without noise costs infinity.
        delta: the chance that is not covered.

    Raises:
        Unpriceable: it cannot be worked out; then nothing may be spent.
    """
    _check_delta(delta)
    return _worst(_cost, spendings, delta)


def stays_within(spendings: Sequence[Spending], budget: Budget) -> bool:
    """Whether all spendings together stay within a budget; the tight bound is only worked out where a quick one fails.

    What the tight bound could not be worked out for does not stay within either, as nobody could say what is spent.

    Raises:
        Unpriceable: it cannot be worked out; then nothing may be spent.
    """
    # Not "greater than": an answer that is no number must not pass.
    return any(_worst(bound, spendings, budget.delta) <= budget.epsilon for bound in (_quick, _cost))


def calibrate(*, epsilon: float, delta: float, rate: float, steps: int, releases: Sequence[Spending] = ()) -> float:
    """The smallest noise multiplier, in steps of 0.001, with which steps and releases stay within a budget.

    Args:
        epsilon: of the budget.
        delta: of the budget.
        rate: of the steps on the training patients.
        steps: how many.
        releases: what is spent besides.

    Raises:
        Unpriceable: no noise is enough.
    """
    return _calibrated(Budget(epsilon, delta), rate, steps, tuple(releases))


@lru_cache(maxsize=256)
def _calibrated(budget: Budget, rate: float, steps: int, releases: tuple[Spending, ...]) -> float:
    epsilon, delta = budget.epsilon, budget.delta
    if steps < 1:
        raise Unpriceable(f"noise cannot be worked out for {steps} steps; a private run has at least one")

    def price(bound: Callable[[_Kinds, float], float], thousandths: int) -> float:
        return _worst(bound, [Spending(thousandths / _FINENESS, rate, steps), *releases], delta)

    def fits(bound: Callable[[_Kinds, float], float], thousandths: int) -> bool:
        return price(bound, thousandths) <= epsilon

    alone = _worst(_cost, releases, delta)
    if alone > epsilon:
        raise Unpriceable(
            f"the {len(releases)} releases alone cost epsilon {alone:.2f} of {epsilon:g} at delta {delta:g}; "
            "give them more noise, or allow a larger epsilon"
        )
    # The quick bound is never below the tight one: where it finds an answer, the tight one is close below.
    enough = _doubled(lambda noise: fits(_rdp, noise)) or _doubled(lambda noise: fits(_cost, noise))
    if enough is None:
        raise Unpriceable(
            f"beside {len(releases)} releases, which cost {alone:.2f}, no noise keeps {steps} steps within epsilon "
            f"{epsilon:g} at delta {delta:g}; allow a larger epsilon, or give the releases more noise"
        )
    if fits(_rdp, enough):
        enough = _smallest(lambda noise: price(_rdp, noise), epsilon, 0, enough)
    start = 3 * enough // 4
    return _smallest(lambda noise: price(_cost, noise), epsilon, 0 if fits(_cost, start) else start, enough) / _FINENESS


def _doubled(enough: Callable[[int], bool]) -> int | None:
    """A whole number that is enough, where one up to the largest noise is."""
    noise = _FINENESS
    while noise <= _MOST_NOISE * _FINENESS:
        if enough(noise):
            return noise
        noise *= 2
    return None


def _smallest(price: Callable[[int], float], limit: float, below: int, above: int) -> int:
    """The smallest whole number with a price within a limit; ``below`` has none, and ``above`` has.

    Between the two prices lies about a power of the number, so that few have to be worked out; where that does not
    take half of what is left, the middle is tried.
    """
    low, high, halve = price(below), price(above), False
    while above - below > 1:
        middle = (below + above) // 2
        if not halve and below and math.inf > low > high > 0:
            share = math.log(low / limit) / math.log(low / high)
            middle = min(max(round(below * (above / below) ** share), below + 1), above - 1)
        left, found = above - below, price(middle)
        if found <= limit:
            above, high = middle, found
        else:
            below, low = middle, found
        halve = not halve and above - below > left / 2
    return above


def _check_delta(delta: float) -> None:
    if not _SMALLEST_DELTA <= delta <= _LARGEST_DELTA:
        raise Unpriceable(
            f"a delta of {delta:g} cannot be accounted for; it is from {_SMALLEST_DELTA:g} to {_LARGEST_DELTA:g}"
        )


def _kinds(spendings: Iterable[Spending]) -> _Kinds:
    """Steps of one kind as one, in an order of their own, so that equal lists have equal costs, and are kept once."""
    counts: dict[tuple[float, float], int] = {}
    for spending in spendings:
        if spending.steps:
            kind = (min(spending.noise, _MOST_NOISE), spending.rate)
            counts[kind] = counts.get(kind, 0) + spending.steps
    kinds = sorted((*kind, steps) for kind, steps in counts.items())
    if not kinds or kinds[0][0] < _LEAST_NOISE:
        return tuple(kinds)
    # Gaussian releases are together exactly one, with less noise.
    precision = math.fsum(steps / noise**2 for noise, rate, steps in kinds if rate == 1)
    merged = [(precision**-0.5, 1.0, 1)] if precision else []
    return (*(kind for kind in kinds if kind[1] < 1), *merged)


def _worst(cost: Callable[[_Kinds, float], float], spendings: Sequence[Spending], delta: float) -> float:
    """The cost to the patients of the part that pays most."""
    parts = {spending.part for spending in spendings}
    return max((cost(_kinds(each for each in spendings if each.part == part), delta) for part in parts), default=0.0)


@lru_cache(maxsize=4096)
def _cost(kinds: _Kinds, delta: float) -> float:
    """What one patient may lose: the tightest bound that can be worked out."""
    if not kinds:
        return 0.0
    if min(noise for noise, _, _ in kinds) < _LEAST_NOISE:
        return math.inf
    # As if nobody had been left out by sampling: exact for releases, and a bound for everything else.
    bound = _gaussian(math.fsum(steps / noise**2 for noise, _, steps in kinds) ** -0.5, delta)
    if bound < _NEGLIGIBLE or all(rate == 1 for _, rate, _ in kinds):
        return bound
    bound = min(bound, _rdp(kinds, delta))
    return bound if bound > _FAR else min(bound, _convolved(kinds, delta))


def _gaussian(noise: float, delta: float) -> float:
    """Epsilon of one Gaussian release: where its delta, which falls as epsilon grows, is the one asked for."""

    def enough(epsilon: float) -> bool:
        log_1 = log_ndtr(0.5 / noise - epsilon * noise)
        log_2 = log_ndtr(-0.5 / noise - epsilon * noise)
        return bool(math.exp(log_1) - math.exp(epsilon + log_2) <= delta)

    if noise < _LEAST_NOISE:
        return math.inf
    if enough(0.0):
        return 0.0
    below, above = 0.0, 1.0
    while not enough(above):
        below, above = above, 2 * above
    while above - below > 1e-9 * above:
        middle = (below + above) / 2
        below, above = (below, middle) if enough(middle) else (middle, above)
    return above


@lru_cache(maxsize=4096)
def _rdp(kinds: _Kinds, delta: float) -> float:
    """A looser bound by Rényi divergences, which is quick and never fails."""
    if not kinds:
        return 0.0
    if min(noise for noise, _, _ in kinds) < _LEAST_NOISE:
        return math.inf
    # Takes seconds to import, and every command that names a budget would wait for it.
    from opacus.accountants import RDPAccountant

    found = _answer(RDPAccountant(), kinds, delta)
    return math.inf if math.isnan(found) else max(found, 0.0)


def _quick(kinds: _Kinds, delta: float) -> float:
    """The quick bound, of what the tight one can be worked out for."""
    found = _rdp(kinds, delta)
    if found <= _FAR and any(rate < 1 for _, rate, _ in kinds):
        _step_of_grid(kinds, delta)
    return found


def _convolved(kinds: _Kinds, delta: float) -> float:
    """The tight bound: first on a grid of the usual step, then on a finer one where that step counts."""
    from opacus.accountants import PRVAccountant

    least = _step_of_grid(kinds, delta)
    try:
        found = _answer(PRVAccountant(), kinds, delta, eps_error=max(_ERROR, least))
        finer = max(_RELATIVE_ERROR * found, _FINEST_ERROR, least)
        if finer < _ERROR / 2:
            found = min(found, _answer(PRVAccountant(), kinds, delta, eps_error=finer))
    except Exception as error:
        # Whatever it is that fails there: without a figure nothing is spent.
        raise _no_figure(kinds) from error
    if not math.isfinite(found):
        raise _no_figure(kinds)
    return max(found, 0.0)


def _step_of_grid(kinds: _Kinds, delta: float) -> float:
    """The smallest error that a convolution of a size that is bearable has."""
    steps = sum(count for _, _, count in kinds)
    width = 2 * (_rdp(kinds, delta / 4000) + 3) * math.sqrt(steps * math.log(12_000 / delta) / 2)
    least = width / _MOST_POINTS
    if least > _COARSEST_ERROR:
        raise Unpriceable(
            f"the privacy cost of {steps} steps is too much to work out, so that they cannot be allowed; ask for fewer"
        )
    return least


def _no_figure(kinds: _Kinds) -> Unpriceable:
    listed = "; ".join(f"{steps} steps, noise {noise:g}, rate {rate:g}" for noise, rate, steps in kinds[:4])
    return Unpriceable(
        f"the privacy cost could not be worked out, so that nothing may be spent ({listed}). Use more noise or fewer "
        "steps; figures far outside of the usual range are the likely cause"
    )


def _answer(accountant: Any, kinds: _Kinds, delta: float, **more: float) -> float:
    accountant.history = list(kinds)
    with warnings.catch_warnings():
        # Of logarithms of zero where the rate is 1, and of orders at the end of their list.
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta, **more))
