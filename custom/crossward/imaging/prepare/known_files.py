"""Which files a site's cache has seen, so that one that is touched, moved or seen again is not read again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from crossward.imaging.prepare.file import Made, Stamp
from crossward.imaging.prepare.lines import Lines


@dataclass
class KnownFiles:
    """Hashes of files by path, valid as long as size and time of change are the same.

    Attributes:
        lines: where they are kept.
        entries: by path.
    """

    lines: Lines
    entries: dict[str, tuple[Stamp, str]] = field(default_factory=dict)
    _new: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for file, size, changed, sha256 in self.lines.read():
            self.entries[file] = Stamp(size, changed), sha256

    def add(self, file: str, made: Made) -> None:
        """Take in a file; it is kept from the next `commit` on."""
        self.entries[file] = made.stamp, made.sha256
        self._new.append([file, made.stamp.size, made.stamp.changed, made.sha256])

    def commit(self) -> None:
        """Put what was taken in on disk."""
        if self._new:
            self.lines.append(self._new)
            self._new.clear()

    def keep_only(self, files: Iterable[str]) -> None:
        """Forget the paths of files that are gone: they may name a person."""
        kept = {file: self.entries[file] for file in files if file in self.entries}
        if len(kept) < len(self.entries):
            self.entries = kept
            self.lines.rewrite([file, stamp.size, stamp.changed, sha] for file, (stamp, sha) in kept.items())
