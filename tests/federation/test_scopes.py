from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from crossward.federation.errors import PrivacyRefusal
from crossward.federation.scopes import (
    Scope,
    TensorSpec,
    layout_digest,
    layout_of,
    mark,
    mark_where,
    names_in,
    tensors_digest,
)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def scopes(model: nn.Module) -> dict[str, str]:
    return {name: spec.scope.value for name, spec in layout_of(model).items()}


def test_a_tensor_without_a_scope_is_refused() -> None:
    with pytest.raises(PrivacyRefusal, match=r"'0\.weight' has no scope"):
        layout_of(small())
    model = small()
    mark(model[0], parameters=Scope.SHARED, buffers=Scope.BUFFER)
    mark(model[2], parameters=Scope.SHARED, buffers=Scope.BUFFER)
    with pytest.raises(PrivacyRefusal, match=r"'1\.weight' has no scope"):
        layout_of(model)


def test_a_bare_parameter_or_buffer_is_not_missed() -> None:
    model = nn.Module()
    model.register_buffer("prototype", torch.zeros(2))
    with pytest.raises(PrivacyRefusal, match="'prototype'"):
        layout_of(model)


def test_scopes_are_inherited_and_overridden() -> None:
    model = small()
    mark(model, parameters=Scope.SHARED, buffers=Scope.BUFFER)
    mark(model[2], parameters=Scope.PERSONAL, buffers=Scope.LOCAL)
    assert scopes(model) == {
        "0.weight": "shared",
        "0.bias": "shared",
        "1.weight": "shared",
        "1.bias": "shared",
        "1.running_mean": "buffer",
        "1.running_var": "buffer",
        "1.num_batches_tracked": "local",
        "2.0.weight": "personal",
        "2.0.bias": "personal",
        "2.1.weight": "personal",
        "2.1.bias": "personal",
        "2.1.running_mean": "local",
        "2.1.running_var": "local",
        "2.1.num_batches_tracked": "local",
    }
    mark(model[2][1], parameters=Scope.SHARED, buffers=Scope.BUFFER)
    assert scopes(model)["2.1.running_mean"] == "buffer"
    assert scopes(model)["2.0.bias"] == "personal"


def test_marking_by_kind_asks_the_module_and_not_its_name() -> None:
    model = small()
    mark(model, parameters=Scope.SHARED, buffers=Scope.BUFFER)
    mark_where(model, lambda module: isinstance(module, nn.BatchNorm1d), parameters=Scope.LOCAL)
    local = {name for name, scope in scopes(model).items() if scope == "local"}
    assert local == {"1.num_batches_tracked", *(f"2.1.{name}" for name in nn.BatchNorm1d(2).state_dict())}
    mark_where(model, lambda module: isinstance(module, nn.BatchNorm2d), parameters=Scope.SHARED, buffers=Scope.LOCAL)
    assert scopes(model)["1.weight"] == "shared"
    assert scopes(model)["1.running_var"] == "local"


def test_a_counter_never_leaves_whatever_it_was_marked() -> None:
    model = nn.BatchNorm1d(3)
    mark(model, parameters=Scope.SHARED, buffers=Scope.SHARED)
    assert layout_of(model)["num_batches_tracked"] == TensorSpec(Scope.LOCAL, ())
    assert not Scope.LOCAL.leaves
    assert all(scope.leaves for scope in Scope if scope is not Scope.LOCAL)


def test_the_layout_is_the_state_dict() -> None:
    model = small()
    model[0].register_buffer("scratch", torch.zeros(3), persistent=False)
    mark(model, parameters=Scope.SHARED, buffers=Scope.BUFFER)
    state = model.state_dict()
    assert {name: spec.shape for name, spec in layout_of(model).items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }


def test_the_layout_is_the_state_dict_where_a_module_is_used_twice() -> None:
    twice = nn.Linear(2, 2)
    model = nn.Sequential(twice, nn.ReLU(), twice)
    mark(model, parameters=Scope.SHARED, buffers=Scope.BUFFER)
    assert list(layout_of(model)) == list(model.state_dict())


def test_names_in_keeps_the_order_of_the_model() -> None:
    layout = {
        "z": TensorSpec(Scope.SHARED, (1,)),
        "a": TensorSpec(Scope.LOCAL, (1,)),
        "m": TensorSpec(Scope.BUFFER, (1,)),
        "b": TensorSpec(Scope.SHARED, (1,)),
    }
    assert names_in(layout, Scope.SHARED) == ["z", "b"]
    assert names_in(layout, Scope.BUFFER, Scope.SHARED) == ["z", "m", "b"]


@given(st.lists(st.integers(0, 9), max_size=5))
def test_the_number_of_values_is_the_product_of_the_shape(shape: list[int]) -> None:
    assert TensorSpec(Scope.SHARED, tuple(shape)).numel == torch.empty(shape).numel()


LAYOUT = {"a": TensorSpec(Scope.SHARED, (2, 3)), "b": TensorSpec(Scope.BUFFER, (1,))}


@pytest.mark.parametrize(
    "other",
    [
        {**LAYOUT, "a": TensorSpec(Scope.LOCAL, (2, 3))},
        {**LAYOUT, "a": TensorSpec(Scope.SHARED, (3, 2))},
        {**LAYOUT, "a": TensorSpec(Scope.SHARED, (6,))},
        {"A": LAYOUT["a"], "b": LAYOUT["b"]},
        {"b": LAYOUT["a"], "a": LAYOUT["b"]},
        {"a": LAYOUT["a"]},
        {**LAYOUT, "c": TensorSpec(Scope.SHARED, ())},
    ],
)
def test_the_digest_of_a_layout_changes_with_any_part_of_it(other: dict[str, TensorSpec]) -> None:
    assert layout_digest(other) != layout_digest(LAYOUT)


def test_the_digest_of_a_layout_does_not_depend_on_order() -> None:
    assert layout_digest(dict(reversed(LAYOUT.items()))) == layout_digest(LAYOUT)
    # Stored in checkpoints and vaults: another value would orphan every run there is.
    assert layout_digest(LAYOUT) == "1fc611a4608dbb8a70a356c9e6eeb09dc8e19d71e5fa12f6ece9c893a3d09b44"


def test_the_digest_of_tensors_follows_names_values_shapes_and_types() -> None:
    base = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0, 3)}
    digest = tensors_digest(base)
    assert tensors_digest(dict(reversed(base.items()))) == digest
    assert tensors_digest({name: tensor.clone() for name, tensor in base.items()}) == digest
    for other in (
        {**base, "a": torch.tensor([1.0, 2.0000002])},
        {**base, "a": torch.tensor([[1.0, 2.0]])},
        {**base, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {**base, "b": torch.zeros(3, 0)},
        {"a": base["a"]},
        {"aa": base["a"], "b": base["b"]},
        {**base, "a": torch.tensor([2.0, 1.0])},
    ):
        assert tensors_digest(other) != digest


def test_the_digest_of_tensors_does_not_depend_on_the_order_in_memory() -> None:
    values = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert tensors_digest({"x": values.to(memory_format=torch.channels_last)}) == tensors_digest({"x": values})
    assert tensors_digest({"x": nn.Parameter(values)}) == tensors_digest({"x": values})
