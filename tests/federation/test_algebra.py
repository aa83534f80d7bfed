from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.standins import (
    Attention,
    Consensus,
    HeldRows,
    PlainMean,
    Shapes,
    assert_identical,
    mean_algebra,
    random_report,
    random_start,
    random_update,
    report_of,
)
from torch import Tensor

from crossward.federation.algebra import Algebra, Extra
from crossward.federation.contract import ALL, Plan, Report, State, Summed, Vector
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import CrosswardError, PrivacyRefusal
from crossward.federation.rules import SampleMean, divide
from crossward.federation.scopes import Scope, TensorSpec

SHAPES = Shapes(outputs=3, inputs=2, kernel=3, classes=4, features=5)
SITES = ["a", "b"]


def changed(report: Report, **tensors: Tensor) -> Report:
    return dataclasses.replace(report, update={**report.update, **tensors})


def without(report: Report, name: str) -> Report:
    return dataclasses.replace(report, update={key: value for key, value in report.update.items() if key != name})


def told(report: Report, **tally: object) -> Report:
    return dataclasses.replace(
        report, tally={**report.tally, **{key: np.asarray(value) for key, value in tally.items()}}
    )


def spoiled(tensor: Tensor, value: float) -> Tensor:
    copy = tensor.clone()
    copy.view(-1)[-1] = value
    return copy


FAULTS: dict[str, tuple[Callable[[Report], Report], str]] = {
    "a tensor nobody declared": (lambda report: changed(report, thumbnails=torch.zeros(2)), "thumbnails"),
    "a local tensor": (lambda report: changed(report, **{"own.weight": torch.zeros(5)}), "own.weight"),
    "a local counter": (
        lambda report: changed(report, **{"norm.num_batches_tracked": torch.tensor(3)}),
        "norm.num_batches_tracked",
    ),
    "a tensor is missing": (lambda report: without(report, "conv.bias"), "conv.bias"),
    "an extra is missing": (lambda report: without(report, "prototypes"), "prototypes"),
    "another shape": (lambda report: changed(report, **{"conv.bias": torch.zeros(4)}), "conv.bias"),
    "a shape that would broadcast": (lambda report: changed(report, **{"conv.bias": torch.zeros(1)}), "conv.bias"),
    "one more dimension": (lambda report: changed(report, **{"conv.bias": torch.zeros(3, 1)}), "conv.bias"),
    "NaN": (lambda report: changed(report, style=spoiled(report.update["style"], float("nan"))), "style"),
    "infinity": (
        lambda report: changed(report, **{"dse.bias": spoiled(report.update["dse.bias"], float("-inf"))}),
        "dse.bias",
    ),
    "NaN in the tally": (lambda report: told(report, n=[float("nan")]), "'n'"),
    "infinity in a measure": (
        lambda report: told(report, **{"shared/norm:conv": [float("inf")]}),
        "shared/norm:conv",
    ),
}

