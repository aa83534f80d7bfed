from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from crossward.evaluate.metrics import (
    Z_95,
    across_domains,
    across_sites,
    auc_interval,
    cross_site,
    rank_auc,
    score,
    summarise,
    wilson_interval,
)
from crossward.federation.errors import BadInput

BINARY = ("nevus", "melanoma")


def pair_counting_auc(scores, positive):
    pairs = [
        (s, t)
        for s, p in zip(scores, positive, strict=True)
        if p
        for t, q in zip(scores, positive, strict=True)
        if not q
    ]
    return sum(1.0 if s > t else 0.5 if s == t else 0.0 for s, t in pairs) / len(pairs)


def binary(chances):
    return [[1 - chance, chance] for chance in chances]


def test_score_of_four_images_worked_by_hand():
    # Positives score .8 and .4, negatives .4 and .1: three pairs won, one tied -> 3.5 / 4.
    facts = score(binary([0.8, 0.4, 0.4, 0.1]), [1, 1, 0, 0], BINARY)
    assert facts["n"] == 4
    assert facts["accuracy"] == 0.75
    assert facts["balanced_accuracy"] == 0.75
    assert facts["auc"] == 0.875
    assert facts["per_class"]["nevus"] == {"n": 2, "recall": 1.0, "auc": 0.875}
    assert facts["per_class"]["melanoma"] == {"n": 2, "recall": 0.5, "auc": 0.875}
    assert facts["undefined"] == {}


def test_balanced_accuracy_weighs_classes_not_images():
    facts = score(binary([0.1] * 8 + [0.1, 0.9]), [0] * 8 + [1, 1], BINARY)
    assert facts["accuracy"] == 0.9
    assert facts["balanced_accuracy"] == 0.75


def test_three_classes_average_one_vs_rest_over_defined_classes():
    chances = [[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.2, 0.7, 0.1], [0.5, 0.4, 0.1]]
    facts = score(chances, [0, 0, 1, 1], ["a", "b", "c"])
    # a: {.7, .3} against {.2, .5}: 3 of 4 pairs; b: {.7, .4} against {.2, .6}: 3 of 4 pairs; c: nothing to rank.
    assert facts["per_class"]["a"]["auc"] == 0.75
    assert facts["per_class"]["b"]["auc"] == 0.75
    assert facts["per_class"]["c"] == {"n": 0, "recall": None, "auc": None}
    assert facts["auc"] == 0.75
    assert facts["balanced_accuracy"] == 0.5
    assert facts["auc_interval"] is None
    assert "3 one-vs-rest" in facts["undefined"]["auc_interval"]
    assert facts["undefined"]["auc[c]"] == "no image of c, n=4"
    assert "auc" not in facts["undefined"]


def test_one_class_only_has_no_auc_and_says_why():
    facts = score(binary([0.2, 0.4, 0.9]), [0, 0, 0], BINARY)
    assert facts["accuracy"] == pytest.approx(2 / 3)
    assert facts["balanced_accuracy"] == pytest.approx(2 / 3)
    assert facts["auc"] is None
    assert facts["auc_interval"] is None
    assert facts["undefined"]["auc"] == "no image of melanoma, n=3"
    assert facts["undefined"]["auc[nevus]"] == "every image is nevus, so there is nothing to tell it from, n=3"


@pytest.mark.parametrize("classes", [BINARY, ("a", "b", "c")])
def test_no_images_is_undefined_with_a_reason_for_every_metric(classes):
    facts = score(np.zeros((0, len(classes))), np.zeros(0, dtype=int), classes)
    assert facts["n"] == 0
    for metric in ("accuracy", "accuracy_interval", "balanced_accuracy", "auc", "auc_interval"):
        assert facts[metric] is None
        assert "n=0" in facts["undefined"][metric]


@pytest.mark.parametrize(
    ("chances", "labels", "classes", "words"),
    [
        ([[math.nan, 1.0], [0.5, 0.5]], [0, 1], BINARY, "1 of 2 images"),
        ([[math.inf, 0.0]], [0], BINARY, "NaN or infinite"),
        ([[2.5, -1.5]], [0], BINARY, "not logits"),
        ([[0.5, 0.5]], [2], BINARY, "outside 0..1"),
        ([[0.5, 0.5]], [-1], BINARY, "outside 0..1"),
        ([[0.5, 0.5]], [0.0], BINARY, "whole numbers"),
        ([[0.5, 0.5]], [0, 1], BINARY, "do not fit"),
        ([[0.5, 0.5, 0.0]], [0], BINARY, "do not fit"),
        ([[1.0]], [0], ("a",), "two or more"),
        ([[0.5, 0.5]], [0], ("a", "a"), "different"),
    ],
)
def test_bad_predictions_fail_loudly(chances, labels, classes, words):
    with pytest.raises(BadInput, match=words):
        score(chances, labels, classes)


