"""Prepared pictures on disk: records of one size in a file that is only appended to, and an index of checksummed lines.

A process that is killed leaves at most a half-written record or line behind, which the next one passes over. What no
file stands for any more is left out by writing the pictures anew under another name, so that whoever has the old file
mapped keeps reading what was there.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.federation.storage import atomic_file, private_folder
from crossward.imaging.prepare.levels import STORED
from crossward.imaging.prepare.lines import Lines, write_out, writing
from crossward.imaging.refusals import Reason, Refused

INDEX: Final = "index"
_FORMAT: Final = 1
_COPIED_AT_ONCE: Final = 256

Key = tuple[str, int, str]
"""SHA-256 of the file's bytes, frame, and digest of everything that made the picture."""


class NotPrepared(BadInput):
    """A site's pictures are not there, or not those that its ``site.yaml`` and the study ask for."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a cache folder for this process alone.

    Raises:
        BadInput: another process is at work there.
    """
    with writing(private_folder(folder)):
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another process prepares images in {folder}; wait until it has ended") from None
        for leftover in folder.rglob(".*.part"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Kept:
    """Where a picture is, and the checksum of its bytes."""

    record: int
    checksum: int


class Pages:
    """A file of pictures, mapped into memory and read a few records at a time.

    Raises:
        NotPrepared: there is no such file.
    """

    def __init__(self, path: Path, *, channels: int, size: int) -> None:
        self._path = path
        self._shape = (channels, size, size)
        try:
            count = path.stat().st_size // (STORED.itemsize * channels * size * size)
            self._records = np.memmap(path, STORED, "r", shape=(count, *self._shape)) if count else self._none()
        except (OSError, ValueError) as error:
            raise NotPrepared(f"{path.parent}: its pictures cannot be read ({type(error).__name__})") from None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self._shape

    def _none(self) -> NDArray[np.uint16]:
        return np.empty((0, *self._shape), STORED)

    def take(self, records: NDArray[np.int64], checksums: NDArray[np.uint32]) -> NDArray[np.uint16]:
        """Some records, every one held against its checksum.

        Raises:
            NotPrepared: one is not there, or not as it was written.
        """
        if records.size and not 0 <= records.min() <= records.max() < len(self._records):
            raise NotPrepared(f"{self._path.parent}: pictures are missing from it")
        found = self._records[records]
        if any(zlib.crc32(picture.data) != want for picture, want in zip(found, checksums.tolist(), strict=True)):
            raise NotPrepared(f"{self._path.parent}: a picture is damaged: it is not what was written")
        return found


class Cache:
    """The pictures of one size and number of channels; one process at a time, which `held` sees to.

    Args:
        folder: of these pictures alone.
        channels: of every picture.
        size: height and width.
    """

    def __init__(self, folder: Path, *, channels: int, size: int) -> None:
        self.folder = private_folder(folder)
        self._shape = (channels, size, size)
        self._bytes = channels * size * size * STORED.itemsize
        self._index = Lines(folder / INDEX)
        self._waiting: list[tuple[Key, bytes | Refused]] = []
        self._entries: dict[Key, Kept | Refused] = {}
        rows = list(self._index.read())
        name = str(rows[0][-1]) if rows else ""
        if rows and rows[0] == self._heading(name):
            self.pixels = name
            self._entries = dict(_entry(row) for row in rows[1:] if _is_known(row))
        else:
            # Never the name of a file that is there: a manifest may point to it.
            newest = max((path.name for path in self.folder.glob("pixels-*")), default=_numbered(0))
            self._begin(_numbered(_number(newest) + 1), {})

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Kept | Refused:
        return self._entries[key]

    def add(self, key: Key, picture: NDArray[np.uint16] | Refused) -> None:
        """Take in a picture as `stored` gives it, or why there is none; it is kept from the next `commit` on."""
        if isinstance(picture, Refused):
            self._waiting.append((key, picture))
            return
        if picture.shape != self._shape or picture.dtype != STORED:
            raise ValueError(f"a picture {picture.shape} of {picture.dtype} among those of {self._shape}")
        self._waiting.append((key, picture.tobytes()))

    def commit(self) -> None:
        """Put what was taken in on disk: first pictures, then the lines that tell of them.

        Raises:
            StorageFailure: disk full, or not to be written; what was committed before is whole.
        """
        if not self._waiting:
            return
        path = self.folder / self.pixels
        with writing(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # A record that was half written is left as it is: nothing points to it.
                first = -(-os.fstat(descriptor).st_size // self._bytes)
                os.lseek(descriptor, first * self._bytes, os.SEEK_SET)
                pictures = [content for _, content in self._waiting if isinstance(content, bytes)]
                write_out(descriptor, b"".join(pictures))
            finally:
                os.close(descriptor)
        added: dict[Key, Kept | Refused] = {}
        for key, content in self._waiting:
            if isinstance(content, bytes):
                added[key] = Kept(first, zlib.crc32(content))
                first += 1
            else:
                added[key] = content
        self._index.append(_row(key, entry) for key, entry in added.items())
        self._entries |= added
        self._waiting.clear()

    def pages(self) -> Pages:
        """All pictures that were committed, to read."""
        path = self.folder / self.pixels
        if not path.exists():
            path.touch(0o600)
        return Pages(path, channels=self._shape[0], size=self._shape[1])

    def verify(self) -> int:
        """Hold every picture against its checksum, forget those that are not what was written, and count them."""
        pages = self.pages()
        damaged = [key for key, kept in self._kept() if not _whole(pages, kept)]
        for key in damaged:
            del self._entries[key]
        return len(damaged)

    def keep_only(self, keys: Collection[Key]) -> None:
        """Forget every other picture, and everything that nothing points to, for good."""
        wanted = set(keys)
        entries = {key: entry for key, entry in self._entries.items() if key in wanted}
        pages = self.pages()
        live = [(key, entry) for key, entry in entries.items() if isinstance(entry, Kept)]
        whole = len(live) * self._bytes == (self.folder / self.pixels).stat().st_size
        if whole and len(entries) == len(self._entries) == sum(1 for _ in self._index.read()) - 1:
            return
        name = _numbered(_number(self.pixels) + 1)
        with atomic_file(self.folder / name) as stream:
            for start in range(0, len(live), _COPIED_AT_ONCE):
                part = [kept for _, kept in live[start : start + _COPIED_AT_ONCE]]
                stream.write(pages.take(*places(part)).tobytes())
        (self.folder / name).chmod(0o600)
        moved = {key: Kept(record, kept.checksum) for record, (key, kept) in enumerate(live)}
        self._begin(name, {**entries, **moved})

    def clear_leftovers(self) -> None:
        """Remove files of pictures that the index does not name; only when no manifest needs them any more."""
        for path in self.folder.glob("pixels-*"):
            if path.name != self.pixels:
                path.unlink(missing_ok=True)

    def _begin(self, name: str, entries: dict[Key, Kept | Refused]) -> None:
        self._index.rewrite([self._heading(name), *(_row(key, entry) for key, entry in entries.items())])
        self.pixels = name
        self._entries = entries

    def _heading(self, name: str) -> list[Any]:
        return ["pictures", _FORMAT, *self._shape, name]

    def _kept(self) -> Iterator[tuple[Key, Kept]]:
        return ((key, entry) for key, entry in self._entries.items() if isinstance(entry, Kept))


def places(kept: Sequence[Kept]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Records and checksums, as `Pages.take` wants them."""
    return (
        np.array([each.record for each in kept], dtype=np.int64),
        np.array([each.checksum for each in kept], dtype=np.uint32),
    )


def _whole(pages: Pages, kept: Kept) -> bool:
    try:
        pages.take(*places([kept]))
    except NotPrepared:
        return False
    return True


def _row(key: Key, entry: Kept | Refused) -> list[Any]:
    told = (entry.reason.name, entry.detail) if isinstance(entry, Refused) else (entry.record, entry.checksum)
    return [*key, *told]


def _is_known(row: list[Any]) -> bool:
    """Whether this version has the reason that a line gives, if it gives one."""
    return not isinstance(row[3], str) or row[3] in Reason.__members__


def _entry(row: list[Any]) -> tuple[Key, Kept | Refused]:
    file, frame, digest, first, second = row
    key = (str(file), int(frame), str(digest))
    return key, Refused(Reason[first], second) if isinstance(first, str) else Kept(first, second)


def _numbered(number: int) -> str:
    return f"pixels-{number:06d}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
