"""What differential privacy asks of a method: no sample moves another's loss, and releases are made of noisy sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from crossward.federation.contract import Plan
from crossward.methods import Method, Task, available, create
from crossward.methods.base import Batch, Context, Model, Prediction
from crossward.methods.fdse import consensus_weights
from crossward.methods.fedcode import COUNT, SEMANTIC, SHARES, STYLE, FedCode
from crossward.methods.rfeddis import EvidentialHeads
from crossward.privacy.dp.release import noisy_sums

TASK = Task(classes=("a", "b", "c"), channels=1, size=16, rounds=3, width=0.0625, norm="group")


@dataclass(frozen=True)
class Case:
    host: str
    block: str | None = None
    head: str | None = None

    def __str__(self) -> str:
        return "+".join(part for part in (self.host, self.block, self.head) if part)

    def build(self, task: Task = TASK, **options: Any) -> tuple[Method, Model]:
        method = create(self.host, **options).under_privacy()
        return method, method.build(task, block=self.block, head=self.head).train()


PLAIN = [Case(name) for name in sorted(available())]
PLUGGED = [
    Case("fedavg", head="evidential"),
    Case("fedavg", block="f2dc"),
    Case("fedbn", block="f2dc-shared", head="evidential"),
    Case("fdse", head="evidential"),
    Case("fdse", block="f2dc", head="evidential"),
    Case("f2dc", head="evidential"),
    Case("fedcode", block="f2dc", head="evidential"),
]
every_case = pytest.mark.parametrize("case", PLAIN + PLUGGED, ids=str)
every_method = pytest.mark.parametrize("name", sorted(available()))


def images(count: int, seed: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(count, 1, 16, 16, generator=generator), torch.arange(count) % 3)


def context_of(method: Method, model: Model) -> Context:
    """The second round of three, in which every term is there: ramps have begun, and there are prototypes."""
    received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    for name, extra in method.extras(TASK, model).items():
        received[name] = torch.randn(max(2, extra.shape[0]), *extra.shape[1:], generator=generator)
    return Context("a", 2, 3, received, generator, Plan(1, ("a", "b"), {STYLE: {"group": np.array([0.0, 1.0])}}))


def losses_of(method: Method, model: Model, batch: Batch, *, drawn: int | None = None) -> Tensor:
    """The sum of the terms for each sample, [b]; with random numbers of the method if they are to be drawn."""
    context = context_of(method, model)
    generator = None if drawn is None else context.generator.manual_seed(drawn)
    terms = method.terms(model, model(batch.images, generator), batch, context)
    assert all(term.shape == (len(batch.labels),) for term in terms.values()), "a term is not per sample"
    return torch.stack(list(terms.values())).sum(dim=0)


def gradient_of(loss: Tensor, model: Model) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, parameters, materialize_grads=True))


def relative(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Distance of two gradients, relative to the first."""
    apart = math.hypot(*(float((a - b).norm()) for a, b in zip(one, other, strict=True)))
    return apart / math.hypot(*(float(each.norm()) for each in one))


def alone(batch: Batch, row: int) -> Batch:
    return Batch(batch.images[row : row + 1], batch.labels[row : row + 1])


@every_case
def test_the_losses_of_a_batch_are_those_of_every_image_alone(case: Case) -> None:
    method, model = case.build()
    batch = images(5)
    together = losses_of(method, model, batch)
    for row in range(5):
        single = losses_of(method, model, alone(batch, row))
        torch.testing.assert_close(together[row : row + 1], single, rtol=1e-4, atol=1e-5)
        one, other = (gradient_of(loss, model) for loss in (losses_of(method, model, batch)[row], single[0]))
        assert relative(one, other) < 1e-3
    assert together.detach().std() > 1e-4, "images are told apart at all"


@every_case
@pytest.mark.parametrize("drawn", [None, 7])
def test_a_sample_s_gradient_does_not_change_with_the_other_samples(case: Case, drawn: int | None) -> None:
    method, model = case.build()
    batch, others = images(4), images(4, seed=10)
    kept = torch.tensor([False, False, True, False])
    swapped = Batch(
        torch.where(kept[:, None, None, None], batch.images, others.images),
        torch.where(kept, batch.labels, (batch.labels + 1) % 3),
    )
    before, after = (losses_of(method, model, each, drawn=drawn) for each in (batch, swapped))
    assert relative(gradient_of(before[2], model), gradient_of(after[2], model)) < 1e-4
    before, after = (losses_of(method, model, each, drawn=drawn) for each in (batch, swapped))
    assert relative(gradient_of(before[1], model), gradient_of(after[1], model)) > 1e-2


