"""What a folder holds: every file with what its DICOM header says, or with the reason why it was not read.

Only headers are read. Pixel data is hashed where two files claim to be the same instance, to tell a copy from a
contradiction, and of every image where that is asked for: images of one scanner nearly all have the same size, so size
alone would send almost every archive through the disk a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.scans import Header
from crossward.imaging.inventory.file import Place, pixel_digest, read_facts, said
from crossward.imaging.inventory.journal import Journal, Record
from crossward.imaging.inventory.walk import Progress, walk
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.workers import work

SECONDS_PER_FILE = 60.0
# What a person or a better day can change without the file changing: asked again by the next scan.
_PASSING = frozenset({Reason.UNREADABLE, Reason.TIMED_OUT, Reason.CRASHED, Reason.TOO_LARGE, Reason.CHANGED})
# Hardly two files share these, so there is nothing to gain by looking for an equal one.
_OWN = frozenset({"sop_uid", "position", "instance_number"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One file, or something in the place of one.

    Attributes:
        path: relative to the folder, with slashes. It may name a person: never printed.
        size: in bytes.
        header: what it says, where it was read.
        reason: why it was not read.
        detail: more words on that, from a closed list.
        digest: hash of the pixel data as stored; None where it was not asked for, empty where it cannot be told.
    """

    path: str
    size: int = 0
    header: Header | None = None
    reason: Reason | None = None
    detail: str = ""
    digest: str | None = None


@dataclass(frozen=True)
class Inventory:
    """What there is below a folder, in the order of the paths."""

    files: tuple[Found, ...]

    def read(self) -> Iterator[tuple[Found, Header]]:
        """The files whose headers were read."""
        return ((found, found.header) for found in self.files if found.header is not None)


def scan(
    folder: Path,
    *,
    state: Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    pixels: bool = False,
    fresh: bool = False,
) -> Inventory:
    """Reads the header of every file below a folder, in worker processes.

    Args:
        folder: to look through.
        state: private folder for a journal of what was read, so that a scan that was killed goes on where it stopped,
            and the next one reads only what is new or changed. It is left out of the inventory.
        processes: how many at once; 0 reads in this process.
        progress: told of folders and files that are done.
        pixels: hash the pixel data of every image, not only of those that share their SOP instance UID.
        fresh: forget what the journal holds.

    Raises:
        BadInput: there is no such folder, or another scan holds its journal.
        StorageFailure: the journal cannot be kept.
    """
    if not folder.is_dir():
        raise BadInput("there is no such folder to scan; check the name and that it is mounted")
    with Journal(state, folder, fresh=fresh) if state is not None else nullcontext() as journal:
        places, refused = walk(folder, without=state, progress=progress)
        gathering = _Gathering(folder, places, journal)
        gathering.read_headers(processes=processes, progress=progress)
        gathering.hash_pixels(everything=pixels, processes=processes, progress=progress)
        gathering.tidy()
    rows = [Found(path=path, reason=refusal.reason, detail=refusal.detail) for path, refusal in refused]
    return Inventory(tuple(sorted([*rows, *gathering.found.values()], key=lambda found: found.path)))


class _Gathering:
    """Results by path as they come in: from the journal first, then from the workers."""

    def __init__(self, folder: Path, places: Iterable[Place], journal: Journal | None) -> None:
        self._folder = str(folder)
        self._places = {place.path: place for place in places}
        self._journal = journal
        self._shared: dict[Any, Any] = {}
        self.found: dict[str, Found] = {}
        self._superseded = 0
        for record in journal.records() if journal is not None else ():
            current = self._places.get(record.place.path) == record.place
            self._superseded += record.place.path in self.found or not current
            if current:
                self._take(record)

    def read_headers(self, *, processes: int | None, progress: Progress | None) -> None:
        places = [place for path, place in self._places.items() if path not in self.found]
        items = [(self._folder, place) for place in places]
        for number, result in work(read_facts, items, processes=processes, seconds=SECONDS_PER_FILE):
            place = places[number]
            self._keep(
                Record(place, None, result.reason, result.detail)
                if isinstance(result, Refused)
                else Record(place, result)
            )
            if progress is not None:
                progress("files", len(self.found), len(self._places))

    def hash_pixels(self, *, everything: bool, processes: int | None, progress: Progress | None) -> None:
        images = {path: header for path, found in self.found.items() if (header := found.header) and header.has_pixels}
        uses = Counter(header.sop_uid for header in images.values() if header.sop_uid)
        places = [
            self._places[path]
            for path, header in images.items()
            if self.found[path].digest is None and (everything or uses[header.sop_uid] > 1)
        ]
        items = [(self._folder, place) for place in places]
        results = work(pixel_digest, items, processes=processes, seconds=SECONDS_PER_FILE)
        for done, (number, result) in enumerate(results, start=1):
            place = places[number]
            if isinstance(result, str):
                self._keep(Record(place, None, digest=result))
            else:
                # The header that was read may be that of another file by now.
                self._take(Record(place, None, result.reason, result.detail))
            if progress is not None:
                progress("pixels", done, len(places))

    def tidy(self) -> None:
        """Leave no trace in the journal of files that are gone or were read again."""
        if self._journal is None or not (self._superseded or self._journal.damaged):
            return
        self._journal.replace(
            Record(
                self._places[path],
                None if found.header is None else said(found.header),
                found.reason,
                found.detail,
                found.digest,
            )
            for path, found in self.found.items()
            if found.reason not in _PASSING
        )

    def _keep(self, record: Record) -> None:
        self._take(record)
        if self._journal is not None and record.reason not in _PASSING:
            self._journal.add(record)

    def _take(self, record: Record) -> None:
        place = record.place
        known = self.found.get(place.path)
        if record.digest is not None and record.facts is None and known is not None:
            self.found[place.path] = replace(known, digest=record.digest)
            return
        self.found[place.path] = Found(
            path=place.path,
            size=place.size,
            header=None if record.facts is None else self._header(record.facts),
            reason=record.reason,
            detail=record.detail,
            digest=record.digest,
        )

    def _header(self, facts: Mapping[str, Any]) -> Header:
        """Equal texts and vectors become one object: a hundred thousand headers repeat most of what they say."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
        }
        for name, value in values.items():
            if name not in _OWN:
                values[name] = self._shared.setdefault((name, value), value)
        return Header(**values)
