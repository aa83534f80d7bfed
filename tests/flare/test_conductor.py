from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from crossward.evaluate.facts import read_result
from crossward.federation import coordinator as coordinators
from crossward.federation.scopes import Scope, names_in, tensors_digest
from crossward.federation.storage import read_json, read_tensors
from crossward.flare import controller as controllers
from crossward.flare import names
from crossward.flare.controller import FederationController
from crossward.methods import registry
from crossward.site.declaration import Declaration
from crossward.site.inprocess import simulate
from crossward.site.messages import EVALUATE, FINISH, JOIN, SCORES, TRAIN
from crossward.site.runfolder import hold
from crossward.site.study import Study
from crossward.site.troubles import Code
from tests.flare.fakes import JOB, Attentive, Federation, Message, SiteThread, closing, small_disk, wait_until
from tests.site.made_up_sites import SITES, made_up_study, same_bits
from tests.site.packs import cohort_in, fill, write_packs

ALDER, BIRCH, CEDAR = SITES
QUICK = SimpleNamespace(join=60, round=60, grace=2.0)
"""Nothing waits so long where all goes well; on a busy machine a site that does its part may need some of it."""
SECOND_JOB = "66666666-2222-3333-4444-555555555555"
FATAL = EventType.FATAL_SYSTEM_ERROR


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(controllers, "LOCK_PATIENCE", 0.0)
    for variable in (names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data")


@pytest.fixture(scope="module")
def in_process(packs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Study], tuple[dict[str, Any], Path]]:
    """The same study run by function calls, once for each."""
    known: dict[str, tuple[dict[str, Any], Path]] = {}

    def run(study: Study) -> tuple[dict[str, Any], Path]:
        if study.digest() not in known:
            folder = tmp_path_factory.mktemp("in-process") / "run"
            known[study.digest()] = simulate(cohort_in(packs), study, folder, jobs=1), folder
        return known[study.digest()]

    return run


@dataclass
class Ended:
    """What a job left behind."""

    federation: Federation
    kit: Path
    state: Path
    job: str
    run: str

    @property
    def outcome(self) -> dict[str, Any]:
        return read_json(self.kit / self.job / "crossward" / "outcome.json")

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.kit / self.job / "crossward" / "result.json")

    @property
    def folder(self) -> Path:
        return self.state / "runs" / self.run

    @property
    def checkpoint(self) -> dict[str, torch.Tensor]:
        return read_tensors(self.folder / "checkpoint.safetensors")[0]

    @property
    def panics(self) -> list[str]:
        return [data for event, data in self.federation.engine.events if event == FATAL]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.outcome["events"] if event["kind"] == kind]


class Bench:
    """A server and three sites whose state outlives jobs."""

    def __init__(self, folder: Path, packs: Path) -> None:
        self.folder = folder
        self.packs = packs
        self.kit = folder / "kit"
        self.state = folder / "server"

    def run(
        self,
        study: Study,
        *,
        job: str = JOB,
        resume: str = "",
        options: dict[str, Any] | None = None,
        timing: Any = QUICK,
        before: Callable[[Federation], None] = lambda federation: None,
        sites: dict[str, dict[str, Any]] | None = None,
    ) -> Ended:
        controller = FederationController(
            study.options() if options is None else options, {"join": 9, "round": 9, "grace": 9}, resume
        )
        controller._timing = timing
        members = {
            name: SiteThread(name, study, self.packs, self.folder / "sites", **(sites or {}).get(name, {}))
            for name in SITES
        }
        federation = Federation(controller, members, self.kit, properties={"state_root": str(self.state)}, job=job)
        with closing(members), federation:
            before(federation)
            controller.control_flow(federation.abort, federation.fl_ctx)
        return Ended(federation, self.kit, self.state, job, resume or job)

    def deployed(self, site: str, run: str = JOB) -> dict[str, torch.Tensor]:
        return read_tensors(self.folder / "sites" / site / "runs" / run / "vault" / "deployed.safetensors")[0]


