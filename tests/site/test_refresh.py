from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_sites import CPU, WIDE, made_up_cohort, made_up_participant, made_up_split, made_up_study, made_up_task
from torch import nn

from crossward.federation.contract import VALIDATION_AS_RECEIVED
from crossward.imaging.data import Split
from crossward.imaging.loading import batches
from crossward.methods.base import Model
from crossward.methods.registry import create
from crossward.site.inprocess import simulate
from crossward.site.trainer import REFRESH_BATCH, refreshed

SEED = 5


def built(**task: Any) -> Model:
    model: Model = create("fedavg").build(made_up_task(width=WIDE, **task))
    # Statistics that fit nothing, so that a refresh that does nothing is seen.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.fill_(3.0)
            module.running_var.fill_(7.0)
    return model.to(memory_format=torch.channels_last)


def test_the_statistics_are_the_plain_average_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's, worked out in float64 from the convolution's output."""
    monkeypatch.setattr("crossward.site.trainer.REFRESH_BATCH", 8)
    split = made_up_split(29, seed=2, gain=1.7, shift=0.4)
    model = built()
    fresh = refreshed(model, split, device=CPU, seed=SEED)
    convolution = copy.deepcopy(model.backbone.stem[0]).double()
    means, variances = [], []
    for images, _ in batches(split, batch_size=8, seed=SEED, drop_last=True):
        with torch.no_grad():
            output = convolution(images.double()).transpose(0, 1).flatten(1)
        means.append(output.mean(1))
        variances.append(output.var(1, unbiased=True))
    assert len(means) == 3
    norm = fresh.backbone.stem[1]
    assert torch.allclose(norm.running_mean.double(), torch.stack(means).mean(0), rtol=1e-5, atol=1e-6)
    assert torch.allclose(norm.running_var.double(), torch.stack(variances).mean(0), rtol=1e-5, atol=1e-6)


def test_one_batch_gives_a_model_that_answers_as_in_training() -> None:
    """The mean is exact; the variance is Bessel-corrected: n / (n - 1) of the batch's own."""
    split = made_up_split(REFRESH_BATCH, seed=2)
    model = built()
    fresh = refreshed(model, split, device=CPU, seed=SEED)
    norm = fresh.backbone.stem[1]
    with torch.no_grad():
        output = model.backbone.stem[0](split.images)
    assert torch.allclose(norm.running_mean, output.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(norm.running_var, output.var((0, 2, 3), unbiased=True), rtol=1e-4)


def test_every_layer_is_refreshed_and_nothing_else_changes() -> None:
    model = built()
    fresh = refreshed(model, made_up_split(20, seed=2), device=CPU, seed=SEED).state_dict()
    for name, tensor in model.state_dict().items():
        statistics = name.endswith(("running_mean", "running_var", "num_batches_tracked"))
        assert torch.equal(fresh[name], tensor) != statistics, name


@pytest.mark.parametrize("training", [True, False])
def test_the_model_itself_is_not_touched(training: bool) -> None:
    model = built().train(training)
    model.backbone.stem.train(not training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [(module.training, getattr(module, "momentum", None)) for module in model.modules()]
    fresh = refreshed(model, made_up_split(20, seed=2), device=CPU, seed=SEED)
    assert [(module.training, getattr(module, "momentum", None)) for module in model.modules()] == flags
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert fresh is not model
    assert not any(module.training for module in fresh.modules())
    assert {module.momentum for module in fresh.modules() if isinstance(module, nn.BatchNorm2d)} == {0.1}
    shared = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert shared.isdisjoint(tensor.data_ptr() for tensor in fresh.state_dict().values())


def test_a_refreshed_model_can_be_trained_and_its_statistics_then_move() -> None:
    fresh = refreshed(built(), made_up_split(20, seed=2), device=CPU, seed=SEED).train()
    before = fresh.backbone.stem[1].running_mean.clone()
    fresh(made_up_split(8, seed=3, shift=2.0).images).logits.sum().backward()
    assert not torch.equal(fresh.backbone.stem[1].running_mean, before)


def test_labels_are_not_used() -> None:
    split = made_up_split(20, seed=2)
    wrong = Split(split.images, torch.full_like(split.labels, -1), split.patients, split.ids)
    one, other = (refreshed(built(), each, device=CPU, seed=SEED).state_dict() for each in (split, wrong))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_model_without_batchnorm_gets_a_plain_copy() -> None:
    model = built(norm="group").eval()
    split = made_up_split(20, seed=2)
    fresh = refreshed(model, split, device=CPU, seed=SEED)
    with torch.no_grad():
        assert torch.equal(fresh(split.images).logits, model(split.images).logits)
    assert fresh is not model


def test_a_site_without_images_gets_a_plain_copy() -> None:
    model = built().eval()
    split = made_up_split(20, seed=2)
    fresh = refreshed(model, made_up_split(0, seed=2), device=CPU, seed=SEED)
    with torch.no_grad():
        assert torch.equal(fresh(split.images).logits, model(split.images).logits)


def test_a_single_image_does_not_break_the_refresh() -> None:
    """BatchNorm refuses one value per channel; a site with one image keeps the statistics or says so in plain words."""
    fresh = refreshed(built(), made_up_split(1, seed=2), device=CPU, seed=SEED)
    assert all(torch.isfinite(tensor).all() for tensor in fresh.state_dict().values())


def test_training_goes_on_from_the_received_statistics_and_not_from_the_refreshed_ones(tmp_path: Path) -> None:
    """Receiving (which refreshes a copy) before training changes nothing in the report."""
    method = create("fedavg")
    state = method.start(made_up_task(), method.build(made_up_task()))
    state.round_number = 1
    plain = made_up_participant(tmp_path / "plain").train(state.payload("alder"))
    site = made_up_participant(tmp_path / "received")
    site.receive(state.payload("alder"))
    report = site.train(state.payload("alder"))
    assert all(torch.equal(tensor, plain.update[name]) for name, tensor in report.update.items())


def test_result_and_history_have_both_figures(tmp_path: Path) -> None:
    result = simulate(made_up_cohort(), made_up_study(rounds=2), tmp_path / "run", jobs=1)
    for site in result["sites"].values():
        assert 0 <= site["accuracy"] <= 1
        assert 0 <= site["as_received"]["accuracy"] <= 1
    assert any(site["accuracy"] != site["as_received"]["accuracy"] for site in result["sites"].values())
    for entry in result["rounds"]:
        for facts in entry["sites"].values():
            assert 0 <= facts["val_accuracy"] <= 1
            assert 0 <= facts["val_accuracy_as_received"] <= 1


def test_both_figures_are_counted_with_the_right_model(tmp_path: Path) -> None:
    method = create("fedavg")
    state = method.start(made_up_task(), method.build(made_up_task()))
    state.round_number = 1
    site = made_up_participant(tmp_path)
    site.train(method.start(made_up_task(), method.build(made_up_task())).payload("alder"))
    tally = site.receive(state.payload("alder"))
    model = method.build(made_up_task()).eval()
    with torch.no_grad():
        answers = model(site.data.val.images).logits.argmax(1)
    assert tally["validation/n"].item() == len(site.data.val)
    assert tally[VALIDATION_AS_RECEIVED].item() == int((answers == site.data.val.labels).sum())
