"""What caps do to FDSE's weights; the weights themselves are tested in test_fdse.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from crossward.methods.fdse_weights import consensus_weights, spread_out, weights_of_moved

Array = np.ndarray[Any, np.dtype[np.float64]]


@st.composite
def mixtures(draw: st.DrawFn, fewest: int = 2) -> Array:
    """Rows of a softmax, flat and steep, some so steep that parts are zero."""
    count = draw(st.integers(fewest, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.normal(size=(count, draw(st.integers(1, 5))))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found: Array = softmax(rows @ rows.T / draw(st.sampled_from([1e-3, 0.02, 0.1, 0.5, 5.0])), axis=1)
    return found


def others_of(mixture: Array) -> Array:
    """What every site receives of others, [N,N-1]."""
    return np.stack([np.delete(row, me) for me, row in enumerate(mixture)])


def spread_by_hand(row: list[float], me: int, others: int) -> list[float]:
    """One row, by giving the excess away again and again."""
    given_away = [0.0 if site == me else part for site, part in enumerate(row)]
    whole = sum(given_away)
    limit = whole / min(others, len(row) - 1)
    held: set[int] = set()
    while over := {site for site, part in enumerate(given_away) if part > limit * (1 + 1e-12)}:
        held |= over
        free = [site for site in range(len(row)) if site != me and site not in held]
        rest = sum(given_away[site] for site in free)
        for site in held:
            given_away[site] = limit
        for site in free:
            share = given_away[site] / rest if rest else 1 / len(free)
            given_away[site] = share * (whole - limit * len(held))
    given_away[me] = row[me]
    return given_away


def test_a_mixture_is_spread_by_hand() -> None:
    mixture = np.array(
        [
            [0.40, 0.40, 0.15, 0.05],  # of 0.6 the first may give 0.3; 0.1 is over and goes 3 to 1
            [0.20, 0.40, 0.20, 0.20],  # nobody stands out
            [0.30, 0.00, 0.70, 0.00],  # what is over goes to two that had nothing
            [0.00, 0.00, 0.00, 1.00],  # nothing is received
        ]
    )
    expected = [[0.40, 0.30, 0.225, 0.075], [0.20, 0.40, 0.20, 0.20], [0.15, 0.075, 0.70, 0.075], [0, 0, 0, 1]]
    np.testing.assert_allclose(spread_out(mixture, 2), expected, rtol=1e-12)
    # Of three others each is at most a third: 0.2, then the next is over as well.
    np.testing.assert_allclose(spread_out(mixture, 3)[0], [0.4, 0.2, 0.2, 0.2], rtol=1e-12)
    np.testing.assert_array_equal(spread_out(mixture, 1), mixture)


def test_of_three_sites_both_others_count_the_same_and_of_two_the_other_is_all_there_is() -> None:
    three = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.05, 0.05, 0.9]])
    expected = [[0.6, 0.2, 0.2], [0.25, 0.5, 0.25], [0.05, 0.05, 0.9]]
    np.testing.assert_allclose(spread_out(three, 2), expected, rtol=1e-12)
    two = np.array([[0.7, 0.3], [0.4, 0.6]])
    np.testing.assert_array_equal(spread_out(two, 2), two)
    np.testing.assert_array_equal(spread_out(np.ones((1, 1)), 2), [[1.0]])


@given(mixtures(), st.integers(1, 5))
def test_rows_keep_their_sum_and_sites_their_own_and_nobody_stands_out(mixture: Array, others: int) -> None:
    before = mixture.copy()
    spread = spread_out(mixture, others)
    np.testing.assert_array_equal(mixture, before)
    np.testing.assert_array_equal(np.diagonal(spread), np.diagonal(mixture))
    np.testing.assert_allclose(spread.sum(axis=1), 1, rtol=0, atol=1e-12)
    assert (spread >= 0).all()
    parts = others_of(spread)
    most = parts.sum(axis=1) / min(others, len(mixture) - 1)
    # Below the smallest normal number a half cannot be told from the whole.
    assert (parts.max(axis=1) <= most * (1 + 1e-9) + np.finfo(np.float64).tiny).all()
    # As many as asked for have a part, unless nobody has any.
    assert ((parts > 0).sum(axis=1) >= np.where(parts.any(axis=1), min(others, len(mixture) - 1), 0)).all()
    # A site still receives most of what is its own.
    assert (spread.max(axis=1) <= np.diagonal(spread) + 1e-12).all()


@given(mixtures(), st.integers(1, 5))
def test_spreading_is_that_of_a_slow_hand_and_twice_is_once(mixture: Array, others: int) -> None:
    spread = spread_out(mixture, others)
    slow = [spread_by_hand(row, me, others) for me, row in enumerate(mixture.tolist())]
    np.testing.assert_allclose(spread, slow, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(spread_out(spread, others), spread, rtol=1e-12)


@given(mixtures(), st.integers(2, 4))
def test_a_row_in_which_nobody_stands_out_is_left_alone(mixture: Array, others: int) -> None:
    parts = others_of(mixture)
    fine = parts.max(axis=1) <= parts.sum(axis=1) / min(others, len(mixture) - 1) * (1 - 1e-9)
    np.testing.assert_array_equal(spread_out(mixture, others)[fine], mixture[fine])


@given(mixtures(), st.integers(1, 4), st.data())
def test_spreading_does_not_depend_on_the_order_of_the_sites(mixture: Array, others: int, data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(mixture)))))
    shuffled = spread_out(mixture[np.ix_(order, order)], others)
    np.testing.assert_allclose(shuffled, spread_out(mixture, others)[np.ix_(order, order)], rtol=1e-9, atol=1e-15)


def zeros_for(cosines: Array, still: list[int]) -> Array:
    cosines = cosines.copy()
    cosines[still] = 0
    cosines[:, still] = 0
    return cosines


def test_who_did_not_move_has_no_weight() -> None:
    cosines = zeros_for(np.eye(5), [1])
    assert weights_of_moved(cosines) == pytest.approx([0.25, 0, 0.25, 0.25, 0.25])
    assert weights_of_moved(cosines, 0.45) == pytest.approx([0.25, 0, 0.25, 0.25, 0.25])
    assert weights_of_moved(zeros_for(np.eye(5), [0, 1, 2, 4])) == pytest.approx([0, 0, 0, 1, 0])
    assert weights_of_moved(np.zeros((3, 3))).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("still", "weighs"), [([], True), ([0], True), ([0, 1], False), ([0, 1, 2], False)])
def test_where_fewer_moved_than_the_cap_takes_nobody_has_a_weight(still: list[int], weighs: bool) -> None:
    weights = weights_of_moved(zeros_for(np.eye(4), still), 0.45)
    assert weights.sum() == pytest.approx(float(weighs))
    assert weights.max() <= 0.45


def test_a_cap_of_an_even_share_is_enough_although_it_is_rounded() -> None:
    # 49 * (1 / 49) is less than 1 in floating point.
    assert weights_of_moved(np.eye(49), 1 / 49) == pytest.approx([1 / 49] * 49)


def test_two_that_conflict_with_the_rest_are_held_at_the_cap() -> None:
    # Two opposite sites cancel out with one half each, whatever the others; held at 0.45 they leave 0.1 to those.
    cosines = np.array([[1, -1, 0, 0], [-1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=float)
    assert consensus_weights(cosines) == pytest.approx([0.5, 0.5, 0, 0], abs=1e-4)
    # x for the pair each, 1/2 - x for the others each; (1/2 - x)^2 falls until x is at the cap.
    assert consensus_weights(cosines, 0.45) == pytest.approx([0.45, 0.45, 0.05, 0.05], abs=1e-6)
