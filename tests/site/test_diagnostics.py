from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_sites import CLASSES, CPU, SITES, cohort_of, made_up_cohort, made_up_site, made_up_split, made_up_study
from torch import Tensor, nn

from crossward.evaluate.facts import finite
from crossward.imaging.data import Cohort, SiteData, Split
from crossward.methods.base import FeatureBlock, Model, Prediction, SoftmaxHead, Trace
from crossward.methods.f2dc import DecouplingBlock
from crossward.methods.registry import create
from crossward.nets import Backbone
from crossward.site.deployed import Deployed, deployed_models
from crossward.site.diagnostics import diagnose
from crossward.site.inprocess import simulate
from crossward.site.study import Study


def untrained(cohort: Cohort, study: Study) -> dict[str, Deployed]:
    return {name: Deployed(name, study.model(), study.method, CPU) for name in cohort.sites}


def part_of(split: Split, rows: list[int]) -> Split:
    names = tuple(f"{row}" for row in rows)
    return Split(split.images[rows], split.labels[rows], names, names)


class Plain(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Identity()
        self.stages = nn.ModuleList([nn.Identity()])


class Scores(nn.Module):
    """A decoupler that keeps the first channel and nothing else."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.tensor([50.0, -50.0, -50.0])[None, :, None, None].expand_as(features)


class Tripled(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return -3 * features


def two_class_layer(first: float, second: float, bias: float) -> nn.Linear:
    """Says class 1 where first * f_0 + second * f_1 + bias is above zero."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0.0, 0.0], [first, second, 0.0]]))
        layer.bias.copy_(torch.tensor([0.0, bias]))
    return layer


def plain_split(values: list[tuple[float, float]], labels: list[int]) -> Split:
    images = torch.zeros(len(values), 3, 8, 8)
    images[:, :2] = torch.tensor(values)[:, :, None, None]
    names = tuple(map(str, range(len(values))))
    return Split(images, torch.tensor(labels), names, names)


def one_site(test: Split, *, channels: int = 1) -> Cohort:
    empty = part_of(test, [])
    site = SiteData("alder", CLASSES, empty, empty, test, "scanner")
    return Cohort({"alder": site}, CLASSES, "pack", channels, 8, True, "made up", ())


@pytest.mark.parametrize("method", ["fedavg", "f2dc", "rfeddis"])
def test_a_run_has_all_that_fits_its_method(method: str, tmp_path: Path) -> None:
    cohort, study = made_up_cohort(), made_up_study(method, rounds=1)
    simulate(cohort, study, tmp_path, jobs=1)
    models = deployed_models(study, {name: tmp_path / "sites" / name for name in SITES})
    facts, pictures = diagnose(cohort, study, models, seed=0)
    assert json.loads(json.dumps(finite(facts), allow_nan=False)) == facts
    assert facts["left_out"] == {}
    assert facts["collapse"]["images"] == 27
    assert list(facts["collapse"]["sites"]) == list(SITES)
    spaces = ["encoder", "global head", "local head"] if method == "rfeddis" else ["encoder"]
    assert list(facts["map"]["spaces"]) == spaces
    assert all(np.array(space["points"]).shape == (27, 2) for space in facts["map"]["spaces"].values())
    assert facts["map"]["site_of"] == [0] * 9 + [1] * 9 + [2] * 9
    assert facts["map"]["labels"] == [0, 1, 2] * 9
    assert (facts["masks"] is not None) == (method == "f2dc")
    assert [entry["site"] for entry in facts["gradcam"]] == [name for name in SITES for _ in range(2)]
    assert [entry["truth"] for entry in facts["gradcam"]] == ["clear", "nodule"] * 3
    assert {entry[key] for entry in facts["gradcam"] for key in ("picture", "overlay")} == set(pictures)
    assert all(picture.dtype == np.uint8 and picture.shape[:2] == (8, 8) for picture in pictures.values())
    again, _ = diagnose(cohort, study, models, seed=0)
    assert {**again, "seconds": 0} == {**facts, "seconds": 0}


def test_the_figures_are_those_of_the_deployed_models(tmp_path: Path) -> None:
    cohort, study = made_up_cohort(), made_up_study("f2dc", rounds=1)
    result = simulate(cohort, study, tmp_path, jobs=1)
    models = deployed_models(study, {name: tmp_path / "sites" / name for name in SITES})
    facts, _ = diagnose(cohort, study, models, seed=0)
    for name in SITES:
        assert facts["masks"]["sites"][name]["head"]["fused"] == pytest.approx(result["sites"][name]["accuracy"])
        answer = models[name].answer(cohort.sites[name].test)
        assert facts["noise"]["sites"][name]["mean_clean"] == pytest.approx(float(answer.uncertainty.mean()))
        first = next(entry for entry in facts["gradcam"] if entry["site"] == name)
        assert first["predicted"] == CLASSES[int(answer.probabilities[0].argmax())]
        features = [models[name].answer(site.test).features.double() for site in cohort.sites.values()]
        largest = np.linalg.eigvalsh(np.cov(torch.cat(features).numpy(), rowvar=False))[-1]
        assert facts["collapse"]["sites"][name]["largest"] == pytest.approx(largest, rel=1e-6)


def test_accuracy_of_the_masked_parts_by_hand() -> None:
    """f+ is the first channel, f- the second, f* = f- - 3 f- = -2 f-.

    Labels 0 1 0 1, channels (0, 2, 0, 2) and (1, 1, 1, 0). h says 1 where f_0 - f_1 > 0.5:
    f+ gives 0 1 0 1, f- never, f* where 2 f_1 > 0.5: 1 1 1 0, f~ where f_0 + 2 f_1 > 0.5: always.
    m says 1 where f_1 - f_0 > 0.5: f+ never, f- 1 1 1 0, f* never.
    """
    block = DecouplingBlock([3], 2, stages=(1,))
    block.decouplers["0"], block.correctors["0"] = Scores(), Tripled()
    block.classifiers["0"] = two_class_layer(-1.0, 1.0, -0.5)
    head = SoftmaxHead(3, 2)
    head.linear = two_class_layer(1.0, -1.0, -0.5)
    model = Model(Plain(), block, head)
    cohort = one_site(plain_split([(0, 1), (2, 1), (0, 1), (2, 0)], [0, 1, 0, 1]), channels=3)
    deployed = Deployed("alder", model, create("f2dc"), CPU)
    facts, _ = diagnose(cohort, made_up_study("f2dc"), {"alder": deployed}, seed=0)
    site = facts["masks"]["sites"]["alder"]
    assert site["head"] == {"robust": 1.0, "related": 0.5, "corrected": 0.25, "fused": 0.5}
    assert site["auxiliary"] == {"robust": 0.5, "related": 0.25, "corrected": 0.5, "fused": None}
    assert site["kept"] == pytest.approx(4 / 7)
    assert (site["n"], site["stage"]) == (4, 1)


def test_parts_of_an_earlier_stage_have_no_accuracy_by_the_main_head() -> None:
    cohort, study = made_up_cohort(("alder",)), made_up_study(create("f2dc", stages=[2]))
    facts, _ = diagnose(cohort, study, untrained(cohort, study), seed=0)
    site = facts["masks"]["sites"]["alder"]
    assert site["stage"] == 2
    assert [site["head"][part] for part in ("robust", "related", "corrected")] == [None] * 3
    assert site["head"]["fused"] is not None
    assert all(site["auxiliary"][part] is not None for part in ("robust", "related", "corrected"))


def test_a_block_that_was_left_out_has_no_masks() -> None:
    cohort, study = made_up_cohort(("alder",)), made_up_study("f2dc")
    models = untrained(cohort, study)
    models["alder"].model.forget_local()
    assert diagnose(cohort, study, models, seed=0)[0]["masks"] is None


class Pixels(Backbone):
    """A backbone whose features are the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (64, 1, 1)))
        self.stages = nn.ModuleList([nn.Identity()])


class Spread(SoftmaxHead):
    """Uncertain by how far an image's pixels are spread; sure of class 0 always."""

    def predict(self, trace: Trace) -> Prediction:
        sure = torch.tensor([[1.0, 0.0, 0.0]]).expand(len(trace.pooled), 3)
        return Prediction(sure, trace.pooled.std(dim=1) / 3, trace.pooled)


def test_the_noise_is_as_strong_as_said_and_raises_what_measures_it() -> None:
    split = replace(made_up_split(60, seed=0), images=torch.full((60, 1, 8, 8), 0.5))
    model = Model(Pixels(), FeatureBlock(), Spread(64, 3))  # type: ignore[arg-type]
    deployed = Deployed("alder", model, create("fedavg"), CPU)
    facts, _ = diagnose(one_site(split), made_up_study(), {"alder": deployed}, seed=0)
    noise = facts["noise"]["sites"]["alder"]
    assert noise["noise_auc"] == 1.0
    assert noise["mean_clean"] == 0.0
    assert 3 * noise["mean_noised"] == pytest.approx(facts["noise"]["sigma"], rel=0.03)
    assert noise["clean"][0] == 1.0
    assert noise["error_auc"] == 0.5


def test_sites_that_cannot_be_looked_into_are_named_and_the_others_go_on() -> None:
    sites = {name: made_up_site(name, number=index) for index, name in enumerate(SITES)}
    sites["birch"] = replace(sites["birch"], test=part_of(sites["birch"].test, []))
    cohort, study = cohort_of(sites), made_up_study("rfeddis")
    models = untrained(cohort, study)
    del models["cedar"]
    facts, _ = diagnose(cohort, study, models, seed=0)
    assert facts["left_out"] == {"birch": "no test images", "cedar": "no deployed model"}
    assert list(facts["noise"]["sites"]) == ["alder"]
    assert facts["map"]["sites"] == ["alder"]
    assert facts["map"]["spaces"]["encoder"]["silhouette_site"] is None
    assert "silhouette_site" in facts["map"]["spaces"]["encoder"]["undefined"]
    # A model is looked into with everybody's images, so that a site without its own has a spectrum, too.
    assert list(facts["collapse"]["sites"]) == ["alder", "birch"]
    assert facts["collapse"]["images"] == 18


@pytest.mark.parametrize("method", ["fedavg", "f2dc", "rfeddis"])
@pytest.mark.parametrize("rows", [[], [0], [0, 3], [0, 1]], ids=["none", "one", "two of one class", "two"])
def test_hardly_any_images_give_reasons_and_no_error(method: str, rows: list[int]) -> None:
    cohort, study = one_site(part_of(made_up_split(9, seed=0), rows)), made_up_study(method)
    facts, pictures = diagnose(cohort, study, untrained(cohort, study), seed=0)
    finite(facts)
    assert all(space["points"] is None and space["undefined"]["points"] for space in facts["map"]["spaces"].values())
    assert len(pictures) == 2 * len(set(made_up_split(9, seed=0).labels[rows].tolist()))


def test_nobody_there_gives_empty_parts() -> None:
    cohort, study = cohort_of({}), made_up_study()
    facts, pictures = diagnose(cohort, study, {}, seed=0)
    finite(facts)
    assert pictures == {}
    assert facts["gradcam"] == []
    assert facts["masks"] is None


def test_a_model_that_diverged_is_left_out_with_the_reason() -> None:
    cohort, study = made_up_cohort(), made_up_study("f2dc")
    models = untrained(cohort, study)
    with torch.no_grad():
        next(models["birch"].model.parameters()).fill_(float("nan"))
    facts, _ = diagnose(cohort, study, models, seed=0)
    finite(facts)
    assert list(facts["left_out"]) == ["birch"]
    assert "not finite" in facts["left_out"]["birch"]
    assert "finite" in facts["collapse"]["sites"]["birch"]["undefined"]["effective_rank"]


def test_many_images_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossward.site.diagnostics.LARGEST_MAP", 12)
    monkeypatch.setattr("crossward.site.diagnostics.LARGEST_COVARIANCE", 15)
    cohort, study = made_up_cohort(), made_up_study()
    facts, _ = diagnose(cohort, study, untrained(cohort, study), seed=0)
    assert facts["map"]["site_of"] == [0] * 4 + [1] * 4 + [2] * 4
    assert facts["collapse"]["images"] == 15


@pytest.mark.parametrize("method", ["fedavg", "f2dc", "rfeddis"])
def test_a_site_reads_each_of_its_own_test_images_once(method: str) -> None:
    cohort, study = made_up_cohort(), made_up_study(method)
    models = untrained(cohort, study)
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_inference_mode_enabled():  # and not for Grad-CAM, which needs gradients
            seen.extend(inputs[0])

    models["alder"].model.register_forward_pre_hook(keep)
    diagnose(cohort, study, models, seed=0)
    for place, site in cohort.sites.items():
        assert [sum(torch.equal(image, other) for other in seen) for image in site.test.images] == [1] * 9, place
    # The images of the three sites, and the noised ones of its own.
    assert len(seen) == 4 * 9


def test_nothing_names_a_patient() -> None:
    secret = "MRN-4711"
    split = made_up_split(9, seed=0)
    split = replace(split, ids=tuple(f"{secret}-{row}" for row in range(9)), patients=(secret,) * 9)
    cohort, study = one_site(split), made_up_study("rfeddis")
    facts, pictures = diagnose(cohort, study, untrained(cohort, study), seed=0)
    assert secret not in json.dumps(facts) + " ".join(pictures)


def test_the_models_are_not_changed() -> None:
    cohort, study = made_up_cohort(("alder",)), made_up_study("f2dc")
    models = untrained(cohort, study)
    before = {name: tensor.clone() for name, tensor in models["alder"].model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    diagnose(cohort, study, models, seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in models["alder"].model.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in models["alder"].model.parameters())
