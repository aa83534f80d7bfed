from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.uncertainty.flags import Threshold, threshold_of

SCORES = st.floats(min_value=0, max_value=1)


def test_the_line_is_the_95th_of_a_hundred_values_and_only_what_is_above_it_is_flagged() -> None:
    values = np.random.default_rng(0).permutation(np.arange(1, 101) / 100)
    threshold = threshold_of(values)
    assert threshold == Threshold(0.95, 100, 95.0, "")
    assert threshold.reason(0.95) is None
    assert threshold.reason(0.951) == "more uncertain than the threshold"
    assert sum(threshold.reason(value) is not None for value in values) == 5


@pytest.mark.parametrize(
    ("n", "rank", "rough"),
    [(1, 1, True), (2, 2, True), (19, 19, True), (20, 19, False), (21, 20, False), (40, 38, False)],
)
def test_few_scans_give_the_largest_value_and_say_so(n: int, rank: int, rough: bool) -> None:
    threshold = threshold_of(np.arange(1, n + 1) / 100)
    assert threshold.value == rank / 100
    assert bool(threshold.note) is rough
    assert not rough or f"{n} validation scans are too few" in threshold.note


# In floating point 64.4 * 250 / 100 is a little more than 161.
@example([value / 1000 for value in range(250)], 644)
@given(st.lists(SCORES, min_size=2, max_size=60).filter(lambda values: len(set(values)) > 1), st.integers(1, 999))
def test_the_line_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], tenths: int) -> None:
    found = threshold_of(values, percentile=tenths / 10).value
    # Counted in whole numbers: at least tenths / 1000 of all values do not exceed it.
    enough = [value for value in values if 1000 * sum(other <= value for other in values) >= tenths * len(values)]
    assert found == min(enough)
    assert found == threshold_of(sorted(values), percentile=tenths / 10).value


def test_a_percentile_is_not_rounded() -> None:
    assert threshold_of([0.1, 0.2], percentile=50).value == 0.1
    assert threshold_of([0.1, 0.2], percentile=50.00000000001).value == 0.2


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([], "no validation scans"),
        ([0.1, math.nan, 0.3], "not a number"),
        ([0.1, math.inf], "not a number"),
        ([0.25] * 30, "the same uncertainty"),
        ([1.0, 1.0], "the same uncertainty"),
    ],
)
def test_where_no_line_can_be_drawn_every_scan_is_flagged_with_the_reason(values: list[float], why: str) -> None:
    threshold = threshold_of(values)
    assert threshold.value is None
    assert threshold.n == len(values)
    for uncertainty in (0.0, 0.2, 1.0):
        reason = threshold.reason(uncertainty)
        assert reason is not None
        assert reason.startswith("no threshold")
        assert why in reason


@pytest.mark.parametrize("uncertainty", [math.nan, math.inf, -math.inf])
def test_an_uncertainty_that_is_not_a_number_is_flagged(uncertainty: float) -> None:
    assert threshold_of(np.linspace(0, 1, 50)).reason(uncertainty) == "its uncertainty is not a number"
    assert threshold_of([]).reason(uncertainty) == "its uncertainty is not a number"


@pytest.mark.parametrize("percentile", [0, 100, -5, math.nan])
def test_a_percentile_that_makes_no_sense_is_refused(percentile: float) -> None:
    with pytest.raises(BadInput, match="not between 0 and 100"):
        threshold_of([0.1, 0.2], percentile=percentile)
