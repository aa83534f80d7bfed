"""Small masked runs in one process, with real training, and what their sites saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.site.made_up_sites import cohort_of, made_up_site, made_up_study
from torch import Tensor

from crossward.federation.contract import Payload, Report
from crossward.federation.storage import read_tensors
from crossward.imaging.data import Cohort
from crossward.privacy.secagg import sketch
from crossward.privacy.secagg.settings import Settings
from crossward.site.inprocess import simulate
from crossward.site.messages import (
    Message,
)
from crossward.site.outbox import Outbox
from crossward.site.participant import Participant
from crossward.site.release import Release
from crossward.site.study import Study

NAMES = ("alder", "birch", "cedar", "dogwood")


def cohort() -> Cohort:
    return cohort_of({name: made_up_site(name, number=number) for number, name in enumerate(NAMES)})


def masked_study(method: str, *, rounds: int = 1, **settings: Any) -> Study:
    return made_up_study(method, rounds=rounds).masked(Settings(**settings))


@dataclass
class Seen:
    """What sites trained, received and answered, noted at the sites themselves."""

    reports: dict[tuple[str, int], Report] = field(default_factory=dict)
    payloads: dict[tuple[str, int], Payload] = field(default_factory=dict)
    answers: list[tuple[str, Message, Message]] = field(default_factory=list)


@dataclass
class Ended:
    result: dict[str, Any]
    folder: Path
    seen: Seen

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / "server" / "checkpoint.safetensors")[0]


def watched(patch: pytest.MonkeyPatch) -> Seen:
    seen, put, receive, make = Seen(), Outbox.put, Participant.receive, Release.__init__

    def listening(self: Release, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        self.tasks = {task: noting(task, answer) for task, answer in self.tasks.items()}

    def noting(task: str, answer: Callable[[Any], Message]) -> Callable[[Any], Message]:
        def answered(message: Any) -> Message:
            found = answer(message)
            seen.answers.append((task, message, found))
            return found

        return answered

    def noted(self: Outbox, report: Report) -> None:
        put(self, report)
        seen.reports[report.site, report.round_number] = report

    def received(self: Participant, payload: Payload) -> Any:
        seen.payloads[self.name, payload.round_number] = payload
        return receive(self, payload)

    patch.setattr(Outbox, "put", noted)
    patch.setattr(Participant, "receive", received)
    patch.setattr(Release, "__init__", listening)
    return seen


@contextmanager
def quick() -> Iterator[None]:
    """All sites draw the same numbers for a sketch: in one process they need not be drawn by each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr(sketch, "gaussian", lru_cache(maxsize=4)(sketch.gaussian))
        yield


class Runs:
    """Studies that were run once, with what their sites saw."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Ended] = {}

    def __call__(self, study: Study) -> Ended:
        if study.digest() not in self._known:
            folder = self._folder / str(len(self._known))
            with pytest.MonkeyPatch.context() as patch:
                seen = watched(patch)
                self._known[study.digest()] = Ended(simulate(cohort(), study, folder, jobs=1), folder, seen)
        return self._known[study.digest()]