@pytest.fixture
def bench(tmp_path: Path, packs: Path) -> Bench:
    return Bench(tmp_path, packs)


def in_round(number: int, *tasks: str) -> Callable[[str, Message], Any]:
    """A site that hangs over these tasks of a round, and does its part otherwise."""

    def interfere(task: str, message: Message) -> Any:
        return None if message["round"] == number and task in tasks else NotImplemented

    return interfere


def refusing(number: int, code: Code, *tasks: str) -> Callable[[str, Message], Any]:
    """A site that cannot do these tasks of a round."""

    def interfere(task: str, message: Message) -> Any:
        refuses = message["round"] == number and task in tasks
        return {"code": int(code), "numbers": {}} if refuses else NotImplemented

    return interfere


def scored(table: dict[int, float]) -> Callable[[str, Message, Message], Message]:
    """Counts on validation images as the test wants them, by the round of the model."""

    def amend(task: str, message: Message, answer: Message) -> Message:
        if "validation" in answer:
            correct = np.array([table[message["model_round"]]])
            answer["validation"] = {**answer["validation"], "validation/correct": correct}
        return answer

    return amend


def assert_same_as_in_process(ended: Ended, bench: Bench, expected: tuple[dict[str, Any], Path]) -> None:
    result, folder = expected
    assert ended.outcome["status"] == "completed"
    assert same_bits(ended.checkpoint, read_tensors(folder / "server" / "checkpoint.safetensors")[0])
    for site in SITES:
        there = read_tensors(folder / "sites" / site / "vault" / "deployed.safetensors")[0]
        assert same_bits(bench.deployed(site, ended.run), there)
    assert ended.outcome["best_round"] == result["best_round"]
    facts = ended.result
    for name in ("accuracy", "balanced_accuracy", "auc", "n_train", "n_val", "n_test", "accuracy_interval"):
        assert {site: facts["sites"][site][name] for site in SITES} == {
            site: result["sites"][site][name] for site in SITES
        }
    assert facts["summary"] == result["summary"]
    for one, other in zip(facts["rounds"], result["rounds"], strict=True):
        for site in SITES:
            for figure in ("status", "loss", "train_accuracy", "val_accuracy", "val_accuracy_as_received"):
                assert one["sites"][site].get(figure) == other["sites"][site].get(figure), (one["round"], site, figure)


@pytest.mark.parametrize(("method", "participation"), [("fedavg", 1.0), ("fedbn", 1.0), ("fedbn", 0.5)])
def test_the_same_model_as_in_process(bench: Bench, in_process: Any, method: str, participation: float) -> None:
    study = made_up_study(method, rounds=3, participation=participation)
    ended = bench.run(study)
    assert_same_as_in_process(ended, bench, in_process(study))
    outcome = ended.outcome
    assert (outcome["status"], outcome["run"], outcome["round"], outcome["rounds"]) == ("completed", JOB, 3, 3)
    assert (outcome["code"], outcome["numbers"], outcome["site"], outcome["troubles"]) == (None, {}, None, [])
    assert outcome["resumable"] is False
    assert ended.panics == []
    assert [event["figures"]["reported"] for event in ended.events("closed")] == [
        event["figures"]["invited"] for event in ended.events("round")
    ]
    assert read_result(ended.folder / "result.json") == ended.result


