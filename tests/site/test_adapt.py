"""A new hospital fits a federation's model to its images, stage by stage and without a label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up_sites import made_up_cohort, made_up_site, made_up_study

from crossward.federation.errors import BadInput, SiteFailure
from crossward.federation.storage import write_tensors
from crossward.imaging.data import SiteData
from crossward.methods import create
from crossward.site.adapt import (
    ADAPTED,
    ADAPTED_OWN,
    AS_RECEIVED,
    OWN_STATISTICS,
    Adapted,
    adapt,
    read_adapted,
    write_adapted,
)
from crossward.site.handover import Handover, read_handover
from crossward.site.inprocess import simulate


@pytest.fixture(scope="module")
def newcomer() -> SiteData:
    return made_up_site("cedar", number=2, train=24, test=18)


@pytest.fixture(scope="module", params=["fdse"])
def handover(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Handover:
    folder = tmp_path_factory.mktemp("run")
    simulate(made_up_cohort(["alder", "birch"]), made_up_study(request.param, rounds=3), folder, jobs=1)
    return read_handover(folder)


def fitted(handover: Handover, newcomer: SiteData, **settings: float) -> Adapted:
    return adapt(handover.study, handover.tensors, newcomer.train, site="cedar", **settings)


def test_fdse_has_four_stages_and_deploys_the_adapted_one_with_its_own_statistics(
    handover: Handover, newcomer: SiteData
) -> None:
    result = fitted(handover, newcomer)
    assert list(result.stages) == [AS_RECEIVED, ADAPTED, OWN_STATISTICS, ADAPTED_OWN]
    assert result.deployed is result.stages[ADAPTED_OWN]
    assert len(result.losses) == 20


def test_only_the_skew_erasers_are_fitted(handover: Handover, newcomer: SiteData) -> None:
    result = fitted(handover, newcomer)
    parameters = {name: dict(stage.model.named_parameters()) for name, stage in result.stages.items()}
    moved = {
        name
        for name, parameter in parameters[ADAPTED_OWN].items()
        if not torch.equal(parameter, handover.tensors[name])
    }
    erasers = {name for name in parameters[ADAPTED_OWN] if ".dse." in name or ".norm_dse." in name}
    # One number per channel before BatchNorm has no effect on what comes after it, and so no gradient.
    assert moved <= erasers
    assert {name for name in erasers if name.endswith("norm_dse.bias")} <= moved
    for stage in (AS_RECEIVED, OWN_STATISTICS):
        assert all(torch.equal(value, handover.tensors[name]) for name, value in parameters[stage].items())
    for name, parameter in parameters[ADAPTED].items():
        assert torch.equal(parameter, parameters[ADAPTED_OWN][name])
        assert parameter.requires_grad


def test_the_federations_statistics_stay_unless_the_stage_has_its_own(handover: Handover, newcomer: SiteData) -> None:
    result = fitted(handover, newcomer)
    shared = [name for name in handover.tensors if name.endswith("norm_dfe.running_mean")]
    assert len(shared) == 12
    for name, stage in result.stages.items():
        buffers = stage.model.state_dict()
        kept = [torch.equal(buffers[buffer], handover.tensors[buffer]) for buffer in shared]
        assert all(kept) if name in (AS_RECEIVED, ADAPTED) else not any(kept), name
        # Those before the eraser never left a site: every stage has them from the hospital's images.
        assert buffers["backbone.stem.0.norm_dse.running_mean"].any()
        assert all(
            module.momentum == 0.1 for module in stage.model.modules() if isinstance(module, torch.nn.BatchNorm2d)
        )


def test_the_statistics_come_nearer_to_the_federations(handover: Handover, newcomer: SiteData) -> None:
    result = fitted(handover, newcomer, epochs=40)
    assert result.distance is not None
    before, after = result.distance
    assert after < 0.8 * before
    assert result.losses[-1] < result.losses[0]


def test_labels_are_not_looked_at_and_the_same_images_give_the_same_model(
    handover: Handover, newcomer: SiteData
) -> None:
    other = replace(newcomer.train, labels=(newcomer.train.labels + 1) % 3)
    one = fitted(handover, newcomer).deployed.model.state_dict()
    two = adapt(handover.study, handover.tensors, other, site="cedar").deployed.model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_was_handed_over_is_not_changed(handover: Handover, newcomer: SiteData) -> None:
    before = {name: tensor.clone() for name, tensor in handover.tensors.items()}
    fitted(handover, newcomer)
    assert all(torch.equal(handover.tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("handover", ["fedavg", "fedbn", "f2dc", "rfeddis", "fedcode"], indirect=True)
def test_other_methods_take_their_own_statistics_and_nothing_else(handover: Handover, newcomer: SiteData) -> None:
    result = fitted(handover, newcomer)
    shares_statistics = handover.study.method.name in ("fedavg", "f2dc", "fedcode")
    assert list(result.stages) == ([AS_RECEIVED] if shares_statistics else []) + [OWN_STATISTICS]
    assert result.losses == []
    assert result.distance is None
    assert 0 <= (result.deployed.accuracy(newcomer.test) or 0) <= 1


@pytest.mark.parametrize("handover", ["fdse", "fedbn", "f2dc", "rfeddis", "fedcode"], indirect=True)
def test_a_written_model_gives_the_same_answers_when_it_is_read(
    handover: Handover, newcomer: SiteData, tmp_path: Path
) -> None:
    result = fitted(handover, newcomer, epochs=1)
    write_adapted(tmp_path / "adapted", handover, result)
    again = read_adapted(tmp_path / "adapted", site="cedar")
    one, two = (model.answer(newcomer.test).probabilities for model in (result.deployed, again))
    assert torch.equal(one, two)
    write_tensors(tmp_path / "other", {"a": torch.zeros(1)}, {})
    with pytest.raises(BadInput, match="not an adapted model"):
        read_adapted(tmp_path / "other", site="cedar")


def test_without_batch_norm_there_are_no_statistics_to_speak_of(newcomer: SiteData) -> None:
    study = made_up_study("fdse")
    study = replace(study, task=replace(study.task, norm="group"))
    tensors = study.method.start(study.task, study.model()).tensors
    assert list(adapt(study, tensors, newcomer.train, site="cedar").stages) == [AS_RECEIVED]


def test_erasers_that_never_left_their_sites_cannot_be_handed_over(newcomer: SiteData) -> None:
    study = made_up_study(create("fdse", personal="local"))
    tensors = study.method.start(study.task, study.model()).tensors
    with pytest.raises(BadInput, match="keeps every skew eraser at its site"):
        adapt(study, tensors, newcomer.train, site="cedar")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_is_none_is_refused(handover: Handover, newcomer: SiteData, rate: float) -> None:
    with pytest.raises(BadInput, match="learning rate"):
        fitted(handover, newcomer, learning_rate=rate)


def test_one_image_is_too_few(handover: Handover, newcomer: SiteData) -> None:
    with pytest.raises(BadInput, match=r"cedar: 1 image\(s\)"):
        adapt(handover.study, handover.tensors, newcomer.train.rows([0]), site="cedar")


def test_a_loss_that_is_no_number_stops_it_with_words(handover: Handover, newcomer: SiteData) -> None:
    with pytest.raises(SiteFailure, match="label-free loss is not a finite number"):
        fitted(handover, newcomer, learning_rate=1e30)
