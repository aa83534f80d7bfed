from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from crossward.federation.contract import VALIDATION, Payload
from crossward.flare import names
from crossward.flare.executor import SiteExecutor
from crossward.flare.gate import SiteGate
from crossward.site import member as members
from crossward.site import messages
from crossward.site.journal import read_journal
from crossward.site.member import Member
from crossward.site.messages import EVALUATE, FINISH, JOIN, TRAIN
from crossward.site.policy import Policy
from crossward.site.troubles import Code
from tests.flare.fakes import (
    as_shareable,
    context_of,
    deploy,
    over_the_wire,
    site_context,
    without_headers,
    workspace_in,
)
from tests.site.made_up_sites import SITES, made_up_study
from tests.site.packs import write_packs

STUDY = made_up_study("fedbn", rounds=2)
ME = SITES[0]
DEFAULTS = members.Member.__init__.__kwdefaults__


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(members.Member.__init__, "__kwdefaults__", {**DEFAULTS, "patience": 0.0})
    for variable in (names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data")


class Process:
    """A site's job process: the executor, and the gate behind it, as FLARE calls them."""

    def __init__(self, kit: Path, **properties: Any) -> None:
        self.kit = kit
        self.properties = {"secure_aggregation": False, **properties}
        self.gate = SiteGate()
        self.executor = SiteExecutor(STUDY.options())
        deploy(kit, STUDY.options())

    def context(self, task: str) -> FLContext:
        return site_context(self.kit, task, properties=self.properties, gate=self.gate)

    def execute(self, task: str, message: dict[str, Any]) -> Shareable:
        return self.executor.execute(task, over_the_wire(as_shareable(message)), self.context(task), Signal())

    def answer(self, task: str, message: dict[str, Any]) -> dict[str, Any]:
        left = self.gate.process(self.execute(task, message), self.context(task))
        return without_headers(over_the_wire(left))

    def end(self) -> None:
        self.executor.handle_event(EventType.END_RUN, self.context(""))


@pytest.fixture
def process(tmp_path: Path, packs: Path) -> Iterator[Process]:
    made = Process(tmp_path / "kit", data_root=str(packs))
    yield made
    made.end()


def addressed(number: int, payload: Payload | None = None, **changes: Any) -> dict[str, Any]:
    message = messages.address(run="run-1", study=STUDY.digest(), round_number=number)
    return message | (messages.pack_payload(payload) if payload else {}) | changes


def start() -> Payload:
    return Payload(0, STUDY.method.start(STUDY.task, STUDY.method.build(STUDY.task)).tensors)


def model(number: int) -> Payload:
    return Payload(number, {name: tensor + 0.01 for name, tensor in start().tensors.items()}, best_round=number)


def test_a_whole_run_passes_executor_and_gate_and_is_in_the_journal(process: Process) -> None:
    asked = [
        (JOIN, addressed(0)),
        (TRAIN, addressed(1, start())),
        (TRAIN, addressed(2, model(1))),
        (EVALUATE, addressed(2, model(2))),
        (FINISH, addressed(2)),
    ]
    answers = [process.answer(task, message) for task, message in asked]
    assert [answer["code"] for answer in answers] == [0] * 5
    assert answers[2]["validation"].keys() == set(VALIDATION)
    assert answers[4]["scores"].keys() == set(messages.SCORES)
    journal = read_journal(process.kit / "state" / "journal.jsonl")
    assert [(entry["task"], entry["left"]) for entry in journal] == [(task, True) for task, _ in asked]
    assert not (process.kit / "11111111-2222-3333-4444-555555555555" / "vault").exists()
    assert (process.kit / "state" / "runs" / "run-1" / "vault" / "deployed.safetensors").exists()


def test_what_leaves_is_what_the_member_says(process: Process, tmp_path: Path, packs: Path) -> None:
    policy = Policy(data_root=packs, state_root=tmp_path / "alone", secure_aggregation=False)
    alone = Member(ME, STUDY.options(), policy)
    np.testing.assert_equal(process.answer(TRAIN, addressed(1, start())), alone.answer(TRAIN, addressed(1, start())))
    alone.close()


def test_flares_own_headers_are_not_taken_for_a_part_of_the_message(process: Process) -> None:
    shareable = as_shareable(addressed(0))
    shareable.set_header(ReservedHeaderKey.TASK_ID, "x")
    answer = process.executor.execute(JOIN, shareable, process.context(JOIN), Signal())
    assert without_headers(answer) == {"code": 0}
    assert answer.get_return_code() == ReturnCode.OK


@pytest.mark.parametrize("properties", [{"publish_score": True}, {"minimum_cell": "10"}], ids=str)
def test_a_policy_that_is_not_understood_is_a_code(tmp_path: Path, properties: dict[str, Any]) -> None:
    process = Process(tmp_path / "kit", **properties)
    assert without_headers(process.execute(JOIN, addressed(0))) == {"code": int(Code.POLICY), "numbers": {}}
    assert not (tmp_path / "kit" / "state").exists()


def test_a_scope_without_the_gate_is_a_code_and_nothing_is_read(tmp_path: Path, packs: Path) -> None:
    process = Process(tmp_path / "kit")
    context = site_context(process.kit, TRAIN, properties={"data_root": str(packs)})
    answer = process.executor.execute(TRAIN, as_shareable(addressed(1, start())), context, Signal())
    assert without_headers(answer) == {"code": int(Code.POLICY), "numbers": {}}
    bare = context_of(workspace_in(process.kit, ME), ME)
    answer = process.executor.execute(JOIN, as_shareable(addressed(0)), bare, Signal())
    assert answer["code"] == int(Code.POLICY)


@pytest.mark.parametrize("task", [JOIN, TRAIN, "unknown"])
def test_nothing_that_goes_wrong_is_an_exception(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("patient 4711")

    monkeypatch.setattr(members, "labels_of", fail)
    monkeypatch.setattr(members.Study, "from_options", fail)
    with caplog.at_level(logging.ERROR):
        answer = without_headers(process.execute(task, addressed(1, start())))
    assert answer == {"code": int(Code.BAD_TASK if task == "unknown" else Code.INTERNAL), "numbers": {}}


def test_the_end_of_a_job_lets_the_next_one_in(process: Process) -> None:
    assert process.answer(JOIN, addressed(0))["code"] == 0
    second = Process(process.kit, **process.properties)
    assert second.answer(JOIN, addressed(0, run="run-2"))["code"] == int(Code.BUSY)
    process.executor.handle_event(EventType.START_RUN, process.context(""))
    assert second.answer(JOIN, addressed(0, run="run-2"))["code"] == int(Code.BUSY)
    process.end()
    assert second.answer(JOIN, addressed(0, run="run-2"))["code"] == 0
    second.end()
    second.end()


def test_the_data_folder_comes_from_the_site_and_never_from_the_job(process: Process, tmp_path: Path) -> None:
    message = addressed(0, data_root=str(tmp_path / "elsewhere"), state_root=str(tmp_path / "elsewhere"))
    assert process.answer(JOIN, message) == {"code": 0}
    assert not (tmp_path / "elsewhere").exists()
    assert (process.kit / "state" / "runs" / "run-1").is_dir()


def simulated(kit: Path, task: str) -> FLContext:
    workspace = workspace_in(kit, ME)
    return context_of(workspace, ME, **{FLContextKey.SIMULATE_MODE: True, FLContextKey.TASK_NAME: task})


def test_in_the_simulator_answers_take_the_way_through_the_gate_by_hand(
    tmp_path: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, state = tmp_path / "kit", tmp_path / "state"
    monkeypatch.setenv(names.DATA_VARIABLE, str(packs))
    monkeypatch.setenv(names.STATE_VARIABLE, str(state))
    deploy(kit, STUDY.options())
    executor = SiteExecutor(STUDY.options())
    answer = executor.execute(JOIN, as_shareable(addressed(0)), simulated(kit, JOIN), Signal())
    assert without_headers(answer) == {"code": 0}
    (entry,) = read_journal(state / "sites" / ME / "journal.jsonl")
    assert (entry["task"], entry["left"]) == (JOIN, True)

    def leaky(self: Member, task: str, message: Any) -> dict[str, Any]:
        return {"code": 0, "patients": np.zeros(3)}

    monkeypatch.setattr(Member, "answer", leaky)
    stopped = executor.execute(JOIN, as_shareable(addressed(0)), simulated(kit, JOIN), Signal())
    assert stopped.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert without_headers(stopped) == {}
    last = read_journal(state / "sites" / ME / "journal.jsonl")[-1]
    assert (last["left"], "patients" in last["reason"]) == (False, True)
    executor.handle_event(EventType.END_RUN, simulated(kit, ""))
