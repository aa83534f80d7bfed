"""Which studies to pull from an archive, and what an archive answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from pathlib import Path

from crossward.federation.errors import BadInput

# Archives take these as wildcards or as a list of values: one line would then stand for studies that nobody listed.
_NOT_IN_A_LIST = re.compile(r"[*?\\/\s\x00-\x1f]")
_LONGEST_VALUE = 64


@dataclass(frozen=True)
class FoundStudy:
    """What an archive says about a study; empty or None where it does not say."""

    uid: str
    date: str = ""
    modalities: tuple[str, ...] = ()
    accession: str = ""
    instances: int | None = None


@dataclass(frozen=True)
class Instance:
    """One file of an archive."""

    study: str
    series: str
    sop: str


@dataclass(frozen=True)
class Question:
    """One search.

    Attributes:
        keys: DICOM keyword to the value that it must match.
        list_name: of the list that asks for it; empty where none does.
        line: of that list.
    """

    keys: Mapping[str, str]
    list_name: str = ""
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class Query:
    """Studies that fit all that is given here.

    Attributes:
        since: the first day.
        until: the last day.
        modalities: a study with a series of any of these, such as CT; the whole study is meant.
        studies: study UIDs, with the line of the list that they are on.
        accessions: accession numbers, likewise. A study on either list will do.
    """

    since: date | None = None
    until: date | None = None
    modalities: tuple[str, ...] = ()
    studies: Mapping[str, int] = field(default_factory=dict)
    accessions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.since or self.until or self.modalities or self.studies or self.accessions):
            raise BadInput("no study is asked for; give --since, --until, --modality, --studies or --accessions")
        if self.since and self.until and self.since > self.until:
            raise BadInput(f"--since {self.since} is after --until {self.until}; exchange them")
        for modality in self.modalities:
            if not re.fullmatch(r"[A-Z0-9_]{1,16}", modality):
                raise BadInput("a modality is a short code in capitals, such as CT, MR or DX; correct --modality")

    def questions(self) -> Iterator[Question]:
        """The searches that find all the studies, one for each listed value and modality."""
        dates = {"StudyDate": f"{_day(self.since)}-{_day(self.until)}"} if self.since or self.until else {}
        listed = [
            ({keyword: value}, name, line)
            for keyword, name, values in (
                ("StudyInstanceUID", "studies", self.studies),
                ("AccessionNumber", "accessions", self.accessions),
            )
            for value, line in values.items()
        ]
        modalities = [{"ModalitiesInStudy": modality} for modality in self.modalities]
        for (value, name, line), modality in product(listed or [({}, "", 0)], modalities or [{}]):
            yield Question({**value, **dates, **modality}, name, line)

    def fits(self, question: Question, found: FoundStudy) -> bool:
        """Whether an answer is one to the question: archives ignore keys that they do not know."""
        keys = question.keys
        # Dates as the standard wrote them before 1993 have dots; anything else is not compared.
        day = found.date.replace(".", "") if re.fullmatch(r"\d{4}(\.?)\d\d\1\d\d", found.date) else ""
        return (
            keys.get("StudyInstanceUID", found.uid) == found.uid
            and keys.get("AccessionNumber", found.accession) == found.accession
            and (not day or not self.since or _day(self.since) <= day)
            and (not day or not self.until or day <= _day(self.until))
            and (not found.modalities or keys.get("ModalitiesInStudy", found.modalities[0]) in found.modalities)
        )


def read_list(path: Path) -> dict[str, int]:
    """Reads a list with one study UID or accession number on a line; blank lines and ``#`` lines are passed over.

    Returns:
        The values, each with the number of its first line.

    Raises:
        BadInput: names the line, never what is on it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path}: cannot be read ({type(error).__name__}); give a text file with one value a line"
        ) from None
    values: dict[str, int] = {}
    for number, text in enumerate(lines, start=1):
        value = text.strip()
        if not value or value.startswith("#"):
            continue
        if len(value) > _LONGEST_VALUE or _NOT_IN_A_LIST.search(value):
            raise BadInput(f"{path}: line {number} is not one UID or accession number; write one value a line")
        values.setdefault(value, number)
    if not values:
        raise BadInput(f"{path}: lists nothing; write one UID or accession number a line")
    return values


def read_day(text: str | None, option: str) -> date | None:
    """A day as the user writes it."""
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadInput(f"{option} {text} is not a day; write it as 2024-12-31") from None


def _day(day: date | None) -> str:
    return f"{day:%Y%m%d}" if day else ""
