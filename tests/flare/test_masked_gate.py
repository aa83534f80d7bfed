"""The gate under secure aggregation, and whole site processes behind it that sum over FLARE's wire format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from crossward.federation.errors import CrosswardError, PrivacyRefusal
from crossward.flare import names
from crossward.flare.executor import SiteExecutor
from crossward.flare.gate import SiteGate
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import MaskedAlgebra
from crossward.site import member as members
from crossward.site import messages
from crossward.site.declaration import Declaration
from crossward.site.evidence import Evidence
from crossward.site.journal import read_journal
from crossward.site.masked_run import MaskedRun
from crossward.site.messages import CONTRIBUTE, EVALUATE, FINISH, JOIN, OK, OPEN_TASKS, TRAIN, Message
from crossward.site.summing import Summing
from crossward.site.troubles import SITE_CODES, Code
from tests.flare.fakes import (
    JOB,
    answer_to,
    as_shareable,
    deploy,
    over_the_wire,
    site_context,
    without_headers,
    workspace_in,
)
from tests.site.made_up_sites import made_up_study
from tests.site.masked import authority, identity
from tests.site.packs import write_packs

OPEN = made_up_study("fedavg", rounds=1)
MASKED = OPEN.masked(Settings())
PRIVATE = OPEN.private(Privacy(epsilon=8.0)).masked(Settings())
NAMES = ("alder", "birch", "cedar", "dogwood")
RUN = "run-1"
DEFAULTS = members.Member.__init__.__kwdefaults__


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # Before every task, over all that a test process holds.
    monkeypatch.setattr("crossward.flare.executor.gc.collect", lambda: 0)
    monkeypatch.setattr(members.Member.__init__, "__kwdefaults__", {**DEFAULTS, "patience": 0.0})
    for variable in (names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


class Process:
    """A site's job process in a kit with a certificate: executor and gate as FLARE calls them."""

    def __init__(self, kit: Path, name: str, study: Any = MASKED, **properties: Any) -> None:
        self.kit, self.name, self.study, self.properties = kit, name, study, properties
        self.gate, self.executor = SiteGate(), SiteExecutor(study.options())
        deploy(kit, study.options(), site=name)
        startup = Path(workspace_in(kit, name).get_startup_kit_dir())
        startup.mkdir(parents=True, exist_ok=True)
        (startup / "client.crt").write_bytes(identity(name).certificate)
        (startup / "client.key").write_bytes(identity(name).key)
        (startup / names.ROOT).write_bytes(authority().roots)
        self.startup = startup

    def executed(self, task: str, message: Message) -> tuple[Shareable, Any]:
        context = site_context(self.kit, task, site=self.name, properties=self.properties, gate=self.gate)
        return self.executor.execute(task, over_the_wire(as_shareable(message)), context, Signal()), context

    def answer(self, task: str, message: Message) -> Message:
        answer, context = self.executed(task, message)
        return without_headers(over_the_wire(self.gate.process(answer, context)))

    def end(self) -> None:
        self.executor.handle_event(EventType.END_RUN, site_context(self.kit, "", site=self.name))

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.kit / "state" / "journal.jsonl")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data", NAMES)


@pytest.fixture
def processes(tmp_path: Path, packs: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Process]]:
    study = getattr(request, "param", MASKED)
    made = {name: Process(tmp_path / name, name, study, data_root=str(packs)) for name in NAMES}
    yield made
    for process in made.values():
        process.end()


def addressed(number: int, study: Any = MASKED, **parts: Any) -> Message:
    return messages.address(run=RUN, study=study.digest(), round_number=number) | parts


class Server:
    """A server that reaches sites by their processes only."""

    def __init__(self, processes: Mapping[str, Process], folder: Path) -> None:
        self.processes = processes
        (study,) = {process.study for process in processes.values()}
        self.coordinator = study.coordinator(folder, NAMES)
        self.declaration = Declaration(study)
        self.address = partial(addressed, study=study)
        self.said: list[tuple[str, str, Message, Message]] = []
        settings = study.masking
        assert settings is not None
        self.summing = Summing(
            lambda number: SecureServer(f"{JOB}/{number}", settings=settings, roots=authority().roots),
            MaskedAlgebra(self.coordinator.algebra, bits=settings.bits),
            study=study.trained_digest(),
            exchange=self.ask,
            evidence=Evidence(folder, shown="runs/server"),
        )
        self.run = MaskedRun(self.coordinator, self.summing, self.address)

    def ask(
        self,
        task: str,
        asked: Mapping[str, Message],
        take: Callable[[str, Message], None],
        *,
        round_number: int,
        enough: int,
    ) -> list[str]:
        heard = []
        for site, message in asked.items():
            answer = self.processes[site].answer(task, message)
            self.said.append((task, site, message, answer))
            content = self.declaration.rebuild(task, answer, message)
            assert content["code"] == OK, (task, site, content)
            take(site, content)
            heard.append(site)
        return heard


