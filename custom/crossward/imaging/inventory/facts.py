"""What an inventory comes to, in counts and closed terms: nothing that names a person, an examination or a hospital."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydicom.uid import UID_dictionary

from crossward.imaging.dicom.scans import Header
from crossward.imaging.inventory.scan import Found, Inventory
from crossward.imaging.labels.patients import clashing, names_someone, patient_ids

Counts = dict[str, int]
Item = TypeVar("Item")
Range = tuple[float, float]

NOT_SAID = "not said"
NO_CODE = "not a code"
NOT_STANDARD = "not of the standard"
UNKNOWN_SCANNER = "unknown scanner"
WITHHELD = "withheld: it repeats an identifier"
_CODE = re.compile(r"[A-Za-z0-9_ ]{1,16}")
_LONGEST = 64
# What is shown of a header's texts; everything else that is shown is a number, a count or a name of the standard.
_SHOWN_TEXTS = ("manufacturer", "model", "software", "kernel", "modality", "photometric", "view", "burned_in")


@dataclass(frozen=True, kw_only=True)
class Scanner:
    """One make and model and the images it made.

    Attributes:
        name: manufacturer and model.
        devices: how many single machines, told apart by serial number or station.
        spacing: smallest and largest, in millimetres.
        sizes: rows by columns.
    """

    name: str
    images: int
    patients: int
    studies: int
    series: int
    devices: int
    stations: int
    modalities: Counts
    software: Counts
    kernels: Counts
    kvp: Range | None
    field_strength: Range | None
    spacing: Range | None
    sizes: Counts
    photometrics: Counts
    bits: Counts


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Files that say the same twice.

    Attributes:
        copies: files more than there are instances, with the same pixels under one SOP instance UID.
        contradictions: SOP instance UIDs under which there are different pixels.
        twins: images more than there are pictures, with the same pixels under different SOP instance UIDs; None where
            not every image was compared.
    """

    copies: int
    contradictions: int
    twins: int | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What there is.

    Attributes:
        files: everything found, refused or not.
        read: files whose header was read.
        images: those with pixel data.
        without_patient: files that do not say whose they are.
        clashes: patient ids that more than one person seems to use.
        clash_files: the files under them.
        refused: by reason.
        refused_details: by reason and what more is known.
    """

    files: int
    bytes: int
    read: int
    images: int
    patients: int
    studies: int
    series: int
    without_patient: int
    clashes: int
    clash_files: int
    repeats: Repeats
    modalities: Counts
    objects: Counts
    syntaxes: Counts
    photometrics: Counts
    bits: Counts
    frames: Counts
    views: Counts
    burned_in: Counts
    scanners: tuple[Scanner, ...]
    refused: Counts
    refused_details: Counts

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: every number is finite, and the order depends on the files alone."""
        return asdict(self)


def facts(inventory: Inventory) -> Facts:
    """Counts what an inventory holds."""
    by_path = {found.path: header for found, header in inventory.read()}
    headers = list(by_path.values())
    images = [header for header in headers if header.has_pixels]
    patients = patient_ids(by_path)
    clashes = _clashes(by_path, patients)
    harmless = _harmless_texts(headers)
    return Facts(
        files=len(inventory.files),
        bytes=sum(found.size for found in inventory.files),
        read=len(headers),
        images=len(images),
        patients=len(set(patients.values())),
        studies=_distinct(headers, lambda header: header.study_uid),
        series=_distinct(headers, lambda header: header.series_uid),
        without_patient=len(headers) - len(patients),
        clashes=len(clashes),
        clash_files=sum(patient in clashes for patient in patients.values()),
        repeats=_repeats(inventory),
        modalities=_counts(headers, lambda header: _code(header.modality, harmless)),
        objects=_counts(headers, lambda header: _standard_name(header.sop_class)),
        syntaxes=_counts(headers, lambda header: _standard_name(header.transfer_syntax)),
        photometrics=_counts(images, lambda header: _code(header.photometric, harmless)),
        bits=_counts(images, _bits),
        frames=_counts(images, lambda header: "one frame" if header.frames == 1 else "several frames"),
        views=_counts(images, lambda header: _code(header.view, harmless)),
        burned_in=_counts(images, lambda header: _code(header.burned_in, harmless)),
        scanners=tuple(_scanner(name, made, patients, harmless) for name, made in images_by_scanner(inventory).items()),
        refused=_counts(inventory.files, lambda found: found.reason and found.reason.value),
        refused_details=_counts(inventory.files, _refusal),
    )


