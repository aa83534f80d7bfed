from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from scipy import integrate, optimize, stats

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp import accounting
from crossward.privacy.dp.accounting import Budget, Spending, calibrate, epsilon, stays_within

TOLERANCE = 0.02
DELTA = 1e-5

# (noise, rate, steps), and delta.
BY_LOSS_DISTRIBUTION = [
    ([(1.0, 0.032, 930)], 1e-5),
    ([(0.9, 0.032, 930)], 1e-5),
    ([(1.3, 0.032, 930)], 1e-5),
    ([(2.13, 0.032, 930)], 1e-5),
    ([(3.76, 0.032, 930)], 1e-5),
    ([(0.6, 0.01, 1000)], 1e-5),
    ([(0.5, 0.05, 50)], 1e-5),
    ([(20.0, 0.1, 3000)], 1e-5),
    ([(0.8, 0.001, 10000)], 1e-6),
    ([(1.5, 0.2, 100)], 1e-3),
    ([(4.0, 0.01, 10)], 1e-5),
    ([(0.3, 0.032, 30)], 1e-5),
    ([(1.1, 0.032, 300)], 1e-8),
    ([(1.0, 0.032, 930)], 1e-10),
    ([(1.0, 1.0, 1)], 1e-5),
    ([(5.0, 1.0, 30)], 1e-5),
    ([(40.0, 1.0, 1)], 1e-5),
    ([(1.0, 0.032, 930), (10.0, 1.0, 30)], 1e-5),
    ([(1.0, 0.032, 310), (2.0, 0.032, 310), (1.5, 0.1, 20), (8.0, 1.0, 10), (12.0, 1.0, 10)], 1e-5),
    ([(1.2, 0.02, 500), (0.9, 0.05, 100), (20.0, 1.0, 60)], 1e-6),
    ([(3.0, 0.5, 40), (4.0, 1.0, 2)], 1e-5),
]


def spendings(listed: list[tuple[float, float, int]]) -> list[Spending]:
    return [Spending(*each) for each in listed]


def releases(*noises: float) -> list[Spending]:
    return [Spending(noise, 1.0, 1) for noise in noises]


def by_another_library(listed: list[tuple[float, float, int]], delta: float) -> float:
    """Epsilon by Google's dp-accounting, with privacy losses in steps of 1e-4."""
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4)
    for noise, rate, steps in listed:
        step = GaussianDpEvent(noise)
        accountant.compose(step if rate == 1 else PoissonSampledDpEvent(rate, step), steps)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("listed", "delta"), BY_LOSS_DISTRIBUTION, ids=str)
def test_another_library_has_the_same_figures(listed: Any, delta: float) -> None:
    found, expected = epsilon(spendings(listed), delta=delta), by_another_library(listed, delta)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    # An upper bound is never noticeably below the other upper bound.
    assert found > expected * 0.9999


