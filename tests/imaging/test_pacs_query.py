from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.imaging.pacs.query import FoundStudy, Query, Question, read_day, read_list


def test_questions_ask_for_every_listed_value_and_modality() -> None:
    query = Query(
        since=date(2024, 1, 2),
        modalities=("CT", "MR"),
        studies={"1.2": 3},
        accessions={"A7": 9},
    )
    dates = {"StudyDate": "20240102-"}
    assert list(query.questions()) == [
        Question({"StudyInstanceUID": "1.2", **dates, "ModalitiesInStudy": "CT"}, "studies", 3),
        Question({"StudyInstanceUID": "1.2", **dates, "ModalitiesInStudy": "MR"}, "studies", 3),
        Question({"AccessionNumber": "A7", **dates, "ModalitiesInStudy": "CT"}, "accessions", 9),
        Question({"AccessionNumber": "A7", **dates, "ModalitiesInStudy": "MR"}, "accessions", 9),
    ]
    assert [question.keys for question in Query(until=date(2024, 12, 31)).questions()] == [{"StudyDate": "-20241231"}]


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        (FoundStudy("1.2", "20240301", ("CT", "SR"), "A1"), True),
        (FoundStudy("1.2", "2024.03.01", ("CT",), "A1"), True),
        (FoundStudy("1.2", "", (), "A1"), True),
        (FoundStudy("1.2", "sometime", (), "A1"), True),
        (FoundStudy("1.2", "20240229", ("CT",), "A1"), False),
        (FoundStudy("1.2", "20240401", ("CT",), "A1"), False),
        (FoundStudy("1.2", "20240301", ("MR",), "A1"), False),
        (FoundStudy("1.2", "20240301", ("CT",), "a1"), False),
        (FoundStudy("1.2", "20240301", ("CT",), ""), False),
    ],
)
def test_answers_are_held_against_the_question(found: FoundStudy, fits: bool) -> None:
    query = Query(since=date(2024, 3, 1), until=date(2024, 3, 31), modalities=("CT",), accessions={"A1": 1})
    (question,) = query.questions()
    assert query.fits(question, found) is fits


def test_another_uid_than_the_listed_one_does_not_fit() -> None:
    query = Query(studies={"1.2": 1})
    (question,) = query.questions()
    assert query.fits(question, FoundStudy("1.2"))
    assert not query.fits(question, FoundStudy("1.2.3"))


def test_questions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadInput, match="no study is asked for"):
        Query()
    with pytest.raises(BadInput, match="is after --until"):
        Query(since=date(2024, 2, 1), until=date(2024, 1, 1))
    for modality in ("ct", "C*", "CT\\MR", ""):
        with pytest.raises(BadInput, match="--modality"):
            Query(modalities=(modality,))


def test_days() -> None:
    assert read_day(None, "--since") is None
    assert read_day("2024-02-29", "--since") == date(2024, 2, 29)
    with pytest.raises(BadInput, match="--since 2023-02-29 is not a day"):
        read_day("2023-02-29", "--since")


def test_a_list_keeps_the_first_line_of_each_value(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbf1.2.3\r\n\r\n# a note\r\n 1.2.4 \r\n1.2.3\r\n")
    assert read_list(tmp_path / "list") == {"1.2.3": 1, "1.2.4": 4}


@given(value=st.text(st.sampled_from("ab12.-_"), min_size=1, max_size=20), odd=st.sampled_from("*?\\ \t/"))
def test_a_wildcard_never_gets_through(tmp_path_factory: pytest.TempPathFactory, value: str, odd: str) -> None:
    file = tmp_path_factory.getbasetemp() / "one-list"
    file.write_text(f"# x\n{value}{odd}{value}\n")
    with pytest.raises(BadInput) as caught:
        read_list(file)
    assert str(caught.value) == f"{file}: line 2 is not one UID or accession number; write one value a line"


def test_lists_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long").write_text("1" * 65)
    for name, line in {
        "none": "cannot be read",
        "binary": "cannot",
        "empty": "lists nothing",
        "long": "line 1",
    }.items():
        with pytest.raises(BadInput, match=line):
            read_list(tmp_path / name)
