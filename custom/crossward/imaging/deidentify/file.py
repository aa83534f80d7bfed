"""One file de-identified, as a worker process does it. Nothing here needs torch, which takes seconds to load."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydicom import Dataset, dcmread, dcmwrite
from pydicom.errors import InvalidDicomError

from crossward.imaging.deidentify.apply import Deidentifier, check_kind, clear_hidden_bits, has_pixels, quiet
from crossward.imaging.deidentify.burned_in import suspicion
from crossward.imaging.deidentify.check import Hit, find, identifiers
from crossward.imaging.deidentify.rules import Options
from crossward.imaging.refusals import Reason, Refused

Tally = tuple[tuple[str, str, int], ...]
_LINKED = ("PatientID", "PatientName", "AccessionNumber", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")


class Outcome(StrEnum):
    """What became of a file."""

    OK = "ok"
    HELD = "held"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One file.

    Attributes:
        outcome: of the file.
        reason: why it was held or refused, from a closed list.
        detail: more words, made from numbers and closed terms.
        output: the new file's place, by pseudonyms; empty where there is none.
        stamp: size and time of the original.
        unsearched: identifiers that are too short to be searched for.
        pixel_bytes: bytes of the new file's pixel data, in which only long identifiers were searched for.
        tally: (attribute, action, how often).
    """

    outcome: Outcome
    reason: str = ""
    detail: str = ""
    output: str = ""
    stamp: str = ""
    unsearched: int = 0
    pixel_bytes: int = 0
    tally: Tally = ()


@dataclass(frozen=True)
class Job:
    """One original, where its copy is to be put for the time being, and how to make it."""

    source: Path
    staged: Path
    stamp: str
    secret: bytes
    options: Options


@dataclass(frozen=True)
class Made:
    """What a worker made: the row, what a mapping would say, and the error number of what kept it from writing."""

    row: Row
    link: dict[str, str]
    failure: int = 0


def refusal(refused: Refused) -> Row:
    """The row of a file that is refused."""
    return Row(outcome=Outcome.REFUSED, reason=refused.reason, detail=refused.detail)


def stamp_of(path: Path) -> str:
    """What changes when a file does: its size and time."""
    try:
        facts = path.stat()
    except OSError:
        return "gone"
    return f"{facts.st_size} {facts.st_mtime_ns}"


def deidentify_file(job: Job) -> Made:
    """What a worker does with a file: writes the new one beside the others in work, and says what to do with it."""
    with quiet():
        dataset = _read(job.source)
        check_kind(dataset, job.options)
        clear_hidden_bits(dataset)
        text = suspicion(job.source, dataset) if has_pixels(dataset) else None
        wanted = identifiers(dataset, job.options)
        deidentifier = Deidentifier(job.secret, job.options)
        output = deidentifier.place(dataset)
        link = {name: str(dataset.get(name) or "") for name in _LINKED}
        pixel_bytes = len(dataset.get("PixelData", b""))
        counts = deidentifier.apply(dataset)
        try:
            _write(job.staged, dataset)
        except OSError as error:
            return Made(Row(outcome=Outcome.REFUSED), {}, failure=error.errno or errno.EIO)
        if stamp_of(job.source) != job.stamp:
            job.staged.unlink()
            raise Refused(Reason.CHANGED)
        hits = find(job.staged, wanted)
    why, detail = (Reason.IDENTIFIER, _told(hits)) if hits else (Reason.BURNED_IN, text.words) if text else ("", "")
    row = Row(
        outcome=Outcome.HELD if why else Outcome.OK,
        reason=why,
        detail=detail,
        output=output,
        unsearched=wanted.too_short,
        pixel_bytes=pixel_bytes,
        tally=tuple(sorted((name, what, count) for (name, what), count in counts.items())),
    )
    return Made(row, link)


def _read(path: Path) -> Dataset:
    try:
        return dcmread(path)
    except InvalidDicomError:
        raise Refused(Reason.NOT_DICOM) from None
    except OSError:
        raise Refused(Reason.UNREADABLE) from None
    except MemoryError:
        raise
    except Exception as error:
        raise Refused(Reason.DAMAGED, type(error).__name__) from None


def _write(path: Path, dataset: Dataset) -> None:
    """To disk and there to stay: the caller gives it its name only when it is whole."""
    with path.open("wb") as stream:
        dcmwrite(stream, dataset, enforce_file_format=True)
        stream.flush()
        os.fsync(stream.fileno())


def _told(hits: Sequence[Hit]) -> str:
    return "; ".join(f"{hit.kind} in {hit.where}" for hit in hits)
