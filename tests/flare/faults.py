"""Faults for the real FLARE system of the tests: processes killed or halted, full disks, changed software."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from crossward.flare.system import JOB, PARENT
from crossward.flare.watch import Event, Outcome, follow
from crossward.site.study import Study
from tests.flare import real
from tests.flare.real import TIMING, Hospitals, Timing

PACE = replace(real.PACE, first=1.0)
"""A fault has to come while the round that it is meant for goes on, so nothing may be seen late."""

READY = 300.0
"""Seconds that nothing here should need; a slow machine must not make a test fail."""


def wait_for(done: Callable[[], bool], what: str, seconds: float = READY) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"in {seconds:.0f} seconds it did not happen: {what}"
        time.sleep(0.1)


def settle(hospitals: Hospitals) -> None:
    """Wait until all is as a test may expect it: everyone up and registered, and nothing left of earlier jobs."""
    wait_for(lambda: not processes(hospitals, *hospitals.system.participants, kind=JOB), "jobs' processes have ended")
    hospitals.system.wait_until_ready(READY)


def processes(hospitals: Hospitals, *names: str, kind: str) -> list[int]:
    return [
        process.pid for process in hospitals.system.processes() if process.participant in names and process.kind == kind
    ]


def send(signal_number: signal.Signals, pids: list[int]) -> None:
    assert pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def kill_all_of(hospitals: Hospitals, name: str) -> list[int]:
    """Kill a participant's parent and then its job process, too fast for the parent to tell of the job's end.

    Returns:
        The parent that was killed.
    """
    parents = processes(hospitals, name, kind=PARENT)
    send(signal.SIGKILL, parents + processes(hospitals, name, kind=JOB))
    return parents


@dataclass(frozen=True)
class Story:
    """What a run came to, and what was seen of it on the way."""

    outcome: Outcome
    events: list[Event]

    def of(self, kind: str, site: str | None = None) -> list[Event]:
        return [event for event in self.events if event.kind == kind and site in (None, event.site)]

    def first(self, kind: str, site: str | None = None) -> Event:
        assert self.of(kind, site), f"there was no '{kind}' of {site}: {self.lines()}"
        return self.of(kind, site)[0]

    def reported(self) -> dict[int, list[str]]:
        return {event.round_number: event.figures["reported"] for event in self.of("closed")}

    def codes(self, kind: str, site: str) -> set[int]:
        return {event.figures["code"] for event in self.of(kind, site)}

    def lines(self) -> str:
        shown = [
            f"{event.kind}/{event.round_number}" + (f"/{event.site}" if event.site else "") for event in self.events
        ]
        seconds = ", ".join(f"{event.figures['seconds']:.1f}" for event in self.of("closed"))
        return f"{' '.join(shown)}; seconds of the rounds: {seconds}"


def run(
    hospitals: Hospitals,
    study: Study,
    react: Callable[[Event], object] = lambda event: None,
    *,
    timing: Timing = TIMING,
    job: Path | None = None,
) -> Story:
    """Run a study as a job and follow it as ``crossward job watch`` does; ``react`` is given every event."""
    events: list[Event] = []
    job = job or hospitals.job(study, timing=timing)

    def listen(event: Event) -> None:
        events.append(event)
        react(event)

    with hospitals.console() as console:
        outcome = follow(console, console.submit(job), listen=listen, job=job, pace=PACE)
    story = Story(outcome, events)
    print(f"\n{outcome.status} {outcome.code or ''} {outcome.reason}\n{story.lines()}")
    return story


def once(kind: str, round_number: int, action: Callable[[], object]) -> Callable[[Event], None]:
    """Do something the first time that an event comes."""
    waiting = [action]

    def react(event: Event) -> None:
        if waiting and (event.kind, event.round_number) == (kind, round_number):
            waiting.pop()()

    return react


@contextmanager
def small_disk(folder: Path, *, size: int) -> Iterator[None]:
    """Put an empty disk of so many bytes in a folder's place; what was in the folder is there again afterwards."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    folder.mkdir(mode=0o700, exist_ok=True)
    options = f"size={size},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        # Lazily where a process still has a file open on it: the disk is gone from the folder at once all the same.
        if subprocess.run(["umount", str(folder)], capture_output=True).returncode:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write to ``filler`` in a folder until there is no room."""
    with suppress(OSError), (folder / "filler").open("ab", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


@dataclass(frozen=True)
class Changed:
    """Software that does something else when it is told to.

    Attributes:
        planted: a folder; a file in it with a site's name has the name of the tensor that the site gives away.
    """

    planted: Path


@contextmanager
def changed_software(hospitals: Hospitals, folder: Path) -> Iterator[Changed]:
    """Start everyone anew with changed software, and with the usual one at the end."""
    changed = Changed(folder / "planted")
    changed.planted.mkdir(parents=True)
    with real.recorded_in(folder):
        _start_anew(hospitals)
    try:
        yield changed
    finally:
        _start_anew(hospitals)


def _start_anew(hospitals: Hospitals) -> None:
    hospitals.system.stop()
    hospitals.system.start()
    hospitals.system.wait_until_ready(READY)
