from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossward.flare.explain import Line, explain
from crossward.site.troubles import Code
from tests.flare.board import Board, Job, event, told

STAMP = "2026-01-01 10:00:00,000 - "
ALLOW_LIST = (
    "nvflare.fuel.common.excepts.ComponentNotAuthorized: component not authorized: Component 'os.system' at config "
    "path 'executors.#1.executor' is not in allow_list"
)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def ended(board: Board, status: str, *, log: str = "", outcome: dict[str, Any] | None = None, **meta: Any) -> Job:
    """A job that has ended."""
    job = Job("job-1", {"job_id": "job-1", "status": status, **meta}, outcome=outcome, log=log)
    board.all["job-1"] = job
    return job


def kit(kits: Path, name: str, *, job_log: str = "", parent_log: str = "", server: bool = False) -> None:
    (kits / name / "startup").mkdir(parents=True)
    (kits / name / "startup" / f"fed_{'server' if server else 'client'}.json").write_text("{}")
    (kits / name / "log.txt").write_text(parent_log)
    if job_log:
        (kits / name / "job-1").mkdir()
        (kits / name / "job-1" / "log.txt").write_text(job_log)


def only(lines: list[Line]) -> Line:
    (line,) = lines
    return line


def test_a_run_that_completed_without_trouble_has_nothing_to_explain(board: Board) -> None:
    ended(board, "FINISHED:ABNORMAL", outcome=told("job-1", "completed", 4))
    assert explain(board, "job-1") == []


def test_a_run_that_completed_with_trouble_tells_of_it(board: Board) -> None:
    troubles = [
        {"site": "hospital-b", "round": number, "task": "train", "code": int(Code.NO_ANSWER), "numbers": {"seconds": 9}}
        for number in (2, 3)
    ]
    ended(board, "FINISHED:COMPLETED", outcome=told("job-1", "completed", 4, troubles=troubles))
    line = only(explain(board, "job-1"))
    assert (line.site, line.round_number) == ("hospital-b", 3)
    assert "did not answer within" in line.cause


def test_a_refusal_at_join_is_the_sites_own_cause_and_the_log_is_where_the_kit_is(board: Board, tmp_path: Path) -> None:
    trouble = {"site": "hospital-b", "round": 0, "task": "join", "code": int(Code.UNREADABLE_DATA), "numbers": {}}
    outcome = told("job-1", "failed", 0, code=int(Code.UNREADABLE_DATA), site="hospital-b", troubles=[trouble])
    ended(board, "FINISHED:EXECUTION_EXCEPTION", outcome=outcome)
    line = only(explain(board, "job-1"))
    assert (line.site, line.round_number, line.log) == ("hospital-b", None, None)
    assert "cannot be read" in line.cause
    assert "log has the details" in line.next_step

    complaint = f"{STAMP}SiteExecutor - ERROR - scan-7.dcm is not an image"
    kit(tmp_path / "kits", "hospital-b", job_log=f"{STAMP}SiteExecutor - INFO - joining\n{complaint}\n")
    assert only(explain(board, "job-1", kits=tmp_path / "kits")).log == complaint


def test_numbers_are_told_with_the_code(board: Board) -> None:
    numbers = {"sites": 3.0, "needed": 4.0}
    outcome = told("job-1", "failed", 0, code=int(Code.SMALL_SUMS), site="hospital-a", numbers=numbers)
    ended(board, "FINISHED:EXECUTION_EXCEPTION", outcome=outcome)
    assert "sums over 3 sites" in only(explain(board, "job-1")).cause


@pytest.mark.parametrize(
    ("detail", "site", "cause"),
    [
        ("server: BYOC not permitted", "server", "its own code"),
        ("hospital-a: BYOC not permitted", "hospital-a", "its own code"),
        ("hospital-a: privacy scope 'x' is not allowed", "hospital-a", "privacy scope"),
        ("server: unsigned job rejected — require_signed_jobs is enabled", "server", "not signed"),
        ("server: job signature verification failed", "server", "signature"),
        ("hospital-a: no reply (deployment timeout)", "hospital-a", "did not answer"),
        ("hospital-a: something quite new", "hospital-a", "something quite new"),
    ],
)
def test_a_job_that_was_not_taken(board: Board, detail: str, site: str, cause: str) -> None:
    ended(board, "FINISHED:FAILED_TO_RUN", job_deploy_detail=["hospital-b: OK", detail])
    line = only(explain(board, "job-1"))
    assert (line.site, line.round_number, line.log) == (site, None, detail)
    assert cause in line.cause
    assert line.next_step


def test_a_class_that_the_server_does_not_allow(board: Board) -> None:
    stack = "Traceback (most recent call last):\n    raise ComponentNotAuthorized(f'component not authorized: {err}')\n"
    ended(board, "FINISHED:EXECUTION_EXCEPTION", log=f"{stack}{ALLOW_LIST}\n")
    line = only(explain(board, "job-1"))
    assert (line.site, line.log) == ("server", ALLOW_LIST)
    assert "not on the list of allowed classes" in line.cause


