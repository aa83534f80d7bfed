"""Ranges of the numbers under masks: what a small ring costs, and what happens when products outgrow their range."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.site.masked import Federation, Hospital, mean_of, random_update
from tests.standins import mean_algebra

from crossward.federation.contract import SAMPLES, Plan, Report
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind, MaskedAlgebra, Request
from crossward.site.messages import TRAIN

pytestmark = pytest.mark.usefixtures("without_fsync")

ALGEBRA = mean_algebra({"conv.weight": (40, 50), "bias": (7,)})
SMALL = mean_algebra({"bias": (7,)})
NAMES = ("a", "b", "c")


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Federation]:
    def make(algebra: Any = ALGEBRA, **options: Any) -> Federation:
        return Federation(tmp_path / "run", algebra, 4, **options)

    return make


def first_range(hospitals: list[Hospital], name: str) -> float:
    """The power of two above the largest product of any site."""
    largest = max(hospital.samples * float(hospital.update[name].abs().max()) for hospital in hospitals)
    return float(2.0 ** math.ceil(math.log2(largest)))


@pytest.mark.parametrize(("bits", "least", "most"), [(32, 0.0, 1e-7), (24, 1e-8, 1e-5), (16, 1e-6, 1e-2)])
def test_a_small_ring_costs_what_its_steps_are_wide_and_no_more(
    made: Any, bits: Any, least: float, most: float
) -> None:
    federation = made(masking=Settings(bits=bits, rounds=4))
    federation.round()
    hospitals = list(federation.hospitals.values())
    for name in ALGEBRA.sent:
        expected = mean_of(hospitals, name)
        found = federation.coordinator.state.tensors[name].double().numpy()
        # Half of the ring is for the range, shared among the sites; each is off by a step at most.
        step = 4 * first_range(hospitals, name) / (0.99 * 2.0 ** (bits - 1))
        rounded = 1e-7 * np.abs(expected).max()
        worst = np.abs(found - expected).max()
        assert worst <= 4 * step / sum(hospital.samples for hospital in hospitals) + rounded
        assert least <= worst / np.abs(expected).max() <= most
    entry = federation.coordinator.history[-1]
    # Counts are exact in every ring.
    assert entry["sums"]["loss"] == 0.5
    assert entry["sums"]["train_accuracy"] == 4 / sum(hospital.samples for hospital in hospitals)


def vectors(reports: list[Report], masked: MaskedAlgebra) -> tuple[Any, dict[str, float], list[Any]]:
    """Everybody's vector under the limits that the sum of ranges gives, without masks."""
    plan = Plan(1, NAMES)
    asked = Request(kind=Kind.RANGES, round_number=1, attempt=1, cohort=NAMES, plan=plan)
    layout = masked.layout(asked)
    summed = np.zeros(layout.words, np.uint32)
    for report in reports:
        contribution, tally = masked.parts(asked, report)
        summed += layout.encode(contribution, tally, {})
    limits = masked.first_limits({key[1]: value for key, value in layout.numbers(summed).items()})
    updates = Request(kind=Kind.UPDATES, round_number=1, attempt=1, cohort=NAMES, plan=plan, limits=limits)
    layout = masked.layout(updates)
    return layout, limits, [layout.encode(*masked.parts(updates, report), limits) for report in reports]


@settings(max_examples=60)
@given(
    exponents=st.lists(st.integers(-30, 20), min_size=3, max_size=3),
    samples=st.lists(st.integers(0, 5000), min_size=3, max_size=3),
    bits=st.sampled_from([16, 24, 32]),
    seed=st.integers(0, 100),
)
def test_the_first_ranges_cut_off_nothing(exponents: list[int], samples: list[int], bits: Any, seed: int) -> None:
    """However different the sites are; and a range is not wider than twice the largest product."""
    masked = MaskedAlgebra(SMALL, bits=bits)
    reports = [
        Report(name, 1, "", random_update(SMALL, seed + place, scale=2.0**exponent), {SAMPLES: np.array([float(n)])})
        for place, (name, exponent, n) in enumerate(zip(NAMES, exponents, samples, strict=True))
    ]
    layout, limits, encoded = vectors(reports, masked)
    for words in encoded:
        assert layout.numbers(words)["outside", "bias"] == 0
    largest = max(n * float(report.update["bias"].abs().max()) for n, report in zip(samples, reports, strict=True))
    assert largest <= limits["bias"] <= max(2.0 * largest, 2.0**-40)
    summed = np.sum(encoded, axis=0, dtype=np.uint32)
    (value,) = [each.value.numpy() for _, each in layout.sums(summed, limits)]
    expected = sum(n * report.update["bias"].double().numpy() for n, report in zip(samples, reports, strict=True))
    step = 3 * limits["bias"] / (0.99 * 2.0 ** (bits - 1))
    assert np.abs(value - expected).max() <= 3 * step + 1e-6 * largest


