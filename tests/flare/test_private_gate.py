"""Differential privacy by a site's executor and gate: private jobs pass them whole, and less protected ones do not."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.signal import Signal

from crossward.federation.contract import VALIDATION_COUNT, Payload
from crossward.federation.errors import PrivacyRefusal
from crossward.flare import names
from crossward.flare.executor import SiteExecutor
from crossward.flare.gate import SiteGate
from crossward.privacy.dp.settings import Privacy
from crossward.site import member as members
from crossward.site import messages
from crossward.site.declaration import Declaration
from crossward.site.journal import read_journal
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, TRAIN, Message
from crossward.site.protection import certified_ledger
from crossward.site.study import Study
from crossward.site.troubles import Code
from tests.flare.fakes import (
    answer_to,
    as_shareable,
    deploy,
    over_the_wire,
    site_context,
    without_headers,
    workspace_in,
)
from tests.site.made_up_sites import SITES, made_up_study
from tests.site.masked import RUN, authority, identity
from tests.site.packs import write_packs

ME = SITES[0]
TESTED = 8
"""Patients among the test images of the packs, of five images each."""
LESS_PROTECTED: tuple[tuple[Privacy | None, dict[str, Any]], ...] = (
    (None, {"max_epsilon": 4.0}),
    (None, {"min_noise": 1.0}),
    (Privacy(epsilon=8.0), {"max_epsilon": 4.0}),
    (Privacy(epsilon=4.0, delta=1e-3), {"max_delta": 1e-5}),
    (Privacy(noise=0.5), {"min_noise": 1.0}),
    (Privacy(epsilon=4.0, unit="image"), {}),
    (Privacy(epsilon=4.0), {"payloads": ["update"]}),
    (Privacy(epsilon=4.0), {"payloads": ["personal", "prototypes", "counts"]}),
    (None, {"payloads": []}),
)
DEFAULTS = members.Member.__init__.__kwdefaults__


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("crossward.flare.executor.gc.collect", lambda: 0)
    monkeypatch.setattr(members.Member.__init__, "__kwdefaults__", {**DEFAULTS, "patience": 0.0})
    for variable in (names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of 32 patients with five images each; every fourth patient is one to test with."""
    images = 4 * 5 * TESTED
    folder = write_packs(tmp_path_factory.mktemp("packs") / "data", (ME,), images=images)
    with (folder / "manifest.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["file", "row", "group"])
        # Of four images in a row two are to train, one to validate and one to test with.
        rows.writerows([f"{ME}.npz", row, f"{(0, 1, 2, 3)[row % 4]}-{row // 20}"] for row in range(images))
    return folder


class Process:
    """A site's job process in a kit with a certificate: executor and gate as FLARE calls them."""

    def __init__(self, kit: Path, study: Study, **properties: Any) -> None:
        self.kit, self.study, self.properties = kit, study, properties
        self.gate, self.executor = SiteGate(), SiteExecutor(study.options())
        deploy(kit, study.options(), site=ME)
        startup = Path(workspace_in(kit, ME).get_startup_kit_dir())
        (startup / "client.crt").write_bytes(identity(ME).certificate)
        (startup / "client.key").write_bytes(identity(ME).key)
        (startup / names.ROOT).write_bytes(authority().roots)

    def context(self, task: str) -> Any:
        return site_context(self.kit, task, site=ME, properties=self.properties, gate=self.gate)

    def answer(self, task: str, number: int = 0) -> Message:
        """What the server gets to hear of a task about the model of a round, which is not the start's."""
        start = dict(self.study.method.start(self.study.task, self.study.model()).tensors)
        payload = Payload(number, {name: tensor + 0.01 * number for name, tensor in start.items()})
        asked = messages.address(run=RUN, study=self.study.digest(), round_number=number)
        asked |= messages.pack_payload(payload)
        if task == FINISH:
            asked["round"] = number
        context = self.context(task)
        answer = self.executor.execute(task, over_the_wire(as_shareable(asked)), context, Signal())
        return without_headers(over_the_wire(self.gate.process(answer, context)))

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.kit / "state" / "journal.jsonl")

    def spent(self) -> list[str]:
        ledger = certified_ledger(self.kit / "state", site=ME, identity=identity(ME))
        return [entry.what for entry in ledger.entries()]


@pytest.fixture
def made(tmp_path: Path, packs: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def make(privacy: Privacy | None, *, name: str = "kit", **properties: Any) -> Process:
        study = made_up_study("fedavg", rounds=1)
        rules = {"data_root": str(packs), "secure_aggregation": False, **properties}
        processes.append(Process(tmp_path / name, study.private(privacy) if privacy else study, **rules))
        return processes[-1]

    yield make
    for process in processes:
        process.executor.handle_event("_end_run", process.context(""))


def whole_run(process: Process) -> dict[str, Message]:
    """Every task of a run of one round; each answer is what the study declares."""
    tasks = {JOIN: 0, TRAIN: 0, EVALUATE: 1, FINISH: 1}
    answers = {task: process.answer(task, number) for task, number in tasks.items()}
    for task, answer in answers.items():
        assert answer["code"] == OK, (task, answer)
        Declaration(process.study).rebuild(task, answer)
    assert all(entry["left"] for entry in process.journal)
    return answers


def test_a_job_that_hides_patients_passes_whole_and_all_that_left_was_paid_for(made: Any) -> None:
    process = made(Privacy(epsilon=8.0), minimum_cell=TESTED)
    answers = whole_run(process)
    assert answers[EVALUATE]["validation"][VALIDATION_COUNT].item() == TESTED
    assert answers[FINISH]["scores"]["n_test"] == TESTED
    assert process.spent() == ["steps", "val counts", "test counts"]


def test_scores_on_fewer_patients_than_the_policy_wants_stay_and_are_not_paid_for(made: Any) -> None:
    """Forty images of eight patients: what would be published is a figure of eight."""
    process = made(Privacy(epsilon=8.0), minimum_cell=TESTED + 1)
    answers = whole_run(process)
    assert answers[FINISH] == {"code": OK, "round": 1}
    assert process.spent() == ["steps", "val counts"]


def test_a_job_that_hides_the_site_passes_whole_and_publishes_no_scores(made: Any) -> None:
    process = made(Privacy(epsilon=8.0, unit="site"), privacy_unit="site")
    answers = whole_run(process)
    assert answers[FINISH] == {"code": OK, "round": 1}
    assert process.spent() == ["update"]


@pytest.mark.parametrize("task", [JOIN, TRAIN, EVALUATE, FINISH])
def test_no_answer_of_a_job_with_less_protection_leaves_whoever_made_it(made: Any, task: str) -> None:
    """The gate knows the policy by itself, also where the member's own check is lost."""
    for number, (privacy, rules) in enumerate(LESS_PROTECTED):
        process = made(privacy, name=f"kit-{number}", minimum_cell=1, **rules)
        answer = answer_to(task, Declaration(process.study))
        with pytest.raises(PrivacyRefusal, match="the site's policy"):
            process.gate.process(as_shareable(answer), process.context(task))
        assert process.journal[-1]["left"] is False
        # Why it is refused is what the server may hear.
        trouble = {"code": int(Code.NO_PRIVACY), "numbers": {"allowed": 4.0}}
        assert without_headers(process.gate.process(as_shareable(trouble), process.context(task))) == trouble