def images_by_scanner(inventory: Inventory) -> dict[str, list[Found]]:
    """The images of every make and model, under a name that can be shown; those with most images first."""
    harmless = _harmless_texts(header for _, header in inventory.read())
    made: dict[str, list[Found]] = defaultdict(list)
    names: dict[str, str] = {}
    for found, header in inventory.read():
        if header.has_pixels:
            name = " ".join(
                dict.fromkeys(_device_text(text, harmless) for text in (header.manufacturer, header.model) if text)
            )
            # The same scanner is often written in several ways: the first in the order of the paths is shown.
            made[names.setdefault(name.casefold(), name or UNKNOWN_SCANNER)].append(found)
    return dict(sorted(made.items(), key=lambda pair: (-len(pair[1]), pair[0])))


def _scanner(name: str, made: list[Found], patients: Mapping[str, str], harmless: frozenset[str]) -> Scanner:
    headers = [found.header for found in made if found.header is not None]
    return Scanner(
        name=name,
        images=len(headers),
        patients=len({patients[found.path] for found in made if found.path in patients}),
        studies=_distinct(headers, lambda header: header.study_uid),
        series=_distinct(headers, lambda header: header.series_uid),
        devices=_distinct(headers, lambda header: header.serial or header.station),
        stations=_distinct(headers, lambda header: header.station),
        modalities=_counts(headers, lambda header: _code(header.modality, harmless)),
        software=_counts(headers, lambda header: header.software and _device_text(header.software, harmless)),
        kernels=_counts(headers, lambda header: header.kernel and _device_text(header.kernel, harmless)),
        kvp=_range(header.kvp for header in headers),
        field_strength=_range(header.field_strength for header in headers),
        spacing=_range(millimetres for header in headers for millimetres in header.spacing or ()),
        sizes=_counts(headers, lambda header: f"{header.rows} x {header.columns}"),
        photometrics=_counts(headers, lambda header: _code(header.photometric, harmless)),
        bits=_counts(headers, _bits),
    )


def _clashes(headers: Mapping[str, Header], patients: Mapping[str, str]) -> set[str]:
    """The patients that seem to be more than one person."""
    by_patient: dict[str, list[Header]] = defaultdict(list)
    for path, patient in patients.items():
        by_patient[patient].append(headers[path])
    return {patient for patient, theirs in by_patient.items() if clashing(theirs)}


def _repeats(inventory: Inventory) -> Repeats:
    by_uid: dict[str, list[str]] = defaultdict(list)
    by_digest: dict[str, set[str]] = defaultdict(set)
    for found, header in inventory.read():
        if header.sop_uid:
            by_uid[header.sop_uid].append(found.digest or "")
        if header.has_pixels:
            by_digest[found.digest or ""].add(header.sop_uid or found.path)
    different = [len(set(digests) - {""}) for digests in by_uid.values()]
    return Repeats(
        copies=sum(len(digests) for digests in by_uid.values()) - sum(max(1, count) for count in different),
        contradictions=sum(count > 1 for count in different),
        twins=None if "" in by_digest else sum(len(uids) - 1 for uids in by_digest.values()),
    )


def _harmless_texts(headers: Iterable[Header]) -> frozenset[str]:
    """Texts on machines that at least one file holds without being about its own patient.

    A patient may bear the name of a manufacturer, but not every patient of its scanners does.
    """
    harmless: set[str] = set()
    for header in headers:
        for field in _SHOWN_TEXTS:
            text: str = getattr(header, field)
            if text and text not in harmless and not (names_someone(text, header) or _names_hospital(text, header)):
                harmless.add(text)
    return frozenset(harmless)


def _names_hospital(text: str, header: Header) -> bool:
    return bool(header.institution) and header.institution.casefold() in text.casefold()


def _device_text(text: str, harmless: frozenset[str]) -> str:
    return " ".join(text.replace("\\", " ").split())[:_LONGEST] if text in harmless else WITHHELD


def _code(text: str, harmless: frozenset[str]) -> str:
    """A coded string, as the standard allows it."""
    if not text:
        return NOT_SAID
    if text not in harmless:
        return WITHHELD
    return text.upper() if _CODE.fullmatch(text) else NO_CODE


def _standard_name(uid: str) -> str:
    return UID_dictionary.get(uid, (NOT_STANDARD,))[0] if uid else NOT_SAID


def _bits(header: Header) -> str:
    if header.bits_stored is None or header.bits_allocated is None:
        return NOT_SAID
    sign = {True: " signed", False: " unsigned", None: ""}[header.signed]
    return f"{header.bits_stored} of {header.bits_allocated}{sign}"


def _refusal(found: Found) -> str | None:
    detail = f" ({found.detail})" if found.detail else ""
    return found.reason and f"{found.reason.value}{detail}"


def _distinct(headers: Iterable[Header], key: Callable[[Header], object]) -> int:
    return len({found for header in headers if (found := key(header))})


def _counts(items: Iterable[Item], term: Callable[[Item], str | None]) -> Counts:
    """How often each term occurs, the most frequent first; those without a term are not counted."""
    counter = Counter(found for item in items if (found := term(item)))
    return dict(sorted(counter.items(), key=lambda pair: (-pair[1], pair[0])))


def _range(values: Iterable[float | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
