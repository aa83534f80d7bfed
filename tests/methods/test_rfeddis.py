from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from scipy.special import digamma, gammaln, log_softmax, softmax
from tests.standins import federated
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence

from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of
from crossward.methods import Method, Task, create
from crossward.methods.base import Batch, Context, Model, Trace
from crossward.methods.fedavg import FedAvg
from crossward.methods.rfeddis import (
    EvidentialHeads,
    RFedDis,
    disentangling,
    expected_cross_entropy,
    kl_to_uniform,
    ramp,
)
from crossward.nets.layers import Norm
from crossward.uncertainty.evidence import conflict, expected_probabilities, fuse, opinion

Array = np.ndarray[Any, np.dtype[np.float64]]
TASK = Task(classes=("a", "b", "c"), channels=1, size=16, rounds=4, width=0.0625)
NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)


def images_of(count: int, size: int = 16, seed: int = 5) -> Tensor:
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(seed))


def context(round_number: int = 3, rounds: int = 4) -> Context:
    return Context("a", round_number, rounds, {}, torch.Generator().manual_seed(3))


def doubles(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def built(method: Method | None = None, task: Task = TASK) -> tuple[Model, EvidentialHeads]:
    model = (method or RFedDis()).build(task)
    assert isinstance(model.head, EvidentialHeads)
    return model, model.head


@st.composite
def dirichlets(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Alphas [b,K] of at least 1 in float64, and labels."""
    count, classes = draw(st.integers(1, 5)), draw(st.integers(2, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([0.0, 0.1, 3.0, 1e3]))
    alpha = 1 + largest * rng.random((count, classes)) * rng.integers(0, 2, (count, classes))
    return torch.from_numpy(alpha), torch.from_numpy(rng.integers(0, classes, count))


# Eq. 10


def test_the_expected_cross_entropy_by_hand() -> None:
    # digamma(n + 1) - digamma(n) = 1 / n: (1,1) gives 1; (2,1) gives 1/2 and 1/2 + 1; (3,1) gives 1/3 and 11/6.
    alpha = doubles([1, 1], [2, 1], [2, 1], [3, 1], [3, 1])
    expected = doubles([1, 1 / 2, 3 / 2, 1 / 3, 11 / 6])[0]
    torch.testing.assert_close(expected_cross_entropy(alpha, torch.tensor([0, 0, 1, 0, 1])), expected)


@pytest.mark.parametrize("alpha", [(1.0, 1.0), (4.5, 1.2), (1.0, 9.0), (30.0, 12.0)])
@pytest.mark.parametrize("label", [0, 1])
def test_the_expected_cross_entropy_is_the_integral(alpha: tuple[float, float], label: int) -> None:
    density = stats.beta(*alpha).pdf
    integral, _ = quad(lambda p: -math.log(p if label == 0 else 1 - p) * density(p), 0, 1)
    value = expected_cross_entropy(doubles(alpha), torch.tensor([label])).item()
    assert value == pytest.approx(integral, rel=1e-6)


def test_the_expected_cross_entropy_is_the_mean_over_samples_of_the_distribution() -> None:
    alpha = np.array([1.5, 4.0, 1.0, 7.0])
    drawn = -np.log(np.random.default_rng(4).dirichlet(alpha, size=100_000))
    for label in range(4):
        value = expected_cross_entropy(doubles(alpha.tolist()), torch.tensor([label])).item()
        error = drawn[:, label].std() / math.sqrt(len(drawn))
        assert value == pytest.approx(drawn[:, label].mean(), abs=4 * error)


# Eq. 11


def test_the_divergence_by_hand() -> None:
    # K = 2, alpha~ = (1, 2): ln Gamma(3) - ln Gamma(2) + (digamma(2) - digamma(3)) = ln 2 - 1/2.
    # alpha~ = (1, 3): the density is 3 p^2, so KL = ln 3 + 2 E[ln p] = ln 3 - 2/3.
    alpha = doubles([5, 2], [2, 77], [1, 3])
    expected = doubles([math.log(2) - 0.5, math.log(2) - 0.5, math.log(3) - 2 / 3])[0]
    torch.testing.assert_close(kl_to_uniform(alpha, torch.tensor([0, 1, 0])), expected)


@given(dirichlets())
def test_the_divergence_is_that_of_dirichlet_distributions_and_never_negative(drawn: tuple[Tensor, Tensor]) -> None:
    alpha, labels = drawn
    wrong = alpha.clone()
    for row, label in enumerate(labels.tolist()):
        wrong[row, label] = 1.0
    expected = kl_divergence(Dirichlet(wrong), Dirichlet(torch.ones_like(wrong)))
    value = kl_to_uniform(alpha, labels)
    # Both subtract logarithms of Gamma functions as large as S ln S, about 1e5.
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)
    assert value.shape == labels.shape
    assert (value >= -1e-9).all()
    assert (expected_cross_entropy(alpha, labels) > 0).all()


@given(
    classes=st.integers(2, 20),
    label=st.integers(0, 19),
    right=st.floats(0, 1e4),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_no_wrong_evidence_is_not_punished(classes: int, label: int, right: float, dtype: str) -> None:
    alpha = torch.ones(1, classes, dtype=getattr(torch, dtype))
    alpha[0, label % classes] += right
    value = kl_to_uniform(alpha, torch.tensor([label % classes]))
    # Two roundings of ln Gamma(K).
    assert abs(value.item()) <= 2 * torch.finfo(alpha.dtype).eps * max(1, math.lgamma(classes))


def test_more_wrong_evidence_is_punished_more() -> None:
    amounts = torch.linspace(0, 50, 40, dtype=torch.float64)
    alpha = torch.ones(40, 3, dtype=torch.float64)
    alpha[:, 2] += amounts
    punished = kl_to_uniform(alpha, torch.zeros(40, dtype=torch.long))
    assert (punished.diff() > 0).all()
    assert punished[0].abs() < 1e-12


@pytest.mark.parametrize("evidence", [1e-3, 1.0, 1e3, 1e6, 1e8])
def test_the_divergence_keeps_its_digits_in_float32(evidence: float) -> None:
    # Two certain heads fuse to the product of their evidence, so that 1e8 takes two of only 2e4.
    alpha = torch.tensor([[1.0, 1 + evidence, 1 + evidence / 3]], requires_grad=True)
    value = kl_to_uniform(alpha, torch.tensor([0]))
    value.backward()
    exact = alpha.detach().double().requires_grad_()
    expected = kl_divergence(Dirichlet(exact), Dirichlet(torch.ones_like(exact)))
    expected.backward()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-12)
    assert alpha.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(alpha.grad[0, 1:].double(), exact.grad[0, 1:], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("function", [expected_cross_entropy, kl_to_uniform])
@pytest.mark.parametrize("classes", [2, 5])
def test_gradients_are_those_of_finite_differences(function: Any, classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    alpha = (1.05 + 6 * torch.rand(4, classes, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.arange(4) % classes
    assert torch.autograd.gradcheck(lambda a: function(a, labels), (alpha,))
    (gradient,) = torch.autograd.grad(kl_to_uniform(alpha, labels).sum(), alpha)
    assert not gradient[range(4), labels].any(), "evidence for the label is not punished"


# Eq. 2 and 3


def divergence(features_global: Array, features_local: Array) -> float:
    """KL(G|L) + KL(L|G) of one sample, each summed over the features by its definition."""
    p, q = softmax(features_global), softmax(features_local)
    forward = sum(p[d] * math.log(p[d] / q[d]) for d in range(len(p)))
    backward = sum(q[d] * math.log(q[d] / p[d]) for d in range(len(p)))
    return forward + backward


@given(count=st.integers(1, 5), width=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 5))
def test_disentangling_in_a_plain_loop(count: int, width: int, seed: int, scale: float) -> None:
    one, other = np.random.default_rng(seed).normal(scale=scale, size=(2, count, width))
    pair = torch.from_numpy(one), torch.from_numpy(other)
    each = [divergence(one[row], other[row]) for row in range(count)]
    expected = sum(math.exp(-value) for value in each) / count
    assert disentangling(*pair).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    reference = math.exp(-sum(each) / (count * width))
    assert disentangling(*pair, reduction="reference").item() == pytest.approx(reference, rel=1e-9)
    for reduction in ("sum", "reference"):
        value = disentangling(*pair, reduction=reduction)  # type: ignore[arg-type]
        assert 0 < value.item() <= 1 + 1e-12
        assert value.item() == pytest.approx(disentangling(*pair[::-1], reduction=reduction).item(), rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["sum", "reference"])
def test_equal_features_are_not_disentangled_at_all(reduction: Any) -> None:
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert disentangling(features, features.clone(), reduction).item() == pytest.approx(1)
    # A softmax does not see a shift of all features.
    assert disentangling(features, features + 3, reduction).item() == pytest.approx(1)


@pytest.mark.parametrize("reduction", ["sum", "reference"])
def test_the_gradient_pushes_the_features_apart(reduction: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    pair = [torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda a, b: disentangling(a, b, reduction), tuple(pair))
    disentangling(*pair, reduction).backward()
    moved = [features.detach() - 0.1 * features.grad for features in pair if features.grad is not None]
    before, after = (
        sum(divergence(one, other) for one, other in zip(*(each.numpy() for each in both), strict=True))
        for both in ([features.detach() for features in pair], moved)
    )
    assert after > before


def test_the_released_reduction_leaves_hardly_any_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    pair = [torch.randn(8, 512, generator=generator) * 0.05 for _ in range(2)]
    slopes = []
    for reduction in ("sum", "reference"):
        features = pair[0].clone().requires_grad_()
        disentangling(features, pair[1], reduction).backward()  # type: ignore[arg-type]
        assert features.grad is not None
        slopes.append(features.grad.norm().item())
    assert slopes[1] < slopes[0] / 100


# The ramp and Eq. 13


def test_the_ramp_counts_rounds_done_of_rounds_planned() -> None:
    assert [ramp(context(number, 4)) for number in (1, 2, 3, 4)] == [0, 0.25, 0.5, 0.75]
    assert ramp(context(1, 1)) == 0
    assert ramp(context(101, 100)) == 1
    assert ramp(context(400, 100)) == 1
    # Another site, process and generator in the same round: a resumed run goes on with the same loss.
    assert ramp(Context("other", 3, 4, {"x": torch.ones(1)}, torch.Generator())) == ramp(context(3, 4))


def written_out(pooled: Tensor, head: EvidentialHeads, labels: Sequence[int], growing: float) -> dict[str, Array]:
    """Eq. 4-13 in numpy, per sample, from what the two heads give for the pooled features."""
    with torch.no_grad():
        (hidden_g, logits_g), (hidden_l, logits_l) = (
            [part.double().numpy() for part in each(pooled)] for each in (head.shared, head.local)
        )
    rows = np.arange(len(labels))
    classes = logits_g.shape[1]
    evidence_g, evidence_l = np.log1p(np.exp(logits_g)), np.log1p(np.exp(logits_l))
    fused = evidence_g + evidence_l + evidence_g * evidence_l / classes
    uncertain = np.zeros(len(labels))
    for evidence in (evidence_g, evidence_l, fused):
        alpha = evidence + 1
        uncertain += digamma(alpha.sum(1)) - digamma(alpha[rows, labels])
        wrong = alpha.copy()
        wrong[rows, labels] = 1
        total = wrong.sum(1, keepdims=True)
        uncertain += growing * (
            gammaln(total[:, 0])
            - gammaln(classes)
            - gammaln(wrong).sum(1)
            + ((wrong - 1) * (digamma(wrong) - digamma(total))).sum(1)
        )
    plain = sum(-log_softmax(logits, axis=1)[rows, labels] for logits in (logits_g, logits_l))
    apart = np.array([math.exp(-divergence(hidden_g[row], hidden_l[row])) for row in rows])
    return {"uncertainty": uncertain, "cross_entropy": plain, "disentangling": growing * apart}


@pytest.mark.parametrize("round_number", [1, 2, 4])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.3, 2.0, 5.0), (0.0, 1.0, 0.0)])
def test_the_loss_is_that_of_the_paper_written_out_in_numpy(
    round_number: int, weights: tuple[float, float, float]
) -> None:
    names = ("uncertainty", "cross_entropy", "disentangling")
    method = RFedDis(**dict(zip(names, weights, strict=True)))
    model, head = built(method)
    labels = [0, 1, 2, 2, 0]
    batch = Batch(images_of(5), torch.tensor(labels))
    with torch.no_grad():
        trace = model.eval()(batch.images)
        terms = method.terms(model, trace, batch, context(round_number))
    expected = written_out(trace.pooled, head, labels, (round_number - 1) / 4)
    assert terms.keys() == expected.keys()
    for name, weight in zip(names, weights, strict=True):
        # float32 against float64: a few roundings of numbers below 10.
        np.testing.assert_allclose(terms[name], weight * expected[name], rtol=2e-6, atol=2e-6, err_msg=name)
    if round_number == 1:
        assert not terms["disentangling"].any()


@pytest.mark.parametrize("reduction", ["sum", "reference"])
def test_the_term_averages_to_the_disentangling_loss(reduction: Any) -> None:
    method = RFedDis(reduction=reduction)
    model, head = built(method)
    batch = Batch(images_of(5), torch.tensor([0, 1, 2, 2, 0]))
    with torch.no_grad():
        trace = model.eval()(batch.images)
        term = method.terms(model, trace, batch, context(4))["disentangling"]
        hidden = [part(trace.pooled)[0] for part in (head.shared, head.local)]
    assert model.coupled == (frozenset() if reduction == "sum" else {"disentangling"})
    assert term.shape == (() if model.coupled else (5,))
    assert term.mean().item() == pytest.approx(0.75 * disentangling(*hidden, reduction=reduction).item(), rel=1e-6)


def test_every_term_reaches_the_parts_it_is_for() -> None:
    method = RFedDis()
    model, head = built(method)
    batch = Batch(images_of(6), torch.tensor([0, 1, 2, 2, 0, 1]))
    terms = method.terms(model, model.train()(batch.images), batch, context())
    for name, term in terms.items():
        for part in (head.shared.hidden, head.local.hidden, model.backbone):
            gradients = torch.autograd.grad(term.sum(), list(part.parameters()), retain_graph=True)
            assert any(gradient.abs().max() > 0 for gradient in gradients), name


def test_the_heads_start_apart() -> None:
    _, head = built()
    one, other = head.shared.state_dict(), head.local.state_dict()
    assert one.keys() == other.keys()
    assert not torch.equal(one["logits.weight"], other["logits.weight"])


# The heads and what leaves a site


@pytest.mark.parametrize(("width", "widths"), [(1.0, [512, 256, 128, 3]), (0.25, [128, 64, 32, 3])])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_each_head_has_three_layers_scaled_with_the_encoder(width: float, widths: list[int], norm: Norm) -> None:
    _, head = built(task=replace(TASK, width=width, norm=norm))
    for part in (head.shared, head.local):
        linear = [module for module in part.modules() if isinstance(module, nn.Linear)]
        assert [linear[0].in_features, *(layer.out_features for layer in linear)] == widths
        between = [module for module in part.modules() if isinstance(module, NORMALISATIONS)]
        assert len(between) == 2
        with torch.no_grad():
            hidden, logits = part.eval()(torch.randn(4, widths[0]))
        assert (hidden.shape, logits.shape) == ((4, widths[2]), (4, 3))
        torch.testing.assert_close(logits, linear[-1](hidden))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("depth", [10, 18])
def test_encoder_and_global_head_are_shared_and_all_else_stays(norm: Norm, depth: int) -> None:
    task = replace(TASK, norm=norm, depth=depth)
    method = RFedDis()
    model, head = built(method, task)
    convolutions = [module for module in model.backbone.modules() if isinstance(module, nn.Conv2d)]
    linear = [module for module in head.shared.modules() if isinstance(module, nn.Linear)]
    shared = {id(parameter) for module in [*convolutions, *linear] for parameter in module.parameters()}
    expected = {name for name, parameter in model.named_parameters() if id(parameter) in shared}
    assert len(expected) == len(convolutions) + 2 * 3

    layout = layout_of(model)
    sent = method.algebra(task, model).sent
    assert set(sent) == set(method.start(task, model).tensors) == expected
    assert {layout[name].scope for name in expected} == {Scope.SHARED}
    assert {layout[name].scope for name in set(layout) - expected} == {Scope.LOCAL}
    for name, module in model.named_modules():
        if isinstance(module, NORMALISATIONS):
            assert not any(f"{name}.{tensor}" in sent for tensor in module.state_dict())
    assert not any(name.startswith("head.local.") for name in sent)


SIZES = {"large": 700.0, "small": 11.0, "middle": 93.0}


def after_a_round(method: Method, folder: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The server's tensors after a round of the real algebra, and the models that the sites had trained."""
    model = method.build(TASK)
    algebra, start = method.algebra(TASK, model), method.start(TASK, model)
    return federated(algebra, start, SIZES, folder, reporting=list(SIZES))


@pytest.mark.parametrize(("weights", "shares"), [("equal", [1, 1, 1]), ("samples", [700, 11, 93])])
def test_sites_count_once_or_by_their_samples(weights: Any, shares: list[int], tmp_path: Path) -> None:
    result, trained = after_a_round(RFedDis(weights=weights), tmp_path)
    assert "head.shared.logits.weight" in result
    for name, tensor in result.items():
        stack = np.stack([tensors[name].double().numpy() for tensors in trained.values()])
        expected = np.average(stack, axis=0, weights=shares)
        bound = 2 * np.finfo(np.float32).eps * np.abs(stack).max()
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=0, atol=bound, err_msg=name)


def test_the_encoder_starts_where_fedavgs_does() -> None:
    own, plain = built()[0].state_dict(), FedAvg().build(TASK).state_dict()
    encoder = [name for name in plain if name.startswith("backbone.")]
    assert len(encoder) == 72
    assert all(torch.equal(own[name], plain[name]) for name in encoder)


# The answer


def sharpened(head: EvidentialHeads) -> None:
    """Untrained heads hardly know anything; make them disagree."""
    with torch.no_grad():
        for part in (head.shared, head.local):
            part.logits.weight.mul_(20)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_answer_is_the_fused_opinion_and_carries_each_heads(norm: Norm) -> None:
    method = RFedDis()
    model, head = built(method, replace(TASK, norm=norm))
    sharpened(head)
    images = images_of(7)
    with torch.no_grad():
        answer = method.predict(model.eval(), images)
        pooled = model.backbone(images).mean(dim=(2, 3))
        evidence = {
            name: torch.log1p(part(pooled)[1].double().exp())
            for name, part in (("global", head.shared), ("local", head.local))
        }
    evidence["fused"] = fuse(evidence["global"], evidence["local"])
    assert answer.opinions.keys() == evidence.keys()
    for name, each in evidence.items():
        belief, uncertainty = opinion(each)
        torch.testing.assert_close(answer.opinions[name].belief.double(), belief, rtol=0, atol=1e-5)
        torch.testing.assert_close(answer.opinions[name].uncertainty.double(), uncertainty, rtol=0, atol=1e-5)
    assert torch.equal(answer.uncertainty, answer.opinions["fused"].uncertainty)
    expected = expected_probabilities(evidence["fused"])
    torch.testing.assert_close(answer.probabilities.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(answer.probabilities.sum(1), torch.ones(7))
    assert torch.equal(answer.probabilities.argmax(1), evidence["fused"].argmax(1))
    assert answer.conflict is not None
    torch.testing.assert_close(
        answer.conflict.double(), conflict(evidence["global"], evidence["local"]), rtol=0, atol=1e-5
    )
    assert answer.conflict.max() > 0.05
    torch.testing.assert_close(answer.features, pooled)


def test_the_logits_are_those_of_the_fused_probabilities() -> None:
    model, head = built()
    sharpened(head)
    with torch.no_grad():
        trace = model.eval()(images_of(4))
    fused = trace.notes["evidence/fused"].double()
    torch.testing.assert_close(trace.logits.double().softmax(1), (fused + 1) / (fused + 1).sum(1, keepdim=True))


@pytest.mark.parametrize("fill", [0.0, 1e3, math.nan])
def test_a_hospital_without_a_local_head_asks_the_global_one(fill: float) -> None:
    method = RFedDis()
    model, head = built(method)
    sharpened(head)
    images = images_of(6)
    with torch.no_grad():
        both = method.predict(model.eval(), images)
        for parameter in head.local.parameters():
            parameter.fill_(fill)
        model.forget_local()
        answer = method.predict(model, images)
        evidence = nn.functional.softplus(head.shared(model.backbone(images).mean(dim=(2, 3)))[1])
    belief, uncertainty = opinion(evidence)
    assert torch.equal(answer.probabilities, expected_probabilities(evidence))
    assert torch.equal(answer.uncertainty, uncertainty)
    assert torch.equal(answer.opinions["fused"].belief, belief)
    assert torch.equal(answer.opinions["global"].belief, belief)
    assert torch.equal(answer.opinions["local"].uncertainty, torch.ones(6))
    assert answer.conflict is not None
    assert not answer.conflict.any()
    assert not torch.allclose(answer.probabilities, both.probabilities)


@pytest.mark.parametrize("size", [8, 16])
def test_under_group_norm_the_uncertainty_still_depends_on_the_image(size: int) -> None:
    # Groups of two channels without an extent could only be +1 and -1, and all images would look alike.
    method = RFedDis()
    model, head = built(method, replace(TASK, norm="group", size=size))
    with torch.no_grad():
        answer = method.predict(model.eval(), images_of(16, size))
        hidden = head.shared.hidden(answer.features)
    assert not any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in model.modules())
    for each in answer.opinions.values():
        assert len(each.uncertainty.unique()) == 16
    assert answer.uncertainty.std() > 1e-3
    assert len(hidden.unique()) > 16


def test_heads_take_evidence_that_is_far_from_anything() -> None:
    head = EvidentialHeads(8, 3).eval()
    notes: dict[str, Tensor] = {}
    pooled = torch.full((2, 8), 1e4, requires_grad=True)
    logits = head(pooled, notes)
    terms = head.terms(Trace(pooled, logits, notes), Batch(torch.zeros(2, 1, 1, 1), torch.tensor([0, 2])), context())
    torch.cat(list(terms.values())).sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(term).all() for term in terms.values())
    assert pooled.grad is not None
    assert torch.isfinite(pooled.grad).all()


