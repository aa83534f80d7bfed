"""A hospital that did not train answers with what is shared, fitted to its own unlabelled images."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from made_up_sites import CLASSES, made_up_cohort, made_up_site, made_up_split, made_up_study

from crossward.federation.contract import Tensors
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.storage import read_tensors
from crossward.imaging.data import Split
from crossward.imaging.held_out import NO_CLASS, NamedScans
from crossward.site.adapt import adapt
from crossward.site.deployed import Deployed, deployed_models
from crossward.site.handover import Handover
from crossward.site.inprocess import simulate
from crossward.site.newcomer import halves, try_newcomer
from crossward.site.study import Study


@pytest.fixture(scope="module", params=["fedavg", "fedbn", "f2dc", "rfeddis"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("run")
    simulate(made_up_cohort(["alder", "birch"]), made_up_study(request.param, rounds=2), folder, jobs=1)
    return request.param, folder


def shared_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = read_tensors(folder / "server" / "checkpoint.safetensors")[0]
    return {name.removeprefix("*/"): tensor for name, tensor in tensors.items()}


def newcomer(study: Study, received: Tensors, images: Split, *, site: str) -> Deployed:
    return adapt(study, received, images, site=site).deployed


def test_it_works_from_the_servers_checkpoint_alone(finished: tuple[str, Path]) -> None:
    method, folder = finished
    study = made_up_study(method, rounds=2)
    data = made_up_site("cedar", number=2)
    model = newcomer(study, shared_of(folder), data.train, site="cedar")
    answer = model.answer(data.test)
    assert torch.allclose(answer.probabilities.sum(1), torch.ones(len(data.test)), atol=1e-5)
    state, shared = model.model.state_dict(), shared_of(folder)
    layout = layout_of(model.model)
    for name in names_in(layout, Scope.SHARED):
        assert torch.equal(state[name], shared[name]), name
    if "local" in answer.opinions:
        assert torch.equal(answer.opinions["local"].uncertainty, torch.ones(len(data.test)))
        assert torch.equal(answer.opinions["fused"].belief, answer.opinions["global"].belief)


def test_labels_are_not_looked_at(finished: tuple[str, Path]) -> None:
    method, folder = finished
    study = made_up_study(method, rounds=2)
    data = made_up_site("cedar", number=2)
    other = replace(data.train, labels=(data.train.labels + 1) % len(data.classes))
    answers = [
        newcomer(study, shared_of(folder), split, site="cedar").answer(data.test) for split in (data.train, other)
    ]
    assert torch.equal(answers[0].probabilities, answers[1].probabilities)


@pytest.mark.parametrize("finished", ["f2dc", "rfeddis"], indirect=True)
def test_what_a_site_keeps_does_not_matter(finished: tuple[str, Path]) -> None:
    """Whatever stands in the modules that never leave a site, a newcomer's answer is the same."""
    method, folder = finished
    study = made_up_study(method, rounds=2)
    data = made_up_site("cedar", number=2)
    model = newcomer(study, shared_of(folder), data.train, site="cedar")
    before = model.answer(data.test).probabilities
    parts = [part for part in (model.model.block, getattr(model.model.head, "local", None)) if part is not None]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    assert parameters
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(0.3)
    assert torch.equal(model.answer(data.test).probabilities, before)


def test_a_model_of_another_study_is_refused(finished: tuple[str, Path]) -> None:
    method, folder = finished
    data = made_up_site("cedar", number=2)
    shared = shared_of(folder)
    name = next(name for name in shared if name.endswith("weight"))
    with pytest.raises(BadInput, match="lacks"):
        newcomer(
            made_up_study(method),
            {key: value for key, value in shared.items() if key != name},
            data.train,
            site="cedar",
        )
    with pytest.raises(BadInput, match="another shape"):
        newcomer(made_up_study(method), {**shared, name: shared[name][:1]}, data.train, site="cedar")


