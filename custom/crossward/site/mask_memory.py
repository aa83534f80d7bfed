"""What a site's masks were used for, on disk: a file for each study and model, a line for each step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossward.federation.errors import PrivacyRefusal, StorageFailure
from crossward.federation.storage import private_folder, sync_folder
from crossward.privacy.secagg.memory import Use


class DurableMemory:
    """Keeps uses under (study, model) beyond jobs and restarts.

    A line is on disk before ``keep`` returns. Whatever cannot be read stands for everything that it may have said: the
    site then refuses to mask.

    Args:
        folder: made with mode 0700.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)

    def uses(self, study: str, model: str) -> Sequence[Use]:
        """Everything kept for a model of a study.

        Raises:
            PrivacyRefusal: the record is damaged.
        """
        path = self._path(study, model)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise PrivacyRefusal(
                f"the record of this site's masks cannot be read ({error.strerror}): {path}"
            ) from error
        try:
            return tuple(_read(line) for line in _lines(content))
        except (ValueError, TypeError, KeyError) as error:
            raise PrivacyRefusal(f"the record of this site's masks is damaged, so nothing is masked: {path}") from error

    def keep(self, study: str, model: str, use: Use) -> None:
        """Keep one more use; when this returns it is on disk.

        Raises:
            StorageFailure: it could not be written; the step must not be taken.
        """
        path = self._path(study, model)
        line = json.dumps(asdict(use), separators=(",", ":")).encode()
        try:
            new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                _drop_cut_line(descriptor)
                _write_whole(descriptor, _checksum(line) + b" " + line + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if new:
                sync_folder(self._folder)
        except OSError as error:
            raise StorageFailure(f"could not write {path} ({error.strerror}); nothing was masked") from error

    def _path(self, study: str, model: str) -> Path:
        return self._folder / f"{hashlib.sha256(json.dumps([study, model]).encode()).hexdigest()}.jsonl"


def _lines(content: bytes) -> list[bytes]:
    """Whole lines. A last one that was cut off by a crash belongs to a step that was not taken."""
    whole, _, _ = content.rpartition(b"\n")
    return whole.split(b"\n") if whole else []


def _read(line: bytes) -> Use:
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text):
        raise ValueError("a line was changed")
    values: dict[str, Any] = json.loads(text)
    return Use(**{**values, "cohort": tuple(values["cohort"])})


def _checksum(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest()[:16].encode()


def _drop_cut_line(descriptor: int) -> None:
    """A line that a crash cut off would take the next one with it."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.ftruncate(descriptor, whole)


def _write_whole(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
