"""What a site demands of a plan under masks: what a method plans passes, and what would show one site does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.standins import masked_plan, masked_site, random_report, report_of

from crossward.federation.algebra import Algebra
from crossward.federation.combine import normalise
from crossward.federation.contract import Plan, State, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.rules import Rule
from crossward.federation.scopes import Scope
from crossward.methods import Method, Task, available, create
from crossward.methods.fdse import ConsensusMaximisation, SimilarityAware
from crossward.methods.fedcode import StyleGroups

TASK = Task(classes=("a", "b", "c"), channels=1, size=8, rounds=2, width=0.0625)
SITES = [f"site-{number}" for number in range(8)]
METHODS = sorted(available())


@cache
def bound(name: str, fewest: int) -> tuple[Algebra, State]:
    """A method's algebra, plain or (with a fewest number of sites) under masks, and its start."""
    method: Method = create(name)
    method = method.under_masks(fewest) if fewest else method
    model = method.build(TASK)
    return method.algebra(TASK, model), method.start(TASK, model)


def planned(name: str, fewest: int, count: int, seed: int, still: float = 0.0) -> tuple[Algebra, Plan]:
    """The plan that a method makes of random reports; a share of the sites' blocks did not move."""
    algebra, start = bound(name, fewest)
    rng = np.random.default_rng(seed)
    handles = []
    for site in SITES[:count]:
        report = random_report(algebra, start, site, rng)
        update = dict(report.update)
        for names in algebra.blocks().values():
            if rng.random() < still:
                update |= {tensor: torch.zeros_like(update[tensor]) for tensor in names}
        samples = float(report.tally["n"].item())
        handles.append(masked_site(algebra, report_of(algebra, start, site, update, samples=samples)))
    return algebra, masked_plan(algebra, 1, handles)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fewest", [0, 3, 5], ids=["plain", "of three", "of five"])
@settings(max_examples=6)
@given(count=st.integers(3, 8), seed=st.integers(0, 2**32 - 1), still=st.sampled_from([0.0, 0.3, 0.8]))
def test_the_plan_that_a_method_makes_is_one_that_its_sites_take(
    name: str, fewest: int, count: int, seed: int, still: float
) -> None:
    algebra, plan = planned(name, fewest, count, seed, still)
    algebra.check_plan(plan)
    # Nor does the way through text, which it takes to the sites, spoil it.
    algebra.check_plan(Plan.from_json(plan.to_json()))


@settings(max_examples=150)
@given(
    count=st.integers(3, 12),
    width=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    heard=st.sampled_from([None, 3, 4, 10]),
    tau=st.sampled_from([1e-4, 0.05, 0.5, 10.0]),
    still=st.sampled_from([0.0, 0.4]),
)
def test_so_are_plans_from_any_cosines(
    count: int, width: int, seed: int, heard: int | None, tau: float, still: float
) -> None:
    # Few dimensions make sites agree, conflict and cancel out, where caps and bounds do bind.
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, width)) * (rng.random((count, 1)) >= still)
    totals = {"norms": np.array([3.0]), "moved": np.array([float(rows.any(axis=1).sum())])}
    gram = {"block": normalise(rows @ rows.T)}
    rules: list[Rule] = [
        ConsensusMaximisation({"block": ["w"]}, cap=None if heard is None else 1 / heard),
        SimilarityAware({"block": ["w"]}, tau=tau, others=None if heard is None else heard - 1),
        StyleGroups(clusters="finch", members=1 if heard is None else 3),
        StyleGroups(clusters="site", members=1 if heard is None else 3),
    ]
    for rule in rules:
        rule.check_plan(rule.plan(totals, {**gram, "style": gram["block"]}), count)


def changed(plan: Plan, group: str, key: str, value: Vector) -> Plan:
    return replace(plan, values={**plan.values, group: {**plan.values[group], key: value}})


def spoiled(value: Vector, number: float) -> Vector:
    copy = value.copy()
    copy.reshape(-1)[-1] = number
    return copy


