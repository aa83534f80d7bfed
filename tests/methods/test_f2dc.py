from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_expit, log_softmax, softmax
from tests.standins import federated
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of
from crossward.methods import Method, Task, create
from crossward.methods.base import Batch, Context, Model, Trace
from crossward.methods.f2dc import (
    F2DC,
    Corrector,
    Decoupler,
    DecouplingBlock,
    Separation,
    domain_aware_weights,
    gumbel_mask,
    hardest_wrong_label,
    separation,
    site_weight,
)
from crossward.methods.fedavg import FedAvg
from crossward.nets.layers import Norm, is_normalisation

Array = np.ndarray[Any, np.dtype[np.float64]]
TASK = Task(classes=("a", "b", "c"), channels=1, size=16, rounds=2, width=0.0625)


def images_of(count: int, size: int = 16, seed: int = 5) -> Tensor:
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(seed))


def context() -> Context:
    return Context("a", 2, 2, {}, torch.Generator().manual_seed(3))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The mask, Eq. 3


def printed_mask(scores: Array, sigma: float, uniform_keep: Array, uniform_drop: Array) -> Array:
    """Eq. 3 as printed: a softmax over keeping and dropping, from log-probabilities and Gumbel noise."""
    keep = (log_expit(scores) - np.log(-np.log(uniform_keep))) / sigma
    drop = (log_expit(-scores) - np.log(-np.log(uniform_drop))) / sigma
    both: Array = softmax(np.stack([keep, drop]), axis=0)
    return both[0]


@given(seed=st.integers(0, 2**32 - 1), sigma=st.sampled_from([0.1, 0.5, 1.0, 3.0]), scale=st.floats(0.01, 10))
def test_the_mask_is_the_two_way_softmax_of_the_paper(seed: int, sigma: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=scale, size=(2, 3, 4, 4))
    keep, drop = rng.uniform(size=(2, *scores.shape))
    mask = gumbel_mask(torch.from_numpy(scores), sigma, torch.from_numpy(keep), torch.from_numpy(drop))
    np.testing.assert_allclose(mask, printed_mask(scores, sigma, keep, drop), rtol=0, atol=1e-12)


def test_the_mask_is_the_papers_at_the_ends_of_float64_too() -> None:
    # Closer to 0 and 1 than any float32 comes.
    keep = np.array([1e-300, 1 - 2.0**-50, 0.3, 1e-12])
    drop = np.array([1 - 2.0**-45, 1e-200, 1 - 1e-12, 0.8])
    scores = np.array([3.0, -20.0, 25.0, 4.0])
    mask = gumbel_mask(torch.from_numpy(scores), 2.0, torch.from_numpy(keep), torch.from_numpy(drop))
    np.testing.assert_allclose(mask, printed_mask(scores, 2.0, keep, drop), rtol=1e-12)


def test_without_noise_the_mask_is_a_tempered_sigmoid() -> None:
    scores = torch.tensor([-0.1, 0.0, 0.1, 0.2])
    # 1 / (1 + e) = 0.26894, 1 / 2, e / (1 + e) = 0.73106, e^2 / (1 + e^2) = 0.88080
    expected = torch.tensor([0.26894142, 0.5, 0.73105858, 0.88079708])
    torch.testing.assert_close(gumbel_mask(scores, 0.1), expected)
    assert gumbel_mask(torch.full((5, 5), 0.3), 1.0).shape == (5, 5)


@given(seed=st.integers(0, 2**32 - 1))
def test_moderate_scores_are_never_masked_completely(seed: int) -> None:
    generator = seeded(seed)
    scores = 4 * torch.rand(64, generator=generator, dtype=torch.float64) - 2
    noise = [torch.rand(64, generator=generator, dtype=torch.float64).clamp(0.05, 0.95) for _ in range(2)]
    for mask in (gumbel_mask(scores, 0.3), gumbel_mask(scores, 0.3, *noise)):
        assert ((mask > 0) & (mask < 1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform_dtype", [torch.float32, torch.float64])
def test_uniforms_that_were_rounded_to_0_or_1_stay_finite(dtype: torch.dtype, uniform_dtype: torch.dtype) -> None:
    ends = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.5]], dtype=uniform_dtype)
    scores = torch.zeros(5, dtype=dtype, requires_grad=True)
    mask = gumbel_mask(scores, 0.1, ends[:, 0], ends[:, 1])
    mask.sum().backward()
    assert torch.isfinite(mask).all()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert mask.detach()[[0, 3]].tolist() == [0.5, 0.5], "equal noise on both sides cancels"
    assert mask[1] < 1e-6
    assert mask[2] > 1 - 1e-6


