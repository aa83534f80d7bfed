"""Every file below a folder, and a row for whatever there is that cannot be one."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from crossward.imaging.inventory.file import GONE, Place
from crossward.imaging.refusals import Reason, Refused

Progress = Callable[[str, int, int], None]

# Where a scan keeps its journal when it is not told another place; it is no part of what there is.
STATE_FOLDER = ".crossward-scan"

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_LOOP = "a link to a folder that is walked already"
_DEAD_LINK = "a link that leads nowhere"
_SHUT = "a folder that cannot be opened"


def walk(
    folder: Path, *, without: Path | None = None, progress: Progress | None = None
) -> tuple[list[Place], list[tuple[str, Refused]]]:
    """Gives the files and the refusals, each by path; nothing is opened but folders.

    Links are followed, and every folder is walked once: real folders come first, so a link back into the tree is the
    one that is refused, never the folder itself.

    Args:
        folder: to walk through.
        without: a folder to leave out, as the usual state folder always is.
        progress: told of folders that are done, and of those known so far.
    """
    left_out = _identity(without) if without is not None and without.is_dir() else None
    waiting, linked = deque([""]), deque[str]()
    walked: set[tuple[int, int]] = set()
    files: list[Place] = []
    refused: list[tuple[str, Refused]] = []
    while waiting or linked:
        inside = (waiting or linked).popleft()
        path = Path(folder, inside)
        try:
            identity = _identity(path)
            if identity == left_out or inside == STATE_FOLDER:
                continue
            if identity in walked:
                refused.append((inside, Refused(Reason.UNREADABLE, _LOOP)))
                continue
            walked.add(identity)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:
            refused.append((inside or ".", Refused(Reason.UNREADABLE, _SHUT)))
            continue
        for entry in entries:
            relative = f"{inside}/{entry.name}" if inside else entry.name
            try:
                if entry.is_dir():
                    (linked if entry.is_symlink() else waiting).append(relative)
                else:
                    files.append(_place(relative, entry.stat()))
            except Refused as refusal:
                refused.append((relative, refusal))
            except OSError:
                refused.append((relative, Refused(Reason.UNREADABLE, _DEAD_LINK if entry.is_symlink() else GONE)))
        if progress is not None:
            progress("folders", len(walked), len(walked) + len(waiting) + len(linked))
    files.sort(key=lambda place: place.path)
    return files, refused


def _place(relative: str, status: os.stat_result) -> Place:
    if not stat.S_ISREG(status.st_mode):
        raise Refused(Reason.UNREADABLE, _KINDS.get(stat.S_IFMT(status.st_mode), "not a file"))
    return Place(relative, status.st_size, status.st_mtime_ns)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
