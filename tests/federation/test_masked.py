"""The contract carries masked mode: a server that sees only sums and cosines gets what the open server gets."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.standins import (
    FEWEST_HOLDERS,
    GROUPS,
    TAU,
    MaskedSite,
    SecureCosines,
    SecureSum,
    Shapes,
    assert_close,
    masked_plan,
    masked_round,
    masked_site,
    masked_sums,
    random_report,
    random_start,
    run_round,
    slots_of,
)

from crossward.federation.algebra import Algebra
from crossward.federation.combine import combine_spooled, spool
from crossward.federation.contract import ALL, Report, State, Vector
from crossward.federation.coordinator import Coordinator
from crossward.methods import Task, available

pytestmark = pytest.mark.usefixtures("without_fsync")

shapes = st.builds(
    Shapes,
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 3),
    kernel=st.integers(1, 3),
    classes=st.integers(1, 5),
    features=st.integers(1, 7),
)


def open_coordinator(folder: Path, algebra: Algebra, start: State, sites: Sequence[str], *, quorum: int) -> Coordinator:
    return Coordinator(folder, algebra, start, sites=sites, rounds=9, seed=0, quorum=quorum)


def by_hand(before: State, reports: Sequence[Report]) -> dict[tuple[str, str], Vector]:
    """The same formulas once more, in plain numpy and without the algebra: reports in, next values out."""
    sites = [report.site for report in reports]
    updates = [{name: value.double().numpy() for name, value in report.update.items()} for report in reports]
    after = slots_of(before)

    def block(names: Sequence[str]) -> Vector:
        return np.stack([np.concatenate([update[name].ravel() for name in names]) for update in updates])

    def unit(rows: Vector) -> Vector:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)

    for names in (["conv.weight", "conv.bias"], ["scale.value"]):
        directions = unit(block(names))
        lengths = np.linalg.norm(block(names), axis=1)
        moved = lengths > 0
        if not moved.any():
            continue
        scores = np.exp(-(directions @ directions.T).sum(axis=1))[moved]
        weights = scores / scores.sum()
        for name in names:
            turned = [update[name] / length for update, length in zip(updates, lengths, strict=True) if length]
            step = sum(weight * direction for weight, direction in zip(weights, turned, strict=True))
            after[ALL, name] = after[ALL, name] + lengths[moved].mean() * step

    after[ALL, "norm.running_mean"] = after[ALL, "norm.running_mean"] + np.mean(
        [update["norm.running_mean"] for update in updates], axis=0
    )

    directions = unit(block(["dse.weight", "dse.bias"]))
    likeness = np.exp(directions @ directions.T / TAU)
    for j, site in enumerate(sites):
        for name in ("dse.weight", "dse.bias"):
            mixture = sum(likeness[j, k] * updates[k][name] for k in range(len(sites)))
            after[site, name] = mixture / likeness[j].sum()

    prototypes = np.stack([update["prototypes"] for update in updates])
    kept = after.get((ALL, "prototypes"), np.zeros_like(prototypes[0])).copy()
    for label in range(prototypes.shape[1]):
        holders = [rows[label] for rows in prototypes if rows[label].any()]
        if len(holders) >= FEWEST_HOLDERS:
            kept[label] = np.mean(holders, axis=0)
    after[ALL, "prototypes"] = kept

    styles = np.stack([update["style"][0] for update in updates])
    groups = (unit(styles) @ unit(styles)[0] < 0).astype(int)
    centres = after.get((ALL, "style"), np.zeros((GROUPS, styles.shape[1]))).copy()
    for group in set(groups.tolist()):
        centres[group] = styles[groups == group].mean(axis=0)
    after[ALL, "style"] = centres
    return after


@settings(max_examples=40)
@given(shapes=shapes, count=st.integers(2, 8), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_open_masked_and_numpy_agree_over_rounds(shapes: Shapes, count: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    algebra = shapes.algebra()
    sites = [f"site-{number}" for number in range(count)]
    state = masked = random_start(algebra, rng)
    with tempfile.TemporaryDirectory() as folder:
        coordinator = open_coordinator(Path(folder), algebra, state, sites, quorum=1)
        assert algebra.needs == "gram"
        for _ in range(2):
            present = data.draw(st.sets(st.sampled_from(sites), min_size=1), label="who reports")
            cohort = [site for site in sites if site in present]
            reports = [random_report(algebra, state, site, rng) for site in cohort]
            expected = by_hand(state, reports)
            handles = [masked_site(algebra, report) for report in reports]
            masked = masked_round(algebra, masked, handles)
            absent = {site: dict(own) for site, own in state.personal.items() if site not in present}
            state = run_round(coordinator, data.draw(st.permutations(reports), label="arrival"))

            assert_close(state, masked, relative=1e-6)
            got = slots_of(state)
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                scale = max(1e-30, np.abs(value).max(initial=0.0))
                np.testing.assert_allclose(got[key], value, rtol=0, atol=1e-6 * scale, err_msg=str(key))
            for site, own in absent.items():
                assert all(torch.equal(state.personal[site][name], value) for name, value in own.items())
            assert set(state.personal) == present | set(absent)


@settings(max_examples=20)
@given(shapes=shapes, count=st.integers(2, 8), seed=st.integers(0, 2**32 - 1))
def test_the_same_plan_gives_the_same_values_to_one_rounding(shapes: Shapes, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    algebra = shapes.algebra()
    state = random_start(algebra, rng)
    reports = [random_report(algebra, state, f"site-{number}", rng) for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        spooled = [spool(Path(folder), report) for report in reports]
        after = combine_spooled(algebra, state, spooled, 1)
        plan = after.plan
    masked = masked_sums(algebra, state, plan, [masked_site(algebra, report) for report in reports])
    assert_close(after, masked, relative=float(np.finfo(np.float32).eps))


def test_plans_agree_and_carry_one_number_per_site_and_block() -> None:
    rng = np.random.default_rng(5)
    algebra = Shapes(3, 2, 3, 4, 6).algebra()
    state = random_start(algebra, rng)
    reports = [random_report(algebra, state, site, rng) for site in ("a", "b", "c")]
    with tempfile.TemporaryDirectory() as folder:
        plan = combine_spooled(algebra, state, [spool(Path(folder), report) for report in reports], 1).plan
    masked = masked_plan(algebra, 1, [masked_site(algebra, report) for report in reports])
    assert plan.cohort == masked.cohort == ("a", "b", "c")
    assert plan.values.keys() == masked.values.keys() == {"shared", "personal", "prototypes", "style"}
    for group, planned in plan.values.items():
        for key, value in planned.items():
            np.testing.assert_allclose(masked.values[group][key], value, rtol=1e-12, atol=1e-15)
    assert plan.values["shared"]["weight:conv"].shape == (3,)
    assert plan.values["personal"]["dse"].sum(axis=1) == pytest.approx([1, 1, 1])


def test_a_stranger_report_changes_the_masked_result() -> None:
    # Guards the comparison itself: it must notice one changed value in one report.
    rng = np.random.default_rng(8)
    algebra = Shapes(3, 2, 3, 4, 6).algebra()
    state = random_start(algebra, rng)
    reports = [random_report(algebra, state, site, rng) for site in ("a", "b", "c")]
    whole = masked_round(algebra, state, [masked_site(algebra, report) for report in reports])
    reports[1].update["norm.running_mean"][0] += 1e-3
    changed = masked_round(algebra, state, [masked_site(algebra, report) for report in reports])
    with pytest.raises(AssertionError):
        assert_close(whole, changed, relative=1e-6)


def test_the_stand_in_server_cannot_reach_a_report() -> None:
    rng = np.random.default_rng(1)
    algebra = Shapes(2, 1, 1, 2, 2).algebra()
    state = random_start(algebra, rng)
    site = masked_site(algebra, random_report(algebra, state, "a", rng))
    assert set(vars(site)) == {"name", "send_tally", "send_sketches", "send_contribution"}
    tallies = SecureSum(["a", "b"])
    site.send_tally(tallies)
    with pytest.raises(PermissionError):
        tallies.total()
    with pytest.raises(KeyError):
        site.send_tally(tallies)
    assert [name for name in dir(tallies) if not name.startswith("_")] == ["add", "total"]
    assert [name for name in dir(SecureCosines(["a"])) if not name.startswith("_")] == ["deposit", "matrix"]


@pytest.mark.parametrize("name", sorted(available()))
@pytest.mark.parametrize("count", [2, 5])
def test_every_method_gives_the_same_model_open_and_masked(name: str, count: int, tmp_path: Path) -> None:
    method = available()[name]()
    task = Task(classes=("a", "b", "c"), channels=1, size=8, rounds=2, width=0.0625)
    model = method.build(task)
    algebra = method.algebra(task, model)
    state = masked = method.start(task, model)
    sites = [f"site-{number}" for number in range(count)]
    rng = np.random.default_rng(count)
    coordinator = open_coordinator(tmp_path, algebra, state, sites, quorum=count)
    for _ in range(2):
        reports = [random_report(algebra, state, site, rng) for site in sites]
        handles: list[MaskedSite] = [masked_site(algebra, report) for report in reports]
        masked = masked_round(algebra, masked, handles)
        state = run_round(coordinator, reports[::-1])
        assert_close(state, masked, relative=1e-6)
