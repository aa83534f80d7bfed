from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.site.made_up_sites import (
    SITES,
    made_up_cohort,
    made_up_study,
    same_bits,
    tensors_on_disk,
    without_seconds,
)
from tests.standins import assert_close, masked_round, masked_site, report_of, run_round
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.algebra import total
from crossward.federation.contract import ALL, Plan, Report, State
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of
from crossward.federation.storage import read_tensors
from crossward.methods import Task, create
from crossward.methods.base import Batch, Context, Model, SoftmaxHead
from crossward.methods.f2dc import DecouplingBlock
from crossward.methods.fedavg import FedAvg
from crossward.methods.fedcode import (
    FedCode,
    PrototypeHead,
    StyleAwareNorm,
    TwoEncoders,
    decoupling,
    first_neighbour_groups,
    groups_by_cosine,
    semantic_contrast,
    style_contrast,
)
from crossward.methods.rfeddis import EvidentialHeads
from crossward.nets.layers import Norm, is_normalisation
from crossward.site.adapt import adapt
from crossward.site.handover import read_handover
from crossward.site.inprocess import simulate

Array = np.ndarray[Any, np.dtype[np.float64]]
TASK = Task(classes=("a", "b", "c"), channels=1, size=16, rounds=4, width=0.0625)
WIDTH = 32
"""Of the features of that model."""


def images_of(count: int, size: int = 16, seed: int = 5) -> Tensor:
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(seed))


def doubles(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(method: FedCode | None = None, task: Task = TASK, **plugs: str) -> tuple[FedCode, TwoEncoders]:
    method = method or FedCode()
    model = method.build(task, **plugs)
    assert isinstance(model, TwoEncoders)
    return method, model


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# SAIN, Eq. 5-7


def sain(channels: int, **options: float) -> StyleAwareNorm:
    with torch.random.fork_rng():
        torch.manual_seed(channels)
        return StyleAwareNorm(channels, **options).double()


def attention_of(layer: StyleAwareNorm, pooled: Tensor) -> Tensor:
    """Squeeze-and-excitation from the layer's own weights."""
    hidden = (pooled @ layer.squeeze.weight.T + layer.squeeze.bias).clamp_min(0)
    return 1 / (1 + torch.exp(-(hidden @ layer.excite.weight.T + layer.excite.bias)))


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 4, 4), (8, 2, 5), (96, 3, 1)])
def test_style_is_what_instance_normalisation_removes_weighted_by_squeeze_and_excitation(
    channels: int, height: int, width: int
) -> None:
    layer = sain(channels)
    features = 2 * drawn(5, channels, height, width) + 3
    with torch.no_grad():
        result = layer(features)
        style = features - functional.instance_norm(features, eps=1e-5)
        # Pooled from the style map itself, as in Fig. 3; the layer takes another way to the same number.
        expected = attention_of(layer, style.mean(dim=(2, 3)))[:, :, None, None] * style
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_a_style_map_by_hand() -> None:
    # Mean 3 and deviation 1 in the only channel: normalised -1 and 1, style 3 and 3. The first hidden unit becomes
    # 2 * 3 - 5 = 1, and the attention sigmoid(1).
    layer = sain(1, eps=0.0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.squeeze.weight[0] = 2
        layer.squeeze.bias[0] = -5
        layer.excite.weight[0, 0] = 1
        result = layer(torch.tensor([[[[2.0, 4.0]]]], dtype=torch.float64))
    weighted = 3 / (1 + math.exp(-1))
    torch.testing.assert_close(result, torch.full((1, 1, 1, 2), weighted, dtype=torch.float64))


def test_a_map_of_one_point_is_all_style() -> None:
    layer = sain(6)
    features = drawn(4, 6, 1, 1)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        functional.instance_norm(features)
    with torch.no_grad():
        result = layer(features)
        expected = attention_of(layer, features.flatten(1))[:, :, None, None] * features
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e4])
def test_a_constant_map_is_all_style_too(value: float) -> None:
    layer = sain(4).float()
    features = torch.full((2, 4, 3, 3), value, requires_grad=True)
    result = layer(features)
    result.sum().backward()
    expected = attention_of(layer, torch.full((2, 4), value))[:, :, None, None] * value
    torch.testing.assert_close(result, expected.expand_as(result))
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


@pytest.mark.parametrize(("channels", "hidden"), [(1, 4), (64, 4), (79, 4), (80, 5), (512, 32)])
def test_attention_has_a_sixteenth_of_the_channels_and_no_less_than_four_units(channels: int, hidden: int) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in StyleAwareNorm(channels).state_dict().items()}
    assert shapes == {
        "squeeze.weight": (hidden, channels),
        "squeeze.bias": (hidden,),
        "excite.weight": (channels, hidden),
        "excite.bias": (channels,),
    }


@pytest.mark.parametrize("training", [True, False])
def test_every_image_has_its_own_style_whatever_else_is_in_the_batch(training: bool) -> None:
    layer = sain(5).train(training)
    features = drawn(6, 5, 3, 4)
    together = layer(features)
    alone = torch.cat([layer(each.unsqueeze(0)) for each in features])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-13)
    assert layer(features[:0]).shape == (0, 5, 3, 4)


@pytest.mark.parametrize("size", [(3, 2), (1, 1)])
def test_the_gradient_of_style_is_that_of_finite_differences(size: tuple[int, int]) -> None:
    layer = sain(3)
    features = drawn(2, 3, *size).requires_grad_()

    def forward(maps: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(dict(layer.named_parameters()), weights, strict=True))
        return torch.func.functional_call(layer, named, (maps,))

    assert torch.autograd.gradcheck(forward, (features, *layer.parameters()))


@pytest.mark.parametrize(("net", "size", "layers"), [("resnet", 16, 12), ("alexnet", 64, 7)])
def test_in_the_style_encoder_it_stands_for_every_normalisation(net: Any, size: int, layers: int) -> None:
    _, model = built(task=replace(TASK, net=net, size=size))
    assert not any(is_normalisation(module) for module in model.style.modules())
    assert sum(isinstance(module, StyleAwareNorm) for module in model.style.modules()) == layers
    assert sum(is_normalisation(module) for module in model.backbone.modules()) == layers
    _, plain = built(FedCode(style_norm="batch"), replace(TASK, net=net, size=size))
    assert [type(module) for module in plain.style.modules()] == [type(module) for module in plain.backbone.modules()]


# SemCL, Eq. 10-12


def similarity(one: Array, other: Array, tau: float) -> float:
    """Eq. 10."""
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other) * tau))


def printed_contrast(own: Array, positive: Array, negatives: Sequence[Array], tau: float) -> float:
    """Eq. 11 and 13."""
    near = math.exp(similarity(own, positive, tau))
    return -math.log(near / (near + sum(math.exp(similarity(own, each, tau)) for each in negatives)))


def printed_semantic(
    semantic: Array, style: Array, labels: Sequence[int], classes: Array, styles: Array, tau: float
) -> list[float]:
    centre = sum(styles) / len(styles)
    return [
        printed_contrast(z, classes[k], [*(g for j, g in enumerate(classes) if j != k), s, centre], tau)
        for z, s, k in zip(semantic, style, labels, strict=True)
    ]


def printed_style(style: Array, semantic: Array, group: int, styles: Array, classes: Array, tau: float) -> list[float]:
    centre = sum(classes) / len(classes)
    others = [p for j, p in enumerate(styles) if j != group]
    return [printed_contrast(s, styles[group], [*others, z, centre], tau) for s, z in zip(style, semantic, strict=True)]


@dataclass(frozen=True)
class Drawn:
    """Features and prototypes of random directions and lengths."""

    semantic: Array
    style: Array
    labels: list[int]
    classes: Array
    styles: Array
    group: int
    tau: float


