from __future__ import annotations

import pytest

from crossward.imaging.dicom.scans import Header
from crossward.imaging.labels.patients import clashing, names_someone, patient_ids


def test_an_id_is_a_patient_and_a_file_without_one_is_nobodys() -> None:
    headers = {"a": Header(patient_id=" 7 "), "b": Header(patient_id="7"), "c": Header(patient_id="  ")}
    assert patient_ids(headers) == {"a": "7", "b": "7"}


def test_issuers_tell_two_people_apart_only_where_every_file_names_one() -> None:
    headers = {"a": Header(patient_id="7", issuer="N"), "b": Header(patient_id="7", issuer="S")}
    ids = patient_ids(headers)
    assert ids["a"] != ids["b"]
    assert set(patient_ids({**headers, "c": Header(patient_id="7")}).values()) == {"7"}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"birth_date": "19700101"}, {"birth_date": "19700102"}, True),
        ({"birth_date": "19700101"}, {"birth_date": ""}, False),
        ({"sex": "M"}, {"sex": "F"}, True),
        ({"sex": "M"}, {"sex": "O"}, False),
        ({"patient_name": "PLANTED^NAME"}, {"patient_name": "OTHER^PERSON"}, True),
        ({"patient_name": "PLANTED^NAME"}, {"patient_name": "name planted"}, False),
        ({"patient_name": "PLANTED^NAME"}, {"patient_name": "Plánted"}, False),
        ({"patient_name": "PLANTED^NAME"}, {"patient_name": ""}, False),
        (
            {"patient_name": "PLANTED^NAME", "birth_date": "19700101"},
            {"patient_name": "OTHER^PERSON", "birth_date": "19700101"},
            False,
        ),
        (
            {"patient_name": "PLANTED^NAME", "birth_date": "19700101"},
            {"patient_name": "OTHER^PERSON", "birth_date": ""},
            True,
        ),
    ],
)
def test_who_is_somebody_else(one: dict[str, str], other: dict[str, str], expected: bool) -> None:
    headers = [Header(patient_id="7", **one), Header(patient_id="7", **other)]
    assert clashing(headers) is expected
    assert clashing(headers[::-1]) is expected


def test_nobody_and_one_person_do_not_clash() -> None:
    assert not clashing([])
    assert not clashing([Header(patient_name="PLANTED^NAME")] * 3)


def test_texts_about_the_patient() -> None:
    header = Header(patient_id="ID-4711", patient_name="PLANTED^NAME", accession="ACC99")
    assert names_someone("scan of planted", header)
    assert names_someone("for id-4711.", header)
    assert names_someone("ANY^BODY", header)
    assert not names_someone("Maker 4711", header)
    assert not names_someone("", header)
