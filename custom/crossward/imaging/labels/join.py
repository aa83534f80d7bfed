"""Labels joined to images: an image is trained on when it is sure which class it has and whose it is.

Everything else is refused with its reason. Nothing here is for printing but classes, counts and reasons.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.scans import Header
from crossward.imaging.labels.patients import clashing, patient_ids
from crossward.imaging.labels.sources import Claim, Claims, File, Progress, claims_of, is_report
from crossward.imaging.refusals import Reason
from crossward.imaging.rules.config import LONGEST_CLASS
from crossward.imaging.rules.site import SiteRules

MOST_CLASSES = 64
# Shorter ones, such as a patient called 1, are labels by chance.
_SHORTEST_IDENTIFIER = 4
_IDENTIFIERS = ("patient_id", "patient_name", "birth_date", "accession", "study_uid", "series_uid", "sop_uid")


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """An image with its class and its patient, or with the reason why it has none.

    Attributes:
        file: path relative to the folder of images.
        header: of the file.
        label: its class.
        patient: whose it is; all images of a person stay together.
        reason: why it is not used.
        detail: more words on that, from a closed list.
    """

    file: str
    header: Header
    label: str | None = None
    patient: str | None = None
    reason: Reason | None = None
    detail: str = ""

    def refused(self, reason: Reason, detail: str = "") -> Labelled:
        """The same, not used; the first reason stays."""
        return self if self.reason is not None else replace(self, reason=reason, detail=detail)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What joining gave.

    Attributes:
        rows: images to use, each with a label and a patient, in the order of the files.
        refused: the others.
        unused: lines of the table, or places in the row of reports, that fit no file.
        notes: what else is worth knowing, in words and counts.
    """

    rows: tuple[Labelled, ...]
    refused: tuple[Labelled, ...]
    unused: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.labels)))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(row.label for row in self.rows if row.label is not None)

    @property
    def patients(self) -> tuple[str, ...]:
        return tuple(row.patient for row in self.rows if row.patient is not None)

    @property
    def reasons(self) -> dict[Reason, int]:
        """How many were refused for each reason, most frequent first."""
        return dict(Counter(row.reason for row in self.refused if row.reason is not None).most_common())


def join(
    rules: SiteRules, files: Sequence[File], *, processes: int | None = None, progress: Progress | None = None
) -> Labels:
    """Gives every image its label and its patient, or a reason.

    Files without a header were refused before, and are in neither list.

    Args:
        rules: of the site.
        files: of its inventory.
        processes: to read elements or reports with; 0 reads in this process.
        progress: told of the files that are read.

    Raises:
        BadInput: the table of labels cannot be used.
    """
    claims = claims_of(rules, files, processes=processes, progress=progress)
    headers = {file.path: file.header for file in files if file.header is not None}
    rows = [_row(path, header, claims, rules.labels.mapping) for path, header in headers.items()]
    if rules.labels.source == "csv" and rules.labels.patient_column is not None:
        whose = {path: _named(claims.by_file.get(path, ())) for path in headers}
    else:
        whose = {path: {patient} for path, patient in patient_ids(headers).items()}
    rows = [_with_patient(row, whose.get(row.file, set())) for row in rows]
    if rules.labels.patient_column is None or rules.labels.key == "patient":
        rows = _without_clashes(rows, headers)
    rows = _without_copies(rows, {file.path: file.digest for file in files})
    joined = Labels(
        rows=tuple(row for row in rows if row.reason is None),
        refused=tuple(row for row in rows if row.reason is not None),
        unused=tuple(claims.unused),
        notes=tuple(claims.notes),
    )
    if not rules.labels.mapping:
        _check_classes(joined.classes, [row.header for row in rows])
    return joined


def _row(path: str, header: Header, claims: Claims, mapping: Mapping[str, str]) -> Labelled:
    row = Labelled(file=path, header=header)
    if is_report(header):
        return row.refused(Reason.NOT_AN_IMAGE)
    if not header.has_pixels:
        return row.refused(Reason.NO_PIXELS)
    if path in claims.refused:
        return row.refused(claims.refused[path].reason, claims.refused[path].detail)
    written = {claim.label for claim in claims.by_file.get(path, ()) if claim.label}
    if not written:
        return row.refused(Reason.NO_LABEL)
    unknown = {label for label in written if not _usable(mapping.get(label, "" if mapping else label))}
    classes = {mapping.get(label, label) for label in written}
    if len(classes) > 1:
        return row.refused(Reason.CONFLICTING_LABELS)
    if unknown:
        return row.refused(Reason.UNKNOWN_LABEL)
    return replace(row, label=classes.pop())


def _usable(label: str) -> bool:
    return bool(label) and label.isprintable() and len(label) <= LONGEST_CLASS


def _named(claims: Iterable[Claim]) -> set[str]:
    return {claim.patient for claim in claims if claim.patient}


def _with_patient(row: Labelled, named: Collection[str]) -> Labelled:
    if len(named) != 1:
        return row.refused(Reason.NO_PATIENT, "the table names two patients" if named else "")
    return replace(row, patient=next(iter(named)))


def _without_clashes(rows: Sequence[Labelled], headers: Mapping[str, Header]) -> list[Labelled]:
    """All images of an id that two people share are refused: a label or a split may be the other one's."""
    patients = patient_ids(headers)
    people: defaultdict[str, list[Header]] = defaultdict(list)
    for path, patient in patients.items():
        people[patient].append(headers[path])
    shared = {patient for patient, described in people.items() if clashing(described)}
    return [row.refused(Reason.PATIENT_CLASH) if patients.get(row.file) in shared else row for row in rows]


def _without_copies(rows: Sequence[Labelled], digests: Mapping[str, str | None]) -> list[Labelled]:
    """One image under two paths counts once, and not at all where the two contradict each other."""
    copies: defaultdict[str, list[Labelled]] = defaultdict(list)
    for row in rows:
        if row.reason is None and row.header.sop_uid:
            copies[row.header.sop_uid].append(row)
    changed: dict[str, Labelled] = {}
    for group in (group for group in copies.values() if len(group) > 1):
        for row in group:
            if len({each.label for each in group}) > 1:
                changed[row.file] = row.refused(Reason.CONFLICTING_LABELS, "a copy of it has the other")
            elif len({each.patient for each in group}) > 1:
                changed[row.file] = row.refused(Reason.NO_PATIENT, "a copy of it names another patient")
            elif row is not group[0] and digests.get(row.file) and digests[row.file] == digests.get(group[0].file):
                changed[row.file] = row.refused(Reason.DUPLICATE)
    return [changed.get(row.file, row) for row in rows]


def _check_classes(classes: Sequence[str], headers: Sequence[Header]) -> None:
    """Refuses classes that are no classes before anything prints them: a wrong column may hold names or ids."""
    remedy = "correct labels.label_column, or name the labels in labels.map"
    if len(classes) > MOST_CLASSES:
        raise BadInput(f"there are {len(classes)} different labels, and {MOST_CLASSES} at most are classes; {remedy}")
    said = {str(getattr(header, field)).casefold() for header in headers for field in _IDENTIFIERS}
    same = sum(len(label) >= _SHORTEST_IDENTIFIER and label.casefold() in said for label in classes)
    if same:
        raise BadInput(f"{same} labels are what headers hold as a patient's name, id or date; {remedy}")