@pytest.mark.parametrize("score", [-2.0, -0.5, 0.0, 1.0, 2.0])
def test_the_noise_keeps_a_unit_as_often_as_its_score_says(score: float) -> None:
    # The difference of two Gumbel variables is one logistic variable, so P(M > 1/2) = sigmoid(S); with the
    # difference of two logistic variables, the paper's printed noise, it would be 0.79 instead of 0.88 for S = 2.
    draws = 200_000
    generator = seeded(7)
    noise = [torch.rand(draws, generator=generator, dtype=torch.float64) for _ in range(2)]
    mask = gumbel_mask(torch.full((draws,), score, dtype=torch.float64), 0.01, *noise)
    kept = 1 / (1 + math.exp(-score))
    standard_error = math.sqrt(kept * (1 - kept) / draws)
    assert (mask > 0.5).double().mean().item() == pytest.approx(kept, abs=4 * standard_error)
    assert mask.mean().item() == pytest.approx(kept, abs=4 * standard_error)


# Decoupler and corrector


@pytest.mark.parametrize("kind", [Decoupler, Corrector])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("channels", "hidden"), [(512, 64), (128, 16), (32, 4)])
def test_two_convolutions_and_nothing_after_the_last(kind: Any, norm: Norm, channels: int, hidden: int) -> None:
    part = kind(channels, norm=norm).eval()
    leaves = [module for module in part.modules() if not list(module.children())]
    first, normalisation, activation, last = leaves
    for convolution in (first, last):
        assert isinstance(convolution, nn.Conv2d)
        assert convolution.kernel_size == (3, 3)
        assert convolution.stride == (1, 1)
        assert convolution.bias is None
    assert (first.in_channels, first.out_channels) == (channels, hidden)
    assert (last.in_channels, last.out_channels) == (hidden, channels)
    assert is_normalisation(normalisation)
    assert isinstance(activation, nn.ReLU)
    features = torch.randn(2, channels, 3, 5, generator=seeded(1))
    with torch.no_grad():
        result = part(features)
        between = normalisation(functional.conv2d(features, first.weight, padding=1)).clamp_min(0)
        expected = functional.conv2d(between, last.weight, padding=1)
    assert result.shape == features.shape
    torch.testing.assert_close(result, expected)
    assert (result < 0).any()


# The block, Eq. 4 and 6


def decoupled(block: DecouplingBlock, stage: str, features: Tensor, sigma: float) -> dict[str, Tensor]:
    """Eq. 3, 4 and 6 without noise, step by step from the block's own modules."""
    mask = 1 / (1 + torch.exp(-block.decouplers[stage](features) / sigma))
    robust, related = mask * features, (1 - mask) * features
    corrected = related + (1 - mask) * block.correctors[stage](related)
    return {"robust": robust, "related": related, "corrected": corrected, "fused": robust + corrected, "mask": mask}


def pool(features: Tensor) -> Tensor:
    return features.flatten(2).sum(dim=2) / (features.shape[2] * features.shape[3])


def built(**options: Any) -> tuple[F2DC, Model, DecouplingBlock]:
    method = F2DC(**options)
    model = method.build(TASK).double()
    assert isinstance(model.block, DecouplingBlock)
    return method, model, model.block


