"""Joining groups that are too small; the partition itself is tested in test_fedcode.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crossward.methods.finch import groups_by_cosine, join_small

Array = np.ndarray[Any, np.dtype[np.float64]]
Groups = np.ndarray[Any, np.dtype[np.int64]]


def cosines_at(*degrees: float) -> Array:
    angles = np.deg2rad(np.array(degrees))
    return np.cos(angles[:, None] - angles[None, :])


def joined(groups: list[int], cosines: Array, members: int) -> list[int]:
    return join_small(np.array(groups, dtype=np.int64), cosines, members).tolist()


def partition(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(groups == group).tolist()) for group in groups}


def by_sets(groups: Groups, cosines: Array, members: int) -> set[frozenset[int]]:
    """The same by sets of sites and single cosines; where there are ties it may choose otherwise."""
    sets = partition(groups)
    while len(sets) > 1 and min(map(len, sets)) < members:
        small = min(sets, key=lambda each: (len(each), min(each)))

        def likeness(other: frozenset[int], small: frozenset[int] = small) -> float:
            return sum(float(cosines[i, j]) for i in small for j in other) / (len(small) * len(other))

        nearest = max(sets - {small}, key=likeness)
        sets = (sets - {small, nearest}) | {small | nearest}
    return sets


@st.composite
def styles(draw: st.DrawFn) -> tuple[Array, Groups]:
    count = draw(st.integers(2, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.normal(size=(count, draw(st.integers(2, 6))))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows @ rows.T
    groups = groups_by_cosine(cosines) if draw(st.booleans()) else np.arange(count)
    return cosines, groups


def test_small_groups_join_by_hand() -> None:
    # Pairs at 0, 90 and 200 degrees. The first of equal size goes first: (0, 10) is nearer to (90, 100), and with
    # those four the pair at 200 has no choice.
    cosines = cosines_at(0, 10, 90, 100, 200, 210)
    pairs = [0, 0, 1, 1, 2, 2]
    assert joined(pairs, cosines, 2) == pairs
    assert joined(pairs, cosines, 3) == [0] * 6
    # Three groups of three stay; a lone one at 50 joins those at 90 and not those at 0.
    cosines = cosines_at(0, 1, 2, 90, 91, 92, 200, 201, 202, 50)
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert joined(groups, cosines, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 1]
    # The smallest first: the lone one at 120 makes the pair at 100 large enough, and all others stay apart.
    cosines = cosines_at(100, 110, 120, 0, 1, 2, 250, 251, 252)
    assert joined([0, 0, 1, 2, 2, 2, 3, 3, 3], cosines, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_mean_cosine_counts_and_not_the_nearest_member() -> None:
    # The lone one at 60 has a neighbour at 70, but that one's group is at 70, 150 and 160 on the whole.
    cosines = cosines_at(0, 20, 40, 70, 150, 160, 60)
    assert joined([0, 0, 0, 1, 1, 1, 2], cosines, 2) == [0, 0, 0, 1, 1, 1, 0]


def test_ties_go_to_the_lowest_index() -> None:
    # The first joins the second, and the others, as far from each other as from those, follow.
    assert joined([0, 1, 2, 3, 4, 5], np.eye(6), 2) == [0] * 6
    # A lone one as near to both pairs.
    assert joined([0, 0, 1, 1, 2], cosines_at(0, 0, 90, 90, 45), 2) == [0, 0, 1, 1, 0]


def test_one_group_is_left_where_sites_are_too_few() -> None:
    assert joined([0, 1], np.eye(2), 3) == [0, 0]
    assert joined([0, 0, 1, 1], cosines_at(0, 1, 90, 91), 9) == [0] * 4
    assert joined([0], np.eye(1), 3) == [0]
    assert joined([], np.zeros((0, 0)), 3) == []


@given(styles(), st.integers(1, 6))
def test_no_group_is_too_small_and_nothing_is_torn_apart(case: tuple[Array, Groups], members: int) -> None:
    cosines, groups = case
    before = groups.copy()
    found = join_small(groups, cosines, members)
    assert np.array_equal(groups, before)
    assert found.dtype == np.int64
    assert list(dict.fromkeys(found.tolist())) == list(range(found.max() + 1))
    sizes = np.bincount(found)
    assert len(sizes) == 1 or sizes.min() >= members
    assert all(len({int(found[site]) for site in own}) == 1 for own in partition(groups))
    assert np.array_equal(join_small(found, cosines, members), found)
    if np.bincount(groups).min() >= members:
        assert np.array_equal(found, groups)


def tied(groups: Groups, cosines: Array, members: int) -> bool:
    """Whether the order of sites decides: two groups are equally small, or nearly equally near, on the way."""
    sets = partition(groups)
    while len(sets) > 1 and min(map(len, sets)) < members:
        smallest = sorted(sets, key=len)
        if len(smallest[0]) == len(smallest[1]):
            return True
        small = smallest[0]
        likeness = {
            other: float(np.mean([cosines[i, j] for i in small for j in other])) for other in sets if other != small
        }
        ordered = sorted(likeness.values())
        if len(ordered) > 1 and ordered[-1] - ordered[-2] < 1e-9:
            return True
        nearest = max(likeness, key=likeness.__getitem__)
        sets = (sets - {small, nearest}) | {small | nearest}
    return False


@given(styles(), st.integers(2, 6))
def test_groups_are_those_of_plain_sets(case: tuple[Array, Groups], members: int) -> None:
    cosines, groups = case
    assert partition(join_small(groups, cosines, members)) == by_sets(groups, cosines, members)


@given(styles(), st.integers(2, 6), st.data())
def test_groups_do_not_depend_on_the_order_of_the_sites(
    case: tuple[Array, Groups], members: int, data: st.DataObject
) -> None:
    cosines, _ = case
    groups = groups_by_cosine(cosines)
    assume(not tied(groups, cosines, members))
    order = np.array(data.draw(st.permutations(range(len(groups)))))
    shuffled = cosines[np.ix_(order, order)]
    moved = join_small(groups_by_cosine(shuffled), shuffled, members)
    back = {frozenset(order[list(own)].tolist()) for own in partition(moved)}
    assert back == partition(join_small(groups, cosines, members))


@pytest.mark.parametrize("members", [1, 2])
def test_the_first_partition_has_pairs_already(members: int) -> None:
    cosines = cosines_at(0, 10, 90, 100)
    assert joined([0, 0, 1, 1], cosines, members) == [0, 0, 1, 1]
