from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.combine import combine_spooled, next_state, spool
from crossward.federation.contract import ALL, Share
from crossward.federation.errors import PrivacyRefusal
from crossward.methods import Task, available
from crossward.privacy.secagg.masks import remove_pads
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.vector import VectorLayout
from tests.privacy.federation import Federation, binding, run_round
from tests.standins import assert_close, random_report

SITES = ["north", "east", "south", "west"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50), st.integers(0, 5))
def test_tallies_are_summed_exactly_to_a_part_in_2_to_the_24(values: list[float], more: int) -> None:
    layout = VectorLayout({}, {"n": (1,), "loss": (2,)}, parties=len(values))
    words = np.zeros(layout.words, dtype=np.uint32)
    for value in values:
        words += layout.encode({}, {"n": np.array([value]), "loss": np.array([more, -value])}, {})
    numbers = layout.numbers(words)
    step = len(values) * 2.0**-24
    assert abs(numbers["tally", "n"][0] - np.sum(np.array(values, dtype=np.longdouble))) <= step
    assert numbers["tally", "loss"][0] == more * len(values)
    assert abs(numbers["tally", "loss"][1] + numbers["tally", "n"][0]) <= step


def test_whole_numbers_come_out_as_they_went_in() -> None:
    layout = VectorLayout({}, {"n": (1,)}, parties=3)
    words = sum(layout.encode({}, {"n": np.array([float(n)])}, {}) for n in (100_000_001, 3, 77))
    assert layout.numbers(words)["tally", "n"][0] == 100_000_081


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e12])
def test_a_number_that_cannot_be_summed_is_refused(bad: float) -> None:
    layout = VectorLayout({}, {"n": (1,)}, parties=3)
    with pytest.raises(PrivacyRefusal, match="nothing was sent"):
        layout.encode({}, {"n": np.array([bad])}, {})


def test_values_beyond_a_limit_are_held_there_and_counted() -> None:
    share = Share(2.0, torch.tensor([0.25, 5.0, -7.0]))
    layout = VectorLayout({ALL: {"w": share}}, {}, parties=3)
    words = sum(layout.encode({ALL: {"w": share}}, {}, {"w": 1.0}) for _ in range(3))
    ((name, summed),) = layout.sums(words, {"w": 1.0})
    assert name == "w"
    np.testing.assert_allclose(summed.value, [1.5, 3.0, -3.0], rtol=1e-6)
    assert summed.coefficient == 6.0
    assert layout.numbers(words)["outside", "w"] == 6


def test_sections_are_rounded_by_chances_of_their_own() -> None:
    half = Share(1.0, torch.full((400,), 0.5))
    layout = VectorLayout({ALL: {"v": half, "w": half}}, {}, parties=1, bits=16)
    limits = dict.fromkeys("vw", float(layout.ring.levels))
    words = layout.encode({ALL: {"v": half, "w": half}}, {}, limits, rounding_key=bytes(32))
    first, second = (words[section.where] for section in layout.sections)
    assert set(first.tolist()) == set(second.tolist()) == {0, 1}
    assert (first != second).any()


def test_every_site_must_have_the_same_limits_and_layout() -> None:
    share = {ALL: {"w": Share(1.0, torch.zeros(3))}}
    layout = VectorLayout(share, {"n": (1,)}, parties=3)
    digests = {
        layout.digest({"w": 1.0}),
        layout.digest({"w": np.nextafter(1.0, 2.0)}),
        VectorLayout(share, {"n": (2,)}, parties=3).digest({"w": 1.0}),
        VectorLayout(share, {"n": (1,)}, parties=4).digest({"w": 1.0}),
        VectorLayout({ALL: {"w": Share(1.0, torch.zeros(4))}}, {"n": (1,)}, parties=3).digest({"w": 1.0}),
    }
    assert len(digests) == 5


@pytest.mark.parametrize("name", sorted(available()))
def test_every_method_gives_the_open_server_s_model_under_masks(name: str, tmp_path: Path) -> None:
    """Reports to sums through real keys, masks, and pads on what is for one site only."""
    method = available()[name]()
    task = Task(classes=("a", "b", "c"), channels=1, size=8, rounds=2, width=0.0625)
    model = method.build(task)
    algebra = method.algebra(task, model)
    state = method.start(task, model)
    rng = np.random.default_rng(3)
    reports = {site: random_report(algebra, state, site, rng) for site in sorted(SITES)}
    spooled = [spool(tmp_path, report) for report in reports.values()]
    expected = combine_spooled(algebra, state, spooled, 1)
    plan = expected.plan
    assert plan is not None

    shares = {site: algebra.contribute(report, plan, plan.cohort.index(site)) for site, report in reports.items()}
    layout = VectorLayout(next(iter(shares.values())), algebra.tallies, parties=len(reports))
    limits = {
        tensor: max(float((each[slot][tensor].value.abs().max()) * np.max(each[slot][tensor].coefficient))
                    for each in shares.values() for slot in each if tensor in each[slot]) or 1.0
        for tensor in algebra.sent
    }  # fmt: skip
    federation = Federation.of(sorted(SITES), Settings())
    vectors = {site: layout.encode(shares[site], reports[site].tally, limits) for site in reports}
    attempt = run_round(federation, binding(SITES, layout=layout.digest(limits)), vectors, slots=layout.slots)

    after = next_state(state, plan)
    for tensor, summed in layout.sums(attempt.sum, limits):
        after.tensors[tensor] = algebra.next_value(tensor, state, ALL, summed, plan)
    for site, where in layout.slots.items():
        own = attempt.sum.copy()
        remove_pads(own[where], federation.sites[site].take_pads())
        for tensor, summed in layout.sums(own, limits, slot=site):
            after.personal.setdefault(site, {})[tensor] = algebra.next_value(tensor, state, site, summed, plan)
        scrambled = dict(layout.sums(attempt.sum, limits, slot=site))
        for tensor, value in after.personal[site].items():
            assert not np.allclose(scrambled[tensor].value, value, atol=1e-3)
    assert_close(expected, after, relative=1e-6)
    assert layout.numbers(attempt.sum)["tally", "n"] == sum(report.tally["n"] for report in reports.values())
