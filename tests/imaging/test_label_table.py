from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.imaging.labels.table import Line, read_table
from crossward.imaging.rules.site import LabelRule

EXPECTED = [Line(2, "a.dcm", "normal", "P1"), Line(3, "b, c.dcm", "node", "P2")]


def read(tmp_path: Path, content: bytes, **rule: str) -> list[Line]:
    file = tmp_path / "labels.csv"
    file.write_bytes(content)
    return read_table(LabelRule(file=file, **{"patient_column": "patient", **rule}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b'file,patient,label\na.dcm,P1,normal\n"b, c.dcm",P2,node\n',
        b'file,patient,label\r\na.dcm,P1,normal\r\n"b, c.dcm",P2,node',
        b'\xef\xbb\xbffile;label;patient\r\na.dcm;normal;P1\r\n"b, c.dcm";node;P2\r\n',
        b"patient\tage\tfile\tlabel\nP1\t50\ta.dcm\tnormal\nP2\t\tb, c.dcm\tnode\n",
        b'file, patient, label\na.dcm, P1, normal\n"b, c.dcm", P2 , node\n',
        b"file;patient;label;;\na.dcm;P1;normal;;\nb, c.dcm;P2;node;;;;\n",
        "file;patient;label\na.dcm;P1;normal\nb, c.dcm;P2;node\n".encode("utf-16"),
    ],
    ids=["commas", "crlf", "mark and semicolons", "tabs", "blanks", "empty columns", "utf-16"],
)
def test_as_spreadsheets_write_it(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path, content) == EXPECTED


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    content = b'sep=;\nfile;patient;label\n\n;;\na;P1;"two\nlines"\n \nb;P2;\n'
    assert read(tmp_path, content) == [Line(5, "a", "two\nlines", "P1"), Line(8, "b", "", "P2")]


def test_the_delimiter_is_the_one_that_makes_the_columns(tmp_path: Path) -> None:
    content = b'file;"label,all;of it"\nx,y,z;node\n'
    rule = {"label_column": "label,all;of it", "patient_column": ""}
    assert read(tmp_path, content, **rule) == [Line(2, "x,y,z", "node", None)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"file,patient\na,b\n", r"no column 'label'; its first line must name"),
        (b"PLANTED.dcm,P1,normal\nb.dcm,P2,normal\n", r"no column 'file', 'label', 'patient'"),
        (b"", "no column"),
        (b"file,patient,label\n", "no lines below its first"),
        (b"file,patient,label,label\na,b,c,d\n", "two columns 'label'"),
        (
            b"file,patient,label\na,P1,normal\nPLANTED,NAME,P2,node\nb,P3\n",
            r"line 3: has 4 cells .*\n.*line 4: has 2 c",
        ),
        (b'file,patient,label\na,P1,"PLANTED\nb,P2,node\n', "line 2: has a quote that does not close"),
        (b"file,patient,label\na,P1,normal\nb,P2,\xe9\xff\n", "line 3: is not UTF-8"),
        (b"file,patient,label\n" + b"a,b\n" * 30, "and 10 more lines"),
    ],
)
def test_what_cannot_be_read_surely_is_refused_without_quoting_it(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=words) as told:
        read(tmp_path, content)
    assert "PLANTED" not in str(told.value)


def test_a_table_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_table(LabelRule(file=tmp_path / "labels.csv"))


CELLS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12).map(str.strip)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(CELLS.filter(bool), CELLS, CELLS), min_size=1, max_size=6),
    delimiter=st.sampled_from(",;\t"),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
)
def test_what_a_csv_writer_wrote_is_read_back(
    tmp_path: Path, rows: list[tuple[str, str, str]], delimiter: str, end: str, mark: bool
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows([("file", "label", "patient"), *rows])
    found = read(tmp_path, text.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    assert [(line.key, line.label, line.patient) for line in found] == rows