@st.composite
def contrasts(draw: st.DrawFn) -> Drawn:
    count, classes, groups, width = (draw(st.integers(1, most)) for most in (4, 6, 5, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def vectors(rows: int) -> Array:
        return rng.normal(size=(rows, width)) * rng.uniform(0.1, 30, size=(rows, 1))

    return Drawn(
        vectors(count),
        vectors(count),
        rng.integers(0, classes, count).tolist(),
        vectors(classes),
        vectors(groups),
        int(rng.integers(groups)),
        draw(st.sampled_from([0.07, 0.2, 0.5, 1.0, 3.0])),
    )


def test_the_semantic_contrast_by_hand() -> None:
    semantic, style = doubles([2, 0], [2, 0]), doubles([0, 7], [5, 0])
    classes, styles = doubles([3, 0], [0, 4]), doubles([0, 2], [6, 6])
    # The mean style is (3, 4). Cosines of both samples with the classes 1, 0, with their own style 0 and 1, with the
    # mean style 0.6; twice as much at tau = 1/2.
    expected = [
        math.log(math.exp(2) + 1 + 1 + math.exp(1.2)) - 2,
        math.log(math.exp(2) + 1 + math.exp(2) + math.exp(1.2)),
    ]
    loss = semantic_contrast(semantic, style, torch.tensor([0, 1]), classes, styles, 0.5)
    torch.testing.assert_close(loss, doubles(expected)[0])


def test_the_style_contrast_by_hand() -> None:
    style, semantic = doubles([0, 2], [0, 2]), doubles([9, 0], [0, 1])
    classes, styles = doubles([6, 0], [0, 8]), doubles([0, 5], [5, 0], [0, -1])
    # The mean class is (3, 4): 0.8. Cosines with the styles 1, 0, -1, with their own semantics 0 and 1.
    rest = math.exp(2) + 1 + math.exp(-2) + math.exp(1.6)
    own = [1, math.exp(2)]
    for group, near in enumerate([2, 0, -2]):
        loss = style_contrast(style, semantic, group, styles, classes, 0.5)
        torch.testing.assert_close(loss, doubles([math.log(rest + each) - near for each in own])[0])


@given(contrasts())
def test_both_contrasts_are_the_printed_ones_with_their_sets_of_negatives(case: Drawn) -> None:
    semantic, style, classes, styles = map(torch.from_numpy, (case.semantic, case.style, case.classes, case.styles))
    near = semantic_contrast(semantic, style, torch.tensor(case.labels), classes, styles, case.tau)
    expected = printed_semantic(case.semantic, case.style, case.labels, case.classes, case.styles, case.tau)
    assert near.shape == (len(semantic),)
    # At tau = 0.07 the exponents reach 14, so the printed quotient of exponentials loses as many digits.
    np.testing.assert_allclose(near, expected, rtol=1e-9, atol=1e-9)
    near = style_contrast(style, semantic, case.group, styles, classes, case.tau)
    expected = printed_style(case.style, case.semantic, case.group, case.styles, case.classes, case.tau)
    assert near.shape == (len(style),)
    np.testing.assert_allclose(near, expected, rtol=1e-9, atol=1e-9)


@given(contrasts(), st.data())
def test_a_class_that_nobody_holds_is_neither_positive_nor_negative(case: Drawn, data: st.DataObject) -> None:
    unknown = sorted(data.draw(st.sets(st.integers(0, len(case.classes) - 1), min_size=1)))
    known = [k for k in range(len(case.classes)) if k not in unknown]
    gaps = case.classes.copy()
    gaps[unknown] = 0
    semantic, style = (torch.from_numpy(each).requires_grad_() for each in (case.semantic, case.style))
    classes, styles = torch.from_numpy(gaps), torch.from_numpy(case.styles)
    near = semantic_contrast(semantic, style, torch.tensor(case.labels), classes, styles, case.tau)
    gradients = torch.autograd.grad(near.sum(), (semantic, style))
    for row, label in enumerate(case.labels):
        if label in unknown:
            assert near[row].item() == 0
            assert not any(gradient[row].any() for gradient in gradients)
        else:
            (expected,) = printed_semantic(
                case.semantic[[row]],
                case.style[[row]],
                [known.index(label)],
                case.classes[known],
                case.styles,
                case.tau,
            )
            assert near[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    if known:
        rest = style_contrast(style, semantic, case.group, styles, classes, case.tau)
        expected_style = printed_style(
            case.style, case.semantic, case.group, case.styles, case.classes[known], case.tau
        )
        np.testing.assert_allclose(rest.detach(), expected_style, rtol=1e-9, atol=1e-9)


def test_without_any_class_there_is_no_semantic_contrast_and_style_has_one_negative_less_to_avoid() -> None:
    semantic, style = (drawn(3, 4, seed=seed).requires_grad_() for seed in (1, 2))
    nothing, styles = torch.zeros(2, 4, dtype=torch.float64), drawn(1, 4, seed=3)
    near = semantic_contrast(semantic, style, torch.tensor([0, 1, 0]), nothing, styles, 0.07)
    assert near.tolist() == [0, 0, 0]
    far = style_contrast(style, semantic, 0, styles, nothing, 0.07)
    assert torch.isfinite(far).all()
    for gradient in torch.autograd.grad((near + far).sum(), (semantic, style)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_of_the_contrasts_are_those_of_finite_differences(groups: int) -> None:
    semantic, style = (drawn(4, 3, seed=seed).requires_grad_() for seed in (1, 2))
    classes, styles = drawn(3, 3, seed=3), drawn(groups, 3, seed=4)
    classes[1] = 0
    labels = torch.tensor([0, 1, 2, 2])
    assert torch.autograd.gradcheck(
        lambda z, s: semantic_contrast(z, s, labels, classes, styles, 0.3), (semantic, style)
    )
    assert torch.autograd.gradcheck(
        lambda s, z: style_contrast(s, z, groups - 1, styles, classes, 0.3), (style, semantic)
    )


def test_each_contrast_moves_both_encoders() -> None:
    semantic, style = (drawn(4, 3, seed=seed).requires_grad_() for seed in (1, 2))
    classes, styles = drawn(2, 3, seed=3), drawn(2, 3, seed=4)
    for loss in (
        semantic_contrast(semantic, style, torch.tensor([0, 1, 1, 0]), classes, styles, 0.5),
        style_contrast(style, semantic, 1, styles, classes, 0.5),
    ):
        for gradient in torch.autograd.grad(loss.sum(), (semantic, style)):
            assert (gradient.norm(dim=1) > 1e-3).all()
    assert not classes.requires_grad
    assert not styles.requires_grad


@pytest.mark.parametrize("which", ["semantic", "style", "both"])
def test_features_that_are_all_zero_have_finite_losses(which: str) -> None:
    semantic, style = (
        torch.zeros(2, 3) if which in (name, "both") else drawn(2, 3).float() for name in ("semantic", "style")
    )
    semantic.requires_grad_()
    style.requires_grad_()
    classes, styles = drawn(2, 3, seed=3).float(), drawn(2, 3, seed=4).float()
    losses = [
        semantic_contrast(semantic, style, torch.tensor([0, 1]), classes, styles, 0.07),
        style_contrast(style, semantic, 1, styles, classes, 0.07),
        decoupling(semantic, style),
    ]
    assert all(torch.isfinite(loss).all() for loss in losses)
    assert not losses[2].any()
    for gradient in torch.autograd.grad(torch.cat(losses).sum(), (semantic, style)):
        assert torch.isfinite(gradient).all()


def test_the_losses_of_nothing_are_nothing() -> None:
    nothing = torch.zeros(0, 3, requires_grad=True)
    classes, styles = drawn(2, 3).float(), drawn(1, 3).float()
    losses = [
        semantic_contrast(nothing, nothing, torch.zeros(0, dtype=torch.long), classes, styles, 0.5),
        style_contrast(nothing, nothing, 0, styles, classes, 0.5),
        decoupling(nothing, nothing),
    ]
    assert [loss.shape for loss in losses] == [(0,)] * 3
    assert torch.cat(losses).sum().item() == 0
    torch.cat(losses).sum().backward()


# FDR, Eq. 14


def test_the_decoupling_by_hand() -> None:
    semantic = doubles([3, 4], [1, 0], [2, -2], [1, 2])
    style = doubles([4, 3], [0, 5], [1, 1], [2, 4])
    # 24/25; nothing in common; |2| + |-2| over 2 sqrt(2) sqrt(2), where the cosine itself would be 0; parallel.
    torch.testing.assert_close(decoupling(semantic, style), doubles([0.96, 0, 1, 1])[0])


@given(count=st.integers(1, 5), width=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), signed=st.booleans())
def test_the_decoupling_is_from_0_to_1_and_the_cosine_of_features_without_sign(
    count: int, width: int, seed: int, signed: bool
) -> None:
    rng = np.random.default_rng(seed)
    semantic, style = rng.normal(size=(2, count, width)) * rng.uniform(1e-3, 1e3, size=(2, count, 1))
    if not signed:
        semantic, style = np.abs(semantic), np.abs(style)
    loss = decoupling(torch.from_numpy(semantic), torch.from_numpy(style))
    assert loss.shape == (count,)
    assert (loss >= 0).all()
    assert (loss <= 1 + 1e-12).all()
    cosines = [abs(similarity(z, s, 1)) for z, s in zip(semantic, style, strict=True)]
    if signed:
        assert (loss.numpy() >= np.array(cosines) - 1e-12).all()
    else:
        np.testing.assert_allclose(loss, cosines, rtol=1e-12)


def test_the_decoupling_is_not_the_constant_that_is_printed() -> None:
    # |a b| / (|a| |b|) of every component is 1: Eq. 14 as printed is d whatever the features, and teaches nothing.
    semantic, style = (drawn(6, 4, seed=seed).requires_grad_() for seed in (1, 2))
    loss = decoupling(semantic, style)
    assert loss.std() > 0.05
    gradient, _ = torch.autograd.grad(loss.sum(), (semantic, style), retain_graph=True)
    assert (gradient.norm(dim=1) > 0.01).all()
    assert torch.autograd.gradcheck(decoupling, (semantic, style))


def test_features_with_nothing_in_common_are_decoupled() -> None:
    semantic, style = drawn(5, 6), drawn(5, 6, seed=2)
    semantic[:, ::2] = 0
    style[:, 1::2] = 0
    assert decoupling(semantic, style).tolist() == [0] * 5


@pytest.mark.parametrize("length", [1e-25, 1e-12, 1.0, 1e12])
def test_the_decoupling_is_from_0_to_1_however_long_or_short_a_vector_is(length: float) -> None:
    # In float32 the square of 1e-25 is 0, but the vector is not.
    semantic = torch.full((1, 4), length, requires_grad=True)
    loss = decoupling(semantic, torch.ones(1, 4))
    loss.backward()
    assert 0 <= loss.item() <= 1 + 1e-6
    assert semantic.grad is not None
    assert torch.isfinite(semantic.grad).all()


# FINCH, Eq. 9


def printed_partition(vectors: Array) -> list[int]:
    """FINCH's first partition: link i and j if nn(i) = j, nn(j) = i or nn(i) = nn(j), and fill what is linked."""
    count = len(vectors)
    if count < 2:
        return [0] * count
    nearest = [
        max((j for j in range(count) if j != i), key=lambda j: (similarity(vectors[i], vectors[j], 1.0), -j))
        for i in range(count)
    ]
    groups = [-1] * count
    for start in range(count):
        if groups[start] >= 0:
            continue
        number, waiting = max(groups) + 1, [start]
        while waiting:
            i = waiting.pop()
            groups[i] = number
            waiting += [
                j
                for j in range(count)
                if groups[j] < 0 and (nearest[i] == j or nearest[j] == i or nearest[i] == nearest[j])
            ]
    return groups


def clear(vectors: Array) -> bool:
    """Whether everybody's nearest is nearer than the next by more than rounding could turn around."""
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    ordered = np.sort(cosines, axis=1)
    return len(vectors) < 3 or bool((ordered[:, -1] - ordered[:, -2] > 1e-9).all())


@st.composite
def sets_of_vectors(draw: st.DrawFn) -> Array:
    count, width = draw(st.integers(2, 50)), draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    centre = draw(st.sampled_from([0.0, 3.0]))
    vectors = rng.normal(loc=centre, size=(count, width))
    assume(clear(vectors))
    return vectors


def at_degrees(*angles: float) -> Array:
    turned = np.deg2rad(angles)
    return np.stack([np.cos(turned), np.sin(turned)], axis=1)


def as_partition(groups: Sequence[int]) -> set[frozenset[int]]:
    return {frozenset(i for i, group in enumerate(groups) if group == each) for each in groups}


@pytest.mark.parametrize(
    ("angles", "groups"),
    [
        ((), []),
        ((30,), [0]),
        ((30, 210), [0, 0]),
        ((0, 90, 180.1), [0, 0, 0]),
        ((0, 10, 90, 100), [0, 0, 1, 1]),
        ((90, 0, 100, 10), [0, 1, 0, 1]),
        # The nearest of each is the next: one chain.
        ((0, 10, 19, 27, 34), [0, 0, 0, 0, 0]),
        # 10 and -12 have the same nearest, 0.
        ((10, -12, 180, 0, 170), [0, 0, 1, 0, 1]),
        # 60 is alone in its style, and is put to the nearest, 85.
        ((0, 5, 60, 85, 90), [0, 0, 1, 1, 1]),
    ],
)
def test_the_first_partition_by_hand(angles: tuple[float, ...], groups: list[int]) -> None:
    assert first_neighbour_groups(at_degrees(*angles)).tolist() == groups
    assert first_neighbour_groups(at_degrees(*angles)).dtype == np.int64


@given(sets_of_vectors())
def test_groups_are_the_first_partition_of_finch(vectors: Array) -> None:
    groups = first_neighbour_groups(vectors).tolist()
    assert groups == printed_partition(vectors)
    units = np.array([row / math.sqrt(sum(row**2)) for row in vectors])
    cosines = np.array([[float(one @ other) for other in units] for one in units])
    before = cosines.copy()
    assert groups_by_cosine(cosines).tolist() == groups
    assert np.array_equal(cosines, before)


@given(sets_of_vectors())
def test_no_group_has_a_single_member_and_they_are_numbered_as_they_appear(vectors: Array) -> None:
    groups = first_neighbour_groups(vectors).tolist()
    assert all(len(members) >= 2 for members in as_partition(groups))
    assert max(groups) + 1 <= len(vectors) // 2
    assert list(dict.fromkeys(groups)) == list(range(max(groups) + 1))
    if len(vectors) < 4:
        assert not any(groups)


@given(sets_of_vectors(), st.integers(0, 2**32 - 1))
def test_groups_do_not_change_when_all_styles_are_turned_or_any_is_lengthened(vectors: Array, seed: int) -> None:
    # Which is why sites may send them turned by a matrix that the server does not know.
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(vectors.shape[1],) * 2))
    groups = first_neighbour_groups(vectors).tolist()
    assert first_neighbour_groups(vectors @ rotation).tolist() == groups
    lengths = rng.uniform(1e-3, 1e3, size=(len(vectors), 1))
    assert first_neighbour_groups(lengths * vectors).tolist() == groups


@given(sets_of_vectors(), st.data())
def test_groups_do_not_depend_on_the_order_of_the_sites(vectors: Array, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(vectors))))
    permuted = first_neighbour_groups(vectors[order]).tolist()
    moved = {frozenset(order[place] for place in members) for members in as_partition(permuted)}
    assert moved == as_partition(first_neighbour_groups(vectors).tolist())


