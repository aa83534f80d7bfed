from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from crossward.federation.errors import CrosswardError, PrivacyRefusal
from crossward.federation.scopes import Scope, layout_of, mark
from crossward.methods import Method, Task, available, base
from crossward.methods.base import Batch, Context, FeatureBlock, SoftmaxHead, Trace
from crossward.nets.layers import Norm

TASK = Task(classes=("a", "b", "c"), channels=1, size=8, rounds=2, width=0.0625)

every_method = pytest.mark.parametrize("name", sorted(available()))


def context_of(model: nn.Module) -> Context:
    received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    # The second round of two: a term that grows from nothing over the rounds is there.
    return Context("a", 2, 2, received, torch.Generator().manual_seed(3))


def a_batch(count: int, task: Task = TASK) -> Batch:
    generator = torch.Generator().manual_seed(9)
    images = torch.randn(count, task.channels, 8, 8, generator=generator)
    return Batch(images, torch.arange(count) % len(task.classes))


@every_method
def test_the_same_task_gives_the_same_start(name: str) -> None:
    method = available()[name]()
    one, same = method.build(TASK).state_dict(), method.build(TASK).state_dict()
    other = method.build(dataclasses.replace(TASK, seed=1)).state_dict()
    assert list(one) == list(same)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@every_method
def test_the_start_does_not_depend_on_what_was_drawn_before_nor_disturb_it(name: str) -> None:
    method = available()[name]()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = method.build(TASK).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)
    second = method.build(TASK).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@every_method
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_every_tensor_has_a_scope_and_only_those_that_leave_start_at_the_server(name: str, norm: Norm) -> None:
    method = available()[name]()
    task = dataclasses.replace(TASK, norm=norm)
    model = method.build(task)
    layout = layout_of(model)
    assert list(layout) == list(model.state_dict())
    start = method.start(task, model)
    assert start.round_number == 0
    assert start.personal == {}
    assert set(start.tensors) == {key for key, spec in layout.items() if spec.scope is not Scope.LOCAL}
    for key, tensor in start.tensors.items():
        assert torch.equal(tensor, model.state_dict()[key])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(tensor.grad_fn is None for tensor in start.tensors.values())
    for key, tensor in start.tensors.items():
        if key.endswith("weight"):
            assert not torch.equal(tensor, model.state_dict()[key])


@every_method
@pytest.mark.parametrize("count", [2, 5])
def test_loss_terms_are_per_sample_and_repeat(name: str, count: int) -> None:
    method = available()[name]()
    gradients: list[list[Tensor]] = []
    values: list[dict[str, Tensor]] = []
    for _ in range(2):
        model = method.build(TASK).train()
        context = context_of(model)
        batch = a_batch(count)
        terms = method.terms(model, model(batch.images), batch, context)
        assert terms
        for term, value in terms.items():
            assert value.shape == (() if term in method.coupled | model.coupled else (count,)), term
            assert torch.isfinite(value).all(), term
        assert set(terms) >= method.coupled | model.coupled
        penalties = method.penalty(model, context)
        assert all(penalty.shape == () for penalty in penalties.values())
        objective = torch.stack([value.mean() for value in terms.values()]).sum() + sum(penalties.values())
        objective.backward()
        values.append({term: value.detach() for term, value in terms.items()})
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][term], values[1][term]) for term in values[0])
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@every_method
def test_under_group_norm_a_term_depends_on_its_own_sample_only(name: str) -> None:
    method = available()[name]()
    model = method.build(dataclasses.replace(TASK, norm="group")).train()
    batch = a_batch(4)
    batch.images.requires_grad_()
    terms = method.terms(model, model(batch.images), batch, context_of(model))
    for term, value in terms.items():
        if term in method.coupled | model.coupled:
            continue
        (gradient,) = torch.autograd.grad(value[1], batch.images, retain_graph=True)
        assert not gradient[[0, 2, 3]].any(), term
        assert gradient[1].any(), term


@every_method
def test_predictions_are_probabilities(name: str) -> None:
    method = available()[name]()
    model = method.build(TASK).eval()
    with torch.no_grad():
        prediction = method.predict(model, a_batch(5).images)
    assert prediction.probabilities.shape == (5, 3)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(5))
    assert prediction.uncertainty.shape == (5,)
    assert ((prediction.uncertainty >= 0) & (prediction.uncertainty <= 1)).all()
    assert prediction.features.shape[0] == 5