def refused(algebra: Algebra, plan: Plan) -> str:
    """In which words a site refuses a plan; none if it takes it."""
    try:
        algebra.check_plan(plan)
    except PrivacyRefusal as refusal:
        return str(refusal)
    return ""


ANYWHERE: dict[str, Callable[[Vector], Vector]] = {
    "NaN": lambda value: spoiled(value, np.nan),
    "infinity": lambda value: spoiled(value, np.inf),
    "negative": lambda value: spoiled(value, -0.5),
    "one more": lambda value: np.concatenate([value, value[:1]]),
    "one less": lambda value: value[:-1],
    "one dimension more": lambda value: value[None],
    "whole numbers": lambda value: value.astype(np.int64),
    "single precision": lambda value: value.astype(np.float32),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fewest", [0, 3], ids=["plain", "masked"])
def test_whatever_a_plan_says_is_refused_when_it_is_spoiled(name: str, fewest: int) -> None:
    algebra, plan = planned(name, fewest, 6, seed=1)
    assert bool(plan.values) == (algebra.needs != "nothing")
    for group, values in plan.values.items():
        for key, value in values.items():
            for fault, spoil in ANYWHERE.items():
                wrong = changed(plan, group, key, spoil(value))
                assert refused(algebra, wrong).startswith(f"the plan of round 1 for '{group}': "), (group, key, fault)
            missing = {kept: one for kept, one in values.items() if kept != key}
            with pytest.raises(PrivacyRefusal, match=f"for '{group}'"):
                algebra.check_plan(replace(plan, values={**plan.values, group: missing}))
    for group in algebra.rules():
        more = {**plan.values.get(group, {}), "seed": np.ones(1)}
        with pytest.raises(PrivacyRefusal, match=f"for '{group}'.*'seed'"):
            algebra.check_plan(replace(plan, values={**plan.values, group: more}))
    with pytest.raises(PrivacyRefusal, match="'elsewhere', which is unknown"):
        algebra.check_plan(replace(plan, values={**plan.values, "elsewhere": {}}))


def weights(*row: float) -> Callable[[Vector], Vector]:
    """The first block's weights, and all others as they are."""

    def change(value: Vector) -> Vector:
        copy = value.copy()
        copy[0] = row
        return copy

    return change


def mixture(*row: float) -> Callable[[Vector], Vector]:
    """What the first site receives in the first block, and all else as it is."""

    def change(value: Vector) -> Vector:
        copy = value.copy()
        copy[0, 0] = row
        return copy

    return change


def instead(*row: float) -> Callable[[Vector], Vector]:
    return lambda value: np.array(row, dtype=np.float64)


CHANGES: list[tuple[str, str, str, Callable[[Vector], Vector], str]] = [
    ("fdse", "shared", "weights", weights(1, 0, 0, 0, 0, 0), "weighs more than 0.333"),
    ("fdse", "shared", "weights", weights(0.5, 0.5, 0, 0, 0, 0), "weighs more than 0.333"),
    # Without the first site's own part the second's is nine times as large as each of the others'.
    ("fdse", "shared", "weights", weights(0.45, 0.45, 0.05, 0.05, 0, 0), "weighs more than 0.333"),
    ("fdse", "shared", "weights", weights(0.34, 0.33, 0.33, 0, 0, 0), "weighs more than 0.333"),
    ("fdse", "shared", "weights", weights(0.2, 0.2, 0.2, 0.2, 0, 0), "do not sum to 1"),
    ("fdse", "shared", "weights", weights(0.3, 0.3, 0.3, 0.3, 0, 0), "do not sum to 1"),
    ("fdse", "shared", "weights", weights(0.4, 0.4, 0.4, -0.2, 0, 0), "negative"),
    ("fdse", "shared", "weights", weights(1e-3, 0, 0, 0, 0, 0), "do not sum to 1"),
    ("fdse", "personal", "attention", mixture(0, 1, 0, 0, 0, 0), "more of another than of its own"),
    ("fdse", "personal", "attention", mixture(0.5, 0.5, 0, 0, 0, 0), "stands out"),
    ("fdse", "personal", "attention", mixture(0.5, 0.3, 0.2, 0, 0, 0), "stands out"),
    ("fdse", "personal", "attention", mixture(0.2, 0.3, 0.3, 0.2, 0, 0), "more of another than of its own"),
    ("fdse", "personal", "attention", mixture(0.5, 0.2, 0.2, 0, 0, 0), "do not sum to 1"),
    ("fdse", "personal", "attention", mixture(0.9, 0.2, 0.2, -0.3, 0, 0), "negative"),
    ("fedcode", "style", "group", instead(0, 0, 0, 0, 0, 1), "less than 3 sites"),
    ("fedcode", "style", "group", instead(0, 0, 0, 0, 1, 1), "less than 3 sites"),
    ("fedcode", "style", "group", instead(0, 0, 0, 2, 2, 2), "not numbered from 0"),
    ("fedcode", "style", "group", instead(1, 1, 1, 2, 2, 2), "not numbered from 0"),
    ("fedcode", "style", "group", instead(0, 0, 0, 0.5, 0.5, 0.5), "not numbered from 0"),
    ("fedcode", "style", "group", instead(-1, -1, -1, 0, 0, 0), "not numbered from 0"),
    ("fedcode", "prototypes", "held", instead(0, 0.5, 1), "neither held nor not"),
    ("fedcode", "prototypes", "held", instead(0, 2, 1), "neither held nor not"),
    ("f2dc", "shared", "total", instead(0), "no training images"),
    ("f2dc", "buffer", "total", instead(-3), "no training images"),
]


@pytest.mark.parametrize(("name", "group", "key", "change", "words"), CHANGES)
def test_a_plan_that_would_show_a_site_is_refused(
    name: str, group: str, key: str, change: Callable[[Vector], Vector], words: str
) -> None:
    algebra, plan = planned(name, 3, 6, seed=2)
    with pytest.raises(PrivacyRefusal, match=f"round 1 for '{group}': .*{words}"):
        algebra.check_plan(changed(plan, group, key, change(plan.values[group][key])))


ALLOWED: list[tuple[str, str, str, Callable[[Vector], Vector]]] = [
    ("fdse", "shared", "weights", weights(1 / 3, 1 / 3, 1 / 3, 0, 0, 0)),
    ("fdse", "shared", "weights", weights(1 / 3, 1 / 3, 0.2, 1 / 3 - 0.2, 0, 0)),
    ("fdse", "shared", "weights", weights(0, 0, 0, 0, 0, 0)),
    ("fdse", "shared", "weights", weights(1 / 3 + 5e-10, 1 / 3, 1 / 3 - 5e-10, 0, 0, 0)),
    ("fdse", "personal", "attention", mixture(1, 0, 0, 0, 0, 0)),
    ("fdse", "personal", "attention", mixture(0.6, 0.2, 0.2, 0, 0, 0)),
    ("fedcode", "style", "group", instead(0, 0, 0, 0, 0, 0)),
    ("fedcode", "style", "group", instead(1, 0, 1, 0, 1, 0)),
    ("fedcode", "prototypes", "held", instead(0, 0, 0)),
    ("f2dc", "shared", "total", instead(12)),
]


@pytest.mark.parametrize(("name", "group", "key", "change"), ALLOWED)
def test_a_plan_within_the_bounds_is_taken(name: str, group: str, key: str, change: Callable[[Vector], Vector]) -> None:
    algebra, plan = planned(name, 3, 6, seed=2)
    algebra.check_plan(changed(plan, group, key, change(plan.values[group][key])))


def test_in_the_open_one_site_may_have_all_the_weight() -> None:
    algebra, plan = planned("fdse", 0, 6, seed=2)
    everything = np.zeros_like(plan.values["shared"]["weights"])
    everything[:, 2] = 1
    algebra.check_plan(changed(plan, "shared", "weights", everything))
    assert "capped" not in plan.values["shared"]
    assert "capped" not in plan.values["personal"]


@pytest.mark.parametrize("count", [2, 3])
def test_a_class_cannot_be_held_by_more_sites_than_there_are(count: int) -> None:
    algebra, plan = planned("fedcode", 3, 3, seed=2)
    fewer = Plan(1, plan.cohort[:count], {**plan.values, "style": {"group": np.zeros(count)}})
    held = changed(fewer, "prototypes", "held", np.array([1.0, 0.0, 0.0]))
    if count >= 3:
        algebra.check_plan(held)
        return
    with pytest.raises(PrivacyRefusal, match="sites are fewer"):
        algebra.check_plan(held)


def test_a_site_with_more_images_than_all_together_are_said_to_have_contributes_nothing() -> None:
    algebra, plan = planned("f2dc", 3, 4, seed=2)
    _, start = bound("f2dc", 3)
    report = report_of(
        algebra, start, SITES[0], {name: torch.zeros(spec.shape) for name, spec in algebra.sent.items()}, samples=40
    )
    for total, fine in ((39.0, False), (1e-300, False), (40.0, True), (90.0, True)):
        lied = replace(plan, values={group: {"total": np.array([total])} for group in plan.values})
        algebra.check_plan(lied)
        if fine:
            assert algebra.contribute(report, lied, 0)
        else:
            with pytest.raises(PrivacyRefusal, match="fewer training images than this one"):
                algebra.contribute(report, lied, 0)


@pytest.mark.parametrize("name", METHODS)
def test_under_masks_a_method_is_itself_with_stricter_options(name: str) -> None:
    method = create(name)
    for fewest in (2, 3, 4, 7):
        masked = method.under_masks(fewest)
        assert type(masked) is type(method)
        assert masked.under_masks(fewest) == masked
        assert masked.under_masks(2) == masked, "what is stricter already stays so"
    assert method.fewest_masked == {"fdse": 4, "fedcode": 3}.get(name, 2)
    expected: dict[str, dict[str, Any]] = {
        "fdse": {"layers": "merged", "heard": 4},
        "fedcode": {"holders": 5, "members": 5},
    }
    assert method.under_masks(5) == create(name, **expected.get(name, {}))


def test_what_is_stricter_already_is_kept() -> None:
    assert create("fedcode", holders=6, members=2).under_masks(4) == create("fedcode", holders=6, members=4)


@settings(max_examples=15)
@given(count=st.integers(4, 8), seed=st.integers(0, 2**32 - 1), fewest=st.integers(3, 6))
def test_under_masks_no_site_stands_out_of_any_block(count: int, seed: int, fewest: int) -> None:
    algebra, plan = planned("fdse", fewest, count, seed, still=0.2)
    heard = max(fewest, 4) - 1
    shared, personal = plan.values["shared"], plan.values["personal"]
    contributors = (shared["weights"] > 1e-12).sum(axis=1)
    assert all(number == 0 or number >= heard for number in contributors)
    for row in shared["weights"]:
        # Whoever it is that works together with the server and takes its own part away.
        for rest in (np.delete(row, site) for site in range(count)):
            assert rest.max() <= rest.sum() / (heard - 1) + 1e-9, "one site stands out of what the others add"
    assert ((shared["capped"] >= 0) & (shared["capped"] <= 1 + 1e-9)).all()
    assert ((personal["capped"] >= 0) & (personal["capped"] <= 1)).all()
    others = personal["attention"] * (1 - np.eye(count))
    bound_of_others = others.sum(axis=2) / min(heard - 1, count - 1)
    assert (others.max(axis=2) <= bound_of_others + 1e-12).all()
    assert Scope.PERSONAL in algebra.rules()


@settings(max_examples=15)
@given(count=st.integers(3, 8), seed=st.integers(0, 2**32 - 1), fewest=st.integers(3, 5))
def test_under_masks_no_prototype_is_of_fewer_sites(count: int, seed: int, fewest: int) -> None:
    _, plan = planned("fedcode", fewest, count, seed)
    sizes = np.bincount(plan.values["style"]["group"].astype(int))
    assert len(sizes) == 1 or sizes.min() >= fewest
    if count < fewest:
        assert not plan.values["prototypes"]["held"].any()
