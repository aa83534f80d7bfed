from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.private.privacy_manager import Scope as PrivacyScope

from crossward.federation.errors import CrosswardError, PrivacyRefusal
from crossward.federation.scopes import Scope, names_in
from crossward.flare import names, places
from crossward.flare.gate import SiteGate
from crossward.privacy.dp.settings import Privacy
from crossward.site.declaration import Declaration
from crossward.site.journal import read_journal
from crossward.site.messages import OPEN_TASKS, TASKS, TRAIN
from crossward.site.policy import Policy
from crossward.site.troubles import Code, Refusal
from tests.flare.fakes import (
    JOB,
    answer_to,
    as_shareable,
    context_of,
    deploy,
    over_the_wire,
    site_context,
    small_disk,
    without_headers,
    workspace_in,
)
from tests.site.made_up_sites import SITES, made_up_study
from tests.site.packs import fill

STUDY = made_up_study("fedbn")
DECLARATION = Declaration(STUDY)
LOCAL = names_in(DECLARATION.algebra.layout, Scope.LOCAL)
SECRET = "patient 4711 has a nodule"
CODES = sorted(value for name, value in vars(ReturnCode).items() if name.isupper() and value != ReturnCode.OK)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


class Site:
    """A site's kit with a deployed job and its gate; the policy takes jobs without secure aggregation."""

    def __init__(self, kit: Path, *, study: Mapping[str, Any] | None = None, **properties: Any) -> None:
        self.kit = kit
        self.configuration = deploy(kit, study or STUDY.options())
        self.gate = SiteGate()
        self.properties = {"secure_aggregation": False, **properties}

    def context(self, task: str) -> FLContext:
        return site_context(self.kit, task, properties=self.properties, gate=self.gate)

    def let_out(self, task: str, answer: Mapping[str, Any] | Shareable) -> Shareable:
        shareable = answer if isinstance(answer, Shareable) else as_shareable(answer)
        return self.gate.process(shareable, self.context(task))

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.kit / "state" / "journal.jsonl")

    def stops(self, task: str, answer: Mapping[str, Any] | Shareable, match: str) -> None:
        """The answer is stopped, and the site's own journal says so."""
        with pytest.raises(PrivacyRefusal, match=match):
            self.let_out(task, answer)
        entry = self.journal[-1]
        assert entry.keys() == {"time", "job", "task", "left", "reason"}
        assert (entry["left"], entry["job"]) == (False, JOB)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "kit")


@pytest.mark.parametrize("task", OPEN_TASKS)
def test_a_declared_answer_leaves_as_it_is_and_is_written_down(site: Site, task: str) -> None:
    answer = answer_to(task, DECLARATION)
    left = site.let_out(task, answer)
    assert type(left) is Shareable
    np.testing.assert_equal(without_headers(over_the_wire(left)), answer)
    assert left[ReservedHeaderKey.HEADERS] == {ReservedHeaderKey.RC: ReturnCode.OK}
    (entry,) = site.journal
    assert (entry["job"], entry["task"], entry["left"]) == (JOB, task, True)
    expected = {}
    for name, value in answer.items():
        parts = value if isinstance(value, dict) else {"": value}
        for inner, part in parts.items():
            where = f"{name}/{inner}" if inner else name
            array = isinstance(part, np.ndarray)
            expected[where] = [
                list(part.shape) if array else [],
                part.nbytes if array else 64 if where == "model" else 8,
            ]
    assert {name: [shape, size] for name, shape, size in entry["items"]} == expected
    assert entry["bytes"] == sum(size for _, size in expected.values())


def test_nothing_planted_in_the_headers_survives(site: Site) -> None:
    answer = as_shareable(answer_to(TRAIN, DECLARATION))
    answer.add_cookie("patient", SECRET)
    answer.set_peer_props({"note": SECRET})
    answer.set_header("x", np.zeros(3))
    answer.set_header(ReservedHeaderKey.CONTENT_TYPE, SECRET)
    left = site.let_out(TRAIN, answer)
    assert left[ReservedHeaderKey.HEADERS] == {ReservedHeaderKey.RC: ReturnCode.OK}
    assert SECRET.encode() not in left.to_bytes()


