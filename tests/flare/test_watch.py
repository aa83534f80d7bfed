from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossward.flare.console import NoSuchJob, Unreachable
from crossward.flare.watch import Event, Outcome, Pace, follow
from crossward.site.troubles import Code
from tests.flare.board import SITES, Board, Job, event, told

PACE = Pace()
DIED = "FINISHED:EXECUTION_EXCEPTION"


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def watched(board: Board, job_id: str, **more: Any) -> tuple[Outcome, list[Event]]:
    heard: list[Event] = []
    outcome = follow(board, job_id, listen=heard.append, pace=PACE, clock=board.clock, **more)
    return outcome, heard


def kinds(heard: list[Event]) -> list[str]:
    return [each.kind for each in heard]


def opening(closed: int = 0) -> list[dict[str, Any]]:
    started = event(1, "started", closed, run="job-1", sites=SITES, rounds=4, resumed_after=closed or None)
    return [started, *(event(2 + place, "joined", closed, site) for place, site in enumerate(SITES))]


def rounds(first: int, last: int, seq: int) -> list[dict[str, Any]]:
    return [event(seq + number - first, "closed", number, reported=SITES) for number in range(first, last + 1)]


def completes(board: Board, job: Job, *, first: int = 1, delay: float = 30) -> None:
    """A life: starts, tells of its rounds, completes."""
    events = [*opening(first - 1), *rounds(first, 4, 4)]
    board.clock.after(3, job.starts)
    board.clock.after(10, lambda: job.tells(first, events[:4]))
    job.result = {"method": "fedavg"}
    outcome = told(job.run, "completed", 4, best_round=3, events=events)
    board.clock.after(delay, lambda: job.ends("FINISHED:COMPLETED", outcome))


def dies(board: Board, job: Job, closed: int, *, status: str = DIED, outcome: dict[str, Any] | None = None) -> None:
    """A life: starts, closes some rounds, ends without having completed."""
    board.clock.after(3, job.starts)
    board.clock.after(10, lambda: job.tells(closed, [*opening(), *rounds(1, closed, 4)]))
    board.clock.after(30, lambda: job.ends(status, outcome))


def one_after_the_other(board: Board, *lives: Callable[[Job], None]) -> None:
    left = list(lives)
    board.live = lambda job: left.pop(0)(job)


def test_a_job_is_followed_to_its_end_and_its_result_is_there(board: Board, tmp_path: Path) -> None:
    board.live = lambda job: completes(board, job)
    outcome, heard = watched(board, board.submit(board.job_folder()), out=tmp_path / "kept")
    assert (outcome.status, outcome.run, outcome.jobs) == ("completed", "job-1", ("job-1",))
    assert (outcome.round_number, outcome.rounds, outcome.best_round) == (4, 4, 3)
    assert outcome.result == {"method": "fedavg"}
    assert outcome.folder == tmp_path / "kept" / "job-1"
    assert kinds(heard) == ["started", "joined", "joined", *["closed"] * 4]
    assert board.aborted == []


def test_nothing_is_kept_where_nobody_asked_for_it(board: Board) -> None:
    board.live = lambda job: completes(board, job)
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert outcome.folder is None
    assert outcome.result == {"method": "fedavg"}


def test_every_event_comes_once_and_in_order_even_if_most_were_never_shown(board: Board) -> None:
    events = [*opening(), *(event(number, "trained", 1, "hospital-a", loss=1.0) for number in range(4, 900))]

    def live(job: Job) -> None:
        board.clock.after(1, job.starts)
        for moment in range(2, 60):
            board.clock.after(moment, lambda shown=events[: moment * 12]: job.tells(1, shown))
        outcome = told(job.run, "completed", 4, best_round=1, events=events)
        board.clock.after(60, lambda: job.ends("FINISHED:COMPLETED", outcome))

    board.live = live
    outcome, heard = watched(board, board.submit(board.job_folder()))
    assert outcome.status == "completed"
    assert [each.seq for each in heard] == [each["seq"] for each in events]


def test_events_that_fell_out_of_the_window_are_delivered_at_the_end(board: Board) -> None:
    events = [event(number, "trained", 1, "hospital-a", loss=1.0) for number in range(1, 601)]

    def live(job: Job) -> None:
        board.clock.after(1, job.starts)
        board.clock.after(8, lambda: job.tells(1, events))
        board.clock.after(20, lambda: job.ends("FINISHED:COMPLETED", told(job.run, "completed", 4, events=events)))

    board.live = live
    _, heard = watched(board, board.submit(board.job_folder()))
    assert sorted(each.seq for each in heard) == list(range(1, 601))
    assert heard[0].seq == 401