def test_wilson_interval_against_published_numbers():
    # The four examples of Newcombe (1998), his method 3.
    for hits, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(hits, n) == pytest.approx([low, high], abs=5e-5)
    assert wilson_interval(0, 0) is None


def hanley_mcneil_error(auc, positives, negatives):
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    spread = auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2)
    return math.sqrt(spread / (positives * negatives))


def test_auc_limits_lie_1_96_of_their_own_errors_away():
    low, high = auc_interval(0.8, 30, 60)
    assert (0.8 - low) / hanley_mcneil_error(low, 30, 60) == pytest.approx(Z_95)
    assert (high - 0.8) / hanley_mcneil_error(high, 30, 60) == pytest.approx(Z_95)


def test_auc_interval_meets_the_textbook_one_for_many_images():
    error = hanley_mcneil_error(0.8, 4000, 4000)
    assert auc_interval(0.8, 4000, 4000) == pytest.approx([0.8 - Z_95 * error, 0.8 + Z_95 * error], abs=3e-4)


def test_a_perfect_auc_of_few_images_is_not_certain():
    low, high = auc_interval(1.0, 5, 5)
    assert high == 1.0
    assert low < 0.75
    assert auc_interval(None, 5, 0) is None


def test_auc_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(7)
    truth, runs = 0.760250, 2000  # two unit normals one apart: Phi(1 / sqrt 2)
    covered = 0
    for _ in range(runs):
        scores = np.concatenate([generator.normal(1, 1, 15), generator.normal(0, 1, 40)])
        low, high = auc_interval(rank_auc(scores, np.arange(55) < 15), 15, 40)
        covered += low <= truth <= high
    assert 0.93 <= covered / runs <= 0.98


@st.composite
def predictions(draw):
    k, n = draw(st.integers(2, 4)), draw(st.integers(1, 25))
    raw = draw(hnp.arrays(np.int64, (n, k), elements=st.integers(0, 5))) + 1  # few values, so many ties
    labels = draw(hnp.arrays(np.int64, n, elements=st.integers(0, k - 1)))
    return raw / raw.sum(axis=1, keepdims=True), labels, [f"class {i}" for i in range(k)]


@given(predictions())
@settings(max_examples=200, deadline=None)
def test_score_agrees_with_counting_pairs_and_is_finite_json(case):
    chances, labels, classes = case
    facts = score(chances, labels, classes)
    json.dumps(facts, allow_nan=False)
    assert facts["accuracy"] == pytest.approx(
        sum(row.argmax() == y for row, y in zip(chances, labels, strict=True)) / len(labels)
    )
    for index, name in enumerate(classes):
        held = labels == index
        if held.any() and not held.all():
            assert facts["per_class"][name]["auc"] == pytest.approx(pair_counting_auc(chances[:, index], held))
        else:
            assert facts["per_class"][name]["auc"] is None
            assert f"n={len(labels)}" in facts["undefined"][f"auc[{name}]"]
    for metric in ("accuracy", "balanced_accuracy", "auc", "accuracy_interval", "auc_interval"):
        assert (facts[metric] is None) == (metric in facts["undefined"])
    for metric in ("accuracy", "auc"):
        if facts[f"{metric}_interval"]:
            low, high = facts[f"{metric}_interval"]
            assert 0 <= low <= facts[metric] <= high <= 1