@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_styles_that_are_far_apart_are_not_mixed(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    blobs = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    # Cosines above 0.9 inside a blob, and below 0.35 between any two.
    noise = rng.uniform(-1, 1, size=(len(blobs), 6))
    vectors = np.eye(6)[blobs] + 0.15 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    groups = first_neighbour_groups(vectors)
    for group in set(groups.tolist()):
        assert len(set(blobs[groups == group].tolist())) == 1


def test_ties_go_to_the_lowest_index() -> None:
    pairs = np.array([[1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0]], dtype=float)
    # As near to the second vector as to the fourth, at 45 degrees.
    between = np.array([[1.0, 1.0, 0.0, 0.0]])
    assert first_neighbour_groups(np.concatenate([pairs, between])).tolist() == [0, 0, 1, 1, 0]
    swapped = np.concatenate([pairs[2:], pairs[:2], between])
    assert first_neighbour_groups(swapped).tolist() == [0, 0, 1, 1, 0]
    # In front of both it is the nearest of the second and the fourth, and joins the pairs.
    assert first_neighbour_groups(np.concatenate([between, pairs])).tolist() == [0] * 5
    # All at right angles: everybody's nearest is the first, whose own is the second.
    assert first_neighbour_groups(np.eye(7)).tolist() == [0] * 7
    cosines = np.array([[1, 0.5, 0.2, 0.1], [0.5, 1, 0.5, 0.1], [0.2, 0.5, 1, 0.5], [0.1, 0.1, 0.5, 1]])
    assert groups_by_cosine(cosines).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [4, 5, 8, 13])