def test_a_job_that_is_just_starting_is_not_pestered_for_its_progress(board: Board) -> None:
    def live(job: Job) -> None:
        board.clock.after(1, job.starts)
        board.clock.after(25, lambda: job.tells(1, opening()))
        board.clock.after(27, lambda: job.ends("FINISHED:COMPLETED", told(job.run, "completed", 4)))

    board.live = live
    watched(board, board.submit(board.job_folder()))
    assert 1 <= board.asked_for_progress <= 4


def test_a_job_that_died_is_submitted_again_and_goes_on_with_its_run(board: Board) -> None:
    one_after_the_other(board, lambda job: dies(board, job, 2), lambda job: completes(board, job, first=3))
    outcome, heard = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, outcome.run, outcome.jobs) == ("completed", "job-1", ("job-1", "job-2"))
    server = json.loads((board.all["job-2"].folder / "app/config/config_fed_server.json").read_text())  # type: ignore[operator]
    assert server["workflows"][0]["args"]["resume"] == "job-1"
    told_of = [(each.kind, dict(each.figures)) for each in heard if each.kind in ("resuming", "resumed")]
    assert told_of == [
        ("resuming", {"run": "job-1", "after": 2, "attempt": 1}),
        ("resumed", {"job": "job-2", "run": "job-1"}),
    ]
    assert [each.round_number for each in heard if each.kind == "closed"] == [1, 2, 3, 4]


def test_a_job_that_flare_ended_because_a_site_died_goes_on(board: Board) -> None:
    ended = told("job-1", "aborted", 2, code=int(Code.ABORTED))
    one_after_the_other(
        board, lambda job: dies(board, job, 2, outcome=ended), lambda job: completes(board, job, first=3)
    )
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert outcome.status == "completed"


def test_the_job_folder_at_hand_is_used_and_left_as_it_is(board: Board) -> None:
    job = board.job_folder("mine")
    before = (job / "app/config/config_fed_server.json").read_text()
    one_after_the_other(board, lambda job: dies(board, job, 2), lambda job: completes(board, job, first=3))
    outcome, _ = watched(board, board.submit(job), job=job)
    assert outcome.status == "completed"
    assert (job / "app/config/config_fed_server.json").read_text() == before


def test_a_job_is_not_resumed_where_nobody_wants_it(board: Board) -> None:
    board.live = lambda job: dies(board, job, 2)
    outcome, heard = watched(board, board.submit(board.job_folder()), resume=False)
    assert (outcome.status, outcome.resumable, list(board.all)) == ("failed", True, ["job-1"])
    assert "resuming" not in kinds(heard)
    assert "died" in outcome.reason


def test_a_server_that_is_away_is_waited_for(board: Board) -> None:
    board.live = lambda job: completes(board, job, delay=200)
    job_id = board.submit(board.job_folder())
    board.clock.after(20, lambda: setattr(board, "down", True))
    board.clock.after(120, lambda: setattr(board, "down", False))
    outcome, heard = watched(board, job_id)
    assert outcome.status == "completed"
    assert kinds(heard).count("unreachable") == kinds(heard).count("reachable") == 1


def test_a_server_that_stays_away_is_given_up_with_the_command_to_come_back(board: Board) -> None:
    board.live = lambda job: dies(board, job, 2)
    job_id = board.submit(board.job_folder())
    board.clock.after(20, lambda: setattr(board, "down", True))
    with pytest.raises(Unreachable, match=r"15 minutes.*crossward job watch job-1"):
        watched(board, job_id)
    assert board.clock.time < 1000


def lose(board: Board, job: Job) -> None:
    """The server is killed and comes back; the job is running in its store, and nowhere else."""
    job.process, job.progress, job.lost = False, None, True
    board.down = True
    board.clock.after(15, lambda: setattr(board, "down", False))


def test_a_job_that_a_restarted_server_only_believes_in_goes_on_from_its_metadata(board: Board) -> None:
    def lost(job: Job) -> None:
        dies(board, job, 2, status="RUNNING")
        board.clock.after(20, lambda: lose(board, job))

    one_after_the_other(board, lost, lambda job: completes(board, job, first=3))
    outcome, heard = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, outcome.jobs) == ("completed", ("job-1", "job-2"))
    assert board.all["job-2"].run == "job-1"
    assert [kind for kind in kinds(heard) if kind in ("unreachable", "reachable", "resuming", "resumed")] == [
        "unreachable",
        "reachable",
        "resuming",
        "resumed",
    ]