def losses(noise: float, rate: float, step: float, size: int, *, added: bool) -> np.ndarray:
    """Chances of a step's privacy loss, rounded up to whole steps of a grid around zero: index size // 2 is zero."""
    # A unit moves a share `rate` of the outputs by one: the loss at x is log(1 - rate + rate e^((2x - 1) / 2 noise^2)).
    grid = (np.arange(size + 1) - size // 2 - 1) * step
    inside = np.expm1(grid if not added else -grid) / rate + 1
    where = np.log(np.where(inside > 0, inside, 1)) * noise**2 + 0.5
    where = np.where(inside > 0, where, -np.inf)
    if added:
        return np.diff(1 - stats.norm.cdf(where, 0, noise))
    return np.diff((1 - rate) * stats.norm.cdf(where, 0, noise) + rate * stats.norm.cdf(where, 1, noise))


def by_hand(listed: list[tuple[float, float, int]], delta: float, *, step: float = 4e-5, size: int = 1 << 19) -> float:
    """Epsilon by our own convolution of losses, for both of a pair of neighbours."""
    found = []
    grid = (np.arange(size) - size // 2) * step
    for added in (False, True):
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        for noise, rate, steps in listed:
            pmf = losses(noise, rate, step, size, added=added)
            spectrum *= np.fft.rfft(np.roll(pmf, -(size // 2))) ** steps
        total = np.roll(np.fft.irfft(spectrum, size), size // 2)

        def excess(loss: float, total: np.ndarray = total) -> float:
            above = grid > loss
            return float((total[above] * -np.expm1(loss - grid[above])).sum()) - delta

        found.append(optimize.brentq(excess, 0, 9, xtol=1e-4))
    return max(found)


@pytest.mark.parametrize(
    "listed",
    [
        [(1.0, 0.032, 930)],
        [(1.3, 0.032, 930)],
        [(0.7, 0.02, 200)],
        [(1.5, 0.1, 60), (9.0, 1.0 - 1e-12, 12)],
        [(1.0, 0.032, 310), (2.0, 0.05, 310), (14.0, 1.0 - 1e-12, 60)],
    ],
    ids=str,
)
def test_our_own_convolution_has_the_same_figures(listed: Any) -> None:
    assert epsilon(spendings(listed), delta=DELTA) == pytest.approx(by_hand(listed, DELTA), rel=TOLERANCE)


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0, 30.0])
def test_a_release_has_the_delta_that_its_definition_gives(noise: float) -> None:
    """Delta is what one neighbour's density has above e^epsilon times the other's."""
    found = epsilon(releases(noise), delta=DELTA)

    def excess(x: float) -> float:
        return max(stats.norm.pdf(x, 1, noise) - math.exp(found) * stats.norm.pdf(x, 0, noise), 0.0)

    edge = found * noise**2 + 0.5
    total, _ = integrate.quad(excess, edge, edge + 10 * noise, limit=500, epsabs=1e-14)
    assert total == pytest.approx(DELTA, rel=1e-5)


def test_four_releases_are_one_with_half_the_noise() -> None:
    assert epsilon(releases(8, 8, 8, 8), delta=DELTA) == pytest.approx(epsilon(releases(4), delta=DELTA), rel=1e-9)
    # 1/3^2 + 1/4^2 = 1/2.4^2
    assert epsilon(releases(3, 4), delta=DELTA) == pytest.approx(epsilon(releases(2.4), delta=DELTA), rel=1e-9)


def test_a_run_that_was_restarted_costs_what_it_would_have_without() -> None:
    whole = epsilon([Spending(1.0, 0.032, 930), *releases(*[12.0] * 30)], delta=DELTA)
    rounds = [each for _ in range(30) for each in (Spending(1.0, 0.032, 31), *releases(12.0))]
    assert epsilon(rounds, delta=DELTA) == whole
    assert epsilon(rounds[34:] + rounds[:34], delta=DELTA) == whole


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_order_does_not_matter_and_more_costs_more(noises: list[float], random: Any) -> None:
    shuffled = random.sample(noises, len(noises))
    assert epsilon(releases(*noises), delta=DELTA) == epsilon(releases(*shuffled), delta=DELTA)
    assert epsilon(releases(*noises, 1.0), delta=DELTA) > epsilon(releases(*noises), delta=DELTA)
    assert epsilon(releases(*noises), delta=DELTA) >= max(epsilon(releases(noise), delta=DELTA) for noise in noises)


def test_more_steps_less_noise_and_a_higher_rate_cost_more() -> None:
    base = epsilon([Spending(1.5, 0.05, 100)], delta=DELTA)
    assert epsilon([Spending(1.5, 0.05, 101)], delta=DELTA) > base
    assert epsilon([Spending(1.49, 0.05, 100)], delta=DELTA) > base
    assert epsilon([Spending(1.5, 0.051, 100)], delta=DELTA) > base
    assert epsilon([Spending(1.5, 0.05, 100)], delta=DELTA / 2) > base
    assert epsilon([Spending(1.5, 1.0, 100)], delta=DELTA) > base


def test_parts_without_a_common_patient_cost_what_the_dearest_does() -> None:
    train, val, test = Spending(2.0, 1.0, 1), Spending(1.0, 1.0, 1, "val"), Spending(3.0, 1.0, 5, "test")
    assert epsilon([train, val, test], delta=DELTA) == epsilon(releases(1.0), delta=DELTA)
    assert epsilon([train, val, test, Spending(1.0, 1.0, 1)], delta=DELTA) == epsilon(releases(2.0, 1.0), delta=DELTA)


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon([], delta=DELTA) == 0.0
    assert epsilon([Spending(0.0, 0.5, 0)], delta=DELTA) == 0.0
    for noise in (0.0, 1e-300, 1e-5):
        for rate in (0.01, 1.0):
            assert epsilon([Spending(noise, rate, 1), Spending(5.0, 0.1, 3)], delta=DELTA) == math.inf


@pytest.mark.parametrize(
    "spending",
    [(0.01, 1.0, 1), (0.01, 0.03, 30), (0.1, 0.03, 30), (1.0, 0.032, 10**6), (1e300, 0.5, 10), (2.0, 1e-7, 10)],
    ids=str,
)
def test_figures_far_out_get_a_bound_that_is_none_too_low(spending: tuple[float, float, int]) -> None:
    noise, rate, steps = spending
    found = epsilon([Spending(*spending)], delta=DELTA)
    assert found >= 0
    # Of one step alone: what its definition gives for the share of runs in which the unit is drawn.
    one = epsilon(releases(noise), delta=min(DELTA / rate, 0.1))
    assert found >= (math.log1p(rate * math.expm1(min(one, 700.0))) if steps and one else 0.0) * 0.999


@pytest.mark.parametrize(
    "values",
    [
        (math.nan, 0.1, 1), (-1.0, 0.1, 1), (math.inf, 0.1, 1),
        (1.0, 0.0, 1), (1.0, 1.01, 1), (1.0, math.nan, 1), (1.0, -0.5, 1),
        (1.0, 0.1, -1), (1.0, 0.1, 1.5), (1.0, 0.1, True), (1.0, 0.1, math.nan),
        (1.0, 0.1, 1, "all"),
    ],
    ids=str,
)  # fmt: skip
def test_a_spending_that_cannot_be_is_refused(values: Any) -> None:
    with pytest.raises(PrivacyRefusal):
        Spending(*values)


@pytest.mark.parametrize("delta", [0.0, -1e-5, 1e-12, 0.5, 1.0, math.nan, math.inf])
def test_a_delta_that_means_nothing_is_refused(delta: float) -> None:
    with pytest.raises(PrivacyRefusal, match="delta"):
        epsilon([], delta=delta)
    with pytest.raises(PrivacyRefusal, match="delta"):
        Budget(1.0, delta)


@pytest.mark.parametrize("most", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_that_is_none_is_refused(most: float) -> None:
    with pytest.raises(PrivacyRefusal, match="budget"):
        Budget(most, DELTA)


@pytest.mark.parametrize("fault", [RuntimeError("no"), MemoryError(), IndexError(), math.nan, math.inf], ids=repr)
def test_without_a_figure_nothing_is_allowed(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    def fail(*ignored: Any, **more: Any) -> float:
        if isinstance(fault, Exception):
            raise fault
        return float(fault)

    accounting._cost.cache_clear()
    monkeypatch.setattr(PRVAccountant, "get_epsilon", fail)
    asked = [Spending(1.234567, 0.04321, 77)]
    with pytest.raises(PrivacyRefusal, match=r"could not be worked out, so that nothing may be spent .*77 steps"):
        epsilon(asked, delta=DELTA)
    # What failed is not remembered.
    monkeypatch.undo()
    assert epsilon(asked, delta=DELTA) > 0


def test_more_steps_than_can_be_reckoned_with_are_refused_in_words() -> None:
    with pytest.raises(PrivacyRefusal, match="1000000000 steps is too much to work out"):
        epsilon([Spending(3.0, 1e-4, 10**9)], delta=DELTA)


def test_a_long_ledger_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    real = PRVAccountant.get_epsilon

    def count(*given_on: Any, **more: Any) -> float:
        nonlocal asked
        asked += 1
        return float(real(*given_on, **more))

    accounting._cost.cache_clear()
    monkeypatch.setattr(PRVAccountant, "get_epsilon", count)
    first = epsilon([Spending(1.17, 0.0321, 7)] * 40, delta=DELTA)
    assert asked
    asked = 0
    assert epsilon([Spending(1.17, 0.0321, 140), Spending(1.17, 0.0321, 140)], delta=DELTA) == first
    assert asked == 0


@pytest.mark.parametrize(("target", "expected"), [(8.0, 0.90), (4.0, 1.30), (2.0, 2.13), (1.0, 3.76)])
def test_the_noise_for_a_usual_run(target: float, expected: float) -> None:
    """The expected ones are those of the design, worked out there by another accountant and rounded."""
    noise = calibrate(epsilon=target, delta=DELTA, rate=0.032, steps=930)
    assert noise == pytest.approx(expected, rel=0.02)
    assert epsilon([Spending(noise, 0.032, 930)], delta=DELTA) <= target
    assert epsilon([Spending(noise - 0.001, 0.032, 930)], delta=DELTA) > target


@pytest.mark.parametrize(
    ("target", "rate", "steps", "others"),
    [
        (4.0, 0.032, 930, [Spending(10.0, 1.0, 30)]),
        (4.0, 0.032, 930, [Spending(6.0, 1.0, 30, "val")]),
        (3.0, 1.0, 12, [Spending(9.0, 1.0, 3)]),
        (0.2, 1.0, 1, []),
        (0.01, 1.0, 5, []),
    ],
    ids=str,
)
def test_calibrated_noise_is_the_smallest_that_stays_within(
    target: float, rate: float, steps: int, others: list[Spending]
) -> None:
    noise = calibrate(epsilon=target, delta=DELTA, rate=rate, steps=steps, releases=others)
    assert epsilon([Spending(noise, rate, steps), *others], delta=DELTA) <= target
    assert epsilon([Spending(noise - 0.001, rate, steps), *others], delta=DELTA) > target
    assert noise == pytest.approx(round(noise, 3), abs=1e-9)


@given(
    noise=st.floats(0.8, 4), rate=st.sampled_from([0.02, 0.3, 1.0]), steps=st.integers(1, 40), part=st.floats(0.7, 1.3)
)
@settings(max_examples=20, deadline=None)
def test_the_quick_answer_is_the_same(noise: float, rate: float, steps: int, part: float) -> None:
    spendings = [Spending(noise, rate, steps), Spending(6.0, 1.0, 2, "val")]
    budget = Budget(part * epsilon(spendings, delta=DELTA), DELTA)
    assert stays_within(spendings, budget) == (part >= 1)


def test_nothing_spent_stays_within_and_no_noise_does_not() -> None:
    assert stays_within([], Budget(0.1, DELTA))
    assert not stays_within([Spending(0.0, 0.5, 1)], Budget(1e12, DELTA))


def test_releases_on_the_same_patients_ask_for_more_noise_and_those_on_others_do_not() -> None:
    plain = calibrate(epsilon=4.0, delta=DELTA, rate=1.0, steps=10)
    assert calibrate(epsilon=4.0, delta=DELTA, rate=1.0, steps=10, releases=releases(5.0)) > plain
    assert calibrate(epsilon=4.0, delta=DELTA, rate=1.0, steps=10, releases=[Spending(5.0, 1.0, 1, "val")]) == plain


def test_a_budget_that_no_noise_can_keep_is_refused() -> None:
    with pytest.raises(PrivacyRefusal, match=r"2 releases alone cost epsilon 6\.\d\d of 4"):
        calibrate(epsilon=4.0, delta=DELTA, rate=0.1, steps=5, releases=releases(1.0, 1.0))
    with pytest.raises(PrivacyRefusal, match="no noise keeps 1000000 steps within"):
        calibrate(epsilon=1e-6, delta=1e-10, rate=1.0, steps=10**6)
    with pytest.raises(PrivacyRefusal, match="at least one"):
        calibrate(epsilon=4.0, delta=DELTA, rate=0.1, steps=0)