def test_events_tell_the_run_as_it_went(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=2)
    ended = bench.run(study)
    events = ended.outcome["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    kinds = [event["kind"] for event in events]
    assert kinds == [
        "started", *["joined"] * 3, "round", *["trained"] * 3, "closed", "round", *["trained"] * 3, "aggregated",
        "closed", "aggregated", "finished", "ended",
    ]  # fmt: skip
    (started,) = ended.events("started")
    assert started["figures"] == {"run": JOB, "sites": list(SITES), "rounds": 2, "resumed_after": None}
    weights = sum(4 * spec.numel for spec in Declaration(study).algebra.sent.values())
    for closed in ended.events("closed"):
        assert (closed["figures"]["bytes_up"], closed["figures"]["bytes_down"]) == (3 * weights, 3 * weights)
    first, second = ended.events("aggregated")
    assert (first["round"], second["round"]) == (1, 2)
    assert first["figures"]["sites"].keys() == set(SITES)
    kept = [json.loads(line) for line in (ended.folder / "events.jsonl").read_text().splitlines()]
    assert [event["seq"] for event in kept] == list(range(1, len(kept) + 1))


def test_every_site_gets_its_own_personal_tensors_and_nobody_elses(
    bench: Bench, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._METHODS, "attentive", Attentive)
    study = made_up_study("attentive", rounds=3)
    ended = bench.run(study)
    assert_same_as_in_process(ended, bench, in_process(study))
    head = "head.linear.weight"
    last = {site: ended.federation.sent(site, EVALUATE)[-1]["tensors"][head] for site in SITES}
    for site in SITES:
        assert np.array_equal(last[site], ended.checkpoint[f"{site}/{head}"].numpy())
    assert not np.array_equal(last[ALDER], last[BIRCH])
    assert not np.array_equal(last[BIRCH], last[CEDAR])


def test_a_round_goes_on_without_a_site_that_does_not_answer_and_takes_it_back(bench: Bench) -> None:
    study = made_up_study("fedbn", rounds=3, quorum=2)
    ended = bench.run(study, sites={CEDAR: {"interfere": in_round(2, TRAIN)}})
    outcome = ended.outcome
    assert outcome["status"] == "completed"
    assert [event["figures"]["reported"] for event in ended.events("closed")] == [
        list(SITES),
        [ALDER, BIRCH],
        list(SITES),
    ]
    assert [(event["site"], event["round"]) for event in ended.events("absent")] == [(CEDAR, 2)]
    assert [(event["site"], event["round"]) for event in ended.events("back")] == [(CEDAR, 3)]
    (trouble,) = outcome["troubles"]
    waited = trouble.pop("numbers")["seconds"]
    assert trouble == {"site": CEDAR, "round": 2, "task": TRAIN, "code": 40}
    assert QUICK.grace <= waited < QUICK.round
    statuses = [entry["sites"][CEDAR]["status"] for entry in ended.result["rounds"]]
    assert statuses == ["reported", "absent", "reported"]
    assert ended.result["sites"][CEDAR]["accuracy"] is not None


def test_without_a_quorum_the_run_stops_and_resumed_equals_an_undisturbed_one(bench: Bench, in_process: Any) -> None:
    study = made_up_study("fedbn", rounds=3)
    first = bench.run(study, sites={CEDAR: {"interfere": refusing(2, Code.MEMORY, TRAIN)}})
    outcome = first.outcome
    assert (outcome["status"], outcome["code"], outcome["resumable"]) == ("failed", int(Code.QUORUM), True)
    assert outcome["numbers"] == {"reports": 2.0, "needed": 3.0}
    assert (outcome["round"], outcome["best_round"]) == (1, None)
    assert len(first.panics) == 1
    assert first.panics[0].startswith("code 42: only 2 of the 3 reports")
    assert int(read_tensors(first.folder / "checkpoint.safetensors")[1]["round"]) == 1
    assert not (bench.kit / JOB / "crossward" / "result.json").exists()

    second = bench.run(study, job=SECOND_JOB, resume=JOB)
    assert second.outcome["status"] == "completed"
    assert second.outcome["run"] == JOB
    (started,) = second.events("started")
    assert started["figures"]["resumed_after"] == 1
    assert_same_as_in_process(second, bench, in_process(study))
    # Those who had trained the round already answer from their outbox.
    jobs = [json.loads(line)["kind"] for line in (second.folder / "events.jsonl").read_text().splitlines()]
    assert jobs.count("started") == 2


def test_a_run_that_was_finished_but_for_the_end_can_be_resumed(bench: Bench, in_process: Any) -> None:
    study = made_up_study("fedavg", rounds=2)
    full = {"interfere": lambda task, message: {"code": 30, "numbers": {}} if task == FINISH else NotImplemented}
    first = bench.run(study, sites=dict.fromkeys(SITES, full))
    assert (first.outcome["status"], first.outcome["code"]) == ("failed", int(Code.DISK_FULL))
    assert first.outcome["site"] in SITES
    assert (first.outcome["round"], first.outcome["resumable"]) == (2, True)
    second = bench.run(study, job=SECOND_JOB, resume=JOB)
    assert_same_as_in_process(second, bench, in_process(study))


def test_a_site_that_missed_the_best_round_gets_its_model_at_the_end(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=3, quorum=2)
    table = scored({1: 9.0, 2: 1.0, 3: 2.0})
    sites = {site: {"amend": table} for site in SITES}
    sites[CEDAR]["interfere"] = in_round(2, TRAIN)
    ended = bench.run(study, sites=sites)
    assert ended.outcome["best_round"] == 1
    (asked,) = ended.federation.sent(CEDAR, FINISH)
    assert (asked["round"], asked["model_round"], asked["best_round"]) == (1, 1, 1)
    for site in (ALDER, BIRCH):
        (told,) = ended.federation.sent(site, FINISH)
        assert "tensors" not in told
    handed_out = ended.federation.sent(ALDER, TRAIN)[1]
    assert handed_out["model_round"] == 1
    assert asked["tensors"].keys() == handed_out["tensors"].keys()
    assert all(np.array_equal(asked["tensors"][name], array) for name, array in handed_out["tensors"].items())
    assert ended.result["sites"][CEDAR]["accuracy"] is not None
    assert bench.deployed(CEDAR)


def test_ties_and_scores_choose_the_round_that_the_sites_deploy(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=3)
    table = scored({1: 2.0, 2: 8.0, 3: 5.0})
    ended = bench.run(study, sites={site: {"amend": table} for site in SITES})
    assert ended.outcome["best_round"] == 2
    assert [event["figures"]["val_accuracy"] for event in ended.events("aggregated")] == [0.2, 0.8, 0.5]
    assert {message["round"] for site in SITES for message in ended.federation.sent(site, FINISH)} == {2}


def test_a_site_that_cannot_join_ends_a_new_run_with_its_own_code(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=2)
    refuse = {"interfere": lambda task, message: {"code": 25, "numbers": {"sites": 3.0, "needed": 4.0}}}
    ended = bench.run(study, sites={BIRCH: refuse})
    outcome = ended.outcome
    assert (outcome["status"], outcome["code"], outcome["site"]) == ("failed", int(Code.SMALL_SUMS), BIRCH)
    assert outcome["numbers"] == {"sites": 3.0, "needed": 4.0}
    assert outcome["resumable"] is True
    assert outcome["troubles"] == [
        {"site": BIRCH, "round": 0, "task": JOIN, "code": 25, "numbers": {"sites": 3.0, "needed": 4.0}}
    ]
    assert [event["site"] for event in ended.events("refused")] == [BIRCH]
    assert sorted(event["site"] for event in ended.events("joined")) == [ALDER, CEDAR]
    assert ended.events("round") == []
    assert len(ended.panics) == 1


def test_a_hundredfold_update_ends_the_job_and_names_its_site(bench: Bench) -> None:
    def amend(task: str, message: Message, answer: Message) -> Message:
        if task == TRAIN and message["round"] == 4:
            return {**answer, "update": {name: 100 * value for name, value in answer["update"].items()}}
        return answer

    ended = bench.run(made_up_study("fedavg", schedule="constant"), sites={BIRCH: {"amend": amend}})
    outcome = ended.outcome
    assert (outcome["status"], outcome["code"], outcome["site"]) == ("failed", int(Code.OUTLIER), BIRCH)
    assert (outcome["numbers"]["round"], outcome["numbers"]["most"]) == (4.0, 5.0)
    assert outcome["numbers"]["times"] > 5
    assert outcome["round"] == 3
    assert int(read_tensors(ended.folder / "checkpoint.safetensors")[1]["round"]) == 3
    assert ended.panics[0].startswith("code 54: round 4: the sites' updates together are ")


def test_a_round_to_infinity_ends_the_job_with_a_word(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome is there, and says what it was; nothing of the round is kept."""
    monkeypatch.setattr(coordinators, "moved", lambda layout, before, after: math.inf if after.round_number == 4 else 1)
    ended = bench.run(made_up_study("fedavg", schedule="constant"))
    outcome = ended.outcome
    assert (outcome["status"], outcome["code"], outcome["site"]) == ("failed", int(Code.DIVERGED), None)
    assert (outcome["round"], outcome["numbers"]) == (3, {})
    assert int(read_tensors(ended.folder / "checkpoint.safetensors")[1]["round"]) == 3
    assert ended.panics[0].startswith("code 20: training diverged: the loss or the model is not finite any more")


def test_a_site_that_does_not_answer_the_first_task_is_named(bench: Bench) -> None:
    hang = {"interfere": lambda task, message: None}
    ended = bench.run(made_up_study("fedavg"), sites={BIRCH: hang}, timing=SimpleNamespace(join=1, round=20, grace=0.3))
    outcome = ended.outcome
    assert (outcome["code"], outcome["site"]) == (int(Code.NO_ANSWER), BIRCH)
    assert 1.0 <= outcome["numbers"]["seconds"] < QUICK.join
    assert outcome["round"] == 0


def test_a_resumed_run_starts_with_a_quorum(bench: Bench) -> None:
    study = made_up_study("fedbn", rounds=3, quorum=2)
    stop = {site: {"interfere": refusing(2, Code.MEMORY, TRAIN)} for site in (ALDER, BIRCH)}
    assert bench.run(study, sites=stop).outcome["code"] == int(Code.QUORUM)
    busy = {"interfere": lambda task, message: {"code": 17, "numbers": {}} if task == JOIN else NotImplemented}
    second = bench.run(study, job=SECOND_JOB, resume=JOB, sites={CEDAR: busy})
    assert second.outcome["status"] == "completed"
    assert [(event["site"], event["figures"]["code"]) for event in second.events("refused")] == [(CEDAR, 17)]
    assert [event["figures"]["reported"] for event in second.events("closed")][-1] == list(SITES)
    assert CEDAR in [event["site"] for event in second.events("back")]


def test_a_site_that_fails_in_a_round_is_in_the_record_with_its_code(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=2, quorum=2)

    def diverge(task: str, message: Message) -> Any:
        return {"code": 20, "numbers": {}} if task == TRAIN and message["round"] == 1 else NotImplemented

    ended = bench.run(study, sites={BIRCH: {"interfere": diverge}})
    assert ended.outcome["status"] == "completed"
    facts = ended.result["rounds"][0]["sites"][BIRCH]
    assert (facts["status"], facts["code"]) == ("failed", 20)
    assert "training diverged" in facts["reason"]
    (failed,) = ended.events("failed")
    assert (failed["site"], failed["round"], failed["figures"]["code"]) == (BIRCH, 1, 20)


def planted(answer: Message) -> Message:
    study = made_up_study("fedbn")
    layout = Declaration(study).algebra.layout
    name = names_in(layout, Scope.LOCAL)[0]
    return {**answer, "update": {**answer["update"], name: np.zeros(layout[name].shape, np.float32)}}


def of_another_model(answer: Message) -> Message:
    return {**answer, "model": tensors_digest({"w": torch.zeros(1)})}


def of_another_round(answer: Message) -> Message:
    return {**answer, "round": answer["round"] + 1}


def not_finite(answer: Message) -> Message:
    return {**answer, "tally": {**answer["tally"], "n": np.array([np.nan])}}


def with_more_images_than_there_are(answer: Message) -> Message:
    return {**answer, "tally": {**answer["tally"], "n": np.array([1e308])}}


def with_less_than_an_image(answer: Message) -> Message:
    """With which its mean loss would be no number."""
    counts = {"train/loss": np.array([1e308]), "train/seen": np.array([1e-9])}
    return {**answer, "tally": {**answer["tally"], **counts}}


def with_more_right_than_images(answer: Message) -> Message:
    count = np.array([9.0])
    counts = {"validation/n": count, "validation/correct": count + 1, "validation/as_received": count}
    return {**answer, "validation": counts}


def with_an_empty_number(answer: Message) -> Message:
    return {"code": int(Code.SMALL_SUMS), "numbers": {"sites": None}}


@pytest.mark.parametrize(
    "spoil",
    [
        planted,
        of_another_model,
        of_another_round,
        not_finite,
        with_more_images_than_there_are,
        with_less_than_an_image,
        with_more_right_than_images,
        with_an_empty_number,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_the_server_uses_no_answer_that_is_not_what_was_declared(bench: Bench, in_process: Any, spoil: Any) -> None:
    """Whatever a site's gate let through: the server holds it against the same list."""
    study = made_up_study("fedbn", rounds=1, quorum=2)

    def amend(task: str, message: Message, answer: Message) -> Message:
        return spoil(answer) if task == TRAIN else answer

    ended = bench.run(study, sites={CEDAR: {"amend": amend}})
    (failed,) = ended.events("failed")
    assert failed["site"] == CEDAR
    assert failed["figures"]["code"] in (int(Code.NOT_DECLARED), int(Code.SMALL_SUMS))
    (closed,) = ended.events("closed")
    assert closed["figures"]["reported"] == [ALDER, BIRCH]
    assert not same_bits(ended.checkpoint, read_tensors(in_process(study)[1] / "server" / "checkpoint.safetensors")[0])


def test_sites_that_publish_nothing_have_no_scores_and_say_why(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=1, quorum=2)
    sites: dict[str, dict[str, Any]] = {
        ALDER: {"publish_scores": False},
        BIRCH: {"interfere": lambda task, message: None if task == FINISH else NotImplemented},
    }
    ended = bench.run(study, sites=sites)
    assert ended.outcome["status"] == "completed"
    facts = ended.result["sites"]
    assert facts[ALDER]["undefined"]["accuracy"] == "kept by the site's policy"
    assert facts[BIRCH]["undefined"]["accuracy"] == "the site did not finish; outcome.json says why"
    for site in (ALDER, BIRCH):
        assert {facts[site][name] for name in ("accuracy", "balanced_accuracy", "auc", "n_train", "n_test")} == {None}
        assert facts[site]["as_received"]["accuracy"] is None
    assert facts[CEDAR]["n_test"] == 10
    assert facts[CEDAR]["accuracy"] is not None
    summary = ended.result["summary"]
    assert summary["left_out"] == [ALDER, BIRCH]
    assert summary["avg"] == facts[CEDAR]["accuracy"]
    assert sorted(ended.events("finished")[0]["figures"]["sites"]) == [ALDER, CEDAR]
    # What the site keeps to itself is still in its own result.
    own = read_json(bench.folder / "sites" / ALDER / "runs" / JOB / "result.json")
    assert own["accuracy"] is not None
    assert set(SCORES[:3]) <= own.keys()


def test_a_run_in_which_nobody_publishes_still_has_a_result(bench: Bench) -> None:
    sites = {site: {"publish_scores": False} for site in SITES}
    ended = bench.run(made_up_study("fedavg", rounds=1), sites=sites)
    assert ended.outcome["status"] == "completed"
    assert ended.result["summary"]["avg"] is None


def test_an_abort_is_an_outcome_of_its_own_and_no_panic(bench: Bench, in_process: Any) -> None:
    study = made_up_study("fedavg", rounds=3)

    def before(federation: Federation) -> None:
        def abort() -> None:
            wait_until(lambda: len(federation.sent(ALDER, TRAIN)) > 1)
            federation.abort.trigger(True)

        threading.Thread(target=abort).start()

    hanging = {"interfere": in_round(2, TRAIN)}
    ended = bench.run(study, sites={CEDAR: hanging}, before=before)
    outcome = ended.outcome
    assert (outcome["status"], outcome["code"], outcome["resumable"]) == ("aborted", 47, True)
    assert outcome["round"] == 1
    assert ended.panics == []
    second = bench.run(study, job=SECOND_JOB, resume=JOB)
    assert_same_as_in_process(second, bench, in_process(study))


def test_a_full_disk_at_the_server_keeps_finished_rounds_and_resumed_equals_an_undisturbed_run(
    bench: Bench, in_process: Any, tmp_path: Path
) -> None:
    study = made_up_study("fedbn", rounds=3)
    with small_disk(tmp_path / "disk") as disk:
        bench.state = disk / "server"

        def fill_in_round_2(task: str, message: Message) -> Any:
            if task == TRAIN and message["round"] == 2:
                fill(disk / "ballast")
            return NotImplemented

        first = bench.run(study, sites={BIRCH: {"interfere": fill_in_round_2}})
        outcome = first.outcome
        assert (outcome["status"], outcome["code"], outcome["resumable"]) == ("failed", 43, True)
        assert outcome["round"] == 1
        assert int(read_tensors(first.folder / "checkpoint.safetensors")[1]["round"]) == 1
        assert len(first.panics) == 1
        (disk / "ballast").unlink()
        second = bench.run(study, job=SECOND_JOB, resume=JOB)
        assert_same_as_in_process(second, bench, in_process(study))


def test_a_full_disk_for_reports_on_their_way_is_the_servers_trouble(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that waits for all reports spools them: a site must not be blamed for the server's disk."""
    monkeypatch.setitem(registry._METHODS, "attentive", Attentive)
    with small_disk(tmp_path / "disk") as disk:
        bench.state = disk / "server"

        def fill_while_training(task: str, message: Message) -> Any:
            if task == TRAIN:
                fill(disk / "ballast")
            return NotImplemented

        ended = bench.run(made_up_study("attentive", rounds=1), sites={ALDER: {"interfere": fill_while_training}})
        assert ended.outcome["code"] == int(Code.SERVER_DISK_FULL)
        assert ended.outcome["site"] is None


def test_where_not_even_the_outcome_can_be_written_flare_is_told(bench: Bench, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        bench.state, bench.kit = disk / "server", disk / "kit"
        bench.kit.mkdir()
        federations: list[Federation] = []

        def before(federation: Federation) -> None:
            federations.append(federation)
            fill(disk / "ballast")

        raised = True
        with suppress(Exception):
            bench.run(made_up_study("fedavg", rounds=1), before=before)
            raised = False
        panics = [event for event, _ in federations[0].engine.events if event == FATAL]
        assert raised or panics


def test_a_run_that_is_not_there_cannot_be_resumed(bench: Bench) -> None:
    ended = bench.run(made_up_study("fedavg"), resume="gone")
    outcome = ended.outcome
    assert (outcome["status"], outcome["code"], outcome["resumable"]) == ("failed", int(Code.NOT_RESUMABLE), False)
    assert outcome["run"] == "gone"
    assert not (bench.state / "runs" / "gone").exists()
    assert len(ended.panics) == 1


def test_a_run_of_another_study_cannot_be_resumed(bench: Bench) -> None:
    bench.run(made_up_study("fedavg", rounds=1))
    ended = bench.run(made_up_study("fedavg", rounds=2), job=SECOND_JOB, resume=JOB)
    assert ended.outcome["code"] == int(Code.NOT_RESUMABLE)


@pytest.mark.parametrize("name", ["../other", "../../other", ".", "a/../../other"])
def test_a_run_to_resume_is_a_name_and_not_a_way(bench: Bench, name: str) -> None:
    """A job's argument decides which folder of the server is taken: it must be one of the runs'."""
    study = made_up_study("fedavg", rounds=1)
    (bench.state / "runs" / "a").mkdir(parents=True)
    place = (bench.state / "runs" / name).resolve()
    place.mkdir(parents=True, exist_ok=True)
    description = {"options": study.options(), "sites": list(SITES)}
    (place / "run.json").write_text(json.dumps(description))
    before = sorted(place.iterdir())
    ended = bench.run(study, resume=name)
    assert ended.outcome["code"] == int(Code.NOT_RESUMABLE)
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**made_up_study().options(), "method": "gone"},
        {**made_up_study().options(), "participation": 7},
        {**made_up_study().options(), "task": {}},
        {**made_up_study().options(), "task": "task"},
        {**made_up_study().options(), "task": {**made_up_study().options()["task"], "rounds": "three"}},
    ],
    ids=["empty", "method", "participation", "no task", "task of words", "rounds in words"],
)
def test_a_study_that_cannot_be_understood_is_said_in_the_outcome_too(bench: Bench, options: dict[str, Any]) -> None:
    ended = bench.run(made_up_study(), options=options)
    outcome = ended.outcome
    assert (outcome["status"], outcome["code"], outcome["resumable"]) == ("failed", int(Code.STUDY), False)
    assert len(ended.panics) == 1


def test_a_run_that_another_job_is_busy_with_can_be_resumed_later(bench: Bench) -> None:
    study = made_up_study("fedavg", rounds=1)
    first = bench.run(study)
    lock = hold(first.folder / ".lock")
    try:
        ended = bench.run(study, job=SECOND_JOB, resume=JOB)
    finally:
        os.close(lock)
    outcome = ended.outcome
    assert outcome["status"] == "failed"
    assert outcome["code"] != int(Code.STUDY)
    assert outcome["resumable"] is True


def test_an_unforeseen_error_is_an_outcome_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(controllers, "Conductor", fail)
    ended = bench.run(made_up_study())
    assert (ended.outcome["code"], ended.outcome["resumable"]) == (int(Code.SERVER_INTERNAL), True)


def test_a_running_job_answers_how_far_it_is(bench: Bench) -> None:
    seen: list[dict[str, Any]] = []
    federations: list[Federation] = []

    def look(task: str, message: Message) -> Any:
        federation = federations[0]
        collector = GroupInfoCollector()
        context = federation.engine.new_context()
        context.put(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
        federation.controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, context)
        seen.append(collector.info["crossward"])
        return NotImplemented

    bench.run(made_up_study("fedavg", rounds=2), sites={ALDER: {"interfere": look}}, before=federations.append)
    assert [(each["status"], each["round"]) for each in seen] == [
        ("starting", 0),
        ("running", 0),
        ("running", 1),
        ("running", 2),
        ("running", 2),
    ]
    assert {(each["run"], each["rounds"]) for each in seen} == {(JOB, 2)}


def test_a_controller_that_has_not_begun_has_nothing_to_say(bench: Bench) -> None:
    controller = FederationController(made_up_study().options(), {"join": 1, "round": 1, "grace": 1})
    collector = GroupInfoCollector()
    context = Federation(controller, {}, bench.kit).engine.new_context()
    context.put(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
    controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, context)
    assert collector.info == {}