@given(predictions(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_score_does_not_depend_on_the_order_of_images(case, random):
    chances, labels, classes = case
    order = list(range(len(labels)))
    random.shuffle(order)
    assert score(chances[order], labels[order], classes) == score(chances, labels, classes)


@given(hnp.arrays(np.float64, st.integers(2, 30), elements=st.floats(0, 1)), st.data())
@settings(max_examples=100, deadline=None)
def test_flipping_the_classes_mirrors_the_auc(scores, data):
    positive = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    forward, backward = rank_auc(scores, positive), rank_auc(scores, ~positive)
    assert (forward is None) == (backward is None)
    if forward is not None:
        assert forward + backward == pytest.approx(1)


def test_across_domains_by_hand():
    assert across_domains([0.5, 0.7, 0.9]) == pytest.approx((0.7, 0.2))
    assert across_domains([0.5]) == (0.5, None)
    assert across_domains([]) == (None, None)


def test_undefined_entries_are_left_out_and_counted():
    result = across_domains([0.5, None, 0.7])
    assert result == pytest.approx((0.6, 0.02**0.5))
    assert result.left_out == 1
    assert copy.deepcopy(result).left_out == 1
    pooled, avg = across_sites([0.5, None, 1.0], [10, 1000, 30])
    assert pooled == pytest.approx(0.875)
    assert avg == pytest.approx(0.75)
    assert across_sites([0.5, None, 1.0], [10, 1000, 30]).left_out == 1
    assert across_sites([None], [0]) == (None, None)


def test_averages_refuse_nan_and_unequal_lengths():
    with pytest.raises(BadInput, match="NaN"):
        across_domains([0.5, math.nan])
    with pytest.raises(BadInput, match="2 accuracies but 1"):
        across_sites([0.5, 0.6], [10])
    with pytest.raises(BadInput, match="negative"):
        across_sites([0.5], [-1])


def test_summary_names_the_worst_site_and_those_left_out():
    sites = {
        "north": score(binary([0.9, 0.1]), [1, 0], BINARY) | {"as_received": {"accuracy": 0.5}},
        "south": score(binary([0.9, 0.6, 0.1, 0.1]), [1, 0, 0, 0], BINARY) | {"as_received": {"accuracy": 0.75}},
        "west": score(binary([0.3]), [1], BINARY),
        "empty": score([], [], BINARY),
    }
    assert summarise(sites) == {
        "avg": pytest.approx((1 + 0.75 + 0) / 3),
        "std": pytest.approx(np.std([1, 0.75, 0], ddof=1)),
        "all": pytest.approx(5 / 7),
        "worst_site": "west",
        "worst_accuracy": 0.0,
        "avg_auc": 1.0,
        "avg_balanced_accuracy": pytest.approx((1 + (1 + 2 / 3) / 2 + 0) / 3),
        "as_received_avg": 0.625,
        "left_out": ["empty"],
        "auc_left_out": ["west", "empty"],
    }


def test_cross_site_metrics_by_hand():
    matrix = [[0.9, 0.7, 0.5], [0.8, 0.8, 0.3], [0.4, 0.2, 0.6]]
    facts = cross_site(matrix, ["photo", "photo", "sketch"])
    assert facts["LTA"] == pytest.approx((0.9 + 0.8 + 0.6) / 3)
    assert facts["GASA"] == pytest.approx((0.8 + 0.8 + 0.6) / 3)
    assert facts["ATA"] == pytest.approx({"photo": 0.4, "sketch": 0.3})
    assert facts["GATA"] == pytest.approx(0.35)
    assert facts["CPRR"] == pytest.approx(0.35 / (2.2 / 3))
    assert facts["undefined"] == {}


def test_cross_site_gives_a_reason_for_every_undefined_figure():
    elsewhere, at_home = (
        "no model has a score on images of another domain",
        "no model has a score on images of its own ",
    )
    only_home = cross_site([[0.5, None], [None, 0.5]], ["a", "b"])["undefined"]
    assert only_home == dict.fromkeys(("GATA", "CPRR", "ATA[a]", "ATA[b]"), elsewhere)
    only_away = cross_site([[None, 0.5], [0.5, None]], ["a", "b"])["undefined"]
    assert only_away == {"LTA": f"{at_home}site", "GASA": f"{at_home}domain", "CPRR": f"{at_home}domain"}
    never_right = cross_site([[0.0, 0.5], [0.5, 0.0]], ["a", "b"])
    assert (never_right["GATA"], never_right["GASA"], never_right["CPRR"]) == (0.5, 0.0, None)
    assert never_right["undefined"] == {"CPRR": "no model is ever right in its own domain"}


def test_cross_site_with_one_domain_has_nothing_to_transfer_to():
    facts = cross_site([[0.9, 0.7], [0.8, None]], ["a", "a"])
    assert facts["LTA"] == 0.9
    assert facts["GASA"] == pytest.approx(0.8)
    assert facts["GATA"] is None
    assert facts["CPRR"] is None
    assert facts["undefined"] == dict.fromkeys(("GATA", "CPRR", "ATA[a]"), "there is one domain only")
    with pytest.raises(BadInput, match="does not fit 2 sites"):
        cross_site([[0.9]], ["a", "a"])