@pytest.mark.parametrize("stages", [(4,), (2, 4), (1, 2, 3, 4)])
def test_maps_and_losses_are_those_of_the_equations_step_by_step(stages: tuple[int, ...]) -> None:
    method, model, block = built(stages=stages, sigma=0.4, tau=0.5, lambda1=0.7, lambda2=1.3)
    model.eval()
    images, labels = images_of(5).double(), torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        trace = model(images)
        terms = method.terms(model, trace, Batch(images, labels), context())

        features = model.backbone.stem(images)
        losses = []
        maps: list[dict[str, Tensor]] = []
        for number, stage in enumerate(model.backbone.stages, start=1):
            features = stage(features)
            if number in stages:
                maps.append(decoupled(block, str(number - 1), features, 0.4))
                torch.testing.assert_close(maps[-1]["robust"] + maps[-1]["related"], features)
                correction = block.correctors[str(number - 1)](maps[-1]["related"])
                identity = features + (1 - maps[-1]["mask"]) * correction
                torch.testing.assert_close(maps[-1]["fused"], identity)
                features = maps[-1]["fused"]
        logits = model.head.linear(pool(features))
        torch.testing.assert_close(trace.pooled, pool(features))
        torch.testing.assert_close(trace.logits, logits)

        wrong = torch.tensor(
            [
                max((c for c in range(3) if c != label), key=row.__getitem__)
                for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
            ]
        )
        for number, parts in zip(stages, maps, strict=True):
            classify = block.classifiers[str(number - 1)]
            plus, minus, star = (pool(parts[kind]) for kind in ("robust", "related", "corrected"))
            cosine = (plus * minus).sum(1) / (plus.square().sum(1).sqrt() * minus.square().sum(1).sqrt())
            rows = range(len(labels))
            discriminability = (
                -classify(plus).log_softmax(1)[rows, labels] - classify(minus).log_softmax(1)[rows, wrong]
            )
            losses.append((cosine / 0.5 + discriminability, -classify(star).log_softmax(1)[rows, labels]))
    assert set(terms) == {"cross_entropy", "decoupling", "correction"}
    expected = {
        "cross_entropy": -logits.log_softmax(1)[range(5), labels],
        "decoupling": 0.7 * sum(first for first, _ in losses) / len(stages),
        "correction": 1.3 * sum(second for _, second in losses) / len(stages),
    }
    for name, value in expected.items():
        # The cosine is taken in float32, whatever the model is in.
        torch.testing.assert_close(terms[name].double(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_with_noise_the_parts_still_add_up(seed: int, training: bool) -> None:
    _, model, _ = built()
    model.train(training)
    images = images_of(4).double()
    with torch.no_grad():
        plain = pool(model.backbone(images))
        trace = model(images, seeded(seed))
    notes = {kind: trace.notes[f"{kind}/3"] for kind in ("robust", "related", "corrected")}
    torch.testing.assert_close(notes["robust"] + notes["related"], plain)
    torch.testing.assert_close(notes["robust"] + notes["corrected"], trace.pooled)
    assert not torch.allclose(trace.pooled, plain)


def test_the_classifier_m_is_one_linear_layer_from_the_stages_channels() -> None:
    model = F2DC(stages=(2, 4)).build(TASK)
    assert isinstance(model.block, DecouplingBlock)
    shapes = [tuple(module.weight.shape) for module in model.block.classifiers.values()]
    assert shapes == [(3, 8), (3, 32)]
    for group in (model.block.decouplers, model.block.correctors):
        widths = [(part[0].in_channels, part[0].out_channels) for part in group.values()]
        assert widths == [(8, 2), (32, 4)]


# The losses, Eq. 5, 7 and 9


def test_the_hardest_wrong_label_by_hand() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0], [1.0, 2.0, 3.0], [-1.0, 7.0, 7.0], [-9.0, -9.5, -8.0]])
    assert hardest_wrong_label(logits, torch.tensor([0, 2, 1, 2])).tolist() == [1, 1, 2, 0]
    tied = hardest_wrong_label(torch.zeros(3, 3), torch.arange(3))
    assert all(int(found) != label for label, found in enumerate(tied))