def test_the_run_goes_on_only_when_its_sites_are_back(board: Board) -> None:
    def lost(job: Job) -> None:
        dies(board, job, 2)
        board.clock.after(20, lambda: board.connected.remove("hospital-b"))

    def live(job: Job) -> None:
        assert "hospital-b" in board.connected
        completes(board, job, first=3)

    one_after_the_other(board, lost, live)
    board.clock.after(70, lambda: board.connected.append("hospital-b"))
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert outcome.status == "completed"
    assert board.clock.time > 70


def test_sites_that_never_come_back_do_not_hold_the_run_up_for_ever(board: Board) -> None:
    board.connected = ["hospital-a"]
    one_after_the_other(board, lambda job: dies(board, job, 2), lambda job: completes(board, job, first=3))
    assert watched(board, board.submit(board.job_folder()))[0].status == "completed"


def test_a_run_that_comes_no_further_is_given_up_after_three_attempts(board: Board) -> None:
    board.live = lambda job: dies(board, job, 2)
    outcome, heard = watched(board, board.submit(board.job_folder()))
    assert outcome.status == "failed"
    assert outcome.jobs == ("job-1", "job-2", "job-3", "job-4")
    assert "3 times" in outcome.reason
    assert "crossward job explain job-4" in outcome.reason
    assert kinds(heard).count("resuming") == 3


def test_progress_makes_up_for_attempts(board: Board) -> None:
    lives = [lambda job, closed=closed: dies(board, job, closed) for closed in (1, 1, 1, 2, 2, 2)]
    one_after_the_other(board, *lives, lambda job: completes(board, job, first=3))
    assert watched(board, board.submit(board.job_folder()))[0].status == "completed"


def test_a_job_that_no_site_ever_joined_is_tried_once_more_only(board: Board) -> None:
    def refused(job: Job) -> None:
        board.clock.after(3, job.starts)
        board.clock.after(10, lambda: job.tells(0, opening()[:1]))
        ended = told(job.run, "aborted", 0, code=int(Code.ABORTED), events=opening()[:1])
        board.clock.after(20, lambda: job.ends("FINISHED:ABNORMAL", ended))

    board.live = refused
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, len(outcome.jobs)) == ("failed", 2)


def test_a_job_that_a_person_aborted_stays_so(board: Board) -> None:
    for outcome_file in (None, told("job-1", "aborted", 2, code=int(Code.ABORTED))):
        board.all.clear()
        board.live = lambda job, left=outcome_file: dies(board, job, 2, status="FINISHED:ABORTED", outcome=left)
        outcome, _ = watched(board, board.submit(board.job_folder(f"job{bool(outcome_file)}")))
        assert (outcome.status, list(board.all)) == ("aborted", ["job-1"])
        assert "aborted" in outcome.reason


def test_flares_word_for_success_is_not_believed(board: Board) -> None:
    board.live = lambda job: dies(board, job, 2, status="FINISHED:COMPLETED")
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, list(board.all)) == ("failed", ["job-1"])
    assert "no outcome" in outcome.reason


def test_flares_word_for_failure_is_not_believed_either(board: Board) -> None:
    ended = told("job-1", "completed", 4, best_round=4)
    board.live = lambda job: dies(board, job, 4, status="FINISHED:ABNORMAL", outcome=ended)
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, list(board.all)) == ("completed", ["job-1"])


def test_a_run_that_is_done_is_not_held_up_by_a_stopped_site(board: Board) -> None:
    def live(job: Job) -> None:
        board.clock.after(3, job.starts)
        board.clock.after(10, lambda: job.tells(4, opening()))

        def done() -> None:
            job.ends("RUNNING", told(job.run, "completed", 4, best_round=4))

        board.clock.after(30, done)

    board.live = live
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, board.aborted) == ("completed", ["job-1"])
    assert board.clock.time < 90


def test_a_run_whose_process_is_gone_goes_on_after_flare_was_told_to_end_the_job(board: Board) -> None:
    def gone(job: Job) -> None:
        dies(board, job, 2, status="RUNNING")

    one_after_the_other(board, gone, lambda job: completes(board, job, first=3))
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, outcome.jobs, board.aborted) == ("completed", ("job-1", "job-2"), ["job-1"])


