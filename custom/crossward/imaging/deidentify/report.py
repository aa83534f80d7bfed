"""What a de-identification did: kept file by file while it runs, so that it can go on after a stop; told at the end.

Nothing here holds a value of a header. Without a mapping, nothing links an original that passed to its pseudonym: the
journal knows originals by a keyed digest, and files are taken in the order of those digests.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from crossward.federation.errors import BadInput, StorageFailure
from crossward.federation.storage import atomic_file, write_json
from crossward.imaging.deidentify.file import Outcome, Row, Tally
from crossward.imaging.deidentify.rules import METHODS, Options

REPORT, REPORT_TEXT = "report.json", "report.txt"
NOTES = (
    "Faces can be reconstructed from scans of the head; nothing is done about that here.",
    "The search for drawn text finds rows of letters in print; it does not find handwriting or single letters.",
    "Identifiers shorter than four characters, and those shorter than eight bytes in pixel data, are not searched for.",
)


class Lines:
    """A private file of JSON lines that is only added to; a last line that a stop cut short is dropped.

    Raises:
        BadInput: another process has it open.
        StorageFailure: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: list[dict[str, Any]] = []
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                raise BadInput("another run is writing to this output folder; wait until it has ended") from None
            whole = self._read(path.read_bytes())
            os.ftruncate(self._descriptor, whole)
            os.lseek(self._descriptor, whole, os.SEEK_SET)
        except OSError as error:
            raise StorageFailure(f"{path} cannot be used: {error.strerror}") from error

    def _read(self, content: bytes) -> int:
        """Takes lines up to the first that is not whole, and gives the length of those before it."""
        whole = 0
        for line in content.splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(entry, dict):
                break
            self.found.append(entry)
            whole += len(line)
        return whole

    def add(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise StorageFailure(
                f"{self._path} cannot be written: {error.strerror}; free some space and run again"
            ) from (error)

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """The rows of finished files, by key. Files of a series meet the same actions: their tally is written once.

    Args:
        path: of its file.
        settings: what the rows depend on.

    Raises:
        BadInput: the rows there were made with other settings, or another run is at work.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self.rows: dict[str, Row] = {}
        self._tallies: dict[str, Tally] = {}
        self._lines = Lines(path)
        if not self._lines.found:
            self._lines.add({"settings": settings})
        elif self._lines.found[0].get("settings") != settings:
            self._lines.close()
            raise BadInput("the output folder was made with other options or another secret; choose a new one")
        for line in self._lines.found:
            if "tally" in line:
                self._tallies[line["name"]] = tuple((who, what, times) for who, what, times in line["tally"])
            if "row" in line:
                row = Row(**{**line["row"], "outcome": Outcome(line["row"]["outcome"])})
                self.rows[line["key"]] = replace(row, tally=self._tallies[line["name"]])
        self._lines.found.clear()

    def add(self, key: str, row: Row) -> Row:
        """Write a row down; gives it back with the tally that all such rows share."""
        name = sha256(json.dumps(row.tally).encode()).hexdigest()[:16]
        if name not in self._tallies:
            self._tallies[name] = row.tally
            self._lines.add({"name": name, "tally": row.tally})
        self.rows[key] = replace(row, tally=self._tallies[name])
        self._lines.add({"key": key, "name": name, "row": asdict(replace(row, tally=()))})
        return self.rows[key]

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True)
class Summary:
    """What became of every file of a folder, by its path in there."""

    rows: Mapping[str, Row]
    options: Options

    def count(self, outcome: Outcome) -> int:
        return sum(row.outcome is outcome for row in self.rows.values())

    @property
    def reasons(self) -> dict[str, dict[str, int]]:
        """How often each reason held or refused a file."""
        counts = Counter((row.outcome, row.reason) for row in self.rows.values() if row.outcome is not Outcome.OK)
        table: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for (outcome, reason), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
            table[outcome][reason] = count
        return dict(table)

    @property
    def attributes(self) -> dict[str, dict[str, int]]:
        """How often each attribute met each action."""
        files = Counter(row.tally for row in self.rows.values())
        table: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for tally, count in files.items():
            for name, what, times in tally:
                table[name][what] += times * count
        return {name: dict(sorted(table[name].items())) for name in sorted(table)}

    def as_json(self, *, files: bool = True) -> dict[str, Any]:
        """Everything as plain values.

        Args:
            files: with a row per file. Its path may name a patient, so this stays in the site's own folder.
        """
        facts: dict[str, Any] = {
            "files": len(self.rows),
            **{str(outcome): self.count(outcome) for outcome in Outcome},
            "reasons": self.reasons,
            "options": asdict(self.options),
            "profile": [meaning for _, meaning, option in METHODS if option is None or getattr(self.options, option)],
            "attributes": self.attributes,
            "identifiers_too_short_to_search": sum(row.unsearched for row in self.rows.values()),
            "pixel_bytes_searched_for_long_identifiers_only": sum(row.pixel_bytes for row in self.rows.values()),
            "notes": list(NOTES),
        }
        if files:
            facts["rows"] = [_told(path, self.rows[path]) for path in sorted(self.rows)]
        return facts

    def write(self, folder: Path) -> None:
        """Write the report as JSON and as text into a folder."""
        write_json(folder / REPORT, self.as_json())
        with atomic_file(folder / REPORT_TEXT) as stream:
            stream.write(self._text().encode("utf-8", "surrogateescape"))
        for name in (REPORT, REPORT_TEXT):
            (folder / name).chmod(0o600)

    def _text(self) -> str:
        lines = [f"De-identified by DICOM PS3.15 Annex E: {len(self.rows)} files"]
        lines += [f"  {outcome}: {self.count(outcome)}" for outcome in Outcome]
        for outcome, reasons in self.reasons.items():
            lines += ["", f"Why files were {outcome}"] + [f"  {count:>7}  {why}" for why, count in reasons.items()]
        lines += ["", "Attributes"]
        for name, actions in self.attributes.items():
            lines.append(f"  {name}: " + ", ".join(f"{what} {count}" for what, count in actions.items()))
        lines += ["", "Files that did not pass"]
        lines += [
            "  " + "; ".join(filter(None, told.values()))
            for path in sorted(self.rows)
            if (told := _told(path, self.rows[path]))["outcome"] != Outcome.OK
        ]
        return "\n".join([*lines, "", *NOTES]) + "\n"


def _told(path: str, row: Row) -> dict[str, str]:
    """A row of the report. Only a held file is named by its pseudonym, since a person has to look at it."""
    # A path that is not UTF-8 is shown with marks, so that the report is.
    readable = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    told = {"file": readable, "outcome": str(row.outcome), "reason": row.reason, "detail": row.detail}
    return {**told, "held_as": row.output} if row.outcome is Outcome.HELD else told