@given(classes=st.integers(2, 9), count=st.integers(0, 6), seed=st.integers(0, 2**32 - 1), tied=st.booleans())
def test_the_hardest_wrong_label_is_never_the_label(classes: int, count: int, seed: int, tied: bool) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-1, 2, size=(count, classes)) if tied else 1e3 * rng.normal(size=(count, classes))
    labels = rng.integers(0, classes, size=count)
    logits = torch.from_numpy(values.astype(np.float32)).requires_grad_()
    found = hardest_wrong_label(logits, torch.from_numpy(labels))
    assert found.shape == (count,)
    assert not found.requires_grad
    for row, (wrong, label) in enumerate(zip(found.tolist(), labels.tolist(), strict=True)):
        assert wrong != label
        assert logits[row, wrong] == max(logits[row, other] for other in range(classes) if other != label)
        if classes == 2:
            assert wrong == 1 - label


def test_separation_by_hand() -> None:
    robust = torch.tensor([[3.0, 4.0], [1.0, 0.0], [2.0, 2.0]])
    related = torch.tensor([[4.0, 3.0], [0.0, 5.0], [1.0, 1.0]])
    # Cosines 24/25, 0 and 1.
    each = separation(robust, related, 0.06, reduction="none")
    torch.testing.assert_close(each, torch.tensor([0.96 / 0.06, 0.0, 1 / 0.06]))
    torch.testing.assert_close(separation(robust, related, 0.06), torch.tensor((0.96 + 0 + 1) / 0.06 / 3))
    torch.testing.assert_close(separation(robust, related, 0.5), torch.tensor((0.96 + 0 + 1) / 0.5 / 3))


@pytest.mark.parametrize(("one", "other"), [([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0]), ([0.0, 0.0],) * 2])
def test_features_that_are_all_zero_have_a_finite_separation(one: list[float], other: list[float]) -> None:
    robust, related = (torch.tensor([row], requires_grad=True) for row in (one, other))
    value = separation(robust, related, 0.06)
    value.backward()
    assert value.item() == 0
    for features in (robust, related):
        assert features.grad is not None
        assert torch.isfinite(features.grad).all()


def test_the_separation_of_nothing_is_nothing() -> None:
    assert separation(torch.zeros(0, 4), torch.zeros(0, 4), 0.06).item() == 0
    assert separation(torch.zeros(0, 4), torch.zeros(0, 4), 0.06, reduction="none").shape == (0,)


def test_the_gradient_of_separation_is_that_of_finite_differences() -> None:
    robust, related = (torch.rand(3, 4, generator=seeded(seed), dtype=torch.float64) + 0.1 for seed in (1, 2))
    pair = (robust.requires_grad_(), related.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: separation(a, b, 0.3), pair)
    assert torch.autograd.gradcheck(lambda a, b: separation(a, b, 0.3, reduction="none"), pair)


SMALL = {"sigma": 0.7, "tau": 0.3, "lambda1": 0.6, "lambda2": 1.7}


def convolved(maps: Array, kernels: Array) -> Array:
    """A 3x3 convolution with padding 1, by its definition."""
    count, _, height, width = maps.shape
    padded = np.pad(maps, ((0, 0), (0, 0), (1, 1), (1, 1)))
    result = np.zeros((count, len(kernels), height, width))
    for row in range(height):
        for column in range(width):
            result[:, :, row, column] = np.einsum(
                "bcij,ocij->bo", padded[:, :, row : row + 3, column : column + 3], kernels
            )
    return result


