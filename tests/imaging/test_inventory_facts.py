"""What an inventory comes to: counts by hand, and nothing that names anybody."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossward.imaging.dicom.scans import Header
from crossward.imaging.inventory.facts import (
    NO_CODE,
    NOT_SAID,
    NOT_STANDARD,
    WITHHELD,
    Repeats,
    facts,
    images_by_scanner,
)
from crossward.imaging.inventory.scan import Found, Inventory
from crossward.imaging.inventory.words import cautions, counts_in_words, overview, range_in_words, scanner_rows
from crossward.imaging.refusals import Reason

ELE, JPEG = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.4.50"
CT, SR = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.88.11"
IMAGE = Header(
    patient_id="P-1",
    study_uid="1.1",
    series_uid="1.1.1",
    sop_uid="1.1.1.1",
    sop_class=CT,
    modality="CT",
    manufacturer="ACME",
    model="One",
    transfer_syntax=ELE,
    photometric="MONOCHROME2",
    bits_stored=12,
    bits_allocated=16,
    signed=False,
    rows=512,
    columns=256,
    has_pixels=True,
)


def inventory(*headers: Header, digests: tuple[str | None, ...] = ()) -> Inventory:
    return Inventory(
        tuple(
            Found(path=f"{number:03}", size=10, header=header, digest=digests[number] if digests else None)
            for number, header in enumerate(headers)
        )
    )


def test_counts_by_hand() -> None:
    other = replace(
        IMAGE,
        patient_id="P-2",
        study_uid="2.1",
        series_uid="2.1.1",
        sop_uid="2.1.1.1",
        manufacturer="Other",
        model="",
        serial="77",
        modality="MR",
        field_strength=1.5,
        transfer_syntax=JPEG,
        photometric="MONOCHROME1",
        signed=None,
        frames=5,
        view="AP",
        burned_in="YES",
    )
    files = (
        Found(path="1", size=100, header=replace(IMAGE, kvp=80.0, spacing=(0.5, 0.7), station="A", kernel="B30")),
        Found(path="2", size=100, header=replace(IMAGE, kvp=120.0, sop_uid="1.1.1.2", station="B", software="v1\\v2")),
        Found(path="3", size=100, header=replace(IMAGE, manufacturer="Acme  ", series_uid="1.1.2", sop_uid="1.1.1.3")),
        Found(path="4", size=100, header=other),
        Found(path="5", size=50, header=Header(sop_class=SR, modality="SR", transfer_syntax="1.9", study_uid="2.1")),
        Found(path="6", size=7, reason=Reason.NOT_DICOM),
        Found(path="7", size=7, reason=Reason.NOT_DICOM, detail="an archive"),
        Found(path="8", reason=Reason.UNREADABLE, detail="a pipe"),
    )
    found = facts(Inventory(files))
    assert (found.files, found.bytes, found.read, found.images) == (8, 464, 5, 4)
    assert (found.patients, found.studies, found.series, found.without_patient) == (2, 2, 3, 1)
    assert list(found.modalities.items()) == [("CT", 3), ("MR", 1), ("SR", 1)]
    assert found.objects == {"CT Image Storage": 4, "Basic Text SR Storage": 1}
    assert found.syntaxes == {"Explicit VR Little Endian": 3, "JPEG Baseline (Process 1)": 1, NOT_STANDARD: 1}
    assert found.photometrics == {"MONOCHROME2": 3, "MONOCHROME1": 1}
    assert found.bits == {"12 of 16 unsigned": 3, "12 of 16": 1}
    assert found.frames == {"one frame": 3, "several frames": 1}
    assert found.views == {NOT_SAID: 3, "AP": 1}
    assert found.burned_in == {NOT_SAID: 3, "YES": 1}
    assert found.refused == {Reason.NOT_DICOM.value: 2, Reason.UNREADABLE.value: 1}
    assert found.refused_details[f"{Reason.NOT_DICOM.value} (an archive)"] == 1

    acme, second = found.scanners
    assert (acme.name, acme.images, acme.patients, acme.studies, acme.series) == ("ACME One", 3, 1, 1, 2)
    assert (acme.devices, acme.stations) == (2, 2)
    assert (acme.kvp, acme.field_strength, acme.spacing) == ((80.0, 120.0), None, (0.5, 0.7))
    assert (acme.software, acme.kernels) == ({"v1 v2": 1}, {"B30": 1})
    assert acme.sizes == {"512 x 256": 3}
    assert (second.name, second.images, second.devices, second.field_strength) == ("Other", 1, 1, (1.5, 1.5))


@pytest.mark.parametrize(
    ("uids", "digests", "expected"),
    [
        (["1", "2", "3"], [None, None, None], Repeats(copies=0, contradictions=0, twins=None)),
        (["1", "1", "1"], ["a", "a", "a"], Repeats(copies=2, contradictions=0, twins=0)),
        (["1", "1", "2"], ["a", "b", None], Repeats(copies=0, contradictions=1, twins=None)),
        (["1", "1", "1"], ["a", "b", "a"], Repeats(copies=1, contradictions=1, twins=0)),
        (["1", "2", "3"], ["a", "a", "b"], Repeats(copies=0, contradictions=0, twins=1)),
        # Inside deflated data the pixels cannot be compared: a copy by its UID, and no more is claimed.
        (["1", "1", "2"], ["", "", "b"], Repeats(copies=1, contradictions=0, twins=None)),
        (["1", "1", "2"], ["", "a", "b"], Repeats(copies=1, contradictions=0, twins=None)),
        # Without a UID nothing says that they are one.
        (["", "", ""], ["a", "a", "b"], Repeats(copies=0, contradictions=0, twins=1)),
    ],
)
def test_copies_contradictions_and_twins(uids: list[str], digests: list[str | None], expected: Repeats) -> None:
    headers = [replace(IMAGE, sop_uid=uid) for uid in uids]
    assert facts(inventory(*headers, digests=tuple(digests))).repeats == expected


def test_two_people_under_one_id_are_counted() -> None:
    one = replace(IMAGE, patient_name="PLANTED^ONE", birth_date="19500101", sex="F")
    other = replace(IMAGE, patient_name="OTHER^TWO", birth_date="19700101", sex="M", sop_uid="9")
    third = replace(IMAGE, patient_id="P-3", patient_name="PLANTED^THREE", sop_uid="10")
    found = facts(inventory(one, one, other, third))
    assert (found.patients, found.clashes, found.clash_files) == (2, 1, 3)
    assert any(caution.startswith("patient ids") and caution.endswith(": 1") for caution in cautions(found))
    assert facts(inventory(one, one, third)).clashes == 0


IDENTIFIED = replace(
    IMAGE,
    patient_id="PLANTED-4711",
    patient_name="PLANTEDNAME^GIVENNAME",
    birth_date="19510203",
    accession="ACC-PLANTED",
    institution="PLANTED HOSPITAL",
    study_uid="1.2.3.4.5.6",
)


@pytest.mark.parametrize("field", ["manufacturer", "model", "software", "kernel", "modality", "photometric", "view"])
@pytest.mark.parametrize(
    "text", ["of plantedname", "PLANTED-4711", "x 19510203", "ACC-PLANTED", "PLANTED HOSPITAL CT", "SOME^ONE"]
)
def test_a_text_that_repeats_an_identifier_is_withheld(field: str, text: str) -> None:
    found = facts(inventory(replace(IDENTIFIED, **{field: text})))
    told = json.dumps(found.as_json()) + repr([overview(found), cautions(found), *map(scanner_rows, found.scanners)])
    assert text not in told
    assert WITHHELD in told


def test_a_patient_who_bears_a_makers_name_does_not_hide_the_maker() -> None:
    bearer = replace(IMAGE, patient_id="P-9", patient_name="ACME^PLANTED")
    assert list(images_by_scanner(inventory(bearer))) == [f"{WITHHELD} One"]
    assert list(images_by_scanner(inventory(bearer, IMAGE))) == ["ACME One"]


def test_a_code_that_is_none_is_not_shown() -> None:
    found = facts(inventory(replace(IMAGE, view="a long remark, as people write")))
    assert found.views == {NO_CODE: 1}


@pytest.mark.parametrize(
    "field", [*[field.name for field in fields(Header) if field.type == "str"][:10], "station", "serial"]
)
def test_nothing_of_the_first_group_and_no_machine_is_shown(field: str) -> None:
    found = facts(inventory(replace(IMAGE, **{field: "PLANTEDVALUE"})))
    assert "PLANTEDVALUE" not in json.dumps(found.as_json())


TEXTS = st.sampled_from(["", "A", "b", "CT", "X^Y", "1.2"]) | st.text(max_size=6)
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.none() | st.integers(0, 70000)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXTS,
    "float | None": NUMBERS,
    "int | None": WHOLE,
    "int": st.integers(1, 9),
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "tuple[float, float] | None": st.none() | st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
}
HEADERS = st.builds(
    Header, **{field.name: BY_TYPE[str(field.type)] for field in fields(Header) if str(field.type) in BY_TYPE}
)


@settings(max_examples=60)
@given(headers=st.lists(HEADERS, max_size=8), refused=st.lists(st.sampled_from(Reason), max_size=4))
def test_counts_add_up_whatever_headers_say(headers: list[Header], refused: list[Reason]) -> None:
    rows = [Found(path=f"x{number}", reason=reason) for number, reason in enumerate(refused)]
    found = facts(Inventory((*inventory(*headers).files, *rows)))
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["files"] == len(headers) + len(refused)
    images = sum(header.has_pixels for header in headers)
    assert found.images == images == sum(scanner.images for scanner in found.scanners)
    assert all(sum(counts.values()) == images for counts in (found.photometrics, found.bits, found.frames, found.views))
    assert all(sum(counts.values()) == len(headers) for counts in (found.modalities, found.objects, found.syntaxes))
    assert sum(found.refused.values()) == len(refused)
    assert found.patients <= len({header.patient_id.strip() for header in headers} - {""}) * 8


def test_words() -> None:
    assert counts_in_words({}) == ""
    assert counts_in_words({"CT": 1200, "MR": 1}) == "CT (1,200), MR (1)"
    assert counts_in_words({str(number): 9 for number in range(8)}).endswith("5 (9), 2 more")
    assert range_in_words(None, "mm") == ""
    assert range_in_words((0.5, 0.5), "mm") == "0.5 mm"
    assert range_in_words((0.5, 0.7), "mm") == "0.5 to 0.7 mm"