def test_a_site_that_refused_ends_it_with_its_words(board: Board) -> None:
    trouble = {"site": "hospital-b", "round": 0, "task": "join", "code": int(Code.SMALL_SUMS), "numbers": {}}
    ended = told(
        "job-1", "failed", 0, code=int(Code.SMALL_SUMS), numbers={"sites": 3, "needed": 4}, site="hospital-b",
        troubles=[trouble],
    )  # fmt: skip
    board.live = lambda job: dies(board, job, 0, outcome=ended)
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, list(board.all)) == ("failed", ["job-1"])
    assert outcome.reason.startswith("hospital-b: the job would open sums over 3 sites")
    assert outcome.troubles == (trouble,)


@pytest.mark.parametrize(
    ("code", "again"), [(Code.BUSY, True), (Code.QUORUM, True), (Code.DISK_FULL, False), (Code.NOT_RESUMABLE, False)]
)
def test_only_what_may_pass_is_tried_again(board: Board, code: Code, again: bool) -> None:
    ended = told("job-1", "failed", 2, code=int(code))
    one_after_the_other(
        board, lambda job: dies(board, job, 2, outcome=ended), lambda job: completes(board, job, first=3)
    )
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status == "completed") is again


def test_too_few_reports_are_not_tried_again_while_a_site_refuses_for_good(board: Board) -> None:
    trouble = {"site": "hospital-b", "round": 1, "task": "train", "code": int(Code.NO_DATA), "numbers": {}}
    ended = told("job-1", "failed", 0, code=int(Code.QUORUM), troubles=[trouble])
    board.live = lambda job: dies(board, job, 0, outcome=ended)
    assert len(watched(board, board.submit(board.job_folder()))[0].jobs) == 1


def test_a_job_that_never_ran_is_not_submitted_again(board: Board) -> None:
    board.live = lambda job: board.clock.after(5, lambda: job.ends("FINISHED:FAILED_TO_RUN"))
    outcome, heard = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, outcome.resumable, heard) == ("failed", False, [])
    assert "could not start" in outcome.reason


def test_a_resumed_job_that_could_not_start_is_tried_again(board: Board) -> None:
    one_after_the_other(
        board,
        lambda job: dies(board, job, 2),
        lambda job: board.clock.after(5, lambda: job.ends("FINISHED:FAILED_TO_RUN")),
        lambda job: completes(board, job, first=3),
    )
    assert watched(board, board.submit(board.job_folder()))[0].status == "completed"


def test_a_waiting_job_says_once_what_it_waits_for(board: Board) -> None:
    def waits(job: Job) -> None:
        history = ["2026-01-01 10:00:00: connected sites (1) < min_sites (2)"]
        board.clock.after(4, lambda: job.meta.update(schedule_history=list(history)))
        board.clock.after(14, lambda: job.meta.update(schedule_history=[*history, history[0]]))
        board.clock.after(30, lambda: completes(board, job))

    board.live = waits
    outcome, heard = watched(board, board.submit(board.job_folder()))
    assert outcome.status == "completed"
    assert [each.figures["reason"] for each in heard if each.kind == "waiting"] == [
        "connected sites (1) < min_sites (2)"
    ]


def test_a_run_that_somebody_else_resumed_is_followed_and_not_submitted_twice(board: Board) -> None:
    def lost(job: Job) -> None:
        dies(board, job, 2)
        theirs = board.job_folder("theirs", resume="job-1")
        board.clock.after(29, lambda: board.submit(theirs))

    one_after_the_other(board, lost, lambda job: completes(board, job, first=3))
    outcome, _ = watched(board, board.submit(board.job_folder()))
    assert (outcome.status, outcome.jobs) == ("completed", ("job-1", "job-2"))
    assert list(board.all) == ["job-1", "job-2"]


def test_a_server_that_goes_while_a_job_is_submitted_again_does_not_get_it_twice(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_the_other(board, lambda job: dies(board, job, 2), lambda job: completes(board, job, first=3))
    job_id = board.submit(board.job_folder())
    submit = board.submit

    def unheard(job: Path) -> str:
        submit(job)
        raise Unreachable("no answer came back")

    monkeypatch.setattr(board, "submit", unheard)
    outcome, _ = watched(board, job_id)
    assert (outcome.status, list(board.all)) == ("completed", ["job-1", "job-2"])


def test_a_job_that_is_not_there_is_said_at_once(board: Board) -> None:
    with pytest.raises(NoSuchJob):
        watched(board, "nobody")
