"""A hospital's table of labels: CSV as spreadsheets and databases really write it.

No message quotes the table: a cell may hold a name, and a table without a first line of columns begins with one.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossward.federation.errors import BadInput
from crossward.imaging.rules.site import LabelRule

LARGEST_TABLE = 256 * 2**20
MOST_TOLD = 20

_DELIMITERS = (",", ";", "\t")
# Spreadsheets put it in front of everything else to tell themselves the delimiter.
_DECLARED = re.compile(r"sep=([,;\t|])\r?\n", re.IGNORECASE)


@dataclass(frozen=True)
class Line:
    """What one line of the table says; a cell that is empty is an empty text.

    Attributes:
        number: of the line in the file, from 1.
        key: what the label is for.
        label: as it is written.
        patient: None where the table does not say.
    """

    number: int
    key: str
    label: str
    patient: str | None


def read_table(rule: LabelRule) -> list[Line]:
    """Reads the lines of a table that are not blank.

    Raises:
        BadInput: it cannot be read, lacks a column, or has lines that do not fit its columns.
    """
    columns = [rule.key_column, rule.label_column, *([rule.patient_column] if rule.patient_column else [])]
    text = _text(rule)
    declared = _DECLARED.match(text)
    skipped = declared.end() if declared else 0
    delimiters = (declared[1],) if declared else _DELIMITERS
    delimiter = _delimiter(text[skipped:], columns, delimiters)
    lines: list[Line] = []
    broken: list[tuple[int, str]] = []
    rows = _rows(text[skipped:], delimiter, first=1 + bool(declared))
    _, header = next(rows)
    places = [header.index(column) for column in columns]
    for number, cells in rows:
        if not any(cells):
            continue
        if len(cells) <= max(places) or any(cells[len(header) :]):
            broken.append((number, f"has {len(cells)} cells where the first line has {len(header)}"))
        else:
            key, label, *patient = (cells[place] for place in places)
            lines.append(Line(number, key, label, patient[0] if patient else None))
    if broken:
        more = f"\nthe table of labels: and {len(broken) - MOST_TOLD} more lines" if len(broken) > MOST_TOLD else ""
        told = [f"the table of labels, line {number}: {what}; correct the line" for number, what in broken[:MOST_TOLD]]
        raise BadInput("\n".join(told) + more)
    if not lines:
        raise BadInput("the table of labels has no lines below its first; add the labels")
    return lines


def _text(rule: LabelRule) -> str:
    if rule.file is None:
        raise BadInput("no table of labels is named; add labels.file")
    try:
        with rule.file.open("rb") as stream:
            content = stream.read(LARGEST_TABLE + 1)
    except OSError as error:
        raise BadInput(f"the table of labels cannot be read ({error.strerror}); check labels.file") from None
    if len(content) > LARGEST_TABLE:
        raise BadInput(f"the table of labels is larger than {LARGEST_TABLE} bytes; check labels.file")
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInput(f"the table of labels, line {line}: is not UTF-8; save the table as UTF-8 CSV") from None


def _delimiter(text: str, columns: Sequence[str], delimiters: Sequence[str]) -> str:
    """The one that makes the first line name every column: nothing is guessed from what the cells look like."""
    lacking: list[list[str]] = []
    for delimiter in delimiters:
        _, header = next(_rows(text, delimiter, first=1), (1, []))
        missing = [column for column in columns if column not in header]
        if not missing:
            _refuse_twice(header, columns)
            return delimiter
        lacking.append(missing)
    fewest = min(lacking, key=len)
    raise BadInput(
        f"the table of labels has no column {', '.join(map(repr, fewest))}; its first line must name the columns of "
        "site.yaml, with comma, semicolon or tab between them"
    )


def _refuse_twice(header: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if header.count(column) > 1:
            raise BadInput(f"the table of labels has two columns {column!r}; rename or delete one")


def _rows(text: str, delimiter: str, *, first: int) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not blank, with the number of the line it begins in."""
    table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    number = first
    try:
        for cells in table:
            if cells:
                yield number, [cell.strip() for cell in cells]
            number = first + table.line_num
    except csv.Error:
        raise BadInput(
            f"the table of labels, line {number}: has a quote that does not close, or is no text; correct the line"
        ) from None