def all_of(federation: Federation, value: float) -> None:
    for hospital in federation.hospitals.values():
        hospital.update = {name: torch.full(spec.shape, value) for name, spec in SMALL.sent.items()}


def moved(federation: Federation, before: torch.Tensor) -> float:
    change = federation.coordinator.state.tensors["bias"] - before
    assert len(set(change.tolist())) == 1
    return float(change[0])


def test_ranges_widen_where_values_were_cut_off(made: Any) -> None:
    """Sites have 10, 11, 12 and 13 images: products are as many times the update, and the first range is to 16."""
    federation = made(SMALL)
    all_of(federation, 1.0)
    federation.round()
    assert federation.coordinator.limits == {"bias": 32.0}
    before = federation.coordinator.state.tensors["bias"].clone()
    all_of(federation, 3.0)
    federation.round()
    # 30, 33, 36 and 39 in a range to 32: seven values of each of three sites are held at its end.
    assert federation.coordinator.history[-1]["secagg"]["cut_off"] == 21
    assert moved(federation, before) == pytest.approx((30 + 3 * 32) / 46, rel=1e-6)
    assert federation.coordinator.limits == {"bias": 256.0}
    before = federation.coordinator.state.tensors["bias"].clone()
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["cut_off"] == 0
    assert moved(federation, before) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(("change", "limit"), [(0.5, 16.0), (0.01, 8.0), (1.0, 32.0)])
def test_ranges_follow_the_sums_slowly(made: Any, change: float, limit: float) -> None:
    federation = made(SMALL)
    all_of(federation, 1.0)
    federation.round()
    all_of(federation, change)
    federation.round()
    assert federation.coordinator.limits["bias"] == pytest.approx(limit, rel=1e-6)


def test_an_update_of_zeros_has_a_range_all_the_same(made: Any) -> None:
    federation = made(SMALL)
    all_of(federation, 0.0)
    federation.round()
    assert not federation.coordinator.state.tensors["bias"].any()
    all_of(federation, 1.0)
    federation.round()
    federation.round()
    assert 0 < federation.coordinator.limits["bias"] < math.inf


def test_ranges_are_asked_for_anew_when_a_large_tensor_would_be_mostly_signs(made: Any) -> None:
    federation = made()
    federation.round()
    before = federation.coordinator.state.tensors["conv.weight"].double().clone()
    for hospital in federation.hospitals.values():
        hospital.update = {name: 1000 * value for name, value in hospital.update.items()}
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["cut_off"] == 0
    expected = mean_of(list(federation.hospitals.values()), "conv.weight")
    change = (federation.coordinator.state.tensors["conv.weight"].double() - before).numpy()
    np.testing.assert_allclose(change, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_ranges_are_asked_for_anew_when_a_site_was_not_in_the_last_sum(made: Any) -> None:
    """Nothing is known of how large its products are."""
    federation = made()
    late = federation.names[3]
    federation.hospitals[late].update = {name: 500 * value for name, value in federation.hospitals[late].update.items()}
    federation.deaf = lambda task, site: (task, site) == (TRAIN, late)
    federation.round()
    federation.deaf = lambda task, site: False
    before = federation.coordinator.state.tensors["conv.weight"].double().clone()
    federation.round()
    entry = federation.coordinator.history[-1]["secagg"]
    assert (entry["cut_off"], entry["sites"]) == (0, list(federation.names))
    expected = mean_of(list(federation.hospitals.values()), "conv.weight")
    change = (federation.coordinator.state.tensors["conv.weight"].double() - before).numpy()
    np.testing.assert_allclose(change, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