# Options and small batches


def test_defaults_are_the_papers() -> None:
    method = RFedDis()
    assert (method.uncertainty, method.cross_entropy, method.disentangling) == (1.0, 1.0, 1.0)
    assert (method.reduction, method.weights) == ("sum", "samples")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("uncertainty", -0.1),
        ("cross_entropy", math.nan),
        ("disentangling", math.inf),
        ("reduction", "mean"),
        ("weights", "domain"),
        ("weights", 1),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"rfeddis.*{option}"):
        create("rfeddis", **{option: value})


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("reduction", ["sum", "reference"])
@pytest.mark.parametrize("labels", [[], [1], [2, 2, 2, 2]])
def test_batches_of_none_of_one_and_of_one_class_train(
    norm: Norm, size: int, reduction: Any, labels: list[int]
) -> None:
    method = RFedDis(reduction=reduction)
    model, _ = built(method, replace(TASK, norm=norm, size=size))
    batch = Batch(images_of(len(labels), size), torch.tensor(labels, dtype=torch.long))
    terms = method.terms(model, model.train()(batch.images), batch, context())
    assert set(terms) == {"uncertainty", "cross_entropy", "disentangling"}
    for name, term in terms.items():
        assert term.shape == (() if name in model.coupled else (len(labels),))
        assert torch.isfinite(term).all()
    torch.stack([term.sum() for term in terms.values()]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
