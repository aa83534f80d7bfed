"""A server that is made up: jobs whose life is written down beforehand, and a clock that only goes on when asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossward.federation.storage import read_json
from crossward.flare.console import NoSuchJob, Unreachable
from crossward.flare.jobs import META, Timing, export, notes_of, usual_study

SITES = ["hospital-a", "hospital-b"]


class Clock:
    def __init__(self) -> None:
        self.time = 0.0
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        """Let time pass, and what was planned for it happen."""
        until = self.time + seconds
        while due := sorted((plan for plan in self._plans if plan[0] <= until), key=lambda plan: plan[0])[:1]:
            self._plans.remove(due[0])
            self.time = max(self.time, due[0][0])
            due[0][1]()
        self.time = until

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self._plans.append((self.time + seconds, action))


@dataclass
class Job:
    """A job at the made-up server."""

    id: str
    meta: dict[str, Any]
    folder: Path | None = None
    process: bool = False
    lost: bool = False
    progress: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    log: str = ""

    @property
    def run(self) -> str:
        return str(notes_of(self.meta).get("resume") or self.id)

    def starts(self) -> None:
        self.process, self.meta["status"] = True, "RUNNING"

    def tells(self, closed: int, events: list[dict[str, Any]], *, rounds: int = 4, shown: int = 200) -> None:
        """The controller's progress."""
        self.progress = {
            "run": self.run,
            "round": closed,
            "rounds": rounds,
            "status": "running",
            "events": events[-shown:],
        }

    def ends(self, status: str, outcome: dict[str, Any] | None = None) -> None:
        self.process, self.progress, self.outcome = False, None, outcome
        self.meta["status"] = status


def event(seq: int, kind: str, round_number: int = 0, site: str | None = None, **figures: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "time": 1000.0 * round_number + seq,
        "kind": kind,
        "round": round_number,
        "site": site,
        "figures": figures,
    }


def told(run: str, status: str, closed: int, **more: Any) -> dict[str, Any]:
    """The content of an outcome.json."""
    usual = {"rounds": 4, "best_round": None, "resumable": status != "completed", "code": None, "numbers": {}}
    rest = {"site": None, "troubles": [], "events": []}
    return {"status": status, "run": run, "round": closed, **usual, **rest, **more}


@dataclass
class Board:
    """Answers as the console does."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    all: dict[str, Job] = field(default_factory=dict)
    live: Callable[[Job], object] = lambda job: None
    """What happens to a job that is submitted."""
    down: bool = False
    connected: list[str] = field(default_factory=lambda: list(SITES))
    aborted: list[str] = field(default_factory=list)
    asked_for_progress: int = 0

    def job_folder(self, name: str = "job", **more: Any) -> Path:
        return export(usual_study("fedavg", secagg=False), self.folder / name, timing=Timing(), min_sites=2, **more)

    def submit(self, job: Path) -> str:
        self._answer()
        job_id = f"job-{len(self.all) + 1}"
        copy = Path(shutil.copytree(job, self.folder / "store" / job_id / job.name))
        meta = {**read_json(job / META), "job_id": job_id, "status": "SUBMITTED", "submit_time": len(self.all) + 1.0}
        self.all[job_id] = Job(job_id, meta, copy)
        self.live(self.all[job_id])
        return job_id

    def status(self, job_id: str) -> str:
        return str(self.meta(job_id)["status"])

    def meta(self, job_id: str) -> dict[str, Any]:
        self._answer()
        if job_id not in self.all:
            raise NoSuchJob(f"no job {job_id}")
        return dict(self.all[job_id].meta)

    def jobs(self) -> list[dict[str, Any]]:
        self._answer()
        return [dict(job.meta) for job in self.all.values()]

    def statistics(self, job_id: str) -> dict[str, Any] | None:
        self._answer()
        self.asked_for_progress += 1
        return json.loads(json.dumps(self.all[job_id].progress))

    def running_jobs(self) -> list[str]:
        self._answer()
        return [job.id for job in self.all.values() if job.process]

    def sites(self) -> list[str]:
        self._answer()
        return list(self.connected)

    def download(self, job_id: str, out: Path) -> Path | None:
        self._answer()
        job = self.all[job_id]
        if not job.meta["status"].startswith("FINISHED:"):
            return None
        place = out / job_id
        (place / "workspace").mkdir(parents=True)
        if job.folder is not None:
            shutil.copytree(job.folder, place / "job" / job.folder.name)
        (place / "workspace" / "log.txt").write_text(job.log)
        for name, content in (("outcome.json", job.outcome), ("result.json", job.result)):
            if content is not None:
                (place / "workspace" / "crossward").mkdir(exist_ok=True)
                (place / "workspace" / "crossward" / name).write_text(json.dumps(content))
        return place

    def abort(self, job_id: str) -> bool:
        self._answer()
        job = self.all[job_id]
        if job.lost:
            return False
        self.aborted.append(job_id)
        self.clock.after(2, lambda: job.ends("FINISHED:ABORTED", job.outcome))
        return True

    def _answer(self) -> None:
        if self.down:
            raise Unreachable("the server does not answer")