@every_case
def test_no_image_has_a_part_in_another_s_loss(case: Case) -> None:
    method, model = case.build()
    batch = images(4)
    batch.images.requires_grad_()
    (gradient,) = torch.autograd.grad(losses_of(method, model, batch, drawn=3)[1], batch.images)
    assert gradient[1].any()
    assert not gradient[[0, 2, 3]].any()


@every_case
@pytest.mark.parametrize("drawn", [None, 7])
def test_an_empty_batch_has_no_losses_and_gives_no_nan(case: Case, drawn: int | None) -> None:
    method, model = case.build()
    losses = losses_of(method, model, images(0), drawn=drawn)
    assert losses.shape == (0,)
    for gradient in gradient_of(losses.sum(), model):
        assert not gradient.any()


@every_case
def test_nothing_couples_and_every_term_is_asked_for(case: Case) -> None:
    method, model = case.build()
    assert method.couples(model) == frozenset()


COUPLED = [
    (Case("rfeddis"), {"reduction": "reference"}, "group", {"disentangling"}),
    (Case("fdse"), {}, "batch", {"consistency"}),
    (Case("fdse", head="evidential"), {"consistency": 2.0}, "batch", {"consistency"}),
    (Case("fdse"), {"consistency": 2.0}, "group", set()),
    (Case("fdse"), {"consistency": 0.0}, "batch", set()),
    (Case("rfeddis", head="softmax"), {"reduction": "reference"}, "group", set()),
]


@pytest.mark.parametrize(("case", "options", "norm", "coupled"), COUPLED)
def test_what_couples_is_what_is_a_number_of_the_whole_batch(
    case: Case, options: dict[str, Any], norm: Any, coupled: set[str]
) -> None:
    method = create(case.host, **options)
    model = method.build(replace(TASK, norm=norm), block=case.block, head=case.head).train()
    batch = images(4)
    terms = method.terms(model, model(batch.images), batch, context_of(method, model))
    assert method.couples(model) == coupled == {name for name, term in terms.items() if term.shape == ()}
    assert method.couples(model) <= method.coupled | model.coupled
    private = method.under_privacy()
    assert private.couples(private.build(replace(TASK, norm=norm), block=case.block, head=case.head)) == frozenset()


def test_with_batch_norm_these_tests_find_samples_that_move_each_other() -> None:
    method, model = Case("fedavg").build(replace(TASK, norm="batch"))
    batch = images(4)
    batch.images.requires_grad_()
    losses = losses_of(method, model, batch)
    (gradient,) = torch.autograd.grad(losses[1], batch.images)
    assert gradient[[0, 2, 3]].any()
    single = losses_of(method, model, alone(images(4), 1))
    assert abs(losses[1].item() - single.item()) > 1e-3


@every_method
def test_under_privacy_a_method_is_itself_with_other_options(name: str) -> None:
    expected: dict[str, dict[str, Any]] = {"fdse": {"consistency": 0.0}}
    method = create(name)
    private = method.under_privacy()
    assert private == create(name, **expected.get(name, {}))
    assert private.under_privacy() == private
    changed = {key for key, value in asdict(private).items() if value != asdict(method)[key]}
    assert not changed or private.private_changes
    for sentence in private.private_changes:
        assert sentence == sentence.strip(" .")
        assert len(sentence) < 160


def test_other_options_are_kept() -> None:
    given = create("rfeddis", reduction="reference", weights="equal", disentangling=0.5)
    assert given.under_privacy() == create("rfeddis", weights="equal", disentangling=0.5)
    assert create("fdse", tau=0.2, heard=3).under_privacy() == create("fdse", tau=0.2, heard=3, consistency=0.0)
    both = create("fdse").under_masks(4)
    assert both.under_privacy() == create("fdse").under_privacy().under_masks(4)


# Uncertainty after the swap to GroupNorm.


