"""What a pull remembers between starts: a line of JSON for each study, readable by its owner only.

A line holds the study's UID, the names of its files, and the UIDs of images that did not come, each with a reason. UIDs
are linked to people, so the file stays in the site's private folder; nothing of it is printed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from crossward.federation.errors import StorageFailure
from crossward.imaging.pacs.files import ImageFolder, file_name
from crossward.imaging.pacs.query import FoundStudy
from crossward.imaging.pacs.trouble import Trouble

STATE_FILE = "pull.jsonl"


class PullState:
    """Which studies are whole; only ever appended to, so a kill costs at most the last line."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE
        self._lock = threading.Lock()
        self._whole: dict[str, tuple[str, ...]] = {}
        self._torn = False
        self._read()

    def _read(self) -> None:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFailure(f"could not read {self._path}: {error.strerror}") from None
        self._torn = bool(text) and not text.endswith(b"\n")
        for line in text.splitlines():
            try:
                row: dict[str, Any] = json.loads(line)
                self._note(row["study"], tuple(row["files"]), whole=not row["missing"] and not row["trouble"])
            except (ValueError, KeyError, TypeError):
                # A line that a kill cut short: its study is simply looked at again.
                continue

    def _note(self, study: str, files: tuple[str, ...], *, whole: bool) -> None:
        self._whole.pop(study, None)
        if whole:
            self._whole[study] = files

    def is_whole(self, study: FoundStudy, images: ImageFolder) -> bool:
        """Whether the study came whole before, has not grown since, and every file is still here."""
        files = self._whole.get(study.uid)
        return files is not None and study.instances == len(files) and all(map(images.has_file, files))

    def write(
        self,
        study: str,
        *,
        there: Iterable[str],
        missing: Mapping[str, Trouble],
        trouble: Trouble | None = None,
    ) -> None:
        """Remembers a study.

        Args:
            study: its UID.
            there: UIDs of the images that are in the folder.
            missing: those that are not, with the reason.
            trouble: what is wrong with the study as a whole.
        """
        files = tuple(sorted(file_name(uid) for uid in there))
        row = {"study": study, "files": files, "missing": missing, "trouble": trouble}
        line = json.dumps(row).encode() + b"\n"
        with self._lock:
            self._note(study, files, whole=not missing and trouble is None)
            try:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "ab") as stream:
                    stream.write(b"\n" + line if self._torn else line)
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:
                self._torn = True
                raise StorageFailure(
                    f"could not write {self._path}: {error.strerror}; put it right and start again"
                ) from None
            self._torn = False