def written_out(
    features: Array, weights: Mapping[str, Array], labels: Sequence[int], held: Array | None = None
) -> tuple[Array, dict[str, Array]]:
    """Eq. 3-9 in numpy from the feature map on, per sample: the logits, and the three losses with their weights.

    The cosine is between the parts of the map ``held``, where one is given that does not move with the features.
    """

    def two_convolutions(part: str, maps: Array) -> Array:
        between = convolved(maps, weights[f"{part}.0.weight"])
        scale = weights[f"{part}.1.weight"] / np.sqrt(weights[f"{part}.1.running_var"] + 1e-5)
        shape = (1, -1, 1, 1)
        between = (between - weights[f"{part}.1.running_mean"].reshape(shape)) * scale.reshape(shape)
        between = np.maximum(between + weights[f"{part}.1.bias"].reshape(shape), 0)
        return convolved(between, weights[f"{part}.3.weight"])

    def classified(layer: str, pooled: Array) -> Array:
        logarithms: Array = log_softmax(pooled @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"], axis=1)
        return logarithms

    mask = 1 / (1 + np.exp(-two_convolutions("decouplers.3", features) / SMALL["sigma"]))
    robust, related = mask * features, (1 - mask) * features
    corrected = related + (1 - mask) * two_convolutions("correctors.3", related)
    plus, minus, star, whole = (part.mean(axis=(2, 3)) for part in (robust, related, corrected, robust + corrected))
    answers = classified("head", whole)
    rows = np.arange(len(labels))
    wrong = [
        max((c for c in range(answers.shape[1]) if c != y), key=answers[i].__getitem__) for i, y in enumerate(labels)
    ]
    whole_map = features if held is None else held
    one, other = ((part * whole_map).mean(axis=(2, 3)) for part in (mask, 1 - mask))
    cosine = (one * other).sum(1) / np.sqrt((one**2).sum(1) * (other**2).sum(1))
    auxiliary = "classifiers.3"
    dfd = cosine / SMALL["tau"] - classified(auxiliary, plus)[rows, labels] - classified(auxiliary, minus)[rows, wrong]
    dfc = -classified(auxiliary, star)[rows, labels]
    return answers, {
        "cross_entropy": -answers[rows, labels],
        "decoupling": SMALL["lambda1"] * dfd,
        "correction": SMALL["lambda2"] * dfc,
    }


@pytest.mark.parametrize("moving", ["mask", "model"])
def test_values_and_gradients_of_the_whole_loss_written_out_in_numpy(moving: Separation) -> None:
    rng = np.random.default_rng(3)
    block = DecouplingBlock((1, 1, 1, 2), 3, separation=moving, **SMALL).double().eval()  # type: ignore[arg-type]
    head = nn.Linear(2, 3).double()
    for tensor in [*block.state_dict().values(), *head.state_dict().values()]:
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(rng.uniform(-0.7, 0.7, size=tuple(tensor.shape))))
    for layer in block.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_var is not None
            layer.running_var.fill_(0.8)
            layer.weight.data.fill_(1.2)
            layer.bias.data.fill_(0.9)
    weights = {name: tensor.numpy() for name, tensor in block.state_dict().items()}
    weights |= {f"head.{name}": tensor.numpy() for name, tensor in head.state_dict().items()}
    labels = [2, 0, 1]
    start = rng.uniform(0.1, 2, size=(3, 2, 2, 3))

    features = torch.from_numpy(start).requires_grad_()
    notes: dict[str, Tensor] = {}
    pooled = block(3, features, notes, None).mean(dim=(2, 3))
    trace = Trace(pooled, head(pooled), notes)
    batch = Batch(torch.zeros(3, 1, 2, 3), torch.tensor(labels))
    terms = block.terms(trace, batch, context())
    terms["cross_entropy"] = functional.cross_entropy(trace.logits, batch.labels, reduction="none")

    held = start if moving == "mask" else None
    answers, expected = written_out(start, weights, labels, held)
    torch.testing.assert_close(trace.logits.log_softmax(1), torch.from_numpy(answers))
    assert terms.keys() == expected.keys()
    step = 1e-5
    for name, value in expected.items():
        np.testing.assert_allclose(terms[name].detach(), value, rtol=2e-7, atol=2e-6, err_msg=name)
        (gradient,) = torch.autograd.grad(terms[name].sum(), features, retain_graph=True)
        slopes = np.zeros_like(start)
        for place in np.ndindex(start.shape):
            sums = []
            for sign in (1, -1):
                moved = start.copy()
                moved[place] += sign * step
                sums.append(written_out(moved, weights, labels, held)[1][name].sum())
            slopes[place] = (sums[0] - sums[1]) / (2 * step)
        assert np.abs(slopes).max() > 0.01
        np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_wrong_label_pulls_no_gradient_through_the_main_classifier() -> None:
    method, model, block = built()
    batch = Batch(images_of(4).double(), torch.tensor([0, 1, 2, 0]))
    trace = model.train()(batch.images, seeded(1))
    terms = method.terms(model, trace, batch, context())
    auxiliary = terms["decoupling"].sum() + terms["correction"].sum()
    assert torch.autograd.grad(auxiliary, trace.logits, allow_unused=True, retain_graph=True) == (None,)
    for part in (block.decouplers, block.correctors, block.classifiers):
        for gradient in torch.autograd.grad(auxiliary, list(part.parameters()), retain_graph=True):
            assert gradient.abs().max() > 0


