from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import dcmread
from pydicom.dataset import FileDataset
from tests.imaging.planted import ACCESSION, BIRTH, ID, NAME, PLACE, UID_ROOT, save, small

from crossward.imaging.deidentify.apply import Deidentifier
from crossward.imaging.deidentify.check import find, identifiers
from crossward.imaging.deidentify.rules import Options

SECRET = bytes(32)


def cleaned(dataset: FileDataset, path: Path, **leftovers: object) -> set[tuple[str, str]]:
    """De-identifies, puts something back as if it had been missed, and tells what the check finds."""
    wanted = identifiers(dataset, Options())
    Deidentifier(SECRET, Options()).apply(dataset)
    for name, value in leftovers.items():
        setattr(dataset, name, value)
    return {(hit.kind, hit.where) for hit in find(save(dataset, path), wanted)}


def test_a_clean_file_has_no_hits(tmp_path: Path) -> None:
    assert cleaned(small(), tmp_path / "x.dcm") == set()


@pytest.mark.parametrize(
    ("attribute", "value", "kind"),
    [
        ("Manufacturer", "made for Planted", "name"),
        ("Manufacturer", "PERSON, P.", "name"),
        ("SeriesDescription", NAME.lower(), "name"),
        ("SoftwareVersions", f"v2 ({ID.title()})", "id"),
        ("StudyDescription", ACCESSION, "accession number"),
        ("StationName", PLACE.lower(), "institution"),
        ("AcquisitionDate", BIRTH, "birth date"),
        ("AcquisitionDateTime", f"{BIRTH}101500", "birth date"),
        ("SeriesDate", "20200115", "date"),
        ("FrameOfReferenceUID", f"{UID_ROOT}.1", "UID"),
        ("ImageComments", f"see {UID_ROOT}.2 there", "UID"),
    ],
)
def test_what_was_missed_is_found_with_its_kind_and_place(
    tmp_path: Path, attribute: str, value: str, kind: str
) -> None:
    assert (kind, attribute) in cleaned(small(), tmp_path / "x.dcm", **{attribute: value})


@pytest.mark.parametrize("value", ["UNPLANTED", "PLANTEDLY", "x1PLANTED9", "PERSONAL"])
def test_a_part_of_a_longer_word_is_no_hit(tmp_path: Path, value: str) -> None:
    assert cleaned(small(), tmp_path / "x.dcm", Manufacturer=value) == set()


def test_a_longer_uid_or_number_is_no_hit(tmp_path: Path) -> None:
    dataset = small(patient="123456")
    assert cleaned(dataset, tmp_path / "x.dcm", FrameOfReferenceUID=f"{UID_ROOT}.10", Manufacturer="v123456.7") == set()
    assert cleaned(small(patient="123456"), tmp_path / "y.dcm", Manufacturer="v 123456 7") == {("id", "Manufacturer")}


def test_other_codes_are_searched(tmp_path: Path) -> None:
    wide = cleaned(small(), tmp_path / "x.dcm", PixelPaddingValue=0, LUTLabel="-")
    assert wide == set()
    dataset = small()
    wanted = identifiers(dataset, Options())
    Deidentifier(SECRET, Options()).apply(dataset)
    dataset.add_new(0x00283006, "OW", "PLANTED".encode("utf-16-le"))
    (hit,) = find(save(dataset, tmp_path / "y.dcm"), wanted)
    assert hit == ("name", "bytes outside any value")


def test_a_korean_name_is_found_in_its_own_character_set(tmp_path: Path) -> None:
    name = "\uae40^\ud76c\uc911"
    dataset = small(SpecificCharacterSet=["", "ISO 2022 IR 149"], PatientName=name)
    path = save(dataset, tmp_path / "in.dcm")
    read = dcmread(path)
    hits = cleaned(read, tmp_path / "out.dcm", ManufacturerModelName="\ud76c\uc911")
    assert ("name", "ManufacturerModelName") in hits


def test_long_identifiers_are_found_in_pixel_data(tmp_path: Path) -> None:
    dataset = small()
    hidden = bytearray(dataset.PixelData)
    hidden[40 : 40 + len(ID)] = ID.encode()
    dataset.PixelData = bytes(hidden)
    assert ("id", "pixel data") in cleaned(dataset, tmp_path / "x.dcm")


def test_what_is_too_short_is_counted_and_not_searched_for(tmp_path: Path) -> None:
    dataset = small(patient="A1", PatientName="Li^X")
    wanted = identifiers(dataset, Options())
    assert not {text for _, text in wanted.words} & {"A1", "Li", "X"}
    assert wanted.too_short >= 1
    assert cleaned(small(patient="A1"), tmp_path / "x.dcm", Manufacturer="A1") == set()


def test_what_deidentification_itself_writes_is_no_hit(tmp_path: Path) -> None:
    dataset = small(patient="CROSSWARD", PatientName="Confidentiality^Profile", InstitutionName="DICOM PS3")
    assert cleaned(dataset, tmp_path / "x.dcm") == set()


def test_a_device_number_that_is_kept_on_purpose_is_not_searched_for() -> None:
    dataset = small(DeviceSerialNumber="SERIAL-55", DeviceUID=f"{UID_ROOT}.55")
    for device in (False, True):
        wanted = identifiers(dataset, Options(device=device))
        assert (("id", "SERIAL-55") in wanted.words) is not device
        assert (f"{UID_ROOT}.55" in wanted.uids) is not device


@settings(max_examples=30)
@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", min_size=4, max_size=20), st.booleans())
def test_any_part_of_a_name_is_found(tmp_path_factory: pytest.TempPathFactory, part: str, upper: bool) -> None:
    dataset = small(PatientName=f"{part}^Q")
    shown = part.upper() if upper else part.lower()
    hits = cleaned(dataset, tmp_path_factory.mktemp("any") / "x.dcm", StudyComments=f"x {shown}")
    assert "name" in {kind for kind, _ in hits}
