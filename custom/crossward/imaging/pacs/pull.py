"""Pulls studies from an archive into a folder, and goes on where it was stopped."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from crossward.imaging.pacs.files import ImageFolder
from crossward.imaging.pacs.query import FoundStudy, Instance, Query, Question
from crossward.imaging.pacs.state import PullState
from crossward.imaging.pacs.trouble import Lost, Retrying, Stopped, Trouble, quiet_libraries
from crossward.imaging.splits import Progress

Piece = TypeVar("Piece")


class Archive(Protocol):
    """What DICOMweb and the older DICOM network service have in common."""

    @property
    def connections(self) -> int: ...
    @property
    def retrying(self) -> Retrying: ...
    def studies(self, keys: Mapping[str, str]) -> list[FoundStudy]: ...
    def instances(self, study: str) -> list[Instance]: ...
    def fetch(
        self, listed: Sequence[Instance], images: ImageFolder, arrived: Callable[[int], None]
    ) -> dict[str, Trouble]: ...


@dataclass
class Pulled:
    """What a pull did: counts only.

    Attributes:
        studies: that fit the question.
        files: that came now.
        bytes: of these.
        present: files that were there already.
        missing: images that did not come, by reason; a study that is not listed at all counts as one.
        not_found: lines of each list whose study the archive does not have.
        unasked: studies that the archive answered with although they do not fit the question; left out.
        retries: attempts beyond the first.
        seconds: that it took.
    """

    studies: int = 0
    files: int = 0
    bytes: int = 0
    present: int = 0
    missing: Counter[Trouble] = field(default_factory=Counter)
    not_found: dict[str, list[int]] = field(default_factory=dict)
    unasked: int = 0
    retries: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return not self.missing and not self.not_found

    def as_json(self) -> dict[str, Any]:
        missing = {trouble.value: count for trouble, count in sorted(self.missing.items())}
        return {**vars(self), "missing": missing, "seconds": round(self.seconds, 3), "complete": self.complete}


def pull(archive: Archive, query: Query, images: ImageFolder, *, progress: Progress | None = None) -> Pulled:
    """Searches, then fetches every file that is not there yet.

    Args:
        archive: where to ask.
        query: which studies.
        images: the folder; what is in it is not fetched again.
        progress: called as progress(what, done, total).

    Raises:
        CrosswardError: the archive cannot be used, or nothing can be written; the same call goes on from there.
    """
    with quiet_libraries():
        return _Pull(archive, query, images, progress).run()


class _Pull:
    def __init__(self, archive: Archive, query: Query, images: ImageFolder, progress: Progress | None) -> None:
        self._archive = archive
        self._query = query
        self._images = images
        self._state = PullState(images.folder)
        self._progress = progress or (lambda what, done, total: None)
        self._lock = threading.Lock()
        self._pulled = Pulled()
        self._found: dict[str, FoundStudy] = {}
        self._listed: dict[tuple[str, int], bool] = {}
        self._searched = self._looked_at = self._expected = 0

    def run(self) -> Pulled:
        began = time.monotonic()
        questions = list(self._query.questions())
        self._listed = {(question.list_name, question.line): False for question in questions if question.list_name}
        self._each(lambda question: self._search(question, len(questions)), questions)
        for (name, line), found in sorted(self._listed.items()):
            if not found:
                self._pulled.not_found.setdefault(name, []).append(line)
        self._pulled.studies = len(self._found)
        self._each(self._study, sorted(self._found.values(), key=lambda study: study.uid))
        self._pulled.retries = self._archive.retrying.retries
        self._pulled.seconds = time.monotonic() - began
        return self._pulled

    def _each(self, work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
        """Works on pieces side by side; the first failure ends all."""
        pool = ThreadPoolExecutor(max_workers=self._archive.connections)
        try:
            futures = [pool.submit(work, piece) for piece in pieces]
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [failure for future in ended if (failure := future.exception())]
            # Those that were only stopped say nothing about why.
            for failure in sorted(failures, key=lambda failure: isinstance(failure, Stopped)):
                raise failure
        except BaseException:
            self._archive.retrying.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _search(self, question: Question, total: int) -> None:
        answers = self._archive.studies(question.keys)
        fitting = [study for study in answers if self._query.fits(question, study)]
        with self._lock:
            self._found.update(_merged(fitting))
            if fitting:
                self._listed[question.list_name, question.line] = True
            self._pulled.unasked += len(answers) - len(fitting)
            self._searched += 1
            self._progress("searches", self._searched, total)

    def _study(self, study: FoundStudy) -> None:
        self._archive.retrying.check()
        if self._state.is_whole(study, self._images):
            self._count(study.instances or 0, 0)
            self._end_of_study()
            return
        try:
            listed = {instance.sop: instance for instance in self._archive.instances(study.uid)}
        except Lost as error:
            self._state.write(study.uid, there=(), missing={}, trouble=error.trouble)
            self._end_of_study({study.uid: error.trouble})
            return
        present = sum(uid in self._images for uid in listed)
        self._count(present, len(listed) - present)
        lost = self._archive.fetch(list(listed.values()), self._images, self._arrived)
        unlisted = max(0, (study.instances or 0) - len(listed))
        self._state.write(
            study.uid,
            there=listed.keys() - lost.keys(),
            missing=lost,
            trouble=Trouble.SHORT_LIST if unlisted else None,
        )
        self._end_of_study(lost, unlisted)

    def _count(self, present: int, wanted: int) -> None:
        with self._lock:
            self._pulled.present += present
            self._expected += wanted
            self._progress("files", self._pulled.files, self._expected)

    def _arrived(self, size: int) -> None:
        with self._lock:
            self._pulled.files += 1
            self._pulled.bytes += size
            self._progress("files", self._pulled.files, self._expected)

    def _end_of_study(self, lost: Mapping[str, Trouble] | None = None, unlisted: int = 0) -> None:
        with self._lock:
            self._pulled.missing.update((lost or {}).values())
            if unlisted:
                self._pulled.missing[Trouble.SHORT_LIST] += unlisted
            self._looked_at += 1
            self._progress("studies", self._looked_at, len(self._found))


def _merged(answers: Sequence[FoundStudy]) -> dict[str, FoundStudy]:
    """Studies by UID; one that is listed several times, under several patients, has the images of all."""
    merged: dict[str, FoundStudy] = {}
    for study in answers:
        before = merged.get(study.uid)
        if before is not None:
            known = before.instances is not None and study.instances is not None
            total = (before.instances or 0) + (study.instances or 0)
            study = replace(study, instances=total if known else None)
        merged[study.uid] = study
    return merged