# Weights of sites, Eq. 10 and 11


def printed_weights(sizes: Sequence[float], domains: int, classes: int, alpha: float = 1.0, beta: float = 0.4) -> Array:
    """Eq. 10-11 with the sum over classes as printed."""
    scores = []
    for size in sizes:
        part = size / sum(sizes)
        distance = math.sqrt(0.5 * sum((part - 1 / domains) ** 2 for _ in range(classes)))
        scores.append(1 / (1 + math.exp(-(alpha * part - beta * distance))))
    return np.array(scores) / sum(scores)


sizes_of_sites = st.lists(st.integers(1, 10_000), min_size=1, max_size=12)


def test_a_sites_weight_by_hand() -> None:
    # n/N = 1/4 and Q = 2: d = sqrt(8/2) / 4 = 1/2, so the score is 1/4 - 0.4/2 = 0.05.
    assert site_weight(25, 100, 2, 8) == pytest.approx(1 / (1 + math.exp(-0.05)))
    assert site_weight(25, 100, 2, 8, alpha=2.0, beta=1.0) == pytest.approx(0.5)
    assert site_weight(50, 100, 2, 8, beta=9.0) == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_two_very_uneven_sites_are_weighed_nearly_alike() -> None:
    assert domain_aware_weights([10, 990], 2, 2) == pytest.approx([0.397, 0.603], abs=5e-4)


def test_sizes_as_in_pacs_are_nearly_uniform() -> None:
    # Two, three, two and three sites for the four domains.
    sizes = [1670] * 2 + [2048] * 3 + [2344] * 2 + [3929] * 3
    by_count = np.array(sizes) / sum(sizes)
    assert (by_count.min(), by_count.max()) == (pytest.approx(0.064, abs=5e-4), pytest.approx(0.151, abs=5e-4))
    weights = domain_aware_weights(sizes, 4, 7)
    assert (weights.min(), weights.max()) == (pytest.approx(0.097, abs=5e-4), pytest.approx(0.105, abs=5e-4))


@pytest.mark.parametrize(("classes", "falls"), [(2, False), (12, False), (13, True), (20, True)])
def test_beyond_an_even_share_the_weight_falls_with_size_from_13_classes_on(classes: int, falls: bool) -> None:
    beyond = [site_weight(n, 100, 4, classes) for n in range(25, 100, 5)]
    assert beyond == sorted(beyond, reverse=falls)
    assert len(set(beyond)) == len(beyond)
    below = [site_weight(n, 100, 4, classes) for n in range(0, 26, 5)]
    assert below == sorted(below)


@given(sizes=sizes_of_sites, domains=st.integers(1, 12), classes=st.integers(2, 20), data=st.data())
def test_weights_are_the_printed_ones_sum_to_one_and_follow_their_sites(
    sizes: list[int], domains: int, classes: int, data: st.DataObject
) -> None:
    weights = domain_aware_weights(sizes, domains, classes)
    np.testing.assert_allclose(weights, printed_weights(sizes, domains, classes), rtol=1e-12)
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert (weights > 0).all()
    order = data.draw(st.permutations(range(len(sizes))))
    permuted = domain_aware_weights([sizes[place] for place in order], domains, classes)
    np.testing.assert_allclose(permuted, weights[order], rtol=1e-12)


