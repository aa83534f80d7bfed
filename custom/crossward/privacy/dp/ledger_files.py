"""The files of a ledger: one process at a time, appended to in whole lines, and on disk before a call returns."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crossward.federation.errors import StorageFailure
from crossward.federation.storage import private_folder, sync_folder

_PAUSE = 0.05


def append(path: Path, line: bytes, *, whole: int) -> None:
    """Add a line to a file.

    Args:
        path: of the file, made with mode 0600.
        line: with its end.
        whole: how many bytes of the file are whole lines; what comes after them is a part of a line that a crash cut
            off, and would take this one with it.

    Raises:
        StorageFailure: it could not be written; it may be there all the same.
    """
    try:
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size > whole:
                os.ftruncate(descriptor, whole)
            _write_whole(descriptor, line, whole=whole)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync_folder(path.parent)
    except OSError as error:
        raise StorageFailure(_unwritten(path, error)) from error


def settle(path: Path) -> None:
    """Put on disk what a process that was killed may have left in memory only.

    Raises:
        StorageFailure: it could not be done.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageFailure(_unwritten(path, error)) from error


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can look into, and that is still there after a power failure."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    private_folder(folder)
    try:
        for each in missing:
            sync_folder(each.parent)
    except OSError as error:
        raise StorageFailure(_unwritten(folder, error)) from error


@contextmanager
def locked(lock: Path, *, writing: bool, patience: float) -> Iterator[None]:
    """Keep other processes from writing, and where this one writes, from reading.

    Args:
        lock: a file in the ledger's folder. Readers, who may have no right to make it, do without where it is not
            there: nobody has written so far.
        writing: or reading.
        patience: seconds to wait for another process.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY, 0o600)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise StorageFailure(_unwritten(lock.parent, error)) from error
    try:
        _wait(descriptor, fcntl.LOCK_EX if writing else fcntl.LOCK_SH, patience, lock.parent)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, kind: int, patience: float, folder: Path) -> None:
    give_up = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise StorageFailure(
                    f"another process holds the privacy ledger {folder}; wait until it has ended"
                ) from None
            time.sleep(_PAUSE)
        except OSError as error:
            raise StorageFailure(
                f"the privacy ledger {folder} cannot be locked ({error.strerror}); keep it on a local disk"
            ) from error
        else:
            return


def _write_whole(descriptor: int, line: bytes, *, whole: int) -> None:
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, whole)
        raise


def _unwritten(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"disk full while writing the privacy ledger {path}: the step was not taken; free some space and resume"
    return f"the privacy ledger {path} cannot be used ({error.strerror or error}): the step was not taken"