def test_a_class_that_a_site_does_not_allow_is_in_its_own_log(board: Board, tmp_path: Path) -> None:
    outcome = told("job-1", "aborted", 0, code=int(Code.ABORTED), events=[event(1, "started", sites=["hospital-a"])])
    ended(board, "FINISHED:ABNORMAL", outcome=outcome)
    without = only(explain(board, "job-1"))
    assert "before any site joined" in without.cause
    assert "--kits" in without.next_step

    died = f"{STAMP}JobExecutor - INFO - run (job-1): child worker process finished with RC 104\n"
    kit(tmp_path / "kits", "hospital-a", job_log=f"{ALLOW_LIST}\n", parent_log=died)
    line = only(explain(board, "job-1", kits=tmp_path / "kits"))
    assert (line.site, line.log) == ("hospital-a", ALLOW_LIST)


def test_a_process_that_was_killed_is_named_with_its_site_and_round(board: Board, tmp_path: Path) -> None:
    outcome = told("job-1", "aborted", 2, code=int(Code.ABORTED), events=[event(1, "joined", 0, "hospital-a")])
    ended(board, "FINISHED:EXECUTION_EXCEPTION", outcome=outcome)
    without = only(explain(board, "job-1"))
    assert (without.site, without.round_number) == ("server", 3)
    assert "died" in without.cause

    say = f"{STAMP}JobExecutor - INFO - run (job-1): child worker process finished with RC"
    kit(tmp_path / "kits", "hospital-a", parent_log=f"{say} 1\n")
    kit(tmp_path / "kits", "hospital-b", parent_log=f"{say.replace('job-1', 'job-0')} 101\n{say} 101\n")
    report = f"{STAMP}FederatedServer - INFO - Failing job job-1 due to reported failure from hospital-b: exception\n"
    kit(tmp_path / "kits", "server", parent_log=report, server=True)
    line = only(explain(board, "job-1", kits=tmp_path / "kits"))
    assert (line.site, line.round_number, line.log) == ("hospital-b", 3, f"{say} 101")
    assert "crossward job watch" in line.next_step


def test_what_flare_calls_an_error_and_is_none_is_not_shown(board: Board) -> None:
    real = f"{STAMP}Something - ERROR - the real one"
    noise = f"{STAMP}byte_receiver - ERROR - Stream error: 'NoneType' object has no attribute 'get_widget'"
    ended(board, "FINISHED:ABNORMAL", log=f"{real}\n{noise}\n{STAMP}X - INFO - bye\n")
    assert only(explain(board, "job-1")).log == real


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("FINISHED:ABORTED", "stopped"),
        ("FINISHED:COMPLETED", "no outcome"),
        ("FINISHED:ABNORMAL", "killed"),
        ("FINISHED:EXECUTION_EXCEPTION", "died"),
        ("FINISHED:FAILED_TO_RUN", "start"),
        ("FINISHED:CAN_NOT_SCHEDULE", "enough sites"),
        ("FINISHED:SOMETHING_NEW", "SOMETHING_NEW"),
    ],
)
def test_every_end_has_a_cause_and_a_next_step(board: Board, status: str, cause: str) -> None:
    ended(board, status)
    line = only(explain(board, "job-1"))
    assert cause in line.cause
    assert line.next_step


def test_a_job_that_waits_for_sites_says_so(board: Board) -> None:
    history = ["2026-01-01 10:00:00: connected sites (1) < min_sites (2)"]
    ended(board, "SUBMITTED", schedule_history=history)
    line = only(explain(board, "job-1"))
    assert "fewer sites are connected" in line.cause
    assert line.log == history[0]
    ended(board, "FINISHED:CAN_NOT_SCHEDULE", schedule_history=[*history, "later: exceeded max schedule count 10"])
    assert only(explain(board, "job-1")).log == history[0]


def test_a_job_that_waits_for_its_turn_says_so(board: Board) -> None:
    ended(board, "SUBMITTED")
    assert "waits for its turn" in only(explain(board, "job-1")).cause


def test_a_running_job_and_one_that_a_restarted_server_lost(board: Board) -> None:
    job = ended(board, "RUNNING")
    job.process = True
    assert only(explain(board, "job-1")).cause == "the job is running"
    job.process = False
    line = only(explain(board, "job-1"))
    assert "restarted" in line.cause
    assert "crossward job watch job-1" in line.next_step


def test_a_site_that_was_caught_is_told_with_its_round_its_fault_and_the_evidence(board: Board) -> None:
    shown = "hospital-b, round 2, attempt 1: shared another secret; evidence: runs/run-1/evidence/round-0002.json"
    trouble = {"site": "hospital-b", "round": 2, "task": "survivors", "code": int(Code.CAUGHT), "evidence": shown}
    ended(board, "FINISHED:COMPLETED", outcome=told("run-1", "completed", 4, troubles=[trouble]))
    line = only(explain(board, "job-1"))
    assert (line.site, line.round_number, line.log) == ("hospital-b", 2, shown)
    assert "what it signed contradicts itself" in line.cause


def test_what_a_site_keeps_against_the_server_is_shown_where_its_log_is_at_hand(board: Board, tmp_path: Path) -> None:
    trouble = {"site": "hospital-b", "round": 2, "task": "survivors", "code": int(Code.NOT_MASKED)}
    ended(board, "FINISHED:COMPLETED", outcome=told("run-1", "completed", 4, troubles=[trouble]))
    shown = f"{STAMP}crossward.site.hospital-b - ERROR - server, round 2, attempt 1: again; evidence: runs/run-1/x.json"
    later = f"{STAMP}crossward.site.hospital-b - ERROR - hospital-b, survivors of round 2: code 26: and so on"
    kit(tmp_path / "kits", "hospital-b", job_log=f"{shown}\n{later}\n")
    assert only(explain(board, "job-1", kits=tmp_path / "kits")).log == shown
