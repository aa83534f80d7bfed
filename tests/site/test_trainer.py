from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_sites import BATCH, CPU, WIDE, made_up_split, made_up_task, made_up_training
from torch import Tensor
from torch.nn import functional

from crossward.federation.errors import BadInput, SiteFailure
from crossward.imaging.data import Split
from crossward.methods.base import Batch, Context, Model, Trace
from crossward.methods.fedavg import FedAvg
from crossward.methods.registry import create
from crossward.nets.layers import Norm
from crossward.site.trainer import CORRECT, LOSS, SEEN, Training, correct_count, predict, train_round

ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Recording(FedAvg):
    """FedAvg that writes down what it is asked."""

    name: ClassVar[str] = "recording"
    batches: ClassVar[list[Batch]] = []
    seeds: ClassVar[list[int]] = []
    draws: ClassVar[list[float]] = []

    def terms(self, model: Model, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        self.batches.append(batch)
        self.seeds.append(context.generator.initial_seed())
        self.draws.append(torch.rand(1, generator=context.generator).item())
        return super().terms(model, trace, batch, context)


@dataclass(frozen=True, kw_only=True)
class TwoTerms(FedAvg):
    """Per-sample terms 0, 1, 2, ... and a scalar 10, so that the loss is the mean of 0..b-1 plus 10."""

    name: ClassVar[str] = "two terms"

    def terms(self, model: Model, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        del model, context
        zero = 0.0 * trace.logits.sum()
        return {"ramp": torch.arange(len(batch.labels)) + zero, "coupled": 10.0 + zero}


@pytest.fixture
def recording() -> Recording:
    method = Recording()
    for record in (method.batches, method.seeds, method.draws):
        record.clear()
    return method


def built(method: Any) -> Model:
    model: Model = method.build(made_up_task(width=WIDE))
    return model.to(memory_format=torch.channels_last)


def context_for(model: Model, *, site: str = "alder", round_number: int = 1) -> Context:
    received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Context(site, round_number, ROUNDS, received, torch.Generator())


def train(
    method: Any, split: Split, *, model: Model | None = None, site: str = "alder", round_number: int = 1, **o: Any
):
    model = model or built(method)
    context = context_for(model, site=site, round_number=round_number)
    return train_round(model, method, split, context, training=made_up_training(**o), device=CPU)


def test_the_cosine_schedule_begins_at_the_rate_and_falls() -> None:
    training = Training(learning_rate=0.2, schedule="cosine")
    assert training.rate(1, 4) == training.rate(1, 1) == pytest.approx(0.2)
    rates = [training.rate(number, 4) for number in range(1, 5)]
    assert all(later < earlier for earlier, later in pairwise(rates))
    assert rates[-1] >= 0.02


def test_the_cosine_schedule_ends_at_a_tenth_as_documented() -> None:
    assert Training(learning_rate=0.2, schedule="cosine").rate(4, 4) == pytest.approx(0.02)


def test_the_constant_schedule_is_constant() -> None:
    assert {Training(learning_rate=0.2, schedule="constant").rate(number, 4) for number in range(1, 5)} == {0.2}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("steps", -1),
        ("learning_rate", math.nan),
        ("learning_rate", -0.1),
        ("momentum", math.inf),
        ("weight_decay", -1e-9),
        ("clip", -1.0),
        ("schedule", "linear"),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(BadInput, match=option):
        Training(**{option: value})


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_budget_of_steps_is_kept_exactly_across_epochs(recording: Recording, steps: int) -> None:
    tally = train(recording, made_up_split(20, seed=1), steps=steps)
    assert [len(batch.labels) for batch in recording.batches] == [BATCH] * steps
    assert tally[SEEN].item() == steps * BATCH
    assert tally["n"].item() == 20


def test_epochs_drop_the_last_partial_batch_and_shuffle_anew(recording: Recording) -> None:
    split = made_up_split(20, seed=1)
    tally = train(recording, split, epochs=3)
    assert len(recording.batches) == 3 * (20 // BATCH)
    assert tally[SEEN].item() == 3 * 16
    rows = {image.numpy().tobytes(): row for row, image in enumerate(split.images.contiguous())}
    seen = [[rows[image.contiguous().numpy().tobytes()] for image in batch.images] for batch in recording.batches]
    orders = [seen[2 * epoch] + seen[2 * epoch + 1] for epoch in range(3)]
    assert all(len(set(order)) == 16 for order in orders), "an epoch shows no image twice"
    assert len({tuple(order) for order in orders}) == 3, "each epoch has an order of its own"


def test_a_site_with_fewer_images_than_a_batch_trains_with_all_it_has(recording: Recording) -> None:
    tally = train(recording, made_up_split(5, seed=1), epochs=2)
    assert [len(batch.labels) for batch in recording.batches] == [5, 5]
    assert tally["n"].item() == 5
    assert tally[SEEN].item() == 10


def test_the_tally_sums_loss_and_correct_answers_over_the_images_seen(recording: Recording) -> None:
    split = made_up_split(20, seed=1)
    model = built(recording)
    tally = train(recording, split, model=model, learning_rate=0.0, momentum=0.0, epochs=2)
    # With a learning rate of 0 the weights stay, so the logits of every batch can be worked out afterwards.
    model.train()
    with torch.no_grad():
        logits = [model(batch.images).logits for batch in recording.batches]
    losses = [
        functional.cross_entropy(answer, batch.labels).item() * len(batch.labels)
        for answer, batch in zip(logits, recording.batches, strict=True)
    ]
    correct = sum(
        int(answer[row].argmax()) == int(label)
        for answer, batch in zip(logits, recording.batches, strict=True)
        for row, label in enumerate(batch.labels)
    )
    assert tally[LOSS].item() == pytest.approx(sum(losses), rel=1e-5)
    assert tally[CORRECT].item() == correct
    assert all(value.shape == (1,) and value.dtype == np.float64 for value in tally.values())


def test_terms_per_sample_are_reduced_to_their_mean_and_scalars_taken_as_they_are() -> None:
    tally = train(TwoTerms(), made_up_split(20, seed=1), steps=3)
    mean = sum(range(BATCH)) / BATCH + 10.0
    assert tally[LOSS].item() == pytest.approx(mean * BATCH * 3)


def test_fedavg_is_bare_sgd_bit_for_bit(recording: Recording) -> None:
    split = made_up_split(40, seed=1)
    model = built(recording)
    bare = built(recording)
    train(recording, split, model=model, steps=4, learning_rate=0.1, momentum=0.9, weight_decay=1e-3)

    velocity: dict[str, Tensor] = {}
    bare.train()
    for batch in recording.batches:
        bare.zero_grad()
        functional.cross_entropy(bare(batch.images).logits, batch.labels, reduction="none").mean().backward()
        with torch.no_grad():
            for name, parameter in bare.named_parameters():
                gradient = parameter.grad.add(parameter, alpha=1e-3)
                velocity[name] = gradient.clone() if name not in velocity else velocity[name].mul_(0.9).add_(gradient)
                parameter.add_(velocity[name], alpha=-0.1)
    expected = bare.state_dict()
    assert len(recording.batches) == 4
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_momentum_starts_anew_every_round(recording: Recording) -> None:
    """Two rounds in a row equal two rounds by two fresh processes: nothing but the model is carried over."""
    split = made_up_split(20, seed=1)
    once = built(recording)
    train(recording, split, model=once)
    copy = built(recording)
    copy.load_state_dict(once.state_dict())
    train(recording, split, model=once, round_number=2)
    train(recording, split, model=copy, round_number=2)
    assert all(torch.equal(one, copy.state_dict()[name]) for name, one in once.state_dict().items())


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_clip_bounds_the_gradient_that_the_optimiser_sees(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    norms = []
    original = torch.optim.SGD.step

    def spy(self: torch.optim.SGD, *args: Any, **options: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)))
        return original(self, *args, **options)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    train(recording, made_up_split(20, seed=1), steps=3, clip=clip)
    assert len(norms) == 3
    if clip:
        assert max(norms) <= clip * 1.0001
    else:
        assert min(norms) > 0.1, "the bound of the other case would hold anyway"


def test_fedprox_pulls_towards_the_received_model() -> None:
    split = made_up_split(40, seed=1)
    moved = []
    for mu in (0.0, 1.0, 5.0):
        method = create("fedprox", mu=mu)
        model = built(method)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train(method, split, model=model, epochs=4, momentum=0.0)
        moved.append(math.sqrt(sum(float((p.detach() - start[n]).square().sum()) for n, p in model.named_parameters())))
    assert moved[2] < 0.8 * moved[0]
    assert moved[2] < moved[1] < moved[0]


def test_fedprox_with_mu_0_is_fedavg_bit_for_bit() -> None:
    split = made_up_split(20, seed=1)
    models = [built(FedAvg()), built(create("fedprox", mu=0.0))]
    train(FedAvg(), split, model=models[0])
    train(create("fedprox", mu=0.0), split, model=models[1])
    other = models[1].state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in models[0].state_dict().items())


def test_the_generator_is_seeded_by_seed_site_round_and_step(recording: Recording) -> None:
    split = made_up_split(20, seed=1)
    places = [
        {"seed": 0, "site": "alder", "round_number": 1},
        {"seed": 1, "site": "alder", "round_number": 1},
        {"seed": 0, "site": "birch", "round_number": 1},
        {"seed": 0, "site": "alder", "round_number": 2},
    ]
    for place in [*places, places[0]]:
        train(recording, split, steps=3, **place)
    draws = [tuple(recording.draws[first : first + 3]) for first in range(0, 15, 3)]
    assert draws[4] == draws[0]
    assert len(set(recording.seeds[:12])) == 12, "no two of (seed, site, round, step) share a seed"


def test_the_order_of_images_depends_on_seed_site_and_round(recording: Recording) -> None:
    split = made_up_split(20, seed=1)
    places = [("alder", 1, 0), ("birch", 1, 0), ("alder", 2, 0), ("alder", 1, 1), ("alder", 1, 0)]
    for site, number, seed in places:
        train(recording, split, steps=1, site=site, round_number=number, seed=seed)
    first = [batch.images.sum().item() for batch in recording.batches]
    assert first[4] == first[0]
    assert len(set(first[:4])) == 4


def test_training_leaves_the_global_random_state_alone(recording: Recording) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    train(recording, made_up_split(20, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_is_not_finite_names_site_round_and_step(recording: Recording) -> None:
    split = made_up_split(20, seed=1)
    split.images[:] = math.nan
    with pytest.raises(
        SiteFailure, match=r"birch, round 3: the loss is not a finite number any more at step 1"
    ) as caught:
        train(recording, split, site="birch", round_number=3)
    assert (caught.value.site, caught.value.round_number) == ("birch", 3)


def test_weights_that_overflow_in_the_last_step_are_a_site_failure_too() -> None:
    """The loss of the only step is finite; what the step makes of the weights is not."""
    model = built(FedAvg())
    with pytest.raises(SiteFailure, match="alder, round 1"):
        train(FedAvg(), made_up_split(20, seed=1), model=model, steps=1, learning_rate=1e38, weight_decay=1e3)


@pytest.mark.parametrize("count", [0, 1])
def test_a_site_that_cannot_be_trained_on_is_a_failure_in_plain_words(recording: Recording, count: int) -> None:
    """BatchNorm cannot take one image whose feature map is a single pixel, and nobody can train on none."""
    with pytest.raises((SiteFailure, BadInput), match="alder"):
        train(recording, made_up_split(count, seed=1))


def test_an_empty_split_has_no_answers() -> None:
    method = FedAvg()
    split = made_up_split(0, seed=1)
    assert correct_count(built(method), method, split, device=CPU) == 0
    assert len(predict(built(method), method, split, device=CPU).probabilities) == 0


@given(count=st.integers(1, 12))
def test_predictions_keep_the_order_and_do_not_depend_on_the_batch(count: int) -> None:
    method = FedAvg()
    model = built(method).eval()
    split = made_up_split(count, seed=3)
    whole = predict(model, method, split, device=CPU).probabilities
    with torch.no_grad():
        single = torch.cat([model(image[None]).logits.softmax(1) for image in split.images])
    assert torch.allclose(whole, single, atol=1e-6)
    assert correct_count(model, method, split, device=CPU) == int((single.argmax(1) == split.labels).sum())


def test_a_prediction_over_several_evaluation_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    method, split = FedAvg(), made_up_split(13, seed=3)
    model = built(method)
    whole = predict(model, method, split, device=CPU).probabilities
    monkeypatch.setattr("crossward.site.trainer.EVALUATION_BATCH", 4)
    assert torch.allclose(predict(model, method, split, device=CPU).probabilities, whole, atol=1e-6)
    assert len(whole) == 13


@pytest.mark.parametrize("name", ["fedavg", "f2dc", "rfeddis"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_an_empty_batch_teaches_nothing_and_does_no_harm(
    name: str, norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches drawn by chance, as under differential privacy, can be empty."""
    split = made_up_split(4, seed=1)
    monkeypatch.setattr("crossward.site.trainer.batches", lambda *_, **__: iter([(split.images[:0], split.labels[:0])]))
    method = create(name)
    model = method.build(made_up_task(norm=norm))
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    tally = train(method, split, model=model, round_number=2, steps=3, weight_decay=0.0)
    assert tally[LOSS].item() == tally[SEEN].item() == tally[CORRECT].item() == 0
    assert all(torch.equal(parameter, before[key]) for key, parameter in model.named_parameters())
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_styled_images_are_trained_on_with_their_rows_and_a_seed_of_the_step(recording: Recording) -> None:
    split = made_up_split(20, seed=1)
    seen: list[tuple[list[int], float]] = []

    def style(images: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        assert torch.equal(images, split.images[rows])
        seen.append((rows.tolist(), float(torch.rand((), generator=generator))))
        return images + 7

    draws = []
    for _ in range(2):
        seen.clear()
        recording.batches.clear()
        train(recording, replace(split, style=style))
        draws.append(list(seen))
        for batch, (rows, _) in zip(recording.batches, seen, strict=True):
            assert torch.equal(batch.images, split.images[rows] + 7)
            assert torch.equal(batch.labels, split.labels[rows])
    assert draws[0] == draws[1]
    assert len({draw for _, draw in draws[0]}) == len(draws[0]) > 1