def test_the_softmax_head_by_hand() -> None:
    head = SoftmaxHead(2, 3)
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        head.linear.bias.zero_()
    pooled = torch.log(torch.tensor([[2.0, 1.0], [1.0, 6.0]]))
    trace = Trace(pooled, head(pooled, {}))
    answer = head.predict(trace)
    torch.testing.assert_close(answer.probabilities, torch.tensor([[0.5, 0.25, 0.25], [1 / 8, 6 / 8, 1 / 8]]))
    torch.testing.assert_close(answer.uncertainty, torch.tensor([0.5, 0.25]))
    batch = Batch(torch.zeros(2, 1, 1, 1), torch.tensor([1, 1]))
    terms = head.terms(trace, batch, context_of(head))
    torch.testing.assert_close(terms["cross_entropy"], -torch.log(torch.tensor([0.25, 0.75])))


class Doubling(FeatureBlock):
    """Doubles the last stage's features, and says so."""

    def __init__(self, scope: Scope | None) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0]))
        if scope is not None:
            mark(self, parameters=scope, buffers=scope)

    def forward(
        self, stage: int, features: Tensor, notes: dict[str, Tensor], generator: torch.Generator | None
    ) -> Tensor:
        if stage < 3:
            return features
        notes["before"] = features.mean(dim=(2, 3))
        return features * self.factor

    def terms(self, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        return {"doubled": trace.pooled.sum(dim=1) - trace.notes["before"].sum(dim=1)}


class Plain(Method):
    name = "plain"
    title = "Plain"
    normalisation = "shared"


def test_a_block_plugs_in_with_its_scope_and_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.BLOCKS, "doubling", lambda task, backbone: Doubling(Scope.LOCAL))
    method = Plain()
    model = method.build(TASK, block="doubling").eval()
    layout = layout_of(model)
    assert layout["block.factor"].scope is Scope.LOCAL
    assert "block.factor" not in method.algebra(TASK, model).sent
    assert layout["head.linear.weight"].scope is Scope.SHARED
    batch = a_batch(3)
    trace = model(batch.images)
    torch.testing.assert_close(trace.pooled, 2 * trace.notes["before"])
    terms = method.terms(model, trace, batch, context_of(model))
    assert set(terms) == {"cross_entropy", "doubled"}
    torch.testing.assert_close(terms["doubled"], trace.notes["before"].sum(dim=1))


def test_a_block_that_marks_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # "A filling marks its own scopes when it is built": forgetting it must not send the block to everybody.
    monkeypatch.setitem(base.BLOCKS, "forgetful", lambda task, backbone: Doubling(None))
    with pytest.raises(PrivacyRefusal, match=r"block\.factor"):
        layout_of(Plain().build(TASK, block="forgetful"))


@pytest.mark.parametrize("plugs", [{"block": "no-such-block"}, {"head": "no-such-head"}])
def test_an_unknown_plug_is_refused_in_plain_words(plugs: dict[str, str]) -> None:
    with pytest.raises(CrosswardError, match="no-such"):
        Plain().build(TASK, **plugs)


class Noisy(FeatureBlock):
    """Adds noise from the generator it is given, and none without one."""

    def forward(
        self, stage: int, features: Tensor, notes: dict[str, Tensor], generator: torch.Generator | None
    ) -> Tensor:
        if generator is None:
            return features
        return features + torch.rand(features.shape, generator=generator)


def test_a_block_draws_from_the_rounds_generator_and_not_at_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.BLOCKS, "noisy", lambda task, backbone: Noisy())
    model = Plain().build(TASK, block="noisy").eval()
    images = torch.randn(2, TASK.channels, TASK.size, TASK.size)
    quiet = model(images).logits
    assert torch.equal(quiet, model(images).logits)
    drawn = [model(images, torch.Generator().manual_seed(seed)).logits for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], quiet)


def test_what_place_adds_starts_the_same_everywhere() -> None:
    class Adding(Plain):
        def place(self, model: base.Model) -> None:
            model.head.linear.bias.data = torch.randn(len(TASK.classes))

    torch.manual_seed(1)
    one = Adding().build(TASK).head.linear.bias
    torch.manual_seed(2)
    assert torch.equal(one, Adding().build(TASK).head.linear.bias)
