"""What the three sources of labels claim about the images of a site, file by file."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from crossward.imaging.dicom.scans import Header
from crossward.imaging.labels.reading import Report, read_element, read_report
from crossward.imaging.labels.table import Line, read_table
from crossward.imaging.refusals import Refused
from crossward.imaging.rules.site import SiteRules
from crossward.imaging.workers import work

Progress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")

SECONDS_PER_FILE = 60.0
# SOP classes of structured reports all begin with this.
_REPORTS = "1.2.840.10008.5.1.4.1.1.88."


class File(Protocol):
    """A file of an inventory."""

    @property
    def path(self) -> str: ...
    @property
    def header(self) -> Header | None: ...
    @property
    def digest(self) -> str | None: ...


@dataclass(frozen=True)
class Claim:
    """One label for one image, as it is written, and whose image it is where the source says so."""

    label: str
    patient: str | None = None


@dataclass
class Claims:
    """What a source says.

    Attributes:
        by_file: claims by the path of the image.
        refused: images whose own label could not be read, by path.
        unused: lines of the table, or places in the row of reports, that fit no file.
        notes: what else is worth knowing, in words and counts.
    """

    by_file: defaultdict[str, list[Claim]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[str, Refused] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_report(header: Header) -> bool:
    """Whether the file is a structured report."""
    return header.sop_class.startswith(_REPORTS) or header.modality == "SR"


def claims_of(rules: SiteRules, files: Sequence[File], *, processes: int | None, progress: Progress | None) -> Claims:
    """Asks the source that the rules name."""
    return _SOURCES[rules.labels.source](rules, files, processes, progress)


def _from_table(rules: SiteRules, files: Sequence[File], _: int | None, __: Progress | None) -> Claims:
    key_of = _KEYS[rules.labels.key]
    named: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        if key_of(file):
            named[key_of(file)].append(file.path)
    claims = Claims()
    outside = 0
    lines = {line.number: line for line in read_table(rules.labels)}
    for line in lines.values():
        key = _path_key(line.key) if rules.labels.key == "file" else line.key
        outside += key is None
        for path in named.get(key or "", ()):
            claims.by_file[path].append(Claim(line.label, line.patient))
        if not key or key not in named:
            claims.unused.append(line.number)
    if claims.unused and rules.labels.key == "file" and _counted_from_table(rules, claims.unused, lines):
        claims.notes.append("the table's paths count from its own folder; write them from the folder of data")
    if outside:
        claims.notes.append(f"{outside} lines name files outside the folder of images; write paths from that folder")
    return claims


def _from_element(rules: SiteRules, files: Sequence[File], processes: int | None, progress: Progress | None) -> Claims:
    images = [file.path for file in files if file.header is not None and file.header.has_pixels]
    items = [(rules.data / path, rules.labels.tag) for path in images]
    claims = Claims()
    for number, result in _counted(read_element, items, "labels", processes, progress):
        if isinstance(result, Refused):
            claims.refused[images[number]] = result
        else:
            claims.by_file[images[number]].append(Claim(result))
    return claims


def _from_reports(rules: SiteRules, files: Sequence[File], processes: int | None, progress: Progress | None) -> Claims:
    by_instance: defaultdict[str, list[str]] = defaultdict(list)
    by_study: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.header is not None and file.header.has_pixels:
            by_instance[file.header.sop_uid].append(file.path)
            by_study[file.header.study_uid].append(file.path)
    for named in (by_instance, by_study):
        named.pop("", None)
    sources = [file.path for file in files if file.header is not None and is_report(file.header)]
    items = [(rules.data / path, rules.labels.concept) for path in sources]
    results = dict(_counted(read_report, items, "reports", processes, progress))
    reports = {number: each for number, each in sorted(results.items()) if not isinstance(each, Refused)}
    claims = Claims()
    current = _current(reports)
    for number, report in current.items():
        fits = 0
        for finding in report.findings:
            where = [by_instance.get(uid, []) for uid in finding.images] or [by_study.get(report.study_uid, [])]
            for path in (path for paths in where for path in paths):
                claims.by_file[path].append(Claim(finding.value))
                fits += 1
        if not fits:
            claims.unused.append(number)
    claims.notes += _on_reports(reports, current, unread=len(results) - len(reports))
    return claims


def _current(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Reports that are finished, say something about the concept, and were not carried on by such a one."""
    saying = {number: report for number, report in reports.items() if report.complete and report.findings}
    replaced = {uid for report in saying.values() for uid in report.replaces}
    return {number: report for number, report in saying.items() if report.sop_uid not in replaced}


def _on_reports(reports: Mapping[int, Report], current: Mapping[int, Report], *, unread: int) -> list[str]:
    unfinished = sum(not report.complete for report in reports.values())
    silent = sum(report.complete and not report.findings for report in reports.values())
    replaced = len(reports) - unfinished - silent - len(current)
    said = {
        "reports could not be read": unread,
        "reports are not finished and were not used": unfinished,
        "reports say nothing about the concept": silent,
        "reports were replaced by later ones": replaced,
    }
    if not reports and not unread:
        return ["there is no structured report among the files; check data, or choose another source of labels"]
    return [f"{count} {what}" for what, count in said.items() if count]


def _counted(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    what: str,
    processes: int | None,
    progress: Progress | None,
) -> Iterable[tuple[int, Result | Refused]]:
    results = work(function, items, processes=processes, seconds=SECONDS_PER_FILE)
    for done, result in enumerate(results, start=1):
        yield result
        if progress is not None:
            progress(what, done, len(items))


def _counted_from_table(rules: SiteRules, unused: Sequence[int], lines: Mapping[int, Line]) -> bool:
    """Whether the first path that fits no file would fit one from where the table lies."""
    key = _path_key(lines[unused[0]].key)
    return bool(key and rules.labels.file and (rules.labels.file.parent / key).is_file())


def _path_key(written: str) -> str | None:
    """A path as the inventory writes it; None where it leads out of the folder."""
    path = PurePosixPath(unicodedata.normalize("NFC", written).replace("\\", "/"))
    return None if path.is_absolute() or ".." in path.parts else path.as_posix() if path.parts else ""


def _header_key(field: str) -> Callable[[File], str]:
    return lambda file: str(getattr(file.header, field)).strip() if file.header is not None else ""


_KEYS: Mapping[str, Callable[[File], str]] = {
    "file": lambda file: unicodedata.normalize("NFC", file.path),
    "sop_uid": _header_key("sop_uid"),
    "series_uid": _header_key("series_uid"),
    "study_uid": _header_key("study_uid"),
    "accession": _header_key("accession"),
    "patient": _header_key("patient_id"),
}

_SOURCES: Mapping[str, Callable[[SiteRules, Sequence[File], int | None, Progress | None], Claims]] = {
    "csv": _from_table,
    "tag": _from_element,
    "sr": _from_reports,
}
