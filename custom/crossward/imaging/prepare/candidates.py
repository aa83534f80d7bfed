"""Which frames of which files are to become pictures, decided from headers and labels before a pixel is read.

The split is made here, of all that headers and labels allow: a file that later turns out to be damaged is missed in its
part, and nobody else changes place because of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.volume import order_slices
from crossward.imaging.inventory.scan import Found
from crossward.imaging.labels import report as label_report
from crossward.imaging.labels.join import Labelled, Labels, join
from crossward.imaging.prepare.manifest import Rejected
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.rules.domains import domain_of
from crossward.imaging.rules.site import SiteRules
from crossward.imaging.secret import pseudonym
from crossward.imaging.splits import Progress

BURNED_IN = "YES"
MOST_FRAMES = 10_000
"""Of one file; a header that says more is taken for damaged or for an attack on the memory."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A file that is to be read.

    Attributes:
        file: path relative to the folder of images.
        label: its class.
        patient: a pseudonym.
        part: 0 training, 1 validation, 2 test.
        domain: of its scanner.
        frames: that become pictures.
    """

    file: str
    label: str
    patient: str
    part: int
    domain: str
    frames: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is to be read, and what is not.

    Attributes:
        candidates: in the order of their files.
        rejected: files with a reason.
        left_out: files whose series is told by another one of its files.
        warnings: one line each.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    left_out: int
    warnings: tuple[str, ...]


def choose(
    rules: SiteRules,
    files: Sequence[Found],
    *,
    secret: bytes,
    classes: Sequence[str] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Goes through an inventory.

    Args:
        rules: of the site.
        files: of its inventory.
        secret: of the site, which makes pseudonyms of patients.
        classes: labels to keep; all of them when not given.
        processes: to read labels with, where they are in DICOM files.
        progress: told of the files that are read for it.

    Raises:
        BadInput: the rules or the labels cannot be used.
    """
    if rules.frames == "volume":
        raise BadInput(
            f"{rules.path.name}: frames: volume keeps 3-D arrays, and the networks here take 2-D pictures; choose "
            "each, middle, first or single"
        )
    joined = join(rules, files, processes=processes, progress=progress)
    usable, refused = _usable(joined.rows, rules, classes)
    rows, unordered, left_out = _by_frames(usable, rules)
    labels = replace(joined, rows=tuple(row for row, _, _ in rows))
    parts = label_report.split(labels, rules)
    unread = [_rejected(found.path, found.reason, found.detail) for found in files if found.reason is not None]
    unlabelled = [_rejected(row.file, row.reason, row.detail) for row in joined.refused if row.reason is not None]
    return Choice(
        candidates=tuple(
            Candidate(
                file=row.file,
                label=str(row.label),
                patient=pseudonym(secret, "patient", str(row.patient)),
                part=int(part),
                domain=domain,
                frames=frames,
            )
            for (row, domain, frames), part in zip(rows, parts, strict=True)
        ),
        rejected=tuple(sorted([*unread, *unlabelled, *refused, *unordered], key=lambda row: row.file)),
        left_out=left_out,
        warnings=(*_unused(joined), *joined.notes, *label_report.warnings(labels, parts)),
    )


def _rejected(file: str, reason: Reason, detail: str = "") -> Rejected:
    return Rejected(file=file, reason=reason, detail=detail)


def _unused(labels: Labels) -> list[str]:
    count = len(labels.unused)
    return [f"{count} labels are for files that are not there; check the key and the folder"] if count else []


def _usable(
    rows: Iterable[Labelled], rules: SiteRules, classes: Sequence[str] | None
) -> tuple[list[tuple[Labelled, str]], list[Rejected]]:
    """Rows with their domains, and those that a rule refuses by their header."""
    usable, refused = [], []
    for row in rows:
        try:
            if classes is not None and row.label not in classes:
                raise Refused(Reason.UNKNOWN_LABEL, "not one of the classes that were asked for")
            if rules.burned_in == "refuse" and row.header.burned_in.strip().upper() == BURNED_IN:
                raise Refused(Reason.BURNED_IN, "its header says so")
            if rules.frames == "single" and row.header.frames > 1:
                raise Refused(Reason.TOO_MANY_FRAMES)
            if row.header.frames > MOST_FRAMES:
                raise Refused(Reason.TOO_LARGE, f"{row.header.frames} frames")
            usable.append((row, domain_of(row.header, rules.domain)))
        except Refused as refusal:
            refused.append(_rejected(row.file, refusal.reason, refusal.detail))
    return usable, refused


Taken = tuple[Labelled, str, tuple[int, ...]]
"""A row with its domain and the frames to take."""


def _by_frames(rows: Sequence[tuple[Labelled, str]], rules: SiteRules) -> tuple[list[Taken], list[Rejected], int]:
    """What the rule takes, what it refuses, and how many files it leaves out for another one of their series."""
    pick = _PICKS.get(rules.frames)
    if pick is None:
        return [(row, domain, tuple(range(row.header.frames))) for row, domain in rows], [], 0
    series: defaultdict[str, list[tuple[Labelled, str]]] = defaultdict(list)
    for row, domain in rows:
        series[row.header.series_uid or row.file].append((row, domain))
    taken: list[Taken] = []
    refused: list[Rejected] = []
    for members in series.values():
        try:
            row, domain = _of_series(members, pick)
        except Refused as refusal:
            refused += [_rejected(row.file, refusal.reason, refusal.detail) for row, _ in members]
        else:
            taken.append((row, domain, (pick(row.header.frames),)))
    return sorted(taken, key=lambda each: each[0].file), refused, len(rows) - len(taken) - len(refused)


Pick = Callable[[int], int]
_PICKS: Mapping[str, Pick] = {"first": lambda count: 0, "middle": lambda count: count // 2}


def _of_series(members: Sequence[tuple[Labelled, str]], pick: Pick) -> tuple[Labelled, str]:
    if len(members) == 1:
        return members[0]
    order = order_slices([row.header for row, _ in members]).order
    return members[order[pick(len(order))]]
