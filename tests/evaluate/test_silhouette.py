from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.evaluate.silhouette import silhouette, squared_distances


def test_by_hand():
    # Points 0, 1 | 4, 6 on a line: (a, b) = (1, 5), (1, 4), (2, 3.5), (2, 5.5).
    expected = (4 / 5 + 3 / 4 + 1.5 / 3.5 + 3.5 / 5.5) / 4
    assert silhouette([[0.0], [1.0], [4.0], [6.0]], ["x", "x", "y", "y"]) == pytest.approx(expected, rel=1e-12)


def test_of_three_groups_the_nearest_other_one_counts_and_a_lone_point_is_zero():
    # Groups {0, 2}, {3}, {100, 101}: 0 and 2 have {3} nearest, (a, b) = (2, 3) and (2, 1); 3 is alone.
    expected = (1 / 3 - 1 / 2 + 0 + (97 - 1) / 97 + (98 - 1) / 98) / 5
    found = silhouette([[0.0], [2.0], [3.0], [100.0], [101.0]], [0, 0, 7, 5, 5])
    assert found == pytest.approx(expected, rel=1e-12)


def test_misplaced_points_are_negative():
    assert silhouette([[0.0], [10.0], [0.1], [10.1]], [0, 0, 1, 1]) < -0.4


def test_coinciding_points_of_two_groups_are_mixed():
    assert silhouette(np.ones((6, 3)), [0, 1, 0, 1, 0, 1]) == 0.0


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (np.zeros((0, 2)), []),
        ([[1.0], [2.0], [3.0]], [4, 4, 4]),
        ([[1.0], [2.0], [3.0]], [0, 1, 2]),
        ([[1.0], [np.nan], [3.0]], [0, 1, 1]),
    ],
)
def test_it_is_none_where_it_says_nothing(rows, groups):
    assert silhouette(rows, groups) is None


@given(st.integers(0, 1000), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_it_depends_on_neither_place_nor_scale(seed, shift, scale):
    random = np.random.default_rng(seed)
    rows, groups = random.normal(size=(12, 3)), random.integers(0, 2, size=12)
    groups[:2] = 0, 1
    assert silhouette(scale * rows + shift, groups) == pytest.approx(silhouette(rows, groups), abs=1e-6)


def test_distances_are_those_of_every_pair():
    rows = np.random.default_rng(3).normal(size=(7, 4)) + 100
    direct = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    assert squared_distances(rows) == pytest.approx(direct, rel=1e-9)
    assert (np.diag(squared_distances(rows)) == 0).all()
