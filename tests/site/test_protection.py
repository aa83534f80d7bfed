"""A site's private side of a run: prices, the ledger, noisy counts, and the wiring into a round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from tests.site.made_up_sites import (
    CPU,
    cohort_of,
    made_up_cohort,
    made_up_site,
    made_up_study,
    made_up_training,
    tensors_on_disk,
)

from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, VALIDATION_CORRECT, VALIDATION_COUNT, Payload
from crossward.federation.errors import BadInput, PrivacyRefusal
from crossward.imaging.data import SiteData
from crossward.methods.registry import available
from crossward.privacy.dp.accounting import Budget, Spending, epsilon
from crossward.privacy.dp.ledger import BudgetSpent
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.settings import Settings
from crossward.site.inprocess import Event, simulate
from crossward.site.participant import Participant
from crossward.site.protection import LedgerRefused, NotPrivate, own_book
from crossward.site.record_protection import prices_of
from crossward.site.study import Study

NAME = "alder"


def private_study(method: Any = "fedavg", *, rounds: int = 2, dp: Privacy | None = None, **training: Any) -> Study:
    return made_up_study(method, rounds=rounds, **training).private(dp or Privacy(epsilon=8.0))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Participant]:
    def make(
        study: Study, *, data: SiteData | None = None, budget: Budget | None = None, run: str = "run"
    ) -> Participant:
        book = replace(own_book(tmp_path / "state", site=NAME, run=run), budget=budget)
        return study.participant(data or made_up_site(NAME), tmp_path / run, device=CPU, book=book)

    return make


def start(study: Study) -> Payload:
    return Payload(0, study.method.start(study.task, study.model()).tensors)


# settings and prices


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon": 1.0, "noise": 1.0},
        {"epsilon": 0.0},
        {"epsilon": math.nan},
        {"noise": math.inf},
        {"epsilon": 1.0, "delta": 0.0},
        {"epsilon": 1.0, "delta": 0.5},
        {"epsilon": 1.0, "clip": 0.0},
        {"epsilon": 1.0, "unit": "hospital"},
        {"epsilon": 1.0, "releases": 1.0},
    ],
)
def test_settings_that_protect_nobody_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Privacy(**options)


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("asked", [1.0, 4.0])
def test_the_planned_rounds_together_just_fit_into_epsilon(asked: float, releases: bool) -> None:
    dp = Privacy(epsilon=asked)
    prices = prices_of(dp, made_up_training(epochs=2, batch_size=16), units=200, rounds=5, releases=releases)
    assert (prices.rate, prices.steps) == (0.08, 26)
    spent = [Spending(prices.step, prices.rate, 5 * prices.steps)]
    if releases:
        assert prices.release is not None
        spent.append(Spending(prices.release, 1.0, 5))
        assert epsilon(spent[1:], delta=dp.delta) <= dp.releases * asked
    assert 0.97 * asked < epsilon(spent, delta=dp.delta) <= asked
    assert 0.97 * asked < epsilon([Spending(prices.validation, 1.0, 5, part="val")], delta=dp.delta) <= asked
    assert 0.97 * asked < epsilon([Spending(prices.test, 1.0, 1, part="test")], delta=dp.delta) <= asked


def test_a_study_demands_group_normalisation_and_the_methods_private_form() -> None:
    study = made_up_study("fdse")
    with pytest.raises(BadInput, match="GroupNorm"):
        replace(study, privacy=Privacy(epsilon=1.0))
    with pytest.raises(BadInput, match="job export --dp"):
        replace(study, privacy=Privacy(epsilon=1.0), task=replace(study.task, norm="group"))
    private = study.private(Privacy(epsilon=1.0))
    assert private.task.norm == "group"
    assert Study.from_options(private.options()) == private
    assert private.digest() != study.digest()
    assert private.trained_digest() != replace(private, privacy=Privacy(epsilon=2.0)).trained_digest()


# a round


def test_a_round_is_paid_for_before_it_is_trained_and_its_report_tells_no_counts(made: Any) -> None:
    study = private_study()
    site = made(study)
    report = site.train(start(study))
    assert report.tally[SAMPLES].item() == site.protection.units == 20
    assert [report.tally[key].item() for key in (LOSS, SEEN, CORRECT)] == [0, 0, 0]
    prices = site.protection.prices
    (entry,) = site.protection._book.ledger.entries()
    assert (entry.what, entry.round, entry.spending) == ("steps", 1, Spending(prices.step, prices.rate, prices.steps))
    assert site.protection.spent() == pytest.approx(epsilon([entry.spending], delta=1e-5))
    # Given again from the outbox, and not paid for again.
    assert site.train(start(study)).update.keys() == report.update.keys()
    assert len(site.protection._book.ledger.entries()) == 1


def test_two_trainings_of_one_round_differ_though_the_seed_is_the_same(made: Any) -> None:
    study = private_study()
    one, other = (made(study, run=run).train(start(study)).update for run in ("one", "two"))
    largest = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert largest > 1e-3


@pytest.mark.parametrize("method", sorted(set(available()) - {"local"}))
def test_every_method_trains_under_it_and_its_noise_is_in_every_tensor_that_leaves(made: Any, method: str) -> None:
    """Without an image's gradient there would still be noise: a tensor without it would leave as it is."""
    study = private_study(method, dp=Privacy(noise=1.0))
    site = made(study)
    report = site.train(start(study))
    site.algebra.check(report)
    for name, spec in site.algebra.layout.items():
        if spec.scope.leaves and name in dict(site._model.named_parameters()):
            assert report.update[name].abs().min() > 0, name
    entries = site.protection._book.ledger.entries()
    assert [entry.what for entry in entries] == (["steps", "release"] if site.algebra.extras else ["steps"])


