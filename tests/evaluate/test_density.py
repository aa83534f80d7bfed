from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.evaluate.density import BINS, density, uncertainty_facts
from crossward.evaluate.facts import finite


def test_density_by_hand():
    shares = density([0.0, 0.02, 0.05, 0.999, 1.0])
    assert len(shares) == BINS == 20
    assert shares[0] == pytest.approx(0.4)
    assert shares[1] == pytest.approx(0.2)
    assert shares[19] == pytest.approx(0.4)
    assert sum(shares[2:19]) == 0


@given(st.lists(st.floats(-1e-6, 1 + 1e-6), min_size=1, max_size=30))
def test_no_value_is_lost_to_rounding(values):
    assert sum(density(values)) == pytest.approx(1.0)


def test_the_facts_by_hand():
    clean, noised = [0.1, 0.2, 0.3, 0.4], [0.35, 0.5, 0.6, 0.7]
    facts = finite(uncertainty_facts(clean, noised, [True, False, True, False]))
    assert facts["mean_clean"] == pytest.approx(0.25)
    assert facts["mean_noised"] == pytest.approx(0.5375)
    assert facts["noise_auc"] == pytest.approx(15 / 16)  # only 0.35 is below 0.4
    assert facts["error_auc"] == pytest.approx(3 / 4)  # of 0.2, 0.4 against 0.1, 0.3, only 0.2 is below 0.3
    assert facts["undefined"] == {}


def test_a_model_that_is_surer_of_noise_has_an_auc_below_one_half():
    assert uncertainty_facts([0.8, 0.9], [0.1, 0.2], [True, False])["noise_auc"] == 0.0


@pytest.mark.parametrize(("right", "word"), [([True, True], "right"), ([False, False], "wrong")])
def test_without_both_kinds_of_answers_errors_cannot_be_ranked(right, word):
    facts = finite(uncertainty_facts([0.1, 0.2], [0.3, 0.4], right))
    assert facts["error_auc"] is None
    assert facts["undefined"] == {"error_auc": f"every answer was {word}, n=2"}
    assert facts["noise_auc"] == 1.0


@pytest.mark.parametrize(
    ("clean", "noised", "right", "reason"),
    [([], [], [], "no test images"), ([0.1, 0.2], [np.nan, 0.3], [True, False], "finite")],
)
def test_what_cannot_be_worked_out_has_a_reason(clean, noised, right, reason):
    facts = finite(uncertainty_facts(clean, noised, right))
    for key in ("clean", "noised", "mean_clean", "mean_noised", "noise_auc", "error_auc"):
        assert facts[key] is None
        assert reason in facts["undefined"][key]
