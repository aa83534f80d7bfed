"""What has happened in a job so far: for the administrator's question, for the run's folder, and for the end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from crossward.federation.storage import write_json
from crossward.flare.names import OUTCOME
from crossward.site.troubles import Code, Refusal

_SHOWN = 200
"""As many events as one answer holds; whoever asks every few seconds misses none."""


class Progress:
    """Collects events; safe to call from several threads.

    Args:
        run: the run's name.
        rounds: planned rounds.
    """

    def __init__(self, run: str, *, rounds: int) -> None:
        self._run = run
        self._rounds = rounds
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._troubles: list[dict[str, Any]] = []
        self._status = "starting"
        self._round = 0

    def event(self, kind: str, round_number: int, site: str | None = None, **figures: Any) -> None:
        """Note that something happened."""
        with self._lock:
            entry = {
                "seq": len(self._events) + 1,
                "time": round(time.time(), 3),
                "kind": kind,
                "round": round_number,
                "site": site,
                "figures": figures,
            }
            self._events.append(entry)

    def trouble(self, kind: str, round_number: int, site: str, task: str, refusal: Refusal) -> None:
        """Note that a site did not do its part, and why."""
        code: dict[str, Any] = {"code": int(refusal.code), "numbers": refusal.numbers}
        if refusal.evidence:
            code["evidence"] = refusal.evidence
        self.event(kind, round_number, site, task=task, **code)
        with self._lock:
            self._troubles.append({"site": site, "round": round_number, "task": task, **code})

    def reached(self, round_number: int) -> None:
        """Note that a round is closed and on disk."""
        with self._lock:
            self._status, self._round = "running", round_number

    def statistics(self) -> dict[str, Any]:
        """The answer to the question how far the job is."""
        with self._lock:
            return {
                "run": self._run,
                "round": self._round,
                "rounds": self._rounds,
                "status": self._status,
                "events": self._events[-_SHOWN:],
            }

    def end(self, folder: Path, *, best_round: int | None, refusal: Refusal | None) -> None:
        """Write how the job ended into its folder: FLARE's own word for it only says that the process ended."""
        status = "completed" if refusal is None else "aborted" if refusal.code is Code.ABORTED else "failed"
        code = None if refusal is None else int(refusal.code)
        numbers = {} if refusal is None else refusal.numbers
        self.event("ended", self._round, refusal.site if refusal else None, status=status, code=code, numbers=numbers)
        with self._lock:
            self._status = status
            content = {
                "status": status,
                "run": self._run,
                "round": self._round,
                "rounds": self._rounds,
                "best_round": best_round,
                "resumable": refusal is not None and refusal.code not in _FINAL,
                "code": code,
                "numbers": numbers,
                "site": refusal.site if refusal else None,
                "troubles": self._troubles,
                "events": self._events,
            }
        write_json(folder / OUTCOME, content)

    def keep(self, path: Path) -> None:
        """Append the events to the run's own file, which has those of all its jobs."""
        with self._lock, path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in self._events)


_FINAL = frozenset({Code.NOT_RESUMABLE, Code.VERSION, Code.STUDY})
"""What no second try can mend: the job itself has to be another one."""
