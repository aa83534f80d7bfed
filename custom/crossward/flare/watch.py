"""Follows a run to its end: every event once, and a job that died is submitted again to go on with its run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from crossward.flare import names
from crossward.flare.console import JobConsole, Unreachable
from crossward.flare.jobs import from_meta, notes_of, with_resume
from crossward.flare.outcome import (
    ABORTED,
    COMPLETED,
    FINISHED,
    LASTING,
    LOST,
    PASSING,
    REFUSED,
    Outcome,
    files_in,
    job_in,
    left_file,
    silent_end,
    told_end,
)

__all__ = ["Clock", "Event", "Listener", "Outcome", "Pace", "follow"]

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, or to the one who watches it (``seq`` is 0 then).

    The watcher's own kinds: waiting {reason}; unreachable; reachable; resuming {run, after, attempt}; resumed {job}.
    """

    kind: str
    round_number: int = 0
    site: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    seq: int = 0
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often to look, and how long to wait, in seconds.

    Attributes:
        poll: between two looks.
        first: before a job is asked for its progress, and between such questions until it answers: a process that
            is just starting fills its log with errors when it is asked.
        patience: for a server that does not answer.
        process: for a running job whose process has ended. FLARE itself waits up to 15 minutes for sites that
            were stopped; the run's outcome is there long before.
        ending: for a job that was told to stop.
        settle: before a job is submitted again; twice as long after every attempt that brought nothing, since the
            sites' processes of the job before need time to end.
        sites: for the sites of the run to be connected again, so that the cohort stays the same.
        attempts: resumed jobs without a new closed round, after which to give up; one, if no site ever joined.
    """

    poll: float = 2.0
    first: float = 6.0
    patience: float = 900.0
    process: float = 20.0
    ending: float = 90.0
    settle: float = 5.0
    sites: float = 90.0
    attempts: int = 3


class Clock(Protocol):
    """The time; a test brings its own."""

    def now(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class _SystemClock:
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


Listener = Callable[[Event], None]


def follow(
    console: JobConsole,
    job_id: str,
    *,
    listen: Listener = lambda event: None,
    resume: bool = True,
    job: Path | None = None,
    out: Path | None = None,
    pace: Pace | None = None,
    clock: Clock | None = None,
) -> Outcome:
    """Follow a job, and the jobs that go on with its run, to the end.

    Args:
        console: the session with the server.
        job_id: FLARE's id of the job.
        listen: given every event once.
        resume: submit the job again when it died and its run can go on.
        job: the job's folder; taken from the server if not given.
        out: where to keep what is downloaded; nothing is kept if not given.
        pace: how often to look, and how long to wait.
        clock: the time, for tests.

    Raises:
        Unreachable: the server did not answer for too long.
        CrosswardError: the job does not exist, or may not be looked at.
    """
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossward-")))
        watcher = _Watcher(console, job_id, listen, pace or Pace(), clock or _SystemClock(), folder, job)
        outcome = watcher.run(resume=resume)
    return outcome if out else replace(outcome, folder=None)


class _Watcher:
    def __init__(
        self,
        console: JobConsole,
        job_id: str,
        listen: Listener,
        pace: Pace,
        clock: Clock,
        folder: Path,
        job: Path | None,
    ) -> None:
        self._console, self._listen, self._pace, self._clock = console, listen, pace, clock
        self._folder, self._job = folder, job
        self._jobs = [job_id]
        self._meta: dict[str, Any] = {}
        self._heard: set[tuple[Any, ...]] = set()
        self._reason_to_wait = ""
        self._answered = ""
        self._ask_at = 0.0
        self._run = ""
        self._sites: list[str] = []
        self._joined = False
        self._closed = self._rounds = self._closed_before = 0
        self._attempts = 0
        self._stopped_by_us = False

    @property
    def _id(self) -> str:
        return self._jobs[-1]

    def run(self, *, resume: bool) -> Outcome:
        while True:
            self._closed_before, self._stopped_by_us = self._closed, False
            status = self._wait_for_end()
            outcome = self._read(status)
            if outcome.status == "completed" or not resume or not self._may_go_on(status, outcome):
                return outcome
            self._attempts = 0 if self._closed > self._closed_before else self._attempts
            # Where no site ever joined, the sites may well refuse the job as it is, which FLARE does not tell.
            if self._attempts >= (self._pace.attempts if self._joined else 1):
                return replace(
                    outcome,
                    reason=f"given up after going on without a new round {_times(self._attempts)}: {outcome.reason}",
                )
            self._attempts += 1
            self._submit_again(outcome)

    # Waiting.

    def _wait_for_end(self) -> str:
        """Look again and again until the job has ended, or is found to have no process any more."""
        without_process: float | None = None
        self._ask_at = self._clock.now() + self._pace.first
        while True:
            self._meta = self._patiently(lambda: self._console.meta(self._id))
            status = str(self._meta.get("status", ""))
            if status.startswith(FINISHED):
                return status
            if status in ("RUNNING", "DISPATCHED"):
                if self._has_process():
                    without_process = None
                elif without_process is None:
                    without_process = self._clock.now()
                elif self._clock.now() - without_process >= self._pace.process:
                    return self._lay_to_rest()
            else:
                self._say_why_it_waits()
            self._clock.sleep(self._pace.poll)

    def _has_process(self) -> bool:
        if self._answered != self._id and self._clock.now() < self._ask_at:
            return self._id in self._patiently(self._console.running_jobs)
        progress = self._patiently(lambda: self._console.statistics(self._id))
        if progress is not None:
            self._answered = self._id
            self._take(progress)
            return True
        self._ask_at = self._clock.now() + self._pace.first
        return self._id in self._patiently(self._console.running_jobs)

    def _lay_to_rest(self) -> str:
        """Have FLARE end a job whose process is gone; the server that lost it in a restart cannot do that."""
        if not self._patiently(lambda: self._console.abort(self._id)):
            return LOST
        self._stopped_by_us = True
        until = self._clock.now() + self._pace.ending
        while self._clock.now() < until:
            self._meta = self._patiently(lambda: self._console.meta(self._id))
            if str(self._meta.get("status", "")).startswith(FINISHED):
                return str(self._meta["status"])
            self._clock.sleep(self._pace.poll)
        return LOST

    def _say_why_it_waits(self) -> None:
        history = self._meta.get("schedule_history") or []
        # Every entry begins with the time at which FLARE tried.
        reason = str(history[-1]).split(": ", 1)[-1] if history else ""
        if reason and reason != self._reason_to_wait:
            self._listen(Event("waiting", self._closed, figures={"reason": reason}))
        self._reason_to_wait = reason

    def _patiently(self, question: Callable[[], Answer]) -> Answer:
        """Ask until the server answers."""
        gone_since: float | None = None
        while True:
            try:
                answer = question()
            except Unreachable as error:
                if gone_since is None:
                    gone_since = self._clock.now()
                    self._listen(Event("unreachable", self._closed))
                if self._clock.now() - gone_since >= self._pace.patience:
                    raise Unreachable(
                        f"the server has not answered for {self._pace.patience / 60:.0f} minutes; the run may go on "
                        f"there. When the server is back: crossward job watch {self._id}"
                    ) from error
                self._clock.sleep(self._pace.poll)
                continue
            if gone_since is not None:
                self._listen(Event("reachable", self._closed))
            return answer

    # Reading.

    def _take(self, progress: Mapping[str, Any]) -> None:
        """Take in what the controller tells of itself, while it runs or in its outcome."""
        self._run = str(progress.get("run") or self._run)
        self._rounds = int(progress.get("rounds") or self._rounds)
        self._closed = max(self._closed, int(progress.get("round") or 0))
        for told in sorted(progress.get("events") or [], key=lambda each: each["seq"]):
            event = Event(
                str(told["kind"]),
                int(told.get("round") or 0),
                told.get("site"),
                dict(told.get("figures") or {}),
                int(told["seq"]),
                float(told.get("time") or 0),
            )
            # The number alone is not enough: a run that lost its last events in a crash counts them again.
            mark = (event.seq, event.time, event.kind, event.site)
            if mark in self._heard:
                continue
            self._heard.add(mark)
            if event.kind == "started":
                self._sites = list(event.figures.get("sites") or [])
            self._joined = self._joined or event.kind == "joined"
            self._listen(event)

    def _read(self, status: str) -> Outcome:
        """What became of the job that has ended."""
        folder = None if status == LOST else self._patiently(lambda: self._console.download(self._id, self._folder))
        told = left_file(folder, names.OUTCOME)
        if told is not None:
            self._take(told)
        begun = bool(self._run) or status == LOST or (folder is not None and files_in(folder).is_dir())
        common = Outcome(
            status="aborted" if status == ABORTED and not self._stopped_by_us else "failed",
            job=self._id,
            jobs=tuple(self._jobs),
            run=self._run or str(notes_of(self._meta).get("resume") or "") or self._id,
            round_number=self._closed,
            rounds=self._rounds,
            resumable=begun and status not in REFUSED and status != COMPLETED,
            folder=folder,
        )
        if told is None:
            return replace(common, reason=silent_end(status, common))
        outcome = replace(
            common,
            best_round=told.get("best_round"),
            resumable=bool(told.get("resumable")),
            code=told.get("code"),
            numbers=dict(told.get("numbers") or {}),
            site=told.get("site"),
            troubles=tuple(told.get("troubles") or ()),
        )
        if told.get("status") == "completed":
            return replace(outcome, status="completed", result=left_file(folder, names.RESULT))
        return replace(outcome, reason=told_end(outcome))

    # Going on.

    def _may_go_on(self, status: str, outcome: Outcome) -> bool:
        if outcome.status == "aborted":
            return False
        if outcome.code is None and not outcome.troubles:
            return outcome.resumable or (status in REFUSED and len(self._jobs) > 1)
        # A site that refused for good refuses again, if nothing came of the job beside its refusal.
        lasting = any(trouble.get("code") in LASTING for trouble in outcome.troubles)
        hopeless = lasting and self._closed == self._closed_before
        return outcome.resumable and outcome.code in PASSING and not hopeless

    def _submit_again(self, outcome: Outcome) -> None:
        told = {"run": outcome.run, "after": self._closed, "attempt": self._attempts}
        self._listen(Event("resuming", self._closed, figures=told))
        following = self._patiently(lambda: self._successor(outcome.run))
        if following is None:
            self._clock.sleep(self._pace.settle * 2 ** (self._attempts - 1))
            self._wait_for_sites()
            following = self._patiently(lambda: self._submit(outcome))
        self._jobs.append(following)
        self._reason_to_wait = ""
        self._listen(Event("resumed", self._closed, figures={"job": self._id, "run": outcome.run}))

    def _successor(self, run: str) -> str | None:
        """The last job that goes on with the run after the present one."""
        since = float(self._meta.get("submit_time") or 0)
        later = [
            str(meta["job_id"])
            for meta in self._console.jobs()
            if notes_of(meta).get("resume") == run and float(meta.get("submit_time") or 0) > since
        ]
        return next((job_id for job_id in reversed(later) if job_id not in self._jobs), None)

    def _wait_for_sites(self) -> None:
        until = self._clock.now() + self._pace.sites
        while self._clock.now() < until:
            if set(self._sites) <= set(self._patiently(self._console.sites)):
                return
            self._clock.sleep(self._pace.poll)

    def _submit(self, outcome: Outcome) -> str:
        """Submit the job anew, unless that has happened: by somebody else, or unheard when the server went away."""
        following = self._successor(outcome.run)
        if following is not None:
            return following
        with tempfile.TemporaryDirectory(prefix="crossward-") as folder:
            place = Path(folder) / f"resume-{outcome.run}"
            job = self._job or job_in(outcome.folder)
            if job is not None:
                return self._console.submit(with_resume(job, outcome.run, place))
            return self._console.submit(from_meta(self._meta, outcome.run, place))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
