from __future__ import annotations

import pytest
from torch import nn

from crossward.federation.scopes import Scope, layout_of
from crossward.methods import Task
from crossward.methods.fedavg import FedAvg
from crossward.methods.fedbn import FedBN
from crossward.nets.layers import Norm
from crossward.nets.resnet import BasicBlock

NORM_LAYERS = {10: 1 + 4 * 2 + 3, 18: 1 + 8 * 2 + 3}


def task_of(depth: int, norm: Norm) -> Task:
    return Task(classes=("a", "b"), channels=1, size=8, rounds=2, width=0.0625, depth=depth, norm=norm)


def norm_tensors(model: nn.Module) -> set[str]:
    """Tensors of normalisation layers, found without the package's own test for them."""
    kinds = ("MapNorm", "GroupNorm")
    layers = [(name, module) for name, module in model.named_modules() if type(module).__name__ in kinds]
    return {f"{name}.{tensor}" for name, module in layers for tensor in module.state_dict()}


@pytest.mark.parametrize("depth", [10, 18])
@pytest.mark.parametrize(("norm", "per_layer"), [("batch", 5), ("group", 2)])
def test_normalisation_stays_and_everything_else_is_shared(depth: int, norm: Norm, per_layer: int) -> None:
    model = FedBN().build(task_of(depth, norm))
    layout = layout_of(model)
    local = {name for name, spec in layout.items() if spec.scope is Scope.LOCAL}
    assert local == norm_tensors(model)
    assert len(local) == per_layer * NORM_LAYERS[depth]
    assert {spec.scope for name, spec in layout.items() if name not in local} == {Scope.SHARED}
    assert all("head" in name or name.endswith("weight") for name in set(layout) - local)
    task = task_of(depth, norm)
    assert local.isdisjoint(FedBN().algebra(task, model).sent)
    assert local.isdisjoint(FedBN().start(task, model).tensors)


def test_the_shortcuts_normalisation_stays_although_its_name_does_not_say_so() -> None:
    model = FedBN().build(task_of(10, "batch"))
    layout = layout_of(model)
    names = [
        f"{name}.shortcut.1.{tensor}"
        for name, block in model.named_modules()
        if isinstance(block, BasicBlock) and not isinstance(block.shortcut, nn.Identity)
        for tensor in ("weight", "bias", "running_mean", "running_var")
    ]
    assert len(names) == 12
    for name in names:
        assert "bn" not in name.lower()
        assert "norm" not in name.lower()
        assert layout[name].scope is Scope.LOCAL
        convolution = name.rsplit(".", 2)[0] + ".0.weight"
        assert layout[convolution].scope is Scope.SHARED


def test_it_starts_where_fedavg_starts() -> None:
    task = task_of(10, "batch")
    own, plain = FedBN().start(task, FedBN().build(task)), FedAvg().start(task, FedAvg().build(task))
    assert set(own.tensors) < set(plain.tensors)
    assert all(own.tensors[name].equal(plain.tensors[name]) for name in own.tensors)


def test_group_norm_leaves_no_trace_in_what_is_sent() -> None:
    task = task_of(10, "group")
    model = FedBN().build(task)
    sent = FedBN().algebra(task, model).sent
    # 9 convolutions of 3x3, 3 of 1x1, and the head's weight and bias.
    assert len(sent) == 14
    assert sum(len(spec.shape) == 4 for spec in sent.values()) == 12