SIZES = {"large": 700.0, "small": 11.0, "middle": 93.0}


def after_a_round(
    method: Method, folder: Path, sites: Sequence[str] = tuple(SIZES)
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The server's tensors after a round of the real algebra, and the models that the sites had trained."""
    model = method.build(TASK, block="none")
    algebra, start = method.algebra(TASK, model), method.start(TASK, model)
    return federated(algebra, start, SIZES, folder, reporting=sites)


@pytest.mark.parametrize("sites", [("large", "small", "middle"), ("small", "middle"), ("middle",)])
@pytest.mark.parametrize(
    ("options", "domains"), [({}, None), ({"domains": 4}, 4), ({"domains": 2, "alpha": 3.0, "beta": 2.0}, 2)]
)
def test_the_model_is_the_sum_of_the_weighted_models_of_those_who_took_part(
    sites: tuple[str, ...], options: dict[str, Any], domains: int | None, tmp_path: Path
) -> None:
    result, trained = after_a_round(F2DC(**options), tmp_path, sites)
    shares = {name: options[name] for name in ("alpha", "beta") if name in options}
    weights = printed_weights([SIZES[site] for site in sites], domains or len(sites), 3, **shares)
    assert any(name.endswith("running_var") for name in result)
    for name, tensor in result.items():
        stack = np.stack([trained[site][name].double().numpy() for site in sites])
        expected = np.tensordot(weights, stack, axes=1)
        # The update is rounded once when the site subtracts, the result once more.
        bound = 2 * np.finfo(np.float32).eps * np.abs(stack).max()
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=0, atol=bound, err_msg=name)


def test_weighed_by_samples_it_combines_as_fedavg_does(tmp_path: Path) -> None:
    own, _ = after_a_round(F2DC(weights="samples"), tmp_path / "own")
    plain, _ = after_a_round(FedAvg(), tmp_path / "plain")
    even, _ = after_a_round(F2DC(), tmp_path / "even")
    assert own.keys() == plain.keys()
    assert all(torch.equal(own[name], plain[name]) for name in plain)
    assert not torch.equal(even["head.linear.bias"], plain["head.linear.bias"])


def test_what_the_plan_waits_for() -> None:
    model = F2DC().build(TASK)
    assert F2DC().algebra(TASK, model).needs == "totals"
    assert F2DC(weights="samples").algebra(TASK, model).needs == "nothing"


# What leaves a site


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("stages", [(4,), (1, 3)])
def test_local_modules_stay_and_the_rest_is_exactly_what_fedavg_sends(norm: Norm, stages: tuple[int, ...]) -> None:
    task = replace(TASK, norm=norm)
    method, plain = F2DC(stages=stages), FedAvg()
    model = method.build(task)
    own, reference = method.algebra(task, model).sent, plain.algebra(task, plain.build(task)).sent
    assert own == reference
    assert sum(spec.numel for spec in own.values()) == sum(spec.numel for spec in reference.values())
    layout = layout_of(model)
    held = {name for name in layout if name.startswith("block.")}
    assert len(held) == len(stages) * (2 * (2 + (5 if norm == "batch" else 2)) + 2)
    assert {layout[name].scope for name in held} == {Scope.LOCAL}
    assert held.isdisjoint(method.start(task, model).tensors)


def test_shared_modules_are_sent_with_their_statistics() -> None:
    method = F2DC(modules="shared")
    model = method.build(TASK)
    layout, sent = layout_of(model), method.algebra(TASK, model).sent
    parameters = {f"block.{name}" for name, _ in model.block.named_parameters()}
    statistics = {f"block.{name}" for name, buffer in model.block.named_buffers() if buffer.is_floating_point()}
    assert len(parameters) == 2 * 4 + 2
    assert len(statistics) == 2 * 2
    assert {layout[name].scope for name in parameters} == {Scope.SHARED}
    assert {layout[name].scope for name in statistics} == {Scope.BUFFER}
    assert {name for name in sent if name.startswith("block.")} == parameters | statistics


# Inference