def blobs(count: int) -> Batch:
    """Films with a bright spot of any place, size and strength; the class says in which third it is."""
    rng = np.random.default_rng(2)
    down, across = np.mgrid[0:16, 0:16]
    labels = np.arange(count) % 3
    films = []
    for label in labels:
        row, column = rng.uniform(2, 14), 16 * (label + rng.uniform(0.1, 0.9)) / 3
        spot = np.exp(-((down - row) ** 2 + (across - column) ** 2) / rng.uniform(2, 12))
        films.append(rng.uniform(1, 3) * spot + 0.3 * rng.normal(size=(16, 16)))
    return Batch(torch.tensor(np.array(films), dtype=torch.float32).unsqueeze(1), torch.from_numpy(labels))


def trained(method: Method, model: Model, batch: Batch, *, steps: int) -> Model:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        optimiser.zero_grad()
        losses_of(method, model, batch, drawn=step).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.eval()


def most_alike(uncertainty: Tensor) -> int:
    """The largest number of images with the same uncertainty, to three digits."""
    return int(np.unique(uncertainty.numpy().round(3), return_counts=True)[1].max())


def after_training(method: Method, model: Model) -> Prediction:
    """The answers to 48 unseen images."""
    model = trained(method, model, blobs(24), steps=25)
    with torch.no_grad():
        return method.predict(model, blobs(72).images[24:])


@every_case
def test_uncertainty_differs_from_image_to_image_after_the_swap_to_group_norm(case: Case) -> None:
    answer = after_training(*case.build())
    uncertainties = [answer.uncertainty, *(opinion.uncertainty for opinion in answer.opinions.values())]
    assert len(uncertainties) == (4 if case.head == "evidential" or case.host == "rfeddis" else 1)
    for uncertainty in uncertainties:
        assert most_alike(uncertainty) <= 16