@pytest.mark.parametrize("processes", [MASKED, PRIVATE], indirect=True, ids=["masks", "masks and noise"])
def test_a_whole_run_passes_executor_and_gate_and_the_journal_lists_only_what_is_masked(
    processes: dict[str, Process], tmp_path: Path
) -> None:
    server = Server(processes, tmp_path / "server")
    server.summing.agree(dict.fromkeys(NAMES, server.address(0)), round_number=0, enough=4)
    everybody = {name: server.run.with_model(name, 1) for name in NAMES}
    server.ask(TRAIN, everybody, lambda site, answer: None, round_number=1, enough=4)
    after, opened, tally = server.run.close(NAMES, {name: {} for name in NAMES})
    server.coordinator.close_round(server.run.record(opened, tally, {}, NAMES, refused={}, seconds=0.0), after)
    everybody = {name: server.run.with_model(name, 1) for name in NAMES}
    server.ask(EVALUATE, everybody, lambda site, answer: None, round_number=1, enough=4)
    assert float(server.run.validation(NAMES)["validation/n"].item()) == 4 * 10
    finish = dict.fromkeys(NAMES, server.address(1))
    server.ask(FINISH, finish, lambda site, answer: None, round_number=1, enough=4)
    images, correct = server.run.test(NAMES)
    assert (images, 0 <= correct <= 40) == (40, True)

    allowed = {
        "code", "round", "hello", "joined", "shares", "upload", "vector", "opening",
    }  # fmt: skip
    for process in processes.values():
        journal = process.journal
        assert all(entry["left"] for entry in journal)
        items = {name for entry in journal for name, _, _ in entry["items"]}
        assert items == allowed
        sizes = {entry["bytes"] for entry in journal if entry["task"] in (TRAIN, EVALUATE, FINISH)}
        assert sizes == {16}, "a code and a number"
        deployed = process.kit / "state" / "runs" / RUN / "vault" / "deployed.safetensors"
        assert deployed.exists()