def test_at_inference_the_same_image_gets_the_same_answer() -> None:
    method = F2DC()
    model = method.build(TASK).eval()
    images = images_of(6)
    with torch.no_grad():
        first = method.predict(model, images).probabilities
        torch.rand(11)
        model(images, seeded(1))
        assert torch.equal(method.predict(model, images).probabilities, first)
        alone = torch.cat([method.predict(model, image[None]).probabilities for image in images])
    torch.testing.assert_close(alone, first)


def test_in_training_the_generator_decides_the_noise() -> None:
    model = F2DC().build(TASK)
    images = images_of(6)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, same, other = (model(images, seeded(seed)).logits for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        quiet = model(images).logits
    assert not torch.allclose(one, quiet)


@pytest.mark.parametrize("stages", [(4,), (2, 4)])
def test_a_hospital_without_the_modules_uses_the_plain_features(stages: tuple[int, ...]) -> None:
    model = F2DC(stages=stages).build(TASK).eval()
    images = images_of(3)
    with torch.no_grad():
        with_modules = model(images)
        plain = model.backbone(images).mean(dim=(2, 3))
        for parameter in model.block.parameters():
            parameter.fill_(math.nan)
        model.forget_local()
        trace = model(images)
    assert torch.equal(trace.pooled, plain)
    assert torch.equal(trace.logits, model.head.linear(plain))
    assert not torch.allclose(with_modules.pooled, plain)


def test_shared_modules_are_there_at_every_hospital() -> None:
    model = F2DC(modules="shared").build(TASK).eval()
    images = images_of(3)
    with torch.no_grad():
        before = model(images).logits
        model.forget_local()
        assert torch.equal(model(images).logits, before)


# Options


def test_defaults_are_the_papers() -> None:
    method = F2DC()
    assert (method.sigma, method.tau, method.lambda1, method.lambda2) == (0.1, 0.06, 0.8, 1.0)
    assert (method.alpha, method.beta, method.stages) == (1.0, 0.4, (4,))
    assert (method.modules, method.weights, method.domains) == ("local", "domain", None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("stages", []),
        ("stages", [0]),
        ("stages", [5]),
        ("stages", [4, 4]),
        ("stages", [1.0]),
        ("stages", 4),
        ("stages", ["4"]),
        ("sigma", 0.0),
        ("sigma", -0.1),
        ("sigma", math.inf),
        ("tau", 0),
        ("tau", math.nan),
        ("lambda1", -0.1),
        ("lambda2", math.nan),
        ("alpha", -1.0),
        ("beta", math.inf),
        ("domains", 0),
        ("domains", -2),
        ("domains", 2.0),
        ("modules", "everywhere"),
        ("weights", "equal"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"f2dc.*{option}"):
        create("f2dc", **{option: value})


# Small batches


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("stages", [(4,), (1, 4)])
@pytest.mark.parametrize("labels", [[], [1], [2, 2, 2, 2]])
def test_batches_of_none_of_one_and_of_one_class_train(
    norm: Norm, size: int, stages: tuple[int, ...], labels: list[int]
) -> None:
    method = F2DC(stages=stages)
    model = method.build(replace(TASK, norm=norm, size=size)).train()
    batch = Batch(images_of(len(labels), size), torch.tensor(labels, dtype=torch.long))
    terms = method.terms(model, model(batch.images, seeded(1)), batch, context())
    assert set(terms) == {"cross_entropy", "decoupling", "correction"}
    assert all(term.shape == (len(labels),) and torch.isfinite(term).all() for term in terms.values())
    torch.cat(list(terms.values())).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_features_that_are_all_zero_train() -> None:
    # A backbone whose ReLUs are all dead: no direction to separate, and still no NaN.
    method = F2DC()
    model = method.build(TASK).train()
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.zero_()
    batch = Batch(images_of(3), torch.tensor([0, 1, 2]))
    terms = method.terms(model, model(batch.images, seeded(1)), batch, context())
    torch.cat(list(terms.values())).sum().backward()
    assert all(torch.isfinite(term).all() for term in terms.values())
    assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in model.parameters())
