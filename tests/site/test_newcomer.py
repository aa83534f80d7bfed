"""A hospital that did not train answers with what is shared, fitted to its own unlabelled images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up_sites import made_up_cohort, made_up_site, made_up_study

from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.storage import read_tensors
from crossward.imaging.data import Split
from crossward.imaging.held_out import NO_CLASS, NamedScans
from crossward.site.deployed import deployed_models
from crossward.site.inprocess import simulate
from crossward.site.newcomer import newcomer, try_newcomer


@pytest.fixture(scope="module", params=["fedavg", "fedbn", "f2dc", "rfeddis"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("run")
    simulate(made_up_cohort(["alder", "birch"]), made_up_study(request.param, rounds=2), folder, jobs=1)
    return request.param, folder


def shared_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = read_tensors(folder / "server" / "checkpoint.safetensors")[0]
    return {name.removeprefix("*/"): tensor for name, tensor in tensors.items()}


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


def test_what_a_site_keeps_does_not_matter(finished: tuple[str, Path]) -> None:
    """Whatever stands in the modules that never leave a site, a newcomer's answer is the same."""
    method, folder = finished
    study = made_up_study(method, rounds=2)
    data = made_up_site("cedar", number=2)
    model = newcomer(study, shared_of(folder), data.train, site="cedar")
    before = model.answer(data.test).probabilities
    parts = [part for part in (model.model.block, getattr(model.model.head, "local", None)) if part is not None]
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
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
    tried = try_newcomer(study, models, {"spoiled": spoiled, "unseen scanner": scans})
    assert tried is not None
    assert (tried["set"], tried["n_fitting"], tried["n_test"]) == ("unseen scanner", 9, 9)
    rows = [row for row in range(18) if (row // 3) % 2 == 1]
    fitting = [row for row in range(18) if (row // 3) % 2 == 0]

    def part(chosen: list[int]) -> Split:
        names = tuple(map(str, chosen))
        return Split(data.test.images[chosen], data.test.labels[chosen], names, names)

    new = newcomer(study, models["birch"].model.state_dict(), part(fitting), site="unseen scanner")
    assert tried["accuracy"] == pytest.approx(new.accuracy(part(rows)))
    assert tried["partners"] == {site: model.accuracy(part(rows)) for site, model in models.items()}


def test_without_a_set_of_known_classes_no_newcomer_is_tried(finished: tuple[str, Path]) -> None:
    method, folder = finished
    study = made_up_study(method, rounds=2)
    models = deployed_models(study, {"alder": folder / "sites" / "alder"})
    assert try_newcomer(study, models, {}) is None
    assert try_newcomer(study, {}, {}) is None