def test_the_noise_of_a_step_is_sigma_times_the_clip_over_the_expected_batch(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clip so small that images do not matter, updates are the noise that was drawn, times the rate."""
    clip, sigma = 1e-6, 3.0
    study = private_study(
        dp=Privacy(noise=sigma, clip=clip), steps=1, momentum=0.0, weight_decay=0.0, learning_rate=1.0, batch_size=10
    )
    update = made(study).train(start(study)).update
    values = torch.cat([tensor.reshape(-1) for tensor in update.values()]).double()
    # Adding to weights of size 1 rounds to about 1e-7: only tensors that begin at zero show it exactly.
    biases = torch.cat([update[name].reshape(-1) for name, tensor in start(study).tensors.items() if not tensor.any()])
    assert len(biases) > 50
    expected = sigma * clip / 10
    assert float(biases.double().std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(biases)))
    assert float(values.abs().max()) < 20 * expected + 1e-6


def test_a_batch_larger_than_a_site_takes_everybody_and_is_divided_by_as_many(made: Any) -> None:
    """Clips so small that every image adds as much: the update is a mean over patients, whatever the batch size."""
    data = made_up_site(NAME)
    data = replace(data, train=replace(data.train, patients=tuple(f"p{row // 4}" for row in range(20))))
    options: dict[str, Any] = {"steps": 1, "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 1.0}
    sizes = []
    for batch in (8, 80):
        study = private_study(dp=Privacy(noise=0.01, clip=1e-3), batch_size=batch, **options)
        site = made(study, data=data, run=f"run-{batch}")
        assert (site.protection.units, site.protection.prices.rate, site.protection.prices.steps) == (5, 1.0, 1)
        update = site.train(start(study)).update
        sizes.append(math.hypot(*(float(tensor.norm()) for tensor in update.values())))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.5)
    assert 1e-4 < max(sizes) < 1.1e-3


def test_a_step_that_draws_nobody_is_noise_alone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseSource, "uniform", lambda self, count: np.ones(count) * (1 - 1e-12))
    study = private_study()
    report = made(study).train(start(study))
    assert all(torch.isfinite(tensor).all() for tensor in report.update.values())
    assert any(float(tensor.abs().max()) > 0 for tensor in report.update.values())


def test_chances_of_a_step_come_from_no_known_seed(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2DC's masks go by place in the batch: under a known seed one patient fewer would move all images after it."""
    seeds: list[int] = []
    real = torch.Generator.manual_seed

    class Noted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds.append(seed)
            return real(self, seed)

    monkeypatch.setattr(torch, "Generator", Noted)
    study = private_study("f2dc", steps=3)
    for run in ("one", "two"):
        made(study, run=run).train(start(study))
    assert len(set(seeds[-6:])) == 6


def test_a_loss_that_couples_images_is_refused_before_anything_is_spent(made: Any) -> None:
    study = private_study("fedavg")
    site = made(study)
    site.method.__class__.coupled = frozenset({"cross_entropy"})
    try:
        with pytest.raises(NotPrivate, match="depends on all images"):
            site.train(start(study))
    finally:
        site.method.__class__.coupled = frozenset()
    assert not site.protection._book.ledger.entries()


def poisoned(row: int) -> SiteData:
    """A site one of whose training images has no gradient."""
    data = made_up_site(NAME)
    images = data.train.images[:].clone()
    images[row] = math.nan
    return replace(data, train=replace(data.train, images=images))


def test_one_image_cannot_end_a_round(made: Any, tmp_path: Path) -> None:
    """That a site stops is seen by everybody, whatever the noise; how many images count as nothing stays there."""
    study = private_study(dp=Privacy(noise=1.0), steps=4, batch_size=10**6)
    report = made(study, data=poisoned(0)).train(start(study))
    assert all(torch.isfinite(tensor).all() for tensor in report.update.values())
    notes = [json.loads(line) for line in (tmp_path / "run" / "left-out.jsonl").read_text().splitlines()]
    assert [(note["round"], note["drawn"], note["left_out"]) for note in notes] == [(1, 80, notes[0]["left_out"])]
    # A step takes one image of each of the 20 patients.
    assert 0 < notes[0]["left_out"] <= 4
    made(study, run="whole").train(start(study))
    (note,) = [json.loads(line) for line in (tmp_path / "whole" / "left-out.jsonl").read_text().splitlines()]
    assert note["left_out"] == 0
    assert oct((tmp_path / "run" / "left-out.jsonl").stat().st_mode & 0o777) == "0o600"


def test_a_model_that_mixes_images_is_refused_before_anything_is_spent(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = private_study("fedavg")
    site = made(study)
    terms = type(study.method).terms

    def mixing(self: Any, model: Any, trace: Any, batch: Any, context: Any) -> Any:
        found = terms(self, model, trace, batch, context)
        return {name: term * (1 + trace.logits.sum()) for name, term in found.items()}

    monkeypatch.setattr(type(study.method), "terms", mixing)
    with pytest.raises(NotPrivate, match="mixes images"):
        site.train(start(study))
    assert not site.protection._book.ledger.entries()


@pytest.mark.parametrize("how", ["a term of its own", "a ramp that leaves zero"])
def test_what_mixes_images_from_the_second_round_on_is_refused_there(
    made: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Prototypes are there from the second round on, and ramps begin at zero."""
    study = private_study("fedavg", rounds=3)
    site = made(study)
    terms = type(study.method).terms

    def later(self: Any, model: Any, trace: Any, batch: Any, context: Any) -> Any:
        found = terms(self, model, trace, batch, context)
        begun, mixed = float(context.round_number > 1), trace.logits * trace.logits.mean()
        if begun or how == "a ramp that leaves zero":
            found["contrast"] = begun * mixed.sum(dim=1)
        return found

    monkeypatch.setattr(type(study.method), "terms", later)
    report = site.train(start(study))
    second = Payload(1, {name: tensor + report.update[name] for name, tensor in start(study).tensors.items()})
    with pytest.raises(NotPrivate, match="mixes images"):
        site.train(second)
    assert [entry.round for entry in site.protection._book.ledger.entries()] == [1]


# budgets


def test_a_round_beyond_the_runs_epsilon_is_refused_with_what_is_left(made: Any) -> None:
    study = private_study(rounds=1)
    site = made(study)
    report = site.train(start(study))
    later = Payload(1, {name: tensor + report.update[name] for name, tensor in start(study).tensors.items()})
    with pytest.raises(BudgetSpent) as refused:
        site.train(later)
    assert refused.value.left == pytest.approx(8.0 - site.protection.spent())
    assert len(site.protection._book.ledger.entries()) == 1


def test_all_runs_on_the_same_images_share_the_sites_budget(made: Any) -> None:
    study = private_study(rounds=1, dp=Privacy(epsilon=4.0))
    budget = Budget(5.0, 1e-5)
    made(study, budget=budget, run="one").train(start(study))
    with pytest.raises(BudgetSpent) as refused:
        made(study, budget=budget, run="two").train(start(study))
    assert refused.value.left == pytest.approx(5.0 - refused.value.spent)
    assert refused.value.asked > 5.0


def test_a_ledger_that_was_cut_ends_the_run(made: Any, tmp_path: Path) -> None:
    study = private_study()
    site = made(study)
    report = site.train(start(study))
    (path,) = (tmp_path / "state" / "ledger").glob("*.jsonl")
    path.write_bytes(b"")
    later = Payload(1, {name: tensor + report.update[name] for name, tensor in start(study).tensors.items()})
    with pytest.raises(LedgerRefused):
        site.train(later)


def test_without_a_ledger_there_is_no_participant(tmp_path: Path) -> None:
    with pytest.raises(PrivacyRefusal, match="ledger"):
        private_study().participant(made_up_site(NAME), tmp_path, device=CPU)


# counts


def test_validation_counts_patients_with_noise_once_for_a_model(made: Any) -> None:
    study = private_study()
    data = made_up_site(NAME, val=12)
    data = replace(data, val=replace(data.val, patients=tuple(f"p{row // 3}" for row in range(12))))
    site = made(study, data=data)
    payload = Payload(1, start(study).tensors)
    first = site.receive(payload)
    assert first[VALIDATION_COUNT].item() == 4
    assert 0 <= first[VALIDATION_CORRECT].item() <= 4
    again = site.receive(payload)
    assert {key: value.item() for key, value in again.items()} == {key: value.item() for key, value in first.items()}
    (entry,) = site.protection._book.ledger.entries()
    assert (entry.what, entry.spending.part, entry.spending.rate) == ("val counts", "val", 1.0)


def test_a_patient_counts_once_whatever_the_number_of_images(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseSource, "add_to", lambda self, tensors, *, scale: None)
    data = made_up_site(NAME, test=10)
    data = replace(data, test=replace(data.test, patients=("many",) * 9 + ("one",)))
    site = made(private_study(dp=Privacy(noise=1.0)), data=data)
    right = torch.tensor([True] * 9 + [False])
    assert site.protection.counted("test", data.test, right, 1) == (2.0, pytest.approx(1.0))
    assert site.protection.counted("test", data.test, ~right, 1) == (2.0, pytest.approx(1.0))


def test_images_can_be_the_unit_and_a_report_says_so(made: Any) -> None:
    data = made_up_site(NAME)
    data = replace(data, train=replace(data.train, patients=tuple(f"p{row // 2}" for row in range(20))))
    patients, images = (
        made(private_study(dp=Privacy(noise=1.0, unit=unit)), data=data, run=unit).protection
        for unit in ("patient", "image")
    )
    assert (patients.units, images.units) == (10, 20)
    assert patients.prices.rate == 2 * images.prices.rate


# whole runs


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return lambda study, cohort, name="run", **options: simulate(cohort, study, tmp_path / name, jobs=1, **options)


def test_a_whole_run_says_what_every_site_spent(runs: Any, tmp_path: Path) -> None:
    study = private_study(rounds=2)
    result = runs(study, made_up_cohort())
    assert result["privacy"]["dp"]["epsilon"] == 8.0
    for site, spent in result["privacy"]["epsilon"].items():
        assert 7.5 < spent <= 8.0, site
    assert all(entry["loss"] is None for each in result["rounds"] for entry in each["sites"].values())
    json.dumps(result, allow_nan=False)


def test_with_secure_aggregation_too(runs: Any) -> None:
    names = ("alder", "birch", "cedar", "dogwood")
    cohort = cohort_of({name: made_up_site(name, number=number) for number, name in enumerate(names)})
    result = runs(private_study(rounds=1).masked(Settings()), cohort)
    assert result["privacy"]["secagg"] is True
    assert result["privacy"]["test"]["n"] == 36
    assert all(7.5 < spent <= 8.0 for spent in result["privacy"]["epsilon"].values())


def test_a_restart_between_rounds_costs_nothing(runs: Any, tmp_path: Path) -> None:
    study, cohort = private_study(rounds=3), made_up_cohort()

    class Stop(Exception):
        pass

    def stop(event: Any) -> None:
        if event.kind == "aggregated" and event.round_number == 2:
            raise Stop

    with pytest.raises(Stop):
        runs(study, cohort, "stopped", listen=stop)
    resumed = runs(study, cohort, "stopped", resume=True)
    whole = runs(study, cohort, "whole")
    assert resumed["privacy"]["epsilon"] == whole["privacy"]["epsilon"]
    assert tensors_on_disk(tmp_path / "stopped").keys() == tensors_on_disk(tmp_path / "whole").keys()


def test_thirty_rounds_with_a_restart_cost_what_an_undisturbed_run_does_and_what_another_library_says(
    tmp_path: Path,
) -> None:
    study, cohort = private_study(rounds=30, dp=Privacy(epsilon=4.0)), made_up_cohort(("alder", "birch"))

    def stop(event: Event) -> None:
        if event.kind == "aggregated" and event.round_number == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(cohort, study, tmp_path / "restarted", jobs=1, listen=stop)
    runs = [
        simulate(cohort, study, tmp_path / folder, resume=resume, jobs=1)
        for folder, resume in (("restarted", True), ("undisturbed", False))
    ]
    spent = [run["privacy"]["epsilon"] for run in runs]
    assert spent[0] == spent[1]
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    ledger = own_book(tmp_path / "restarted" / "sites" / NAME, site=NAME, run="run").ledger
    steps = [each.spending for each in ledger.entries() if each.what == "steps"]
    assert len(steps) == 30
    for each in steps:
        accountant.compose(PoissonSampledDpEvent(each.rate, GaussianDpEvent(each.noise)), each.steps)
    by_steps = epsilon(steps, delta=1e-5)
    assert by_steps == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert 3.9 < by_steps <= spent[0][NAME] <= 4.0