def test_sites_with_the_very_same_style_are_in_one_group(count: int) -> None:
    # All cosines are 1, so that everybody's nearest is the first: a rounding must not make two groups of one style.
    for seed in range(50):
        style = np.random.default_rng(seed).normal(size=64)
        assert first_neighbour_groups(np.tile(style, (count, 1))).tolist() == [0] * count, seed


def test_styles_of_zero_have_no_direction_and_break_nothing() -> None:
    assert first_neighbour_groups(np.zeros((5, 3))).tolist() == [0] * 5
    groups = first_neighbour_groups(np.concatenate([at_degrees(0, 10, 90, 100), np.zeros((1, 2))])).tolist()
    assert groups[:4] == [0, 0, 1, 1]
    assert groups[4] in (0, 1)


# The server's step


def wide(*values: float) -> Tensor:
    """A row of features that begins with these numbers."""
    return functional.pad(torch.tensor([values], dtype=torch.float32), (0, WIDTH - len(values)))


NOTHING = wide(0.0)


@dataclass
class Server:
    """The real coordinator, and reports in which a test says what it is about."""

    coordinator: Coordinator

    @classmethod
    def of(cls, method: FedCode, folder: Path, sites: Sequence[str], **options: Any) -> Server:
        _, model = built(method)
        algebra, start = method.algebra(TASK, model), method.start(TASK, model)
        return cls(Coordinator(folder, algebra, start, sites=sites, rounds=9, seed=0, **options))

    def report(
        self,
        site: str,
        classes: Sequence[Tensor] = (NOTHING, NOTHING, NOTHING),
        style: Tensor = NOTHING,
        *,
        samples: float = 1.0,
        **moved: Tensor,
    ) -> Report:
        algebra, state = self.coordinator.algebra, self.coordinator.state
        update = {name: torch.zeros(spec.shape) for name, spec in algebra.sent.items()}
        update |= {"prototypes": torch.cat(list(classes)), "style": style, **moved}
        return report_of(algebra, state, site, update, samples=samples)

    def round(self, *reports: Report) -> State:
        return run_round(self.coordinator, reports)

    def styles(self, styles: Mapping[str, Tensor]) -> State:
        return self.round(*(self.report(site, style=style) for site, style in styles.items()))


def group_of(plan: Plan | None, site: str) -> float:
    assert plan is not None
    return float(plan.values["style"]["group"][plan.cohort.index(site)])


def test_a_class_prototype_is_the_plain_mean_over_the_sites_that_hold_the_class(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "abc")
    state = server.round(
        server.report("a", [wide(1, 2), wide(5, 5), NOTHING], samples=1000),
        server.report("b", [wide(3, 8), NOTHING, NOTHING], samples=1),
        server.report("c", [wide(2, 2), wide(0, 1), NOTHING], samples=30),
    )
    # Class a by three, b by two, c by nobody: zeros, as long as nobody ever held it.
    expected = torch.cat([wide(2, 4), wide(2.5, 3), NOTHING])
    assert torch.equal(state.tensors["prototypes"], expected)


def test_a_class_that_nobody_holds_any_more_keeps_its_last_prototype(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "ab")
    server.round(
        server.report("a", [wide(1, 1), wide(4, 0), NOTHING]), server.report("b", [NOTHING, wide(2, 2), NOTHING])
    )
    state = server.round(
        server.report("a", [NOTHING, wide(9, 9), wide(7, 7)]), server.report("b", [NOTHING, NOTHING, NOTHING])
    )
    assert torch.equal(state.tensors["prototypes"], torch.cat([wide(1, 1), wide(9, 9), wide(7, 7)]))


def test_fewer_holders_than_asked_for_make_no_prototype_and_their_features_are_not_added(tmp_path: Path) -> None:
    server = Server.of(FedCode(holders=2), tmp_path, "abc")
    reports = [
        server.report("a", [wide(2, 0), wide(1, 1), NOTHING]),
        server.report("b", [wide(4, 2), NOTHING, wide(3, 0)]),
        server.report("c", [wide(0, 1), NOTHING, wide(5, 0)]),
    ]
    state = server.round(*reports)
    assert torch.equal(state.tensors["prototypes"], torch.cat([wide(2, 1), NOTHING, wide(4, 0)]))
    algebra = server.coordinator.algebra
    assert state.plan is not None
    for me, present in enumerate(([1, 0, 0], [1, 0, 1], [1, 0, 1])):
        share = algebra.contribute(reports[me], state.plan, me)[ALL]["prototypes"]
        assert np.asarray(share.coefficient).tolist() == present
    # Once two held it, it stays when one of them has it no more.
    server.round(*(server.report(site, [NOTHING, wide(1, 0), NOTHING]) for site in "abc"))
    later = server.round(server.report("a", [NOTHING, wide(8, 8), NOTHING]), server.report("b"), server.report("c"))
    assert torch.equal(later.tensors["prototypes"][1], wide(1, 0)[0])


def test_style_prototypes_are_the_means_of_the_groups_and_every_site_is_told_its_own(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "abcde")
    styles = {"a": wide(1, 0), "b": wide(0, 2), "c": wide(3, 0.2), "d": wide(0.1, 4), "e": wide(8, 0.1)}
    state = server.round(
        *(server.report(site, style=style, samples=10.0**place) for place, (site, style) in enumerate(styles.items()))
    )
    torch.testing.assert_close(state.tensors["style"], torch.cat([wide(4, 0.1), wide(0.05, 3)]))
    assert [group_of(server.coordinator.payload(site).plan, site) for site in "abcde"] == [0, 1, 0, 1, 0]


def test_with_one_cluster_per_site_every_style_is_a_prototype(tmp_path: Path) -> None:
    styles = {"a": wide(1, 0), "b": wide(1, 0.1), "c": wide(0, 2)}
    apart = Server.of(FedCode(clusters="site"), tmp_path / "site", "abc")
    state = apart.styles(styles)
    assert torch.equal(state.tensors["style"], torch.cat(list(styles.values())))
    assert [group_of(state.plan, site) for site in "abc"] == [0, 1, 2]
    # Three sites are always one group to FINCH.
    together = Server.of(FedCode(), tmp_path / "finch", "abc").styles(styles)
    torch.testing.assert_close(together.tensors["style"], wide(2 / 3, 0.7))
    assert [group_of(together.plan, site) for site in "abc"] == [0, 0, 0]


def test_the_number_of_groups_may_change_from_round_to_round(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "abcd")
    counts = []
    for angles in ((0, 10, 90, 100), (0, 10, 19, 27), (0, 90, 8, 100)):
        styles = {site: wide(*row) for site, row in zip("abcd", at_degrees(*angles).tolist(), strict=True)}
        state = server.styles(styles)
        groups = printed_partition(at_degrees(*angles))
        assert [group_of(state.plan, site) for site in "abcd"] == groups
        means = [
            torch.stack([row for row, own in zip(styles.values(), groups, strict=True) if own == group]).mean(dim=0)
            for group in range(max(groups) + 1)
        ]
        torch.testing.assert_close(state.tensors["style"], torch.cat(means))
        counts.append(len(state.tensors["style"]))
    assert counts == [2, 1, 2]
    resumed = Server.of(FedCode(), tmp_path, "abcd").coordinator
    assert resumed.resume()
    assert torch.equal(resumed.payload("b").tensors["style"], state.tensors["style"])
    assert group_of(resumed.payload("b").plan, "b") == 1


