"""Lines on disk that outlive a process that is killed: each whole or passed over."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crossward.federation.errors import StorageFailure
from crossward.federation.storage import atomic_file


class Lines:
    """A file of JSON lists, one a line, each with its checksum in front; only ever appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[list[Any]]:
        """All whole lines; what was half written or is damaged is passed over."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFailure(f"could not read {self.path}: {error.strerror}") from error
        for line in content.split(b"\n"):
            checksum, _, text = line.partition(b" ")
            if text and checksum == _checksum(text):
                yield json.loads(text)

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        """Put lines on disk."""
        # After a line that was cut off, the first of these must not become its end.
        self._put(b"\n" + b"".join(_line(row) for row in rows))

    def rewrite(self, rows: Iterable[Sequence[Any]]) -> None:
        """Have these lines alone, from one moment to the next."""
        with atomic_file(self.path) as stream:
            stream.writelines(_line(row) for row in rows)
        self.path.chmod(0o600)

    def _put(self, content: bytes) -> None:
        with writing(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                write_out(descriptor, content)
            finally:
                os.close(descriptor)


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _line(row: Sequence[Any]) -> bytes:
    text = json.dumps(row, separators=(",", ":"), allow_nan=False).encode()
    return _checksum(text) + b" " + text + b"\n"


def write_out(descriptor: int, content: bytes) -> None:
    """Put all of it on disk."""
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a disk into a line that a person can act on."""
    try:
        yield
    except OSError as error:
        raise StorageFailure(
            f"could not write {path} ({error.strerror}): what was prepared before is kept; free some space, or choose "
            "a cache folder that can be written, and run it again"
        ) from error
