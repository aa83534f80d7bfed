from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.standins import report_of, run_round

from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.scopes import Scope, layout_of
from crossward.methods import Task
from crossward.methods.local import Local
from crossward.nets.layers import Norm


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("depth", [10, 18])
def test_nothing_leaves(norm: Norm, depth: int) -> None:
    task = Task(classes=("a", "b"), channels=1, size=8, rounds=2, width=0.0625, norm=norm, depth=depth)
    model = Local().build(task)
    layout = layout_of(model)
    assert set(layout) == set(model.state_dict())
    assert {spec.scope for spec in layout.values()} == {Scope.LOCAL}
    algebra = Local().algebra(task, model)
    assert algebra.sent == {}
    assert algebra.needs == "nothing"
    assert Local().start(task, model).tensors == {}


def test_rounds_pass_without_a_tensor_and_one_that_is_sent_is_refused(tmp_path: Path) -> None:
    task = Task(classes=("a", "b"), channels=1, size=8, rounds=2, width=0.0625)
    model = Local().build(task)
    algebra, start = Local().algebra(task, model), Local().start(task, model)
    coordinator = Coordinator(tmp_path, algebra, start, sites=["a", "b"], rounds=2, seed=0)
    smuggled = report_of(algebra, start, "a", {}, samples=3.0)
    smuggled = type(smuggled)(smuggled.site, 1, smuggled.model, {"head.linear.bias": torch.zeros(2)}, smuggled.tally)
    with pytest.raises(PrivacyRefusal, match=r"head\.linear\.bias"):
        coordinator.accept(smuggled)
    for number in (1, 2):
        state = coordinator.state
        after = run_round(coordinator, [report_of(algebra, state, site, {}) for site in ("a", "b")])
        assert after.round_number == number
        assert after.tensors == {}
        assert after.personal == {}
        assert coordinator.payload("a").tensors == {}
    assert coordinator.finished
