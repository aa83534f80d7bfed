from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from crossward.evaluate.collapse import collapse_facts, effective_rank, singular_values
from crossward.evaluate.facts import finite


def features_with(variances):
    """Four points a feature, at + and - along each axis, so that the covariance is diagonal and known."""
    rows = []
    for axis, variance in enumerate(variances):
        point = np.zeros(len(variances))
        point[axis] = 1.0
        rows += [point * math.sqrt(variance), -point * math.sqrt(variance)]
    rows = np.array(rows)
    return rows * math.sqrt((len(rows) - 1) / 2)


def test_singular_values_of_a_covariance_that_is_known():
    assert singular_values(features_with([1.0, 9.0, 4.0])) == pytest.approx([9.0, 4.0, 1.0], rel=1e-12)


def test_they_are_those_of_the_covariance_itself():
    random = np.random.default_rng(1)
    rows = random.normal(size=(50, 8)) @ random.normal(size=(8, 8)) + 5
    direct = np.linalg.svd(np.cov(rows, rowvar=False), compute_uv=False)
    assert singular_values(rows) == pytest.approx(direct, rel=1e-9)


def test_small_values_survive_beside_large_ones():
    """In the covariance matrix itself 1e-18 beside 1 would be lost in rounding."""
    values = singular_values(features_with([1.0, 1e-18]))
    assert values[1] == pytest.approx(1e-18, rel=1e-6)


def test_fewer_images_than_features_leave_zeros_that_are_not_reported():
    rows = np.random.default_rng(2).normal(size=(4, 10))
    values = singular_values(rows)
    assert len(values) == 10
    assert (values[3:] < 1e-25).all()
    facts = collapse_facts(rows)
    assert len(facts["singular_values"]) == 3
    assert facts["features"] == 10


@given(st.integers(1, 40), st.floats(1e-6, 1e6))
def test_the_effective_rank_of_equal_values_is_their_number(count, value):
    assert effective_rank([value] * count) == pytest.approx(count, rel=1e-9)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_the_effective_rank_lies_between_one_and_the_rank(values):
    assert 1 - 1e-9 <= effective_rank([*values, 0.0]) <= len(values) + 1e-9


def test_the_effective_rank_by_hand():
    # shares 1/2, 1/4, 1/4: entropy 1.5 log 2
    assert effective_rank([2.0, 1.0, 1.0]) == pytest.approx(2**1.5, rel=1e-12)


def test_the_facts_of_a_collapsed_model():
    facts = finite(collapse_facts(features_with([100.0, 50.0, 0.99, 0.5])))
    assert facts["singular_values"] == pytest.approx([1.0, 0.5, 0.0099, 0.005])
    assert facts["largest"] == pytest.approx(100.0)
    assert facts["unused"] == 0.5
    assert facts["effective_rank"] == pytest.approx(math.exp(entropy([100.0, 50.0, 0.99, 0.5])), rel=1e-9)
    assert facts["undefined"] == {}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (np.zeros((0, 3)), "two images"),
        (np.ones((1, 3)), "two images"),
        (np.full((6, 3), 0.1), "same features"),
        (np.zeros((6, 3)), "same features"),
        ([[1.0, np.nan], [0.0, 1.0]], "not all finite"),
        ([[1.0, np.inf], [0.0, 1.0]], "not all finite"),
    ],
)
def test_what_cannot_be_worked_out_has_a_reason(rows, reason):
    facts = finite(collapse_facts(rows))
    for key in ("singular_values", "largest", "effective_rank", "unused"):
        assert facts[key] is None
        assert reason in facts["undefined"][key]
