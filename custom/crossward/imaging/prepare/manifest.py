"""What a site's prepared pictures are: which files became which pictures, and why the others did not.

The manifest stays in the site's own cache folder. It holds relative paths and pseudonyms, and no other identifier.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import crossward
from crossward.federation.errors import StorageFailure
from crossward.federation.storage import read_json, write_json
from crossward.imaging.prepare.cache import NotPrepared
from crossward.imaging.refusals import Reason

NAME: Final = "manifest.json"
PARTS: Final = ("train", "val", "test")
_CHECKSUM: Final = "sha256"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture to train on or to test with.

    Attributes:
        file: relative to the folder of images.
        frame: of the file, from 0.
        patient: a pseudonym, the same for all pictures of a patient.
        label: its class.
        part: 0 training, 1 validation, 2 test.
        domain: of the scanner.
        record: its place among the cached pictures.
        checksum: of its cached bytes.
    """

    file: str
    frame: int
    patient: str
    label: str
    part: int
    domain: str
    record: int
    checksum: int

    @property
    def name(self) -> str:
        """What names the picture within its site."""
        return f"{self.file}#{self.frame}" if self.frame else self.file


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A file that became no picture, and why."""

    file: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A prepared site.

    Attributes:
        size: height and width of the pictures.
        channels: of the pictures.
        asked: digests of what decided the pictures: ``site.yaml``, the labels and the version.
        pixels: name of the file that holds them.
        seen: files that were looked at.
        phantom: whether the images are made up.
        left_out: of those, how many the rule for series leaves out (``first`` and ``middle`` take one of a series).
        pictures: in the order of their files.
        rejected: one row a file.
        transforms: digest of what made the pictures, by domain.
        styles: ranges of scanner-style augmentation, by domain.
        warnings: one line each.
    """

    size: int
    channels: int
    asked: Mapping[str, str]
    pixels: str
    seen: int
    phantom: bool
    left_out: int
    pictures: tuple[Picture, ...]
    rejected: tuple[Rejected, ...]
    transforms: Mapping[str, str]
    styles: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def accepted(self) -> int:
        """Files that became pictures."""
        return len({picture.file for picture in self.pictures})

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted({picture.label for picture in self.pictures}))

    def summary(self) -> dict[str, Any]:
        """Counts only: nothing here names a file."""
        return {
            "size": self.size,
            "channels": self.channels,
            "files": {
                "seen": self.seen,
                "accepted": self.accepted,
                "rejected": len(self.rejected),
                "left_out": self.left_out,
            },
            "reasons": dict(Counter(row.reason.value for row in self.rejected).most_common()),
            "pictures": len(self.pictures),
            "patients": len({picture.patient for picture in self.pictures}),
            "parts": {part: self._labels(self._of_part(number)) for number, part in enumerate(PARTS)},
            "domains": {
                domain: {
                    part: sum(picture.domain == domain for picture in self._of_part(number))
                    for number, part in enumerate(PARTS)
                }
                for domain in sorted({picture.domain for picture in self.pictures})
            },
            "warnings": list(self.warnings),
        }

    def _of_part(self, part: int) -> list[Picture]:
        return [picture for picture in self.pictures if picture.part == part]

    def _labels(self, pictures: Sequence[Picture]) -> dict[str, int]:
        found = Counter(picture.label for picture in pictures)
        return {label: found[label] for label in self.classes}

    def write(self, folder: Path) -> None:
        """Put it into the folder of its pictures, for the site alone to read."""
        content = json.loads(json.dumps({**asdict(self), "summary": self.summary()}))
        for row, rejected in zip(content["rejected"], self.rejected, strict=True):
            row["reason"] = rejected.reason.name
        write_json(folder / NAME, {_CHECKSUM: _digest(content), **content})
        (folder / NAME).chmod(0o600)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read what `write` wrote.

        Raises:
            NotPrepared: it is not there, is damaged, or is of another version.
        """
        try:
            content = read_json(folder / NAME)
            if content.pop(_CHECKSUM, None) != _digest(content):
                raise NotPrepared(f"{folder / NAME} is damaged, or was changed by hand")
            del content["summary"]
            pictures = tuple(Picture(**row) for row in content.pop("pictures"))
            rejected = tuple(Rejected(**{**row, "reason": Reason[row["reason"]]}) for row in content.pop("rejected"))
            warnings = tuple(content.pop("warnings"))
            return cls(pictures=pictures, rejected=rejected, warnings=warnings, **content)
        except (StorageFailure, KeyError, TypeError) as error:
            raise NotPrepared(f"{folder / NAME} cannot be read, or was written by another version") from error


def asked_digests(site_file: Path, labels: Path | None) -> dict[str, str]:
    """Digests of what a manifest depends on beside the images themselves, as far as it is there.

    Raises:
        NotPrepared: one of them cannot be read.
    """
    files = {"site.yaml": site_file, "labels": labels}
    try:
        found = {
            what: hashlib.sha256(path.read_bytes()).hexdigest()
            for what, path in files.items()
            if path is not None and path.is_file()
        }
    except OSError as error:
        raise NotPrepared(f"{site_file.name} or the labels that it names cannot be read ({error.strerror})") from None
    return {**found, "version": crossward.__version__}


def folder_of(cache: Path, *, size: int, channels: int) -> Path:
    """Where pictures of this size and number of channels are kept."""
    return cache / f"{size}x{size}x{channels}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
