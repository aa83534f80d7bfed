"""A vector that every site reports once and the plan sorts into groups, as style prototypes will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from crossward.federation.algebra import Algebra, Extra
from crossward.federation.contract import ALL, SAMPLES, Needs, Plan, Report, State, Summed, Tally, Vector
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import PrivacyRefusal, StorageFailure
from crossward.federation.rules import Rule, divide
from crossward.federation.scopes import tensors_digest

STYLES = {"a": [1.0, 0.0], "b": [0.0, 2.0], "c": [3.0, 0.2]}


class NearestGroups(Rule):
    """Two groups: who resembles the first site more than not, and who does not."""

    needs: ClassVar[Needs] = "gram"

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {"style": tuple(names)}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        return {"group": (gram["style"][0] < 0.5).astype(np.float64)}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {ALL: np.eye(2)[int(plan["group"][me])]}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        return divide(summed).float()


ALGEBRA = Algebra({}, {}, {"style": Extra((1, 2), NearestGroups())})


def run(folder: Path, *, study: str = "") -> Coordinator:
    return Coordinator(folder, ALGEBRA, State(0, {}), sites=sorted(STYLES), rounds=3, seed=0, study=study)


def report(site: str, coordinator: Coordinator, **tally: Vector) -> Report:
    digest = tensors_digest(coordinator.payload(site).tensors)
    number = coordinator.state.round_number + 1
    return Report(site, number, digest, {"style": torch.tensor([STYLES[site]])}, {SAMPLES: np.array([1.0]), **tally})


def test_one_row_goes_into_the_row_of_its_group_and_the_site_reads_its_group_from_the_plan(tmp_path: Path) -> None:
    coordinator = run(tmp_path)
    for site in STYLES:
        coordinator.accept(report(site, coordinator))
    after = coordinator.close_round({})
    torch.testing.assert_close(after.tensors["style"], torch.tensor([[2.0, 0.1], [0.0, 2.0]]))
    plan = coordinator.payload("b").plan
    assert plan is not None
    assert plan.cohort == ("a", "b", "c")
    assert plan.values["style"]["group"].tolist() == [0.0, 1.0, 0.0]
    for site in STYLES:
        coordinator.accept(report(site, coordinator))
    torch.testing.assert_close(coordinator.close_round({}).tensors["style"], after.tensors["style"])

    resumed = run(tmp_path)
    assert resumed.resume()
    plan = resumed.payload("a").plan
    assert plan is not None
    assert plan.digest() == (coordinator.state.plan or Plan(0, ())).digest()


def test_a_plan_survives_text_exactly() -> None:
    plan = Plan(3, ("a", "b"), {"shared": {"u": np.array([1 / 3, 2e-17]), "m": np.eye(2) / 7}})
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()


def test_a_tally_that_was_not_declared_does_not_get_in(tmp_path: Path) -> None:
    coordinator = run(tmp_path)
    with pytest.raises(PrivacyRefusal, match="'labels'"):
        coordinator.accept(report("a", coordinator, labels=np.ones(100_000)))
    with pytest.raises(PrivacyRefusal, match="'n'"):
        coordinator.accept(report("a", coordinator, n=np.ones(2)))
    assert coordinator.reported == ()


def test_a_checkpoint_of_another_study_is_refused(tmp_path: Path) -> None:
    coordinator = run(tmp_path, study="fedavg, lr 0.1")
    for site in STYLES:
        coordinator.accept(report(site, coordinator))
    coordinator.close_round({})
    with pytest.raises(StorageFailure, match="another study"):
        run(tmp_path, study="fedavg, lr 0.2").resume()