def test_a_planted_local_tensor_stops_the_answer_and_is_named_in_the_sites_own_log_and_journal(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    answer = answer_to(TRAIN, DECLARATION)
    shape = DECLARATION.algebra.layout[LOCAL[0]].shape
    answer["update"][LOCAL[0]] = np.full(shape, 4711.0, np.float32)
    with caplog.at_level(logging.ERROR):
        site.stops(TRAIN, answer, LOCAL[0])
    assert f"the gate stopped an answer to 'train': train: update holds '{LOCAL[0]}'" in caplog.text
    assert LOCAL[0] in site.journal[-1]["reason"]
    assert "4711" not in json.dumps(site.journal[-1]["reason"]) + caplog.text


@pytest.mark.parametrize("name", ["DXO", "DATA", "patients", "note", "__other__"])
def test_malicious_code_in_a_job_that_adds_a_field_lets_nothing_leave(site: Site, name: str) -> None:
    site.stops(TRAIN, {**answer_to(TRAIN, DECLARATION), name: SECRET}, name)
    site.stops("join", {"code": 0, name: SECRET}, name)


@pytest.mark.parametrize("task", ["", "secagg", "Train", "x" * 200, *sorted(set(TASKS) - set(OPEN_TASKS))])
def test_an_answer_to_an_unknown_task_is_stopped(site: Site, task: str) -> None:
    site.stops(task, {"code": 0}, "unknown task")
    assert len(site.journal[-1]["task"]) <= 40


def test_an_empty_answer_and_a_foreign_one_are_stopped(site: Site) -> None:
    site.stops(TRAIN, Shareable(), "without a code")
    site.stops(TRAIN, {"DXO": {"kind": "WEIGHTS", "data": {}}}, "without a code")


@pytest.mark.parametrize("code", CODES)
def test_of_an_answer_that_flare_marks_as_failed_only_the_mark_leaves(site: Site, code: str) -> None:
    answer = as_shareable({**answer_to(TRAIN, DECLARATION), "note": SECRET})
    answer.set_return_code(code)
    answer.add_cookie("patient", SECRET)
    left = site.let_out(TRAIN, answer)
    assert left == {ReservedHeaderKey.HEADERS: {ReservedHeaderKey.RC: code}}


@pytest.mark.parametrize("code", [SECRET, "ok", "", 7, None, ["EXECUTION_EXCEPTION"], {"a": 1}], ids=repr)
def test_a_mark_that_is_not_one_of_flares_is_stopped(site: Site, code: Any) -> None:
    answer = as_shareable({"code": 0})
    answer.set_return_code(code)
    with pytest.raises(PrivacyRefusal) as caught:
        site.let_out("join", answer)
    assert SECRET not in str(caught.value)
    assert not site.journal[-1]["left"]


def test_headers_that_are_none_stop_the_answer(site: Site) -> None:
    answer = as_shareable({"code": 0})
    answer[ReservedHeaderKey.HEADERS] = [SECRET]
    site.stops("join", answer, "ValueError")


class Trap(Mapping[str, Any]):
    """Raises words with values in them when it is looked at."""

    def __getitem__(self, key: str) -> Any:
        raise ValueError(SECRET)

    def __iter__(self) -> Iterator[str]:
        raise ValueError(SECRET)

    def __len__(self) -> int:
        return 1


def test_words_that_are_not_ours_do_not_get_into_journal_log_or_report(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(PrivacyRefusal) as caught:
        site.let_out(TRAIN, {**answer_to(TRAIN, DECLARATION), "update": Trap()})
    assert caught.value.__cause__ is None
    for words in (str(caught.value), caplog.text, json.dumps(site.journal)):
        assert SECRET not in words
        assert "ValueError" in words


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"executors": []}',
        '{"executors": 5}',
        '{"executors": [{}]}',
        json.dumps({"executors": [{"executor": {"path": names.EXECUTOR}}]}),
        json.dumps({"executors": [{"executor": {"path": names.EXECUTOR, "args": {"study": {}}}}]}),
        json.dumps({"executors": [{"executor": {"path": names.EXECUTOR, "args": {"study": "fedavg"}}}]}),
    ],
    ids=repr,
)
def test_a_job_that_does_not_say_what_may_leave_lets_nothing_leave(site: Site, content: str | None) -> None:
    if content is None:
        site.configuration.unlink()
    else:
        site.configuration.write_text(content)
    site.stops("join", {"code": 0}, "the gate stopped")
    site.stops(TRAIN, answer_to(TRAIN, DECLARATION), "the gate stopped")


def test_malicious_code_in_a_job_as_another_executor_or_a_second_one_lets_nothing_leave(tmp_path: Path) -> None:
    foreign = Site(tmp_path / "foreign")
    deploy(foreign.kit, STUDY.options(), path="some.other.Executor")
    foreign.stops("join", {"code": 0}, "does not say what may leave")
    second = Site(tmp_path / "second")
    content = json.loads(second.configuration.read_text())
    content["executors"] *= 2
    second.configuration.write_text(json.dumps(content))
    second.stops("join", {"code": 0}, "does not say what may leave")


