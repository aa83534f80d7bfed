"""The site's journal: one line for everything that left the site, or was stopped on its way out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossward.federation.errors import StorageFailure
from crossward.federation.storage import private_folder


class Journal:
    """Appends lines of JSON; each is on disk before ``write`` returns.

    Args:
        path: of the file, made with mode 0600 in a folder with mode 0700.
    """

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)
        self._path = path

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry, with the time.

        Raises:
            StorageFailure: it could not be written; what should have been recorded must not go on.
        """
        line = json.dumps({"time": round(time.time(), 3), **entry}, allow_nan=False) + "\n"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                whole = _whole_lines(descriptor)
                if os.write(descriptor, line.encode()) != len(line.encode()):
                    # A part of a line would spoil the one that comes after it.
                    os.ftruncate(descriptor, whole)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageFailure(f"the journal {self._path} cannot be written: {error.strerror or error}") from error


def _whole_lines(descriptor: int) -> int:
    """Cut off a last line that a power failure left unfinished; gives the size of what stays."""
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    whole = os.pread(descriptor, size, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)
    return whole


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The entries of a journal, oldest first; a last line cut short by a power failure is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StorageFailure(f"the journal {path} cannot be read: {error.strerror}") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(dict(json.loads(line)))
        except ValueError:
            if number < len(lines):
                raise StorageFailure(f"the journal {path} is damaged at line {number}") from None
    return entries
