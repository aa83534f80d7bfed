"""What FLARE costs beside training: seconds and bytes a round, and the memory of server and sites, round by round."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as Screen

from crossward.federation.errors import RunFailure
from crossward.flare.console import Console
from crossward.flare.jobs import PHANTOM_CLASSES, Timing, export
from crossward.flare.system import JOB, LocalSystem
from crossward.flare.watch import Event, Pace, follow
from crossward.imaging.phantom import write_hospitals
from crossward.methods import Task, create
from crossward.site.declaration import Declaration
from crossward.site.participant import Plugs
from crossward.site.study import Study
from crossward.site.trainer import Training

_PATIENTS = 40
_SIZE = 32
_BATCH = 8
_STEPS = 4
_HOSPITALS = 4
_EPOCH = 60.0
_MEGABYTE = 1e6
_WORK = re.compile(r"answered 'train' of round (\d+) after ([\d.]+) s of work")


def measure(sites: int, *, rounds: int, method: str, width: float, screen: Screen) -> dict[str, Any]:
    """Run a job with short training on a real system of processes, and look at them after every round."""
    study = Study(
        method=create(method),
        task=Task(classes=PHANTOM_CLASSES, channels=1, size=_SIZE, rounds=rounds, width=width),
        training=Training(steps=_STEPS, batch_size=_BATCH),
        plugs=Plugs(),
    )
    sent = Declaration(study).algebra.sent
    model = 4 * sum(spec.numel for spec in sent.values())
    with tempfile.TemporaryDirectory(prefix="crossward-bench-") as folder:
        # Several sites may have the same phantoms: what is measured does not depend on the images.
        write_hospitals(Path(folder) / "data", sites=min(sites, _HOSPITALS), patients=_PATIENTS)
        hospitals = sorted(path for path in (Path(folder) / "data").iterdir() if path.is_dir())
        data = {f"site-{number + 1}": hospitals[number % len(hospitals)] for number in range(sites)}
        system = LocalSystem.make(Path(folder) / "system", data)
        try:
            system.start()
            system.wait_until_ready()
            watched = _Watched(system, screen)
            job = export(study, Path(folder) / "job", timing=Timing(), min_sites=sites)
            with Console.open(system.admin_kit) as console:
                outcome = follow(console, console.submit(job), listen=watched, job=job, pace=Pace(poll=0.2))
            if outcome.status != "completed" or outcome.result is None:
                raise RunFailure(f"the measured job failed: {outcome.reason}")
            work = _work(system, outcome.job)
        finally:
            system.stop()
    return _row(sites, model, outcome.result["rounds"], work, watched.memory)


class _Watched:
    """Notes the memory of the job's processes when a round is closed."""

    def __init__(self, system: LocalSystem, screen: Screen) -> None:
        self._system = system
        self._screen = screen
        self.memory: list[dict[str, float]] = []

    def __call__(self, event: Event) -> None:
        import psutil

        if event.kind != "closed":
            return
        used = {
            process.participant: psutil.Process(process.pid).memory_info().rss / _MEGABYTE
            for process in self._system.processes()
            if process.kind == JOB
        }
        self.memory.append(used)
        shown = ", ".join(f"{name} {megabytes:.0f} MB" for name, megabytes in sorted(used.items()))
        self._screen.print(f"round {event.round_number}: {event.figures['seconds']:.1f} s, {shown}", soft_wrap=True)


def _work(system: LocalSystem, job: str) -> dict[int, float]:
    """The longest that any site worked in each round, from the sites' own logs."""
    work: dict[int, float] = {}
    for site in system.sites:
        log = (system.kit(site) / job / "log.txt").read_text(encoding="utf-8", errors="replace")
        for number, seconds in _WORK.findall(log):
            work[int(number)] = max(work.get(int(number), 0.0), float(seconds))
    return work


def _row(
    sites: int,
    model: int,
    rounds: list[Mapping[str, Any]],
    work: Mapping[int, float],
    memory: list[dict[str, float]],
) -> dict[str, Any]:
    # The first round starts everything up, and is not what a long run costs.
    later = rounds[1:] or rounds
    seconds = statistics.median(record["seconds"] for record in later)
    beside = statistics.median(record["seconds"] - work.get(record["round"], 0.0) for record in later)
    server = [used["server"] for used in memory if "server" in used]
    members = [max(value for name, value in used.items() if name != "server") for used in memory if len(used) > 1]
    half = len(server) // 2
    return {
        "sites": sites,
        "model MB": model / _MEGABYTE,
        "s a round": seconds,
        "s beside training": beside,
        "of a 60 s epoch": beside / _EPOCH,
        "up / model": statistics.mean(record["bytes_up"] for record in later) / sites / model,
        "down / model": statistics.mean(record["bytes_down"] for record in later) / sites / model,
        "server MB, first half": max(server[: half or 1]),
        "server MB, second half": max(server[half:]),
        "site MB, first half": max(members[: half or 1]),
        "site MB, second half": max(members[half:]),
    }
