from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from crossward.federation.contract import Plan, State

PLAN = Plan(3, ("a", "b"), {"shared": {"u": np.array([0.25, 0.75])}, "style": {"group": np.array([0.0, 1.0])}})


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(PLAN, round_number=4),
        dataclasses.replace(PLAN, cohort=("b", "a")),
        dataclasses.replace(PLAN, cohort=("a", "b", "c")),
        dataclasses.replace(PLAN, cohort=("ab",)),
        dataclasses.replace(PLAN, values={**PLAN.values, "shared": {"u": np.array([0.25, np.nextafter(0.75, 1)])}}),
        dataclasses.replace(PLAN, values={**PLAN.values, "shared": {"v": np.array([0.25, 0.75])}}),
        dataclasses.replace(PLAN, values={**PLAN.values, "shared": {"u": np.array([[0.25, 0.75]])}}),
        dataclasses.replace(PLAN, values={"shared": PLAN.values["style"], "style": PLAN.values["shared"]}),
        dataclasses.replace(PLAN, values={}),
    ],
)
def test_the_digest_of_a_plan_changes_with_any_part_of_it(other: Plan) -> None:
    assert other.digest() != PLAN.digest()


def test_the_digest_of_a_plan_does_not_depend_on_how_it_is_held() -> None:
    strided = np.array([[0.25, 9.0], [0.75, 9.0]])[:, 0]
    assert not strided.flags.contiguous
    same = Plan(3, ("a", "b"), {"style": {"group": np.array([0, 1])}, "shared": {"u": strided}})
    assert same.digest() == PLAN.digest()


def test_a_payload_has_the_common_tensors_and_the_sites_own() -> None:
    state = State(2, {"w": torch.zeros(1), "p": torch.ones(1)}, {"a": {"p": torch.full((1,), 5.0)}})
    own, common = state.payload("a", best_round=1), state.payload("b")
    assert own.round_number == common.round_number == 2
    assert (own.best_round, common.best_round) == (1, None)
    assert {name: tensor.item() for name, tensor in own.tensors.items()} == {"w": 0.0, "p": 5.0}
    assert {name: tensor.item() for name, tensor in common.tensors.items()} == {"w": 0.0, "p": 1.0}
    assert state.tensors["p"].item() == 1.0
