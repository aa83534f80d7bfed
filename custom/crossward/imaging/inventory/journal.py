"""What a scan of a folder has read so far, kept so that one that was killed goes on where it stopped.

One line per file, each with its own checksum: a line that was cut short, damaged, or written by another version does
not fit its checksum and is left out, whatever happened to the machine. The lines hold what headers say, names included,
so the file is its owner's alone.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any
from zlib import crc32

import pydicom

import crossward
from crossward.federation.errors import BadInput, StorageFailure
from crossward.federation.storage import atomic_file, private_folder
from crossward.imaging.inventory.file import EMPTY, Place
from crossward.imaging.refusals import Reason

_FORMAT = 1
# Headers that another version read may have been read in another way.
_SEED = crc32(" ".join([str(_FORMAT), crossward.__version__, pydicom.__version__, *sorted(EMPTY)]).encode())


@dataclass(frozen=True, slots=True)
class Record:
    """What came out of one file.

    Attributes:
        place: the file, as it was.
        facts: what its header says, by field; None where it was refused.
        reason: why it was refused.
        detail: more words on that.
        digest: of its pixel data, where that was asked for.
    """

    place: Place
    facts: dict[str, Any] | None
    reason: Reason | None = None
    detail: str = ""
    digest: str | None = None


class Journal:
    """The lines about one folder; only one scan at a time may hold it.

    Args:
        state: folder for the journals of any number of folders; made private.
        folder: the one that is scanned.
        fresh: begin anew.

    Attributes:
        damaged: whether ``records`` had to leave a line out.

    Raises:
        BadInput: another scan of the folder is under way.
        StorageFailure: the state folder cannot be used.
    """

    def __init__(self, state: Path, folder: Path, *, fresh: bool = False) -> None:
        private_folder(state)
        self.damaged = False
        name = sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self._path = state / f"scan-{name}.jsonl"
        try:
            self._lock = os.open(state / f"scan-{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lines = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            if fresh:
                os.ftruncate(self._lines, 0)
            self._end_line()
        except BlockingIOError:
            raise BadInput("another scan of this folder is under way; wait for it, or give another --state") from None
        except OSError as error:
            raise self._failure(error) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lines)
        os.close(self._lock)

    def records(self) -> Iterator[Record]:
        """All that is whole, oldest first; a record with neither facts nor reason adds a digest to an earlier one."""
        with self._path.open("rb") as lines:
            for line in lines:
                record = _decoded(line)
                if record is None:
                    self.damaged = True
                else:
                    yield record

    def add(self, record: Record) -> None:
        """Append one; it outlives this process from here on."""
        line = _encoded(record)
        try:
            written = os.write(self._lines, line)
        except OSError as error:
            raise self._failure(error) from None
        if written != len(line):
            raise StorageFailure(f"disk full while writing {self._path}: free some space and scan again")

    def replace(self, records: Iterable[Record]) -> None:
        """Keep these and forget all others; nothing can be added after it."""
        with atomic_file(self._path) as stream:
            stream.writelines(map(_encoded, records))

    def _end_line(self) -> None:
        """A line that was cut short must not spoil the next one."""
        size = os.fstat(self._lines).st_size
        if size and os.pread(self._lines, 1, size - 1) != b"\n":
            os.write(self._lines, b"\n")

    def _failure(self, error: OSError) -> StorageFailure:
        return StorageFailure(
            f"{self._path} cannot be written ({error.strerror}): what was read before is kept; "
            "make room there or choose another --state, and scan again"
        )


def _encoded(record: Record) -> bytes:
    place = record.place
    reason = record.reason and record.reason.name
    values = [place.path, place.size, place.changed, record.facts, reason, record.detail, record.digest]
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (crc32(text, _SEED), text)


def _decoded(line: bytes) -> Record | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % crc32(text, _SEED):
        return None
    path, size, changed, facts, reason, detail, digest = json.loads(text)
    return Record(Place(path, size, changed), facts, Reason[reason] if reason else None, detail, digest)
