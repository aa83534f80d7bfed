from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.privacy.audit.one_run import Guesses, guess, lower_bound, most_certified, p_value


def test_without_delta_the_p_value_is_a_binomial_tail() -> None:
    # Two guesses, both right, and an epsilon of 0: two fair coins.
    assert p_value(Guesses(2, 2, 2), epsilon=0.0, delta=0.0) == pytest.approx(1 / 4)
    # With e^epsilon = 3 each guess is right with a chance of 3/4: P[W >= 2] of 3 is 3 * 9/16 * 1/4 + 27/64 = 54/64.
    assert p_value(Guesses(5, 3, 2), epsilon=math.log(3), delta=0.0) == pytest.approx(54 / 64)
    assert p_value(Guesses(5, 3, 0), epsilon=math.log(3), delta=0.0) == pytest.approx(1)


def test_delta_adds_what_the_theorem_says() -> None:
    # Two fair coins, both right, out of m = 4 canaries. P[2 > W >= 2 - i] / i is 1/2 for i = 1 and (1/2 + 1/4) / 2 for
    # i = 2; the larger is 1/2, so that 2 * 4 * 0.01 * 1/2 = 0.04 is added to 1/4.
    assert p_value(Guesses(4, 2, 2), epsilon=0.0, delta=0.01) == pytest.approx(0.29)
    # Three guesses, two right: 3/8 for i = 1; (3/8 + 1/8) / 2 for i = 2. With m = 10: 1/2 + 20 * 0.01 * 3/8.
    assert p_value(Guesses(10, 3, 2), epsilon=0.0, delta=0.01) == pytest.approx(0.575)
    # And where the second is the larger: one right of two at a chance of 3/4. P[W = 0] = 1/16, and nothing else.
    expected = 15 / 16 + 2 * 4 * 0.001 / 16
    assert p_value(Guesses(4, 2, 1), epsilon=math.log(3), delta=0.001) == pytest.approx(expected)


def test_the_lower_bound_by_hand() -> None:
    # k guesses, all right: the chance p with p^k = 0.05 is the one that is just not refuted, and epsilon its odds.
    for made in (5, 20, 300):
        chance = 0.05 ** (1 / made)
        assert lower_bound(Guesses(1000, made, made), delta=0.0) == pytest.approx(
            math.log(chance / (1 - chance)), abs=2e-4
        )
    # 300 guesses can show 4.6 at most (security reference, section 6).
    assert most_certified(1000, 300, delta=1e-5) == pytest.approx(4.57, abs=0.01)
    # 293 of 300 without privacy: 3.09 was measured elsewhere.
    assert lower_bound(Guesses(1000, 300, 293), delta=1e-5) == pytest.approx(3.09, abs=0.02)
    assert lower_bound(Guesses(1000, 300, 150), delta=1e-5) == 0.0


def test_randomised_response_of_a_claim_is_hardly_ever_refuted() -> None:
    # The mechanism that is exactly as bad as epsilon allows: each coin is told truly with a chance of e^eps/(1+e^eps).
    random, epsilon, trials, made = np.random.default_rng(4), 1.0, 2000, 200
    right = random.binomial(made, 1 / (1 + math.exp(-epsilon)), size=trials)
    above = sum(lower_bound(Guesses(made, made, int(count)), delta=0.0) > epsilon for count in right[:400])
    # 5 % are allowed; more than 38 of 400 would come by chance once in ten thousand.
    assert above <= 38
    # And it is close to what it could be at best, or it would show nothing.
    assert np.median([lower_bound(Guesses(made, made, int(count)), delta=0.0) for count in right[:100]]) > 0.6


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0, 5), st.floats(0, 1e-2))
def test_the_p_value_is_one_and_falls_with_right_guesses(made: int, right: int, epsilon: float, delta: float) -> None:
    right = min(right, made)
    found = p_value(Guesses(made, made, right), epsilon=epsilon, delta=delta)
    assert 0 <= found <= 1
    if right:
        assert p_value(Guesses(made, made, right - 1), epsilon=epsilon, delta=0.0) >= p_value(
            Guesses(made, made, right), epsilon=epsilon, delta=0.0
        )


def test_guesses_are_the_extremes() -> None:
    scores = np.array([3.0, -1.0, 0.2, 5.0, -4.0, 0.1])
    included = np.array([True, False, True, False, False, True])
    # Highest two: 5 (out) and 3 (in); lowest two: -4 and -1, both out.
    assert guess(scores, included, guesses=4) == Guesses(6, 4, 3)
    with pytest.raises(BadInput):
        guess(scores, included, guesses=8)
    with pytest.raises(BadInput):
        Guesses(3, 2, 3)