def test_another_jobs_whitelist_is_not_used(site: Site) -> None:
    """Process and gate may outlive a job: what may leave is that of the job at hand."""
    fedavg = made_up_study("fedavg")
    context = site.context(TRAIN)
    site.gate.process(as_shareable(answer_to(TRAIN, DECLARATION)), context)
    context.put(ReservedKey.RUN_NUM, "66666666-2222-3333-4444-555555555555", private=True, sticky=False)
    other = Path(workspace_in(site.kit, SITES[0]).get_client_app_config_file_path(context.get_job_id()))
    other.parent.mkdir(parents=True)
    executor = {"path": names.EXECUTOR, "args": {"study": fedavg.options()}}
    other.write_text(json.dumps({"executors": [{"executor": executor}]}))
    with pytest.raises(PrivacyRefusal, match="lacks"):
        site.gate.process(as_shareable(answer_to(TRAIN, DECLARATION)), context)
    site.gate.process(as_shareable(answer_to(TRAIN, Declaration(fedavg))), context)


def test_when_the_journal_cannot_be_written_no_update_leaves_and_a_bare_code_does(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        site = Site(tmp_path / "kit", state_root=str(disk / "state"))
        site.let_out("join", {"code": 0})
        fill(disk / "ballast")
        # The page that the journal has begun may take one more line: then that update is on record, and may leave.
        trouble = {"code": int(Code.DISK_FULL), "numbers": {}}
        answers = [without_headers(site.let_out(TRAIN, answer_to(TRAIN, DECLARATION))) for _ in range(5)]
        left = [answer for answer in answers if answer["code"] == 0]
        assert answers[len(left) :] == [trouble] * (5 - len(left))
        assert len(left) < 5
        journal = read_journal(disk / "state" / "journal.jsonl")
        assert [entry["task"] for entry in journal] == ["join", *["train"] * len(left)]
        # Until not even a short line fits any more.
        for _ in range(60):
            assert without_headers(site.let_out(TRAIN, trouble)) == trouble
        assert without_headers(site.let_out("join", {"code": 0})) == trouble
        with pytest.raises(CrosswardError):
            site.let_out(TRAIN, {**answer_to(TRAIN, DECLARATION), "note": SECRET})
        with pytest.raises(CrosswardError):
            site.let_out(TRAIN, {**trouble, "note": SECRET})


def test_a_disk_that_is_full_from_the_start_lets_a_bare_code_leave(tmp_path: Path) -> None:
    """How else would the server learn that the disk is full?"""
    with small_disk(tmp_path / "disk") as disk:
        site = Site(tmp_path / "kit", state_root=str(disk / "state"))
        fill(disk / "ballast")
        trouble = {"code": int(Code.DISK_FULL), "numbers": {}}
        assert without_headers(site.let_out(TRAIN, answer_to(TRAIN, DECLARATION)))["code"] in (
            int(Code.DISK_FULL),
            int(Code.STORAGE),
        )
        assert without_headers(site.let_out("join", trouble)) == trouble


def test_a_policy_that_is_not_understood_lets_no_update_leave_and_the_server_hears_why(tmp_path: Path) -> None:
    site = Site(tmp_path / "kit", publish_score=True)
    trouble = {"code": int(Code.POLICY), "numbers": {}}
    assert without_headers(site.let_out(TRAIN, answer_to(TRAIN, DECLARATION))) == trouble
    assert without_headers(site.let_out("join", {"code": 0})) == trouble
    assert without_headers(site.let_out("join", trouble)) == trouble


@pytest.mark.parametrize("properties", [{"publish_scores": False}, {"minimum_cell": 11}], ids=str)
def test_scores_that_the_policy_keeps_are_stopped_whoever_sent_them(tmp_path: Path, properties: dict[str, Any]) -> None:
    site = Site(tmp_path / "kit", **properties)
    site.stops("finish", answer_to("finish", DECLARATION), "policy keeps its scores")
    assert site.let_out("finish", {"code": 0, "round": 1})["round"] == 1


NAMES = st.sampled_from(
    ["code", "numbers", "round", "update", "tally", "scores", "validation", "model", "DXO", LOCAL[0]]
)
VALUES = st.recursive(
    st.none() | st.integers(-2, 60) | st.floats() | st.text(max_size=5) | st.sampled_from([np.ones(1), np.array("x")]),
    lambda inner: st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield Site(tmp_path_factory.mktemp("gate") / "kit")


@given(task=st.sampled_from([*TASKS, "other"]), junk=st.dictionaries(NAMES | st.text(max_size=3), VALUES, max_size=5))
def test_junk_is_stopped_or_leaves_as_what_was_declared(lasting: Site, task: str, junk: dict[str, Any]) -> None:
    try:
        left = lasting.let_out(task, junk)
    except PrivacyRefusal:
        assert not lasting.journal[-1]["left"]
        return
    assert lasting.journal[-1]["left"]
    content = without_headers(left)
    assert content.keys() <= {"code", "numbers", *answer_to(task, DECLARATION)}
    np.testing.assert_equal(DECLARATION.rebuild(task, content), content)
    assert left[ReservedHeaderKey.HEADERS] == {ReservedHeaderKey.RC: ReturnCode.OK}


class OtherFilter(Filter):
    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        return shareable


class LookAlike(SiteGate):
    """A subclass is not the gate: it may do anything."""


def test_a_site_without_a_scope_or_without_the_gate_in_it_does_nothing(tmp_path: Path) -> None:
    bare = context_of(workspace_in(tmp_path / "kit", SITES[0]), SITES[0])
    contexts = [bare, site_context(tmp_path / "kit", TRAIN)]
    for other in (OtherFilter(), LookAlike()):
        context = site_context(tmp_path / "kit", TRAIN)
        scope = context.get_prop(FLContextKey.SCOPE_OBJECT)
        assert isinstance(scope, PrivacyScope)
        scope.add_task_result_filter(other, FilterKey.OUT)
        contexts.append(context)
    incoming = site_context(tmp_path / "kit", TRAIN)
    incoming.get_prop(FLContextKey.SCOPE_OBJECT).add_task_result_filter(SiteGate(), FilterKey.IN)
    for context in (*contexts, incoming):
        with pytest.raises(Refusal) as caught:
            places.site_policy(context)
        assert caught.value.code is Code.POLICY
        with pytest.raises(CrosswardError):
            SiteGate().process(as_shareable({"code": 0}), context)


def test_places_are_the_kits_and_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = tmp_path / "kit"
    context = site_context(kit, TRAIN, properties={"data_root": "films", "minimum_cell": 3}, gate=SiteGate())
    assert places.site_policy(context) == Policy(data_root=kit / "films", state_root=kit / "state", minimum_cell=3)
    assert places.run_folder(context) == kit / JOB
    assert places.job_configuration(context) == kit / JOB / f"app_{SITES[0]}" / "config" / "config_fed_client.json"
    monkeypatch.setenv(names.DATA_VARIABLE, "/other/films")
    monkeypatch.setenv(names.STATE_VARIABLE, "/other/state")
    assert places.site_policy(context) == Policy(
        data_root=Path("/other/films"), state_root=Path("/other/state"), minimum_cell=3
    )


def test_a_relative_kit_gives_places_that_stay_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = places.site_policy(site_context(Path("kit"), TRAIN, gate=SiteGate()))
    assert policy.state_root == tmp_path / "kit" / "state"


def test_the_server_has_no_gate_and_no_data(tmp_path: Path) -> None:
    context = context_of(workspace_in(tmp_path / "kit", "server"), "server")
    assert places.server_policy(context).state_root == tmp_path / "kit" / "state"
    context.put(FLContextKey.SCOPE_PROPERTIES, {"state_root": "/var/state"}, private=True, sticky=False)
    assert places.server_policy(context) == Policy(data_root=None, state_root=Path("/var/state"))
    context.put(FLContextKey.SCOPE_PROPERTIES, {"place": "/var/state"}, private=True, sticky=False)
    with pytest.raises(Refusal):
        places.server_policy(context)


def test_in_the_simulator_places_come_from_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(workspace_in(tmp_path / "kit", SITES[0]), SITES[0], **{FLContextKey.SIMULATE_MODE: True})
    assert places.is_simulated(context)
    with pytest.raises(Refusal) as caught:
        places.site_policy(context)
    assert caught.value.code is Code.POLICY
    monkeypatch.setenv(names.STATE_VARIABLE, "/sim/state")
    policy = places.site_policy(context)
    assert (policy.data_root, policy.state_root) == (None, Path("/sim/state/sites") / SITES[0])
    policy.check_privacy(Privacy(epsilon=8.0, delta=0.01))
    monkeypatch.setenv(names.DATA_VARIABLE, "/sim/data")
    assert places.site_policy(context).data_root == Path("/sim/data")