def test_a_vector_leaves_only_as_an_answer_to_the_request_that_the_executor_got(
    processes: dict[str, Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(processes, tmp_path / "server")
    server.summing.agree(dict.fromkeys(NAMES, addressed(0)), round_number=0, enough=4)
    everybody = {name: server.run.with_model(name, 1) for name in NAMES}
    server.ask(TRAIN, everybody, lambda site, answer: None, round_number=1, enough=4)
    server.run.close(NAMES, {name: {} for name in NAMES})
    process = processes["alder"]
    said = [each for each in server.said if each[:2] == (CONTRIBUTE, "alder")]
    (_, _, message, answer) = said[-1]
    vector = answer["vector"]

    def let_out(content: Mapping[str, Any], asked: Message | None) -> Shareable:
        context = site_context(process.kit, CONTRIBUTE, site="alder", properties=process.properties, gate=process.gate)
        if asked is not None:
            context.set_prop(names.ASKED, asked, private=True, sticky=False)
        return process.gate.process(as_shareable(content), context)

    np.testing.assert_equal(without_headers(let_out(answer, message)), answer)
    for content, asked in (
        (answer, None),
        (answer, {}),
        (answer, said[0][2]),
        ({**answer, "vector": vector[:-1]}, message),
        ({**answer, "vector": np.append(vector, np.uint8(1))}, message),
        ({**answer, "vector": vector.view("<f4")}, message),
        ({**answer, "update": {}}, message),
        ({**answer, "upload": b"patient 4711"}, message),
    ):
        with pytest.raises(PrivacyRefusal):
            let_out(content, asked)
        entry = process.journal[-1]
        assert (entry["left"], entry["task"]) == (False, CONTRIBUTE)


def test_a_kit_without_its_certificate_is_a_code(tmp_path: Path, packs: Path) -> None:
    for lost in ("client.crt", "client.key", names.ROOT):
        process = Process(tmp_path / lost, "alder", data_root=str(packs))
        (process.startup / lost).unlink()
        answer = process.answer(JOIN, addressed(0, agreement=1))
        assert answer == {"code": int(Code.NO_CERTIFICATE), "numbers": {}}
        process.end()


# a site that demands masks, and a job that has none


@pytest.fixture
def strict(tmp_path: Path, packs: Path) -> Iterator[Process]:
    process = Process(tmp_path / "strict", "alder", OPEN, data_root=str(packs), state_root="")
    yield process
    process.end()


@pytest.mark.parametrize("task", OPEN_TASKS)
def test_no_answer_of_an_open_job_leaves_a_site_that_demands_masks(strict: Process, task: str) -> None:
    """Whoever made it: the gate knows the policy by itself."""
    context = site_context(strict.kit, task, site="alder", properties=strict.properties, gate=strict.gate)
    with pytest.raises(PrivacyRefusal, match="the site's policy demands secure aggregation, and the job does not"):
        strict.gate.process(as_shareable(answer_to(task, Declaration(OPEN))), context)
    assert strict.journal[-1]["left"] is False
    lenient = {**strict.properties, "secure_aggregation": False}
    context = site_context(strict.kit, task, site="alder", properties=lenient, gate=strict.gate)
    assert strict.gate.process(as_shareable(answer_to(task, Declaration(OPEN))), context)["code"] == OK


@pytest.mark.parametrize(
    ("masking", "reason"),
    [
        (Settings(min_sites=3), "sums over 3 sites, and the site's policy wants at least 4"),
        (Settings(colluders=0), "no site that works together with the server"),
    ],
    ids=["small sums", "nobody colludes"],
)
def test_no_answer_of_a_job_with_weaker_masks_leaves(
    tmp_path: Path, packs: Path, masking: Settings, reason: str
) -> None:
    """The gate holds the job against the whole rule, as the member does."""
    process = Process(tmp_path / "kit", "alder", OPEN.masked(masking), data_root=str(packs), minimum_sites=4)
    context = site_context(process.kit, EVALUATE, site="alder", properties=process.properties, gate=process.gate)
    with pytest.raises(PrivacyRefusal, match=reason):
        process.gate.process(as_shareable({"code": OK, "round": 1}), context)
    assert process.journal[-1]["left"] is False
    process.end()


@pytest.mark.parametrize("code", sorted(SITE_CODES))
def test_a_trouble_leaves_such_a_site_so_that_the_server_hears_why(strict: Process, code: Code) -> None:
    for task in OPEN_TASKS:
        context = site_context(strict.kit, task, site="alder", properties=strict.properties, gate=strict.gate)
        left = strict.gate.process(as_shareable({"code": int(code), "numbers": {}}), context)
        assert without_headers(left) == {"code": int(code), "numbers": {}}
        assert left[ReservedHeaderKey.HEADERS] == {ReservedHeaderKey.RC: ReturnCode.OK}


def test_the_member_refuses_before_the_gate_has_to(strict: Process) -> None:
    assert strict.answer(JOIN, addressed(0, OPEN)) == {"code": int(Code.OPEN_JOB), "numbers": {}}
    assert strict.journal[-1]["left"] is True
    assert not (strict.kit / "state" / "runs").exists()


def test_sums_that_are_too_small_are_a_code_with_two_numbers(tmp_path: Path, packs: Path) -> None:
    process = Process(tmp_path / "large", "alder", data_root=str(packs), minimum_sites=7)
    answer = process.answer(JOIN, addressed(0, agreement=1))
    assert answer == {"code": int(Code.SMALL_SUMS), "numbers": {"sites": 3.0, "needed": 7.0}}
    process.end()


def test_a_masked_job_in_the_open_clothes_of_another_is_stopped(tmp_path: Path, packs: Path) -> None:
    """The gate goes by the job's own configuration: answers of an open job do not leave a masked one."""
    process = Process(tmp_path / "kit", "alder", data_root=str(packs), secure_aggregation=False)
    for task in (TRAIN, EVALUATE, FINISH):
        context = site_context(process.kit, task, site="alder", properties=process.properties, gate=process.gate)
        with pytest.raises(CrosswardError, match="may not leave the site"):
            process.gate.process(as_shareable(answer_to(task, Declaration(OPEN))), context)