def test_where_nothing_is_shared_there_is_no_model() -> None:
    data = made_up_site("cedar", number=2)
    with pytest.raises(BadInput, match="local shares no model"):
        newcomer(made_up_study("local"), {}, data.train, site="cedar")


def test_a_held_out_scanner_is_tried_as_a_newcomer_on_patients_that_did_not_fit_it(finished: tuple[str, Path]) -> None:
    method, folder = finished
    study = made_up_study(method, rounds=2)
    models = deployed_models(study, {site: folder / "sites" / site for site in ("alder", "birch")})
    data = made_up_site("cedar", number=2, test=18)
    patients = tuple(f"patient {row // 3}" for row in range(18))
    scans = NamedScans.of_classes(replace(data.test, patients=patients), data.classes)
    spoiled = NamedScans(replace(data.test, labels=torch.full((18,), NO_CLASS)), ("empty",) * 18)
    tried = try_newcomer(Handover(study, 2, shared_of(folder)), models, {"spoiled": spoiled, "unseen scanner": scans})
    assert tried is not None
    assert (tried["set"], tried["n_fitting"], tried["n_test"]) == ("unseen scanner", 9, 9)
    # Every patient has one scan of each class, so that the order of the hash alone decides.
    first = sorted(set(patients), key=lambda who: blake2b(f"{study.training.seed}/{who}".encode()).digest())[:3]
    rows = [row for row in range(18) if patients[row] not in first]
    fitting = [row for row in range(18) if patients[row] in first]

    def part(chosen: list[int]) -> Split:
        names = tuple(map(str, chosen))
        return Split(data.test.images[chosen], data.test.labels[chosen], names, names)

    new = newcomer(study, shared_of(folder), part(fitting), site="unseen scanner")
    assert tried["accuracy"] == pytest.approx(new.accuracy(part(rows)))
    assert tried["partners"] == {site: model.accuracy(part(rows)) for site, model in models.items()}


def test_both_halves_have_every_class_and_share_no_patient() -> None:
    """Labels that alternate, as in a labels.csv: taking every other patient would give halves of one class each."""
    split = made_up_split(24, seed=0, classes=2)
    assert split.labels.tolist() == [0, 1] * 12
    whole = replace(split, patients=tuple(f"patient {row % 8}" for row in range(24)))
    for seed in range(5):
        fitting, test = halves(whole, seed=seed)
        assert fitting.labels.bincount().tolist() == test.labels.bincount().tolist() == [6, 6]
        assert not set(fitting.patients) & set(test.patients)
        assert sorted(fitting.ids + test.ids) == sorted(split.ids)
    assert halves(whole, seed=0)[0].patients != halves(whole, seed=1)[0].patients


@pytest.mark.parametrize("finished", ["fedavg"], indirect=True)
@pytest.mark.parametrize(("patients", "tried"), [("aa", False), ("abc", False), ("aabb", True), ("abcd", True)])
def test_too_few_scans_make_no_newcomer(finished: tuple[str, Path], patients: str, tried: bool) -> None:
    """One scan to fit to, or none to test on, says nothing about a newcomer."""
    method, folder = finished
    study = made_up_study(method, rounds=2)
    models = deployed_models(study, {"alder": folder / "sites" / "alder"})
    split = made_up_split(len(patients), seed=0, classes=1)
    scans = NamedScans.of_classes(replace(split, patients=tuple(patients)), CLASSES)
    assert (try_newcomer(Handover(study, 2, shared_of(folder)), models, {"unseen scanner": scans}) is not None) is tried


def test_without_a_set_of_known_classes_no_newcomer_is_tried(finished: tuple[str, Path]) -> None:
    method, folder = finished
    study = made_up_study(method, rounds=2)
    models = deployed_models(study, {"alder": folder / "sites" / "alder"})
    assert try_newcomer(Handover(study, 2, shared_of(folder)), models, {}) is None
    assert try_newcomer(Handover(study, 2, {}), {}, {}) is None