def test_a_lone_site_is_its_own_group_and_a_style_of_zeros_stays_finite(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "abc", quorum=1)
    state = server.styles({"b": wide(1, 2)})
    assert torch.equal(state.tensors["style"], wide(1, 2))
    state = server.styles({"a": NOTHING, "b": NOTHING, "c": wide(3, 0)})
    assert torch.equal(state.tensors["style"], wide(1, 0))


def test_the_encoder_is_the_mean_by_sample_counts_without_the_papers_one_over_n(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "abc")
    start = dict(server.coordinator.state.tensors)
    sizes = {"a": 700, "b": 11, "c": 93}
    trained = {
        site: {name: tensor + drawn(*tensor.shape, seed=place).float() for name, tensor in start.items()}
        for place, site in enumerate(sizes)
    }
    state = server.round(
        *(
            server.report(site, samples=sizes[site], **{name: own[name] - start[name] for name in start})
            for site, own in trained.items()
        )
    )
    assert set(state.tensors) == set(start) | {"prototypes", "style"}
    assert any(name.endswith("running_var") for name in start)
    for name in start:
        stack = np.stack([own[name].double().numpy() for own in trained.values()])
        expected = np.average(stack, axis=0, weights=list(sizes.values()))
        bound = 2 * np.finfo(np.float32).eps * np.abs(stack).max()
        np.testing.assert_allclose(state.tensors[name].numpy(), expected, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("clusters", ["finch", "site"])
def test_style_groups_of_too_few_members_join_the_nearest(clusters: Any, tmp_path: Path) -> None:
    angles = {"a": 0.0, "b": 5.0, "c": 90.0, "d": 95.0, "e": 93.0, "f": 20.0, "g": 24.0}
    styles = {site: wide(*row) for site, row in zip(angles, at_degrees(*angles.values()).tolist(), strict=True)}
    server = Server.of(FedCode(clusters=clusters, members=3), tmp_path, "abcdefg")
    state = server.styles(styles)
    # FINCH has the pairs (a, b) and (f, g) beside the three: they join. One by one it comes to the same.
    assert [group_of(state.plan, site) for site in "abcdefg"] == [0, 0, 1, 1, 1, 0, 0]
    near = torch.stack([styles[site] for site in "abfg"]).mean(dim=0)
    far = torch.stack([styles[site] for site in "cde"]).mean(dim=0)
    torch.testing.assert_close(state.tensors["style"], torch.cat([near, far]))


@pytest.mark.parametrize("options", [{}, {"clusters": "site", "holders": 2, "share_head": True}, {"members": 3}])
def test_a_server_that_sees_only_sums_and_cosines_gets_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    sites = "abcdef"
    server = Server.of(FedCode(**options), tmp_path, sites)
    algebra = server.coordinator.algebra
    rng = np.random.default_rng(3)
    masked = server.coordinator.state
    for _ in range(2):
        reports = []
        for site in sites:
            extras = {
                name: torch.from_numpy(rng.normal(size=spec.shape).astype(np.float32))
                for name, spec in algebra.sent.items()
            }
            extras["prototypes"] *= torch.from_numpy(rng.integers(0, 2, (3, 1)).astype(np.float32))
            classes, style = extras.pop("prototypes"), extras.pop("style")
            reports.append(
                server.report(site, list(classes.split(1)), style, samples=float(rng.integers(1, 99)), **extras)
            )
        masked = masked_round(algebra, masked, [masked_site(algebra, report) for report in reports])
        assert_close(server.round(*reports), masked, relative=1e-6)


def test_what_the_plan_waits_for() -> None:
    method, model = built()
    algebra = method.algebra(TASK, model)
    assert algebra.needs == "gram"
    assert algebra.blocks() == {"style/style": ("style",)}
    update = {name: torch.zeros(spec.shape) for name, spec in algebra.sent.items()}
    update["prototypes"][1, 3] = -1.0
    tally = algebra.measure(update)
    assert {key: value.tolist() for key, value in tally.items()} == {"prototypes/present": [0, 1, 0]}
    assert total([tally, tally])["prototypes/present"].tolist() == [0, 2, 0]


# What a site reports


LABELS = [0, 2, 2, 0, 2, 0, 0]


def one_by_one(model: TwoEncoders, images: Tensor, labels: Sequence[int]) -> tuple[Array, Array]:
    """Eq. 2 and 8, an image at a time."""
    semantic = [model.backbone.pool(model.backbone(image[None]))[0].numpy() for image in images]
    style = [model.style.pool(model.style(image[None]))[0].numpy() for image in images]
    rows = []
    for label in range(3):
        own = [vector for vector, each in zip(semantic, labels, strict=True) if each == label]
        rows.append(sum(own) / len(own) if own else np.zeros(WIDTH))
    return np.array(rows), np.array([sum(style) / len(style)])


def described(method: FedCode, model: Model, images: Tensor, labels: Sequence[int], size: int) -> dict[str, Tensor]:
    whole = torch.tensor(labels)
    batches = [Batch(images[at : at + size], whole[at : at + size]) for at in range(0, len(labels), size)]
    with torch.inference_mode():
        return dict(method.describe(model, iter(batches), Context("a", 1, 4, {}, torch.Generator())))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_prototypes_are_means_over_single_images_in_batches_of_any_size(size: int, norm: Norm) -> None:
    method, model = built(task=replace(TASK, norm=norm))
    model.double()
    images = images_of(7).double()
    with torch.no_grad():
        # Statistics that are not the initial ones, so that evaluation mode is told from training mode.
        model.train()(3 * images + 1)
        classes, style = one_by_one(model.eval(), images, LABELS)
    extras = described(method, model.eval(), images, LABELS, size)
    assert extras.keys() == {"prototypes", "style"}
    assert {tensor.dtype for tensor in extras.values()} == {torch.float32}
    assert not extras["prototypes"][1].any()
    assert not extras["prototypes"].requires_grad
    # Rounded once to float32.
    np.testing.assert_allclose(extras["prototypes"], classes, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(extras["style"], style, rtol=1e-7, atol=1e-12)
    assert np.abs(classes[[0, 2]]).max() > 0.01


def test_a_site_without_images_reports_zeros() -> None:
    method, model = built()
    model.eval()
    empty = Batch(images_of(0), torch.zeros(0, dtype=torch.long))
    for batches in ([], [empty], [empty, empty]):
        with torch.inference_mode():
            extras = method.describe(model, iter(batches), Context("a", 1, 4, {}, torch.Generator()))
        assert {name: tuple(tensor.shape) for name, tensor in extras.items()} == {
            "prototypes": (3, WIDTH),
            "style": (1, WIDTH),
        }
        assert not any(tensor.any() for tensor in extras.values())


def test_a_report_has_exactly_the_declared_extras() -> None:
    method, model = built()
    sent = method.algebra(TASK, model).sent
    for name, tensor in described(method, model.eval(), images_of(7), LABELS, 4).items():
        assert tuple(tensor.shape) == sent[name].shape


# What leaves a site


def scopes_of(model: nn.Module, part: str) -> dict[str, Scope]:
    """Scopes of the floating-point tensors of one part; the batch counter is local anyway."""
    floating = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return {
        name: spec.scope for name, spec in layout_of(model).items() if name.startswith(f"{part}.") and name in floating
    }


def kinds_of(model: nn.Module, part: str) -> tuple[set[str], set[str]]:
    """Names of the parameters and of the statistics of one part."""
    inside = model.get_submodule(part)
    statistics = {f"{part}.{name}" for name, buffer in inside.named_buffers() if buffer.is_floating_point()}
    return {f"{part}.{name}" for name, _ in inside.named_parameters()}, statistics


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("style_norm", ["sain", "batch"])
@pytest.mark.parametrize(("net", "size"), [("resnet", 16), ("alexnet", 64)])
def test_only_the_semantic_encoder_leaves(norm: Norm, style_norm: Any, net: Any, size: int) -> None:
    task = replace(TASK, norm=norm, net=net, size=size)
    method, model = built(FedCode(style_norm=style_norm), task)
    parameters, statistics = kinds_of(model, "backbone")
    assert bool(statistics) is (norm == "batch")
    scopes = scopes_of(model, "backbone")
    assert {name for name, scope in scopes.items() if scope is Scope.SHARED} == parameters
    assert {name for name, scope in scopes.items() if scope is Scope.BUFFER} == statistics
    for part in ("style", "head"):
        assert set(scopes_of(model, part).values()) == {Scope.LOCAL}
    sent = method.algebra(task, model).sent
    assert set(sent) == parameters | statistics | {"prototypes", "style"}
    assert set(method.start(task, model).tensors) == parameters | statistics
    assert sent["prototypes"].shape == (3, model.backbone.out_channels)
    assert sent["style"].shape == (1, model.backbone.out_channels)


def test_a_shared_classifier_leaves_too() -> None:
    method, model = built(FedCode(share_head=True))
    assert scopes_of(model, "head") == dict.fromkeys(("head.linear.weight", "head.linear.bias"), Scope.SHARED)
    assert set(scopes_of(model, "style").values()) == {Scope.LOCAL}
    plain = FedAvg().build(TASK)
    assert set(method.start(TASK, model).tensors) == set(FedAvg().start(TASK, plain).tensors)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_local_normalisation_stays_and_the_convolutions_leave(norm: Norm) -> None:
    task = replace(TASK, norm=norm)
    method, model = built(FedCode(local_norm=True), task)
    convolutions = {
        f"backbone.{name}.weight" for name, module in model.backbone.named_modules() if isinstance(module, nn.Conv2d)
    }
    assert len(convolutions) == 12
    assert set(method.start(task, model).tensors) == convolutions
    assert set(method.algebra(task, model).sent) == convolutions | {"prototypes", "style"}


@pytest.mark.parametrize("share_head", [False, True])
def test_evidential_heads_have_their_own_scopes(share_head: bool) -> None:
    method, model = built(FedCode(share_head=share_head), head="evidential")
    assert isinstance(model.head, EvidentialHeads)
    sent = {name for name in method.algebra(TASK, model).sent if name.startswith("head.")}
    assert sent == {
        f"head.shared.{name}.{tensor}"
        for name, module in model.head.shared.named_modules()
        if isinstance(module, nn.Linear)
        for tensor in ("weight", "bias")
    }
    assert len(sent) == 6
    assert set(scopes_of(model, "head.local").values()) == {Scope.LOCAL}
    assert set(scopes_of(model, "style").values()) == {Scope.LOCAL}


@pytest.mark.parametrize(("block", "leaves"), [("f2dc", False), ("f2dc-shared", True)])
def test_a_plugged_block_has_its_own_scopes(block: str, leaves: bool) -> None:
    method, model = built(block=block)
    assert isinstance(model.block, DecouplingBlock)
    parameters, statistics = kinds_of(model, "block")
    sent = {name for name in method.algebra(TASK, model).sent if name.startswith("block.")}
    assert sent == (parameters | statistics if leaves else set())
    for part in ("backbone", "style", "head"):
        assert scopes_of(model, part) == scopes_of(built()[1], part)


def test_the_semantic_encoder_starts_where_fedavgs_does_and_the_style_encoder_elsewhere() -> None:
    own, plain = built()[1].state_dict(), FedAvg().build(TASK).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in plain.items())
    assert not torch.equal(own["style.stem.0.weight"], own["backbone.stem.0.weight"])


# The loss, Eq. 16


PLAN = Plan(1, ("a", "b", "c"), {"style": {"group": np.array([0.0, 1.0, 0.0])}})


def received(seed: int = 7) -> dict[str, Tensor]:
    return {"prototypes": drawn(3, WIDTH, seed=seed).float(), "style": drawn(2, WIDTH, seed=seed + 1).float()}


def context(site: str = "b", *, prototypes: bool = True) -> Context:
    generator = torch.Generator().manual_seed(3)
    if prototypes:
        return Context(site, 2, 4, received(), generator, PLAN)
    return Context(site, 1, 4, {}, generator)


def a_batch(count: int = 5) -> Batch:
    return Batch(images_of(count), torch.arange(count) % 3)


def losses(method: FedCode, model: Model, where: Context, batch: Batch | None = None) -> dict[str, Tensor]:
    batch = batch or a_batch()
    return method.terms(model, model.train()(batch.images, where.generator), batch, where)


def test_in_the_first_round_there_is_nothing_to_contrast_with() -> None:
    method, model = built()
    assert set(losses(method, model, context(prototypes=False))) == {"cross_entropy", "orthogonality"}


@pytest.mark.parametrize("site", ["a", "b"])
@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"alpha": 3.0, "beta": 0.25, "tau": 0.2, "semantic": 0.5, "style": 2.0},
        {"alpha": 0.0, "beta": 0.0},
        {"semantic": 0.0},
        {"style": 0.0},
    ],
)
def test_the_loss_is_that_of_the_paper_written_out(site: str, weights: dict[str, float]) -> None:
    method, model = built(FedCode(**weights))
    batch, where = a_batch(), context(site)
    trace = model.train()(batch.images)
    terms = method.terms(model, trace, batch, where)
    semantic, style = (part.detach().double().numpy() for part in (trace.pooled, trace.notes["style"]))
    classes, styles = (where.received[name].double().numpy() for name in ("prototypes", "style"))
    labels, group = batch.labels.tolist(), {"a": 0, "b": 1}[site]
    alpha, beta, tau = (weights.get(name, usual) for name, usual in (("alpha", 20.0), ("beta", 1.0), ("tau", 0.5)))
    near = np.array(printed_semantic(semantic, style, labels, classes, styles, tau))
    own = np.array(printed_style(style, semantic, group, styles, classes, tau))
    lengths = np.linalg.norm(semantic, axis=1) * np.linalg.norm(style, axis=1)
    expected = {
        "cross_entropy": -trace.logits.detach().double().log_softmax(1)[range(5), labels].numpy(),
        "semantic_contrast": alpha * weights.get("semantic", 1.0) * near,
        "style_contrast": alpha * weights.get("style", 1.0) * own,
        "orthogonality": beta * np.abs(semantic * style).sum(axis=1) / lengths,
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert terms[name].shape == (5,)
        # float32 against float64, and cosines are divided by tau.
        np.testing.assert_allclose(terms[name].detach(), value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_style_comes_from_the_style_encoder_and_semantics_from_the_other() -> None:
    _, model = built()
    images = images_of(4)
    trace = model.train()(images)
    # Under SAIN the style encoder is the same in training and evaluation.
    assert torch.equal(trace.notes["style"], model.style.pool(model.style(images)))
    with torch.no_grad():
        answer = model.eval()(images)
    assert torch.equal(answer.pooled, model.backbone.pool(model.backbone(images)))
    assert torch.equal(answer.logits, model.head.linear(answer.pooled))


def test_every_term_moves_what_it_is_for_and_nothing_that_was_received() -> None:
    method, model = built()
    where = context()
    before = {name: tensor.clone() for name, tensor in where.received.items()}
    terms = losses(method, model, where)
    for name, term in terms.items():
        for part in ("backbone", "style", "head"):
            gradients = torch.autograd.grad(
                term.sum(), list(model.get_submodule(part).parameters()), retain_graph=True, allow_unused=True
            )
            moved = any(gradient is not None and bool(gradient.any()) for gradient in gradients)
            moves = {"cross_entropy": ("backbone", "head")}.get(name, ("backbone", "style"))
            assert moved is (part in moves), (name, part)
    torch.cat(list(terms.values())).sum().backward()
    for name, tensor in where.received.items():
        assert not tensor.requires_grad
        assert tensor.grad is None
        assert torch.equal(tensor, before[name])


def test_samples_of_a_class_without_a_prototype_skip_the_semantic_contrast_only() -> None:
    method, model = built()
    where = context()
    where.received["prototypes"][1] = 0  # type: ignore[index]
    terms = losses(method, model, where)
    without = torch.tensor([label == 1 for label in a_batch().labels.tolist()])
    assert torch.equal(terms["semantic_contrast"] == 0, without)
    for name in ("cross_entropy", "style_contrast", "orthogonality"):
        assert (terms[name] > 0).all()
    torch.cat(list(terms.values())).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(("plan", "site"), [(PLAN, "d"), (None, "a")])
def test_a_site_that_was_not_in_the_last_round_has_no_group_but_its_classes(plan: Plan | None, site: str) -> None:
    method, model = built()
    terms = losses(method, model, replace(context(site), plan=plan))
    assert set(terms) == {"cross_entropy", "orthogonality", "semantic_contrast"}


def test_under_partial_participation_the_absent_skip_style_and_keep_semantics(tmp_path: Path) -> None:
    server = Server.of(FedCode(), tmp_path, "abcd", participation=0.5)
    coordinator = server.coordinator
    invited = coordinator.cohort(1)
    assert len(invited) == 2
    rows = [wide(1, 2), wide(2, 1), wide(0, 1)]
    server.round(*(server.report(site, rows, style=wide(place, 1)) for place, site in enumerate(invited)))
    method, model = built()
    for site in "abcd":
        payload = coordinator.payload(site)
        where = Context(site, 2, 4, payload.tensors, torch.Generator(), payload.plan)
        terms = losses(method, model, where)
        assert "semantic_contrast" in terms
        assert ("style_contrast" in terms) is (site in invited)


@pytest.mark.parametrize("prototypes", [True, False])
@pytest.mark.parametrize(
    ("plugs", "more"),
    [
        ({"block": "f2dc"}, {"decoupling", "correction"}),
        ({"head": "evidential"}, {"uncertainty", "disentangling"}),
        ({"block": "f2dc", "head": "evidential"}, {"decoupling", "correction", "uncertainty", "disentangling"}),
    ],
)
def test_plugged_parts_bring_their_terms_beside(plugs: dict[str, str], more: set[str], prototypes: bool) -> None:
    method, model = built(**plugs)
    where = context(prototypes=prototypes)
    batch = a_batch()
    trace = model.train()(batch.images, where.generator)
    terms = method.terms(model, trace, batch, where)
    contrasts = {"semantic_contrast", "style_contrast"} if prototypes else set()
    assert set(terms) == {"cross_entropy", "orthogonality"} | contrasts | more
    assert all(term.shape == (5,) and torch.isfinite(term).all() for term in terms.values())
    own = {**model.head.terms(trace, batch, where), **model.block.terms(trace, batch, where)}
    assert all(torch.equal(terms[name], value) for name, value in own.items())
    expected = decoupling(trace.pooled, trace.notes["style"])
    torch.testing.assert_close(terms["orthogonality"], expected)
    torch.cat(list(terms.values())).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("style_norm", ["sain", "batch"])
@pytest.mark.parametrize("labels", [[], [1], [2, 2, 2, 2]])
def test_batches_of_none_of_one_and_of_one_class_train(
    norm: Norm, size: int, style_norm: Any, labels: list[int]
) -> None:
    method, model = built(FedCode(style_norm=style_norm), replace(TASK, norm=norm, size=size))
    batch = Batch(images_of(len(labels), size), torch.tensor(labels, dtype=torch.long))
    terms = losses(method, model, context(), batch)
    assert set(terms) == {"cross_entropy", "orthogonality", "semantic_contrast", "style_contrast"}
    for term in terms.values():
        assert term.shape == (len(labels),)
        assert torch.isfinite(term).all()
    torch.stack([term.sum() for term in terms.values()]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


# Inference


def test_only_training_looks_at_the_style_encoder() -> None:
    method, model = built()
    calls: list[int] = []
    model.style.register_forward_hook(lambda *_: calls.append(1))
    images = images_of(3)
    with torch.no_grad():
        before = method.predict(model.eval(), images)
        for parameter in model.style.parameters():
            parameter.fill_(math.nan)
        after = method.predict(model, images)
        assert not calls
        assert torch.equal(after.probabilities, before.probabilities)
        assert "style" not in model(images).notes
        assert model.train()(images).notes["style"].isnan().all()
    assert len(calls) == 1


# A hospital that did not train


def test_a_hospital_without_a_classifier_answers_by_the_nearest_prototype() -> None:
    method, model = built(FedCode(tau=0.2))
    images = images_of(6)
    shared = received()
    # Around the features themselves, so that not every image has the same nearest.
    with torch.no_grad():
        features = model.eval()(images).pooled
    shared["prototypes"] = features[[0, 2, 4]] + 0.01 * shared["prototypes"]
    with torch.no_grad():
        for parameter in [*model.head.parameters(), *model.style.parameters()]:
            parameter.fill_(math.nan)
        method.welcome(model, shared)
        answer = method.predict(model.eval(), images)
    rows = shared["prototypes"].double().numpy()
    scores = np.array([[similarity(z, row, 0.2) for row in rows] for z in features.double().numpy()])
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    # Cosines in float32, five times as much.
    np.testing.assert_allclose(answer.probabilities, expected, rtol=1e-5)
    assert answer.probabilities.argmax(1).tolist() == scores.argmax(axis=1).tolist()
    assert len(set(answer.probabilities.argmax(1).tolist())) > 1
    np.testing.assert_allclose(answer.uncertainty, 1 - expected.max(axis=1), rtol=1e-5)
    assert torch.equal(answer.features, features)


def test_a_class_without_a_prototype_is_never_the_answer() -> None:
    method, model = built()
    shared = received()
    shared["prototypes"][1] = 0
    method.welcome(model, shared)
    shared["prototypes"].fill_(math.nan)
    with torch.no_grad():
        answer = method.predict(model.eval(), images_of(4)).probabilities
    assert torch.isfinite(answer).all()
    assert not answer[:, 1].any()
    torch.testing.assert_close(answer.sum(1), torch.ones(4))
    assert isinstance(model.head, PrototypeHead)
    assert set(scopes_of(model, "head").values()) == {Scope.SHARED}


def test_a_hospital_is_welcomed_the_same_way_twice_and_no_random_number_is_drawn() -> None:
    states = []
    before = torch.get_rng_state()
    for _ in range(2):
        method, model = built()
        method.welcome(model, received())
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert torch.equal(torch.get_rng_state(), before)


def test_without_prototypes_there_is_nothing_to_answer_by() -> None:
    method, model = built()
    with pytest.raises(BadInput, match=r"no class prototypes yet.*train at least one round.*use share_head"):
        method.welcome(model, method.start(TASK, model).tensors)


def test_prototypes_that_are_all_zero_are_none_to_answer_by() -> None:
    # As they are where more holders are asked for than there are sites; a softmax of nothing would be no number.
    method, model = built(FedCode(holders=9))
    with pytest.raises(BadInput, match="prototypes"):
        method.welcome(model, {**received(), "prototypes": torch.zeros(3, WIDTH)})


@pytest.mark.parametrize("prototypes", [True, False])
def test_a_shared_classifier_stays(prototypes: bool) -> None:
    method, model = built(FedCode(share_head=True))
    images = images_of(4)
    with torch.no_grad():
        before = method.predict(model.eval(), images).probabilities
        method.welcome(model, received() if prototypes else {})
        assert isinstance(model.head, SoftmaxHead)
        assert torch.equal(method.predict(model, images).probabilities, before)


def test_whoever_names_the_usual_head_does_not_share_it_unasked() -> None:
    method, model = built(head="softmax")
    assert set(scopes_of(model, "head").values()) == {Scope.LOCAL}
    assert not any(name.startswith("head.") for name in method.algebra(TASK, model).sent)
    _, shared = built(FedCode(share_head=True), head="softmax")
    assert set(scopes_of(shared, "head").values()) == {Scope.SHARED}


@pytest.mark.parametrize(
    ("method", "plugs", "needed"),
    [
        (FedCode(), {}, {"prototypes"}),
        (FedCode(), {"head": "softmax"}, {"prototypes"}),
        (FedCode(share_head=True), {}, set()),
        (FedCode(), {"head": "evidential"}, set()),
    ],
)
def test_prototypes_are_handed_over_only_where_they_have_to_answer(
    method: FedCode, plugs: dict[str, str], needed: set[str]
) -> None:
    assert method.welcomes(method.build(TASK, **plugs)) == needed


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_contrasts_and_styles_are_not_worked_out_in_half_precision(half: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    semantic, style, classes, styles = torch.rand(4, 5, 8, generator=generator) + 0.1
    labels = torch.arange(5)
    whole = semantic_contrast(semantic, style, labels, classes, styles, 0.5)
    with torch.autocast("cpu", dtype=half):
        assert torch.equal(semantic_contrast(semantic, style, labels, classes, styles, 0.5), whole)
    norm = StyleAwareNorm(8).eval()
    maps = torch.randn(2, 8, 3, 3, generator=generator).to(half)
    assert torch.equal(norm(maps), norm(maps.float()))
    assert norm(maps).dtype == torch.float32


def test_with_evidential_heads_the_global_one_answers_and_a_local_block_is_left_out() -> None:
    method, model = built(block="f2dc", head="evidential")
    assert isinstance(model.head, EvidentialHeads)
    images = images_of(4)
    with torch.no_grad():
        for part in (model.block, model.head.local, model.style):
            for parameter in part.parameters():
                parameter.fill_(math.nan)
        method.welcome(model, received())
        answer = method.predict(model.eval(), images)
        plain = model.backbone.pool(model.backbone(images))
    assert torch.isfinite(answer.probabilities).all()
    assert torch.equal(answer.features, plain)
    assert torch.equal(answer.opinions["fused"].belief, answer.opinions["global"].belief)


# Options


def test_defaults_are_the_papers() -> None:
    method = FedCode()
    assert (method.alpha, method.beta, method.tau) == (20.0, 1.0, 0.5)
    assert (method.semantic, method.style) == (1.0, 1.0)
    assert (method.clusters, method.holders, method.members, method.style_norm) == ("finch", 1, 1, "sain")
    assert not method.share_head
    assert not method.local_norm
    # At alpha = 100 and tau = 0.07 the contrasts are some 1400 times as steep as cross-entropy.
    assert method.clip == 10.0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in ("alpha", "beta", "semantic", "style") for value in (-0.1, math.nan, math.inf)),
        *(("tau", value) for value in (0.0, -0.5, math.nan, math.inf)),
        ("holders", 0),
        ("holders", -1),
        ("holders", 1.0),
        ("members", 0),
        ("members", -2),
        ("members", 2.0),
        ("clusters", "kmeans"),
        ("style_norm", "instance"),
        ("share_head", 1),
        ("local_norm", "yes"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"fedcode.*{option}") as caught:
        create("fedcode", **{option: value})
    assert str(value) in str(caught.value)


def test_options_at_their_limits_are_taken() -> None:
    made = create("fedcode", alpha=0, beta=0, semantic=0, style=0, tau=0.01, holders=1, clusters="site")
    assert made == FedCode(alpha=0, beta=0, semantic=0, style=0, tau=0.01, clusters="site")


# Whole runs


Seen = dict[tuple[str, int], set[str]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Which terms a site's loss had in a round."""
    found: Seen = {}
    plain = FedCode.terms

    def spy(self: FedCode, model: Model, trace: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        terms = plain(self, model, trace, batch, context)
        assert all(torch.isfinite(term).all() for term in terms.values())
        found.setdefault((context.site, context.round_number), set()).update(terms)
        return terms

    monkeypatch.setattr(FedCode, "terms", spy)
    return found


FIRST = {"cross_entropy", "orthogonality"}


@pytest.mark.parametrize("options", [{}, {"clusters": "site", "style_norm": "batch"}])
def test_a_run_of_three_rounds_repeats_and_keeps_style_and_classifier_at_their_site(
    options: dict[str, Any], tmp_path: Path, seen: Seen
) -> None:
    study = made_up_study(FedCode(**options), rounds=3)
    results = [
        without_seconds(simulate(made_up_cohort(), study, tmp_path / name, jobs=jobs))
        for name, jobs in (("one", 1), ("two", 2))
    ]
    assert results[0] == results[1]
    one, other = (tensors_on_disk(tmp_path / name) for name in ("one", "two"))
    assert same_bits(one, other)
    assert all(torch.isfinite(tensor).all() for tensor in one.values())
    for (_, number), terms in seen.items():
        assert terms == (FIRST if number == 1 else FIRST | {"semantic_contrast", "style_contrast"})
    assert {number for _, number in seen} == {1, 2, 3}

    # Every site holds every class; three sites are one style group to FINCH.
    assert (one["server/*/prototypes"].abs().sum(dim=1) > 0).all()
    assert one["server/*/style"].shape == (3 if options else 1, WIDTH)
    layout = layout_of(study.model())
    models = [read_tensors(tmp_path / "one" / "sites" / site / "vault" / "model-0003.safetensors")[0] for site in SITES]
    for name, spec in layout.items():
        values = [model[name] for model in models]
        if spec.scope.leaves:
            assert name.startswith("backbone.")
            assert torch.equal(values[0], values[1]), name
            assert torch.equal(values[0], values[2]), name
            assert torch.equal(values[0], one[f"server/*/{name}"])
        elif name.startswith(("style.", "head.")) and name.endswith("weight"):
            assert not torch.equal(values[0], values[1]), name
            assert not torch.equal(values[0], study.model().state_dict()[name]), name
    local = read_tensors(tmp_path / "one" / "sites" / "alder" / "vault" / "local-0003.safetensors")[0]
    assert {name.split(".")[0] for name in local} == {"backbone", "style", "head"}
    assert {name for name in local if name.startswith("backbone.") and "num_batches_tracked" not in name} == set()

    handover = read_handover(tmp_path / "one")
    assert set(handover.tensors) == {name for name, spec in layout.items() if spec.scope.leaves} | {"prototypes"}
    data = made_up_cohort().sites["cedar"]
    answer = adapt(study, handover.tensors, data.train, site="elsewhere").deployed.answer(data.test)
    nearest = functional.normalize(answer.features) @ functional.normalize(handover.tensors["prototypes"]).T
    assert torch.equal(answer.probabilities.argmax(1), nearest.argmax(1))
    torch.testing.assert_close(answer.probabilities, (nearest / 0.5).softmax(1))


def test_in_a_run_with_partial_participation_who_was_absent_has_no_style_contrast(tmp_path: Path, seen: Seen) -> None:
    study = made_up_study(FedCode(), rounds=4, participation=0.6)
    simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    invited = {number: study.coordinator(tmp_path / "other", SITES).cohort(number) for number in range(1, 5)}
    assert set(seen) == {(site, number) for number, sites in invited.items() for site in sites}
    returning = {(site, number) for site, number in seen if number > 1 and site not in invited[number - 1]}
    assert returning
    for (site, number), terms in seen.items():
        assert ("semantic_contrast" in terms) is (number > 1)
        assert ("style_contrast" in terms) is (number > 1 and (site, number) not in returning)


def test_a_site_without_a_class_trains_and_reports_no_prototype_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = made_up_cohort()
    alder = cohort.sites["alder"]
    keep = [row for row, label in enumerate(alder.train.labels.tolist()) if label != 1]
    sites = {**cohort.sites, "alder": replace(alder, train=alder.train.rows(keep))}
    reports: list[Report] = []
    accept = Coordinator.accept

    def spy(self: Coordinator, report: Report) -> None:
        reports.append(report)
        accept(self, report)

    monkeypatch.setattr(Coordinator, "accept", spy)
    simulate(replace(cohort, sites=sites), made_up_study(FedCode(), rounds=2), tmp_path / "run", jobs=1)
    last = {report.site: report for report in reports if report.round_number == 2}
    for site, report in last.items():
        held = (report.update["prototypes"].abs().sum(dim=1) > 0).tolist()
        assert held == [True, site != "alder", True]
        assert report.tally["prototypes/present"].tolist() == [float(each) for each in held]
    final = tensors_on_disk(tmp_path / "run")["server/*/prototypes"]
    others = torch.stack([last[site].update["prototypes"][1] for site in ("birch", "cedar")])
    torch.testing.assert_close(final[1], others.mean(dim=0))