# What the contract says ("refuse a report that is not exactly what was declared"), beyond names and shapes.
FURTHER_FAULTS: dict[str, Callable[[Report], Report]] = {
    "no sample count": lambda report: dataclasses.replace(
        report, tally={key: value for key, value in report.tally.items() if key != "n"}
    ),
    "a sample count of two numbers": lambda report: told(report, n=[1.0, 2.0]),
    "a negative sample count": lambda report: told(report, n=[-40.0]),
    "a complex tensor": lambda report: changed(report, w=report.update["w"].to(torch.complex64)),
    "a tensor of twice the bits": lambda report: changed(report, w=report.update["w"].double()),
    "a tensor of whole numbers": lambda report: changed(report, w=report.update["w"].long()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_report_that_is_not_as_declared_is_refused_and_nothing_changes(fault: str, tmp_path: Path) -> None:
    spoil, named = FAULTS[fault]
    rng = np.random.default_rng(0)
    algebra = SHAPES.algebra()
    start = random_start(algebra, rng)
    coordinator = Coordinator(tmp_path, algebra, start, sites=SITES, rounds=2, seed=0)
    good = {site: random_report(algebra, start, site, rng) for site in SITES}
    coordinator.accept(good["b"])
    with pytest.raises(PrivacyRefusal, match=f"^a, round 1: .*{named}"):
        coordinator.accept(spoil(good["a"]))
    assert coordinator.state is start
    assert coordinator.reported == ("b",)
    assert coordinator.totals().keys() == good["b"].tally.keys()
    assert not coordinator.checkpoint_path.exists()
    coordinator.accept(good["a"])
    undisturbed = Coordinator(tmp_path / "undisturbed", algebra, start, sites=SITES, rounds=2, seed=0)
    undisturbed.accept(good["a"])
    undisturbed.accept(good["b"])
    assert_identical(coordinator.close_round({}), undisturbed.close_round({}))


@pytest.mark.parametrize("fault", FURTHER_FAULTS)
def test_a_report_that_cannot_be_combined_is_refused_and_the_site_may_try_again(fault: str, tmp_path: Path) -> None:
    algebra = mean_algebra({"w": (2,)})
    start = State(0, {"w": torch.zeros(2)})
    coordinator = Coordinator(tmp_path, algebra, start, sites=["a"], rounds=2, seed=0)
    good = report_of(algebra, start, "a", {"w": torch.tensor([1.0, 2.0])}, samples=4.0)
    with pytest.raises(CrosswardError):
        coordinator.accept(FURTHER_FAULTS[fault](good))
    assert coordinator.reported == ()
    coordinator.accept(good)
    assert coordinator.close_round({}).tensors["w"].tolist() == [1.0, 2.0]


def test_a_good_report_passes() -> None:
    algebra = SHAPES.algebra()
    start = random_start(algebra, np.random.default_rng(1))
    algebra.check(random_report(algebra, start, "a", np.random.default_rng(2)))


def test_what_is_sent_is_what_leaves_and_the_extras() -> None:
    algebra = SHAPES.algebra()
    assert list(algebra.sent) == [
        *("conv.weight", "conv.bias", "scale.value", "norm.running_mean", "dse.weight", "dse.bias"),
        *("prototypes", "style"),
    ]
    assert set(algebra.layout) - set(algebra.sent) == {"own.weight", "norm.num_batches_tracked"}


def test_blocks_are_named_by_group() -> None:
    assert SHAPES.algebra().blocks() == {
        "shared/conv": ("conv.weight", "conv.bias"),
        "shared/scale": ("scale.value",),
        "personal/dse": ("dse.weight", "dse.bias"),
        "style/vector": ("style",),
    }


def test_measures_by_hand() -> None:
    algebra = SHAPES.algebra()
    update = {name: torch.zeros(spec.shape) for name, spec in algebra.sent.items()}
    update["conv.weight"].view(-1)[0] = 3.0
    update["conv.bias"][1] = -4.0
    update["prototypes"][2] = 1.0
    measured = {key: value.tolist() for key, value in algebra.measure(update).items()}
    assert measured == {
        "shared/norm:conv": [5.0],
        "shared/moved:conv": [1.0],
        "shared/norm:scale": [0.0],
        "shared/moved:scale": [0.0],
        "prototypes/present": [0.0, 0.0, 1.0, 0.0],
    }


@pytest.mark.parametrize(
    ("rules", "needs"),
    [
        ({Scope.SHARED: SampleMean(), Scope.BUFFER: PlainMean()}, "nothing"),
        ({Scope.SHARED: SampleMean(), Scope.BUFFER: Consensus()}, "gram"),
        # The strictest rule that is used decides; a rule for a scope that does not occur does not count.
        ({Scope.SHARED: SampleMean(), Scope.BUFFER: SampleMean(), Scope.PERSONAL: Attention()}, "nothing"),
    ],
)
def test_the_strictest_rule_in_use_decides_what_the_plan_waits_for(
    rules: Mapping[Scope, SampleMean], needs: str
) -> None:
    layout = {"w": TensorSpec(Scope.SHARED, (2,)), "m": TensorSpec(Scope.BUFFER, (2,))}
    assert Algebra(layout, rules).needs == needs
    with_extra = Algebra(layout, rules, {"prototypes": Extra((2, 2), HeldRows())})
    assert with_extra.needs == ("totals" if needs == "nothing" else needs)


def test_a_model_whose_tensors_are_all_local_needs_nothing() -> None:
    algebra = Algebra({"w": TensorSpec(Scope.LOCAL, (2,))}, {})
    assert algebra.needs == "nothing"
    assert algebra.sent == {}


def test_a_scope_without_a_rule_is_refused() -> None:
    with pytest.raises(PrivacyRefusal, match="'w' is personal"):
        Algebra({"w": TensorSpec(Scope.PERSONAL, (2,))}, {Scope.SHARED: SampleMean()})


@pytest.mark.parametrize("name", ["w", "own"])
def test_an_extra_cannot_take_the_name_of_a_tensor(name: str) -> None:
    layout = {"w": TensorSpec(Scope.SHARED, (2,)), "own": TensorSpec(Scope.LOCAL, (2,))}
    with pytest.raises(PrivacyRefusal, match=f"extra '{name}'"):
        Algebra(layout, {Scope.SHARED: SampleMean()}, {name: Extra((2,), SampleMean())})


@pytest.mark.parametrize("name", [scope.value for scope in Scope if scope.leaves])
def test_an_extra_cannot_take_the_name_of_a_scope(name: str) -> None:
    # Groups are named by scope or by extra: an extra called 'shared' would replace the rule of the shared tensors.
    layout = {"w": TensorSpec(Scope.SHARED, (2,))}
    with pytest.raises(CrosswardError):
        Algebra(layout, {Scope.SHARED: SampleMean()}, {name: Extra((2, 2), HeldRows())})


def test_contribute_takes_a_part_of_the_update() -> None:
    rng = np.random.default_rng(4)
    algebra = SHAPES.algebra()
    start = random_start(algebra, rng)
    update = random_update(algebra, rng)
    report = report_of(algebra, start, "a", update)
    weights: dict[str, dict[str, Vector]] = {
        "shared": {"weight:conv": np.array([0.25, 0.75]), "weight:scale": np.array([0.5, 0.5])},
        "personal": {"dse": np.array([[0.9, 0.1], [0.2, 0.8]])},
        "prototypes": {"open": np.ones(4)},
        "style": {"group": np.array([0.0, 1.0])},
    }
    plan = Plan(1, ("a", "b"), weights)
    whole = algebra.contribute(report, plan, 1)
    for name in algebra.sent:
        part = dataclasses.replace(report, update={name: update[name]})
        for slot, shares in algebra.contribute(part, plan, 1).items():
            assert shares.keys() == {name}
            assert torch.equal(shares[name].value, whole[slot][name].value)
            assert np.array_equal(shares[name].coefficient, whole[slot][name].coefficient)
    assert set(whole) == {ALL, "a", "b"}
    assert whole["a"]["dse.bias"].coefficient == 0.1
    assert whole["b"]["dse.bias"].coefficient == 0.8


def test_contribute_is_pure() -> None:
    rng = np.random.default_rng(6)
    algebra = mean_algebra({"w": (3,)})
    start = random_start(algebra, rng)
    report = random_report(algebra, start, "a", rng)
    before = report.update["w"].clone()
    plan = Plan(1, ("a",))
    first, second = algebra.contribute(report, plan, 0), algebra.contribute(report, plan, 0)
    assert first[ALL]["w"].coefficient == second[ALL]["w"].coefficient == report.tally["n"].item()
    assert torch.equal(report.update["w"], before)


def test_dividing_by_nobody_gives_zero() -> None:
    assert divide(Summed(torch.tensor([6.0, 2.0], dtype=torch.float64), 4.0)).tolist() == [1.5, 0.5]
    assert divide(Summed(torch.zeros(2, dtype=torch.float64), 0.0)).tolist() == [0.0, 0.0]
    rows = Summed(torch.tensor([[6.0, 2.0], [0.0, 0.0]], dtype=torch.float64), np.array([4.0, 0.0]))
    assert divide(rows).tolist() == [[1.5, 0.5], [0.0, 0.0]]


class Adding(PlainMean):
    """Adds the sum to what is there."""

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        return current + summed.value.float()


def test_the_next_value_starts_from_the_sites_own_tensor_then_the_common_one_then_zero() -> None:
    layout = {"w": TensorSpec(Scope.PERSONAL, (1,))}
    algebra = Algebra(layout, {Scope.PERSONAL: Adding()}, {"extra": Extra((1,), Adding())})
    state = State(0, {"w": torch.tensor([10.0])}, {"a": {"w": torch.tensor([20.0])}})
    step = Summed(torch.tensor([1.0], dtype=torch.float64), 1.0)
    plan = Plan(1, ("a", "b"))
    assert algebra.next_value("w", state, "a", step, plan).tolist() == [21.0]
    assert algebra.next_value("w", state, "b", step, plan).tolist() == [11.0]
    assert algebra.next_value("w", state, ALL, step, plan).tolist() == [11.0]
    assert algebra.next_value("extra", state, ALL, step, plan).tolist() == [1.0]