def test_a_swap_that_erases_uncertainty_is_found() -> None:
    # Two channels of a vector that are a group can only become +1 and -1: what a plain swap would make of the heads.
    case = Case("fedavg", head="evidential")
    method, model = case.build()
    assert isinstance(model.head, EvidentialHeads)
    for head in (model.head.shared, model.head.local):
        layers = [
            nn.GroupNorm(each.num_channels // 2, each.num_channels) if isinstance(each, nn.GroupNorm) else each
            for each in head.hidden
        ]
        head.hidden = nn.Sequential(*layers)
    assert most_alike(after_training(method, model).uncertainty) > 24


# Releases.


class Silent:
    """In place of noise: none."""

    def add_to(self, tensors: Sequence[Tensor], *, scale: float) -> None:
        del tensors, scale


class Loud:
    """In place of a cryptographic source: noise that can be drawn again."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def add_to(self, tensors: Sequence[Tensor], *, scale: float) -> None:
        for tensor in tensors:
            tensor += scale * torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64)


@every_case
def test_a_method_with_extras_makes_them_of_sums_and_no_other_has_any(case: Case) -> None:
    method, model = case.build()
    batch, context = images(7), context_of(method, model)
    extras = {name: extra.shape for name, extra in method.extras(TASK, model).items()}
    with torch.inference_mode():
        parts = method.private_parts(model.eval(), batch, context)
        ones = [method.private_parts(model, alone(batch, row), context) for row in range(7)]
        empty = method.private_parts(model, images(0), context)
    assert bool(parts) == bool(extras)
    if not parts:
        return
    assert {name: (0, *part.shape[1:]) for name, part in parts.items()} == {n: tuple(p.shape) for n, p in empty.items()}
    norms = torch.stack([part.double().flatten(1).square().sum(dim=1) for part in parts.values()]).sum(dim=0).sqrt()
    assert norms.max() <= 1 + 1e-9
    assert norms.max() > 0.99, "what may be told is told"
    for name, part in parts.items():
        torch.testing.assert_close(part, torch.cat([one[name] for one in ones]), rtol=1e-4, atol=1e-5)
    sums = noisy_sums([(parts, torch.ones(7)), (empty, torch.ones(0))], noise=3.0, source=Loud(1))
    made = method.extras_of(sums, context)
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == extras
    assert all(tensor.dtype == torch.float32 and torch.isfinite(tensor).all() for tensor in made.values())


def sums_of(semantic: list[list[float]], style: list[float], count: list[float]) -> dict[str, Tensor]:
    exact = {SEMANTIC: semantic, STYLE: style, COUNT: count}
    return {name: SHARES[name] * torch.tensor(value, dtype=torch.float64) for name, value in exact.items()}


def nowhere() -> Context:
    return Context("a", 1, 1, {}, torch.Generator())


def test_prototypes_by_hand() -> None:
    assert math.hypot(*SHARES.values()) == pytest.approx(1)
    sums = sums_of([[30.0, 40.0], [12.0, 0.0], [-50.0, 120.0]], [-6.0, 8.0], [100.0, 19.9, 26.0])
    extras = FedCode().extras_of(sums, nowhere())
    # 50 / 100; below the floor; 130 / 26 = 5 is longer than any mean of unit vectors.
    expected = torch.tensor([[0.3, 0.4], [0.0, 0.0], [-5 / 13, 12 / 13]])
    torch.testing.assert_close(extras[SEMANTIC], expected)
    torch.testing.assert_close(extras[STYLE], torch.tensor([[-0.6, 0.8]]))
    lower = FedCode(floor=10).extras_of(sums, nowhere())
    torch.testing.assert_close(lower[SEMANTIC][1], torch.tensor([12 / 19.9, 0.0]))


@pytest.mark.parametrize("count", [-40.0, -1e-9, 0.0, 1e-12, 19.999])
def test_a_class_with_a_noisy_count_below_the_floor_is_absent(count: float) -> None:
    extras = FedCode().extras_of(sums_of([[3.0, 4.0]], [0.0, 0.0], [count]), nowhere())
    assert not extras[SEMANTIC].any()
    assert not extras[STYLE].any()
    assert torch.isfinite(extras[STYLE]).all()


@pytest.mark.parametrize("floor", [0, -3])
def test_a_floor_that_is_none_is_refused(floor: int) -> None:
    with pytest.raises(Exception, match="floor"):
        create("fedcode", floor=floor)


def test_without_noise_prototypes_are_means_of_features_of_length_one() -> None:
    method, model = Case("fedcode").build(floor=3)
    batch, context = images(12), context_of(method, model)
    with torch.inference_mode():
        parts = method.private_parts(model.eval(), batch, context)
        features = nn.functional.normalize(model(batch.images).pooled, dim=1)
        styles = nn.functional.normalize(model.style_of(batch.images), dim=1)  # type: ignore[operator]
    extras = method.extras_of(noisy_sums([(parts, torch.ones(12))], noise=1e-3, source=Silent()), context)
    for label in range(3):
        mean = torch.stack([features[row] for row in range(12) if row % 3 == label]).mean(dim=0)
        torch.testing.assert_close(extras[SEMANTIC][label], mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        extras[STYLE][0], nn.functional.normalize(styles.sum(dim=0), dim=0), rtol=1e-3, atol=1e-4
    )


def test_the_noise_of_a_prototype_is_as_long_as_the_docs_say() -> None:
    noise, features, members = 4.0, 512, 1000
    parts = {
        SEMANTIC: torch.zeros(members, 1, features),
        STYLE: torch.zeros(members, features),
        COUNT: SHARES[COUNT] * torch.ones(members, 1),
    }
    extras = FedCode().extras_of(noisy_sums([(parts, torch.ones(members))], noise=noise, source=Loud(3)), nowhere())
    expected = noise * math.sqrt(2 * features) / members
    assert expected == pytest.approx(0.128)
    # The length of 512 normal numbers spreads by 1 / sqrt(1024) = 3 %; the count by 8 of 1000.
    assert float(extras[SEMANTIC].norm()) == pytest.approx(expected, rel=0.2)


@given(seed=st.integers(0, 2**32 - 1))
def test_noise_makes_the_weights_of_fdse_nearly_even(seed: int) -> None:
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=4096) + rng.uniform(0.2, 3, size=(5, 1)) * rng.normal(size=(5, 4096))
    updates[1] = 0.9 * updates[0] + 0.1 * updates[1]
    noise = rng.normal(size=updates.shape)
    noise *= 7 * np.linalg.norm(updates, axis=1).mean() / np.linalg.norm(noise, axis=1, keepdims=True)
    weights = []
    for each in (updates, updates + noise):
        each = each / np.linalg.norm(each, axis=1, keepdims=True)
        weights.append(consensus_weights(each @ each.T))
    assert weights[0].max() - weights[0].min() > 0.05
    assert weights[1].min() > 0.17
    assert weights[1].max() < 0.23
