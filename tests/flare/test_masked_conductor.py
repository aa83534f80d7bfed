"""Secure aggregation over FLARE's tasks, with sites that are threads: the in-process run's model, and lost sites."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossward.evaluate.facts import read_result
from crossward.federation.contract import Payload, Report
from crossward.federation.storage import read_json, read_tensors
from crossward.flare import controller as controllers
from crossward.flare import names
from crossward.flare.controller import FederationController
from crossward.privacy.secagg.settings import Settings
from crossward.site.inprocess import simulate
from crossward.site.messages import CONTRIBUTE, JOIN, SURVIVORS, TRAIN, Message
from crossward.site.participant import Participant
from crossward.site.release import Credentials
from crossward.site.study import Study
from crossward.site.troubles import Code
from tests.flare.fakes import JOB, Federation, SiteThread, closing, workspace_in
from tests.site.liars import lying, rubbish
from tests.site.made_up_sites import made_up_study, same_bits
from tests.site.masked import authority, identity
from tests.site.packs import cohort_in, write_packs
from tests.standins import counted_trainings

NAMES = ("alder", "birch", "cedar", "dogwood", "elm")
LAST = NAMES[-1]
QUICK = SimpleNamespace(join=60, round=60, grace=2, step=1)
SECOND_JOB = "66666666-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(controllers, "LOCK_PATIENCE", 0.0)
    monkeypatch.setattr("crossward.flare.conductor.gc.collect", lambda: 0)
    for variable in (names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data", NAMES)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    return counted_trainings(monkeypatch)


def masked_study(*, rounds: int = 2, quorum: int | None = 3) -> Study:
    return made_up_study("fedavg", rounds=rounds, quorum=quorum).masked(Settings())


class Bench:
    """A server and five sites whose state outlives jobs."""

    def __init__(self, folder: Path, packs: Path) -> None:
        self.folder, self.packs, self.kit = folder, packs, folder / "kit"
        startup = Path(workspace_in(self.kit, "server").get_startup_kit_dir())
        startup.mkdir(parents=True, exist_ok=True)
        (startup / names.ROOT).write_bytes(authority().roots)
        self.sites: dict[str, SiteThread] = {}

    def run(
        self,
        study: Study,
        *,
        job: str = JOB,
        resume: str = "",
        interfere: Callable[[str, str, Message], Any] = lambda site, task, message: NotImplemented,
        **policy: Any,
    ) -> Federation:
        timing = {"join": 9, "round": 9, "grace": 9, "step": 9}
        controller = FederationController(study.options(), timing, resume)
        controller._timing = QUICK

        def site_of(name: str) -> SiteThread:
            return SiteThread(
                name,
                study,
                self.packs,
                self.folder / "sites",
                interfere=lambda task, message: interfere(name, task, message),
                job=job,
                credentials=lambda: Credentials(identity(name), authority().roots),
                **policy,
            )

        self.sites = {name: site_of(name) for name in NAMES}
        properties = {"state_root": str(self.folder / "server")}
        federation = Federation(controller, self.sites, self.kit, properties=properties, job=job)
        with closing(self.sites), federation:
            controller.control_flow(federation.abort, federation.fl_ctx)
        return federation

    def outcome(self, job: str = JOB) -> dict[str, Any]:
        return read_json(self.kit / job / "crossward" / "outcome.json")

    def result(self, job: str = JOB) -> dict[str, Any]:
        return read_result(self.kit / job / "crossward" / "result.json")

    @property
    def checkpoint(self) -> dict[str, torch.Tensor]:
        return read_tensors(self.folder / "server" / "runs" / JOB / "checkpoint.safetensors")[0]


@pytest.fixture
def bench(tmp_path: Path, packs: Path) -> Bench:
    return Bench(tmp_path, packs)


@pytest.fixture(scope="module")
def in_process(packs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("in-process") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        return simulate(cohort_in(packs), masked_study(), folder, jobs=1), folder


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers_in(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers_in(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_same_model_as_in_process_and_no_number_of_a_single_site(
    bench: Bench, in_process: tuple[dict[str, Any], Path]
) -> None:
    federation = bench.run(masked_study())
    expected, folder = in_process
    assert bench.outcome()["status"] == "completed"
    assert same_bits(bench.checkpoint, read_tensors(folder / "server" / "checkpoint.safetensors")[0])
    for name in NAMES:
        deployed = Path("vault") / "deployed.safetensors"
        there = read_tensors(folder / "sites" / name / deployed)[0]
        assert same_bits(read_tensors(bench.folder / "sites" / name / "runs" / JOB / deployed)[0], there)
    result = bench.result()
    assert result["best_round"] == expected["best_round"]
    assert result["privacy"]["test"] == expected["privacy"]["test"]
    assert result["privacy"]["differences"] == expected["privacy"]["differences"]
    assert [entry["sums"] for entry in result["rounds"]] == [entry["sums"] for entry in expected["rounds"]]
    # What stands under a site's name: who took part, and counts that are not known.
    assert numbers_in([entry["sites"] for entry in result["rounds"]]) == []
    assert {number for name in NAMES for number in numbers_in(result["sites"][name])} == {0}
    about_one = [event for event in bench.outcome()["events"] if event["site"]]
    assert all(set(event["figures"]) <= {"loss", "seconds"} and not event["figures"].get("loss") for event in about_one)
    # All sites agreed once.
    assert len([each for each in federation.exchanges if each.task == JOIN]) == len(NAMES)


@pytest.mark.parametrize("step", [CONTRIBUTE, SURVIVORS])
def test_a_site_that_hangs_over_a_step_is_done_without_and_is_back_in_the_next_round(
    bench: Bench, trained: list[tuple[str, int]], step: str
) -> None:
    hung = threading.Event()

    def interfere(site: str, task: str, message: Message) -> Any:
        if (site, task, message["round"]) == (LAST, step, 2) and not hung.is_set():
            hung.set()
            return None
        return NotImplemented

    bench.run(masked_study(rounds=3), interfere=interfere)
    assert bench.outcome()["status"] == "completed"
    assert hung.is_set()
    rounds = bench.result()["rounds"]
    rest = list(NAMES) if step == SURVIVORS else list(NAMES[:-1])
    assert [entry["secagg"]["sites"] for entry in rounds] == [list(NAMES), rest, list(NAMES)]
    assert sorted(trained) == sorted((name, number) for name in NAMES for number in (1, 2, 3))


def test_a_site_that_was_restarted_gets_keys_again_with_the_next_round(
    bench: Bench, trained: list[tuple[str, int]]
) -> None:
    restarted = threading.Event()

    def interfere(site: str, task: str, message: Message) -> Any:
        if (site, task, message["round"]) == (LAST, TRAIN, 2) and not restarted.is_set():
            restarted.set()
            bench.sites[site].restart()
        return NotImplemented

    federation = bench.run(masked_study(rounds=3), interfere=interfere)
    assert bench.outcome()["status"] == "completed"
    troubles = [(each["site"], each["round"], each["code"]) for each in bench.outcome()["troubles"]]
    assert troubles == [(LAST, 2, int(Code.NO_KEYS))]
    rounds = bench.result()["rounds"]
    assert [entry["secagg"]["sites"] for entry in rounds] == [list(NAMES), list(NAMES[:-1]), list(NAMES)]
    assert rounds[1]["sites"][LAST]["status"] == "failed"
    assert len([each for each in federation.exchanges if each.task == JOIN]) == 2 * len(NAMES)
    assert (LAST, 2) not in trained


def test_too_few_sites_end_the_job_and_the_resumed_run_trains_nothing_again(
    bench: Bench, trained: list[tuple[str, int]], in_process: tuple[dict[str, Any], Path]
) -> None:
    def interfere(site: str, task: str, message: Message) -> Any:
        if site in NAMES[:3] and (task, message["round"]) == (CONTRIBUTE, 2):
            return {"code": int(Code.STORAGE), "numbers": {}}
        return NotImplemented

    bench.run(masked_study(), interfere=interfere)
    outcome = bench.outcome()
    assert (outcome["status"], outcome["code"], outcome["round"]) == ("failed", int(Code.STORAGE), 1)
    assert outcome["site"] == " and ".join(NAMES[:3]), "none of them is there for another reason"
    assert outcome["resumable"] is True
    assert len(trained) == 2 * len(NAMES)
    trained.clear()
    bench.run(masked_study(), job=SECOND_JOB, resume=JOB)
    assert bench.outcome(SECOND_JOB)["status"] == "completed"
    assert trained == []
    assert same_bits(bench.checkpoint, read_tensors(in_process[1] / "server" / "checkpoint.safetensors")[0])


@pytest.mark.parametrize("victims", [NAMES, NAMES[:1]], ids=["everybody", "one"])
def test_a_site_that_lies_to_others_is_left_out_by_name_and_the_run_goes_on(
    bench: Bench, trained: list[tuple[str, int]], victims: tuple[str, ...]
) -> None:
    """It seals rubbish in the first round: no site that is honest is blamed for it, and none is dropped quietly."""
    del trained
    liar = NAMES[1]

    def interfere(site: str, task: str, message: Message) -> Any:
        if (site, task, message["round"]) == (liar, TRAIN, 1):
            release = bench.sites[site].member._release
            assert release is not None
            lying(release, liar, rubbish(victims))
        return NotImplemented

    bench.run(masked_study(rounds=1), interfere=interfere)
    outcome, (entry,) = bench.outcome(), bench.result()["rounds"]
    out = {liar} if len(victims) > 1 else {liar, *victims}
    code = Code.DISPUTED if len(victims) > 1 else Code.QUARREL
    assert outcome["status"] == "completed"
    assert entry["secagg"]["sites"] == [name for name in NAMES if name not in out]
    assert {(each["site"], each["code"]) for each in outcome["troubles"]} == {(name, int(code)) for name in out}
    assert {event["site"] for event in outcome["events"] if event["kind"] == "failed"} == out
    for name in out:
        assert (entry["sites"][name]["status"], entry["sites"][name]["code"]) == ("failed", int(code))
    for trouble in outcome["troubles"]:
        place = bench.folder / "server" / trouble["evidence"].partition("; evidence: ")[2]
        assert read_json(place)["site"] == trouble["site"]
    own = bench.folder / "sites" / victims[0] / "runs" / JOB / "evidence"
    assert {read_json(path)["site"] for path in own.iterdir()} == {liar}


def test_a_site_that_contradicts_itself_is_caught_by_name_and_with_evidence(
    bench: Bench, trained: list[tuple[str, int]]
) -> None:
    del trained
    liar = NAMES[1]

    def interfere(site: str, task: str, message: Message) -> Any:
        if (site, task, message["round"]) == (liar, TRAIN, 1):
            release = bench.sites[site].member._release
            assert release is not None
            lying(release, liar, lambda peer, body: {"self": bytes(32)} if peer == LAST else {})
        return NotImplemented

    bench.run(masked_study(rounds=1), interfere=interfere)
    outcome, (entry,) = bench.outcome(), bench.result()["rounds"]
    assert outcome["status"] == "completed"
    assert entry["secagg"]["sites"] == [name for name in NAMES if name != liar]
    assert {(each["site"], each["code"]) for each in outcome["troubles"]} == {(liar, int(Code.CAUGHT))}
    shown = {each["evidence"].partition("; evidence: ")[0].partition(": ")[2] for each in outcome["troubles"]}
    assert shown == {"committed to different secrets towards different sites"}
    assert (entry["sites"][liar]["status"], entry["sites"][liar]["code"]) == ("failed", int(Code.CAUGHT))


def test_a_round_that_is_rejected_ends_the_job_and_names_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many sites send too much that there is no sum without them, and new ranges let it in."""
    train = Participant.train

    def scaled(self: Participant, payload: Payload, *given: Any) -> Report:
        report = train(self, payload, *given)
        times = 100 if (self.name in NAMES[:3], report.round_number) == (True, 4) else 1
        return replace(report, update={name: times * tensor for name, tensor in report.update.items()})

    monkeypatch.setattr(Participant, "train", scaled)
    bench.run(made_up_study("fedavg", quorum=3, schedule="constant").masked(Settings()))
    outcome = bench.outcome()
    assert (outcome["status"], outcome["code"], outcome["site"]) == ("failed", int(Code.OUTLIER), None)
    assert (outcome["numbers"]["round"], outcome["round"]) == (4.0, 3)


@pytest.mark.parametrize(
    ("study", "policy", "code", "numbers"),
    [
        (made_up_study("fedavg", rounds=1), {"secure_aggregation": True}, Code.OPEN_JOB, {}),
        (masked_study(rounds=1), {"minimum_sites": 6}, Code.SMALL_SUMS, {"sites": 3.0, "needed": 6.0}),
    ],
    ids=["open", "small"],
)
def test_a_job_that_is_too_weak_for_its_sites_ends_with_their_word(
    bench: Bench, trained: list[tuple[str, int]], study: Study, policy: Any, code: Code, numbers: dict[str, float]
) -> None:
    federation = bench.run(study, **policy)
    outcome = bench.outcome()
    assert (outcome["status"], outcome["code"], outcome["numbers"]) == ("failed", int(code), numbers)
    assert outcome["site"] in NAMES
    assert {each.task for each in federation.exchanges} == {JOIN}
    assert trained == []
