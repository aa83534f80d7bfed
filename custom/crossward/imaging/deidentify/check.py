"""What de-identification missed: the identifiers of the original file are looked for in the bytes of the new one.

This does not share a rule with the removal itself. It knows the words of the original, and reads the written file as a
stranger would: as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydicom import Dataset, dcmread
from pydicom.charset import convert_encodings
from pydicom.dataelem import DataElement
from pydicom.uid import PYDICOM_IMPLEMENTATION_UID, UID_dictionary

from crossward.imaging.deidentify.rules import METHOD, METHODS, Action, Options, action, keyword, values

# Shorter words turn up everywhere by chance.
SHORTEST = 4
# In pixel data eight given bytes meet by chance once in 10^19.
_SHORTEST_IN_PIXELS = 8
_LONGEST = 64

_TEXT = frozenset(("AE", "LO", "SH", "ST", "LT", "UC", "UT", "UR", "CS"))
# The first that fits an attribute's keyword says what kind of identifier it holds; none, and it is not searched for.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("", re.compile(r"ProtocolName|SequenceName|CodingScheme|CodeValue|FrameLabel|TemplateIdentifier|MappingResource")),
    ("accession number", re.compile(r"AccessionNumber")),
    ("institution", re.compile(r"Institution|Department|Organization|Facility|Location|Station")),
    ("address", re.compile(r"Address|Telephone|Telecom|Residence|Email")),
    ("name", re.compile(r"(Person|Patient|Physician|Operator|Author|Observer|Creator)s?Names?|Alias")),
    ("id", re.compile(r"IDs?$|Identifier|SerialNumber|OrderNumber|Issuer|Insurance|MedicalRecord|RequestNumber")),
)
# What de-identification itself writes is no find, even for a patient whose id is "DICOM".
_OWN_PHRASES = tuple(
    phrase.lower().encode() for phrase in (METHOD, "CROSSWARD", *(meaning for _, meaning, _ in METHODS))
)
_UID = re.compile(rb"[0-9]+(?:\.[0-9]+){2,}")
_DIGITS = re.compile(rb"[0-9]{8,20}")


class Hit(NamedTuple):
    """An identifier that is still there: its kind and the attributes it was found in, never its value."""

    kind: str
    where: str


@dataclass(frozen=True)
class Identifiers:
    """What names somebody in a file.

    Attributes:
        words: (kind, text) of names, ids, places; at least four characters each.
        uids: unique identifiers.
        dates: (kind, YYYYMMDD).
        too_short: how many were left out because they are shorter.
        codes: Python's names of the file's character sets.
    """

    words: frozenset[tuple[str, str]]
    uids: frozenset[str]
    dates: frozenset[tuple[str, str]]
    too_short: int
    codes: tuple[str, ...] = ()


def identifiers(dataset: Dataset, options: Options) -> Identifiers:
    """Collects them from an original dataset, its file meta information included."""
    words: set[tuple[str, str]] = set()
    uids: set[str] = set()
    dates: set[tuple[str, str]] = set()
    for element in _elements(dataset):
        texts = _texts(element)
        if element.VR == "UI" and action(element.tag, "UI", options) is not Action.KEEP:
            uids.update(text for text in texts if text not in UID_dictionary and text != PYDICOM_IMPLEMENTATION_UID)
        elif element.VR in ("DA", "DT"):
            kind = "birth date" if "Birth" in keyword(element.tag) else "date"
            dates.update((kind, digits) for text in texts if len(digits := text.replace(".", "")[:8]) == 8)
        elif element.VR == "PN":
            words.update(("name", part) for text in texts for part in [text, *_name_parts(text)])
        elif element.VR in _TEXT and (kind := _kind(element, options)):
            words.update((kind, text) for text in texts if len(text) <= _LONGEST)
            if kind == "name":
                words.update((kind, part) for text in texts for part in _name_parts(text))
    long_enough = frozenset((kind, text) for kind, text in words if _is_long(text))
    codes = tuple(convert_encodings(dataset.get("SpecificCharacterSet") or ""))
    return Identifiers(long_enough, frozenset(uids), frozenset(dates), len(words) - len(long_enough), codes)


def find(path: Path, wanted: Identifiers) -> tuple[Hit, ...]:
    """Every identifier that is still in a de-identified file."""
    with path.open("rb") as stream:
        dataset = dcmread(stream, stop_before_pixels=True)
        header_ends = stream.tell()
        stream.seek(0)
        header = stream.read(header_ends).lower()
        for phrase in _OWN_PHRASES:
            header = header.replace(phrase, b"\0")
        pixels = stream.read()
    found: set[tuple[str, str]] = {
        (kind, text) for kind, text in wanted.words if _in_header(text, header, wanted.codes)
    }
    written = {match.decode("ascii") for match in _UID.findall(header)}
    found |= {("UID", uid) for uid in wanted.uids & written}
    days = {match[:8].decode("ascii") for match in _DIGITS.findall(header)}
    found |= {(kind, day) for kind, day in wanted.dates if day in days}
    hits = {Hit(kind, _where(dataset, text)) for kind, text in found}
    long_ones = [*wanted.words, *(("UID", uid) for uid in wanted.uids)]
    hits |= {Hit(kind, "pixel data") for kind, text in long_ones if _in_pixels(text, pixels)}
    return tuple(sorted(hits))


def _elements(dataset: Dataset) -> Iterator[DataElement]:
    """Every element at every depth that can be read; what cannot be read is not in the new file either."""
    for part in (getattr(dataset, "file_meta", None) or Dataset(), dataset):
        for tag in list(part.keys()):
            try:
                element = part[tag]
                items = list(element.value) if element.VR == "SQ" else []
            except Exception:
                continue
            yield element
            for item in items:
                yield from _elements(item)


def _texts(element: DataElement) -> list[str]:
    texts = [str(value).strip(" \0") for value in values(element) if not isinstance(value, bytes)]
    return [text for text in texts if text]


def _kind(element: DataElement, options: Options) -> str:
    if element.tag.is_private or element.tag.group == 2 or action(element.tag, element.VR, options) is Action.KEEP:
        return ""
    return next((kind for kind, pattern in _KINDS if pattern.search(element.keyword)), "")


def _name_parts(name: str) -> list[str]:
    return [part for part in re.split(r"[\W\d_]+", name) if _is_long(part)]


def _is_long(text: str) -> bool:
    # Two characters of an eastern script are a whole name.
    return len(text.encode("utf-8", "ignore")) >= SHORTEST


def _spellings(text: str, *codes: str) -> set[bytes]:
    """A text as bytes in several codes and cases."""
    cases = {text, text.lower(), text.upper(), text.title()}
    return {case.encode(code, "ignore") for case in cases for code in codes}


def _in_header(text: str, header: bytes, codes: tuple[str, ...]) -> bool:
    """Whether a word stands in bytes that were brought to lower case, and not as a part of a longer word."""
    if not text.isascii():
        # Scripts without spaces, and escape sequences that end in a letter, have no edges that could be told.
        return any(
            word.lower() in header
            for word in _spellings(text, "latin-1", "utf-8", "utf-16-le", *codes)
            if len(word) >= SHORTEST
        )
    # A number beside a point is another number.
    edge = rb"[0-9a-z.]" if text.isdigit() else rb"[0-9a-z]"
    plain = {word.lower() for word in _spellings(text, "latin-1", "utf-8") if len(word) >= SHORTEST}
    if any(re.search(rb"(?<!" + edge + rb")" + re.escape(word) + rb"(?!" + edge + rb")", header) for word in plain):
        return True
    wide = {word.lower() for word in _spellings(text, "utf-16-le")}
    return any(re.search(rb"(?<![0-9a-z]\0)" + re.escape(word) + rb"(?![0-9a-z]\0)", header) for word in wide)


def _in_pixels(text: str, pixels: bytes) -> bool:
    return any(
        word in pixels for word in _spellings(text, "latin-1", "utf-8", "utf-16-le") if len(word) >= _SHORTEST_IN_PIXELS
    )


def _where(dataset: Dataset, text: str) -> str:
    """The attributes whose value has a text, by keyword."""
    low = text.lower()
    names = {
        keyword(element.tag) for element in _elements(dataset) if any(low in value.lower() for value in _texts(element))
    }
    return ", ".join(sorted(names)) or "bytes outside any value"
