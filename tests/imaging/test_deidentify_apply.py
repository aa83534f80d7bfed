from __future__ import annotations

import io
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import dcmread
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    BasicTextSRStorage,
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    EncapsulatedPDFStorage,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)
from tests.imaging.planted import ID, MARKS, UID_ROOT, marks_in, picture, plant_everywhere, save, small
from tests.imaging.test_deidentify_rules import MAY_STAY

from crossward.imaging.deidentify.apply import Deidentifier, check_kind, clear_hidden_bits, quiet
from crossward.imaging.deidentify.rules import Options
from crossward.imaging.refusals import Reason, Refused

SECRET = bytes(range(32))


def applied(dataset: FileDataset, **options: bool) -> FileDataset:
    Deidentifier(SECRET, Options(**options)).apply(dataset)
    return dataset


def written(dataset: FileDataset) -> bytes:
    stream = io.BytesIO()
    with quiet():
        dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_identifiers_in_every_attribute_are_gone(tmp_path: Path, syntax: str) -> None:
    dataset = small()
    with quiet():
        assert plant_everywhere(dataset, without=MAY_STAY) > 900
        dataset.file_meta.TransferSyntaxUID = syntax
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID
        path = save(dataset, tmp_path / "in.dcm")
        assert set(marks_in(path.read_bytes())) == set(MARKS)
        content = written(applied(dcmread(path)))
    assert marks_in(content) == []


def test_pixels_and_what_explains_them_are_unchanged() -> None:
    before = small(RescaleSlope="2.5", PixelSpacing=[0.5, 0.25], WindowCenter="40", KVP="120", ViewPosition="PA")
    pixels = before.PixelData
    after = dcmread(io.BytesIO(written(applied(before))))
    assert after.PixelData == pixels
    np.testing.assert_array_equal(after.pixel_array, picture())
    assert (after.RescaleSlope, after.PixelSpacing, after.WindowCenter) == (2.5, [0.5, 0.25], 40)
    assert (after.Manufacturer, after.ManufacturerModelName, after.ViewPosition) == ("Maker", "Model 1", "PA")


def test_what_was_done_is_written_into_the_file() -> None:
    dataset = applied(small(), device=True)
    codes = [item.CodeValue for item in dataset.DeidentificationMethodCodeSequence]
    assert codes == ["113100", "113107", "113111", "113109"]
    assert {item.CodingSchemeDesignator for item in dataset.DeidentificationMethodCodeSequence} == {"DCM"}
    assert dataset.PatientIdentityRemoved == "YES"
    assert dataset.LongitudinalTemporalInformationModified == "MODIFIED"
    assert dataset.PatientBirthDate == dataset.PatientSex == ""


def test_the_same_patient_and_uid_are_the_same_in_every_file_and_others_differ() -> None:
    one, two = applied(small(1)), applied(small(2))
    other = applied(small(3, patient="PLANTED-ID-78"))
    assert one.PatientID == two.PatientID != other.PatientID
    assert one.StudyInstanceUID == two.StudyInstanceUID == other.StudyInstanceUID
    assert one.SOPInstanceUID != two.SOPInstanceUID
    assert one.file_meta.MediaStorageSOPInstanceUID == one.SOPInstanceUID
    strange = small(1)
    Deidentifier(bytes(32), Options()).apply(strange)
    assert strange.PatientID != one.PatientID
    assert strange.SOPInstanceUID != one.SOPInstanceUID
    assert applied(small(1, patient=f" {ID} ")).PatientID == one.PatientID


def test_references_follow_the_files_that_they_name() -> None:
    item = Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = CTImageStorage, f"{UID_ROOT}.3.7"
    dataset = applied(small(1, SourceImageSequence=Sequence([item])))
    reference = dataset.SourceImageSequence[0]
    assert reference.ReferencedSOPInstanceUID == applied(small(7)).SOPInstanceUID
    assert reference.ReferencedSOPClassUID == CTImageStorage


def test_uids_are_valid_and_only_real_names_of_the_standard_stay() -> None:
    dataset = applied(small(FrameOfReferenceUID="1.2.840.10008.999.20200115"))
    assert dataset.FrameOfReferenceUID.is_valid
    assert dataset.FrameOfReferenceUID.startswith("2.25.")
    assert len(dataset.FrameOfReferenceUID) <= 64


def test_a_file_without_a_patient_id_belongs_to_its_study() -> None:
    one, two = applied(small(1, patient="")), applied(small(2, patient=" "))
    assert one.PatientID == two.PatientID
    assert one.PatientID != applied(small(3, patient="", StudyInstanceUID=f"{UID_ROOT}.9")).PatientID


days = st.dates(date(1920, 1, 1), date(2100, 12, 31))


@settings(max_examples=60)
@given(days, days, st.text("ABC123", min_size=1, max_size=6))
def test_dates_of_a_patient_move_together_into_the_past(first: date, second: date, patient: str) -> None:
    moment = f"{second:%Y%m%d}235959.25+0100"
    with quiet():
        dataset = applied(small(patient=patient, StudyDate=f"{first:%Y%m%d}", SeriesDate=f"{second:%Y.%m.%d}",
                            AcquisitionDateTime=moment))  # fmt: skip
    study, series = (date(int(t[:4]), int(t[4:6]), int(t[6:])) for t in (dataset.StudyDate, dataset.SeriesDate))
    assert series - study == second - first
    assert timedelta(days=30) <= first - study < timedelta(days=3680)
    assert dataset.AcquisitionDateTime == f"{dataset.SeriesDate}235959.25+0100"
    assert dataset.StudyTime == "101112"


def test_patients_have_different_shifts() -> None:
    shifted = {applied(small(patient=f"P{number}")).StudyDate for number in range(40)}
    assert len(shifted) > 35


@pytest.mark.parametrize(
    "value", ["2020", "202001", "00000000", "20201399", "PLANTED", "00010105", "20200115-20200116"]
)
def test_a_date_that_cannot_be_moved_is_emptied(value: str) -> None:
    with quiet():
        assert applied(small(StudyDate=value, AcquisitionDateTime=value)).StudyDate == ""


def test_text_in_disguise_is_removed(tmp_path: Path) -> None:
    with quiet():
        dataset = small(BodyPartExamined="Planted^Person", StudyTime="PLANTED", Manufacturer="A\0PLANTED")
        dataset.add_new(0x00180060, "LO", "PLANTED")  # KVP is a number
        dataset.add_new(0x00180050, "DS", "1")
        content = save(dataset, tmp_path / "x.dcm").read_bytes()
        assert content.count(b"DS\x02\x001 ") == 1
        path = tmp_path / "y.dcm"
        path.write_bytes(content.replace(b"DS\x02\x001 ", b"DS\x02\x00PL"))
        after = applied(dcmread(path))
    for name in ("BodyPartExamined", "KVP", "SliceThickness", "StudyTime", "Manufacturer"):
        assert name not in after


def test_private_attributes_go_unless_they_are_safe() -> None:
    dataset = small()
    siemens = dataset.private_block(0x0019, "SIEMENS MR HEADER", create=True)
    siemens.add_new(0x0C, "IS", "1000")
    siemens.add_new(0x0E, "FD", [1.0, 0.0, 0.0])
    siemens.add_new(0x0F, "LO", "PLANTED")
    siemens.add_new(0x27, "LO", "PLANTED")  # the right place and another kind
    other = dataset.private_block(0x0021, "PLANTED MAKER", create=True)
    other.add_new(0x0C, "IS", "1000")
    after = dcmread(io.BytesIO(written(applied(dataset))))
    block = after.private_block(0x0019, "SIEMENS MR HEADER")
    assert (block[0x0C].value, block[0x0E].value) == (1000, [1.0, 0.0, 0.0])
    assert sum(element.tag.is_private for element in after) == 3


def test_overlays_and_curves_go() -> None:
    dataset = small()
    dataset.add_new(0x60003000, "OW", b"PLANTED!")
    dataset.add_new(0x60020022, "LO", "PLANTED")
    dataset.add_new(0x50003000, "OW", b"PLANTED!")
    assert not [element for element in applied(dataset) if element.tag.group >> 8 in (0x50, 0x60)]


def coded(scheme: str, meaning: str = "Chest") -> Dataset:
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = "51185008", scheme, meaning
    return item


def test_codes_of_public_schemes_stay_and_local_ones_go() -> None:
    dataset = applied(small(AnatomicRegionSequence=Sequence([coded("SCT"), coded("99PLANTED", "PLANTED")]),
                            ViewCodeSequence=Sequence([coded("L")])))  # fmt: skip
    assert [item.CodingSchemeDesignator for item in dataset.AnatomicRegionSequence] == ["SCT"]
    assert "ViewCodeSequence" not in dataset


def test_frames_keep_their_items() -> None:
    frames = [Dataset() for _ in range(3)]
    frames[1].FrameContentSequence = Sequence([Dataset()])
    frames[1].FrameContentSequence[0].FrameAcquisitionNumber = 5
    frames[0].FrameContentSequence = Sequence([Dataset()])
    frames[0].FrameContentSequence[0].FrameComments = "PLANTED"
    dataset = applied(small(PerFrameFunctionalGroupsSequence=Sequence(frames)))
    items = dataset.PerFrameFunctionalGroupsSequence
    assert [len(item) for item in items] == [0, 1, 0]
    assert items[1].FrameContentSequence[0].FrameAcquisitionNumber == 5


@pytest.mark.parametrize(("age", "kept"), [("045Y", "045Y"), ("089Y", "089Y"), ("090Y", "090Y"), ("103Y", "090Y"),
                                           ("100M", "100M"), ("PLANTED", None)])  # fmt: skip
def test_age_is_capped(age: str, kept: str | None) -> None:
    with quiet():
        dataset = applied(small(PatientAge=age, PatientSex="F", PatientWeight="70"), patient=True)
        assert dataset.get("PatientAge") == kept
        assert (dataset.PatientSex, dataset.PatientWeight) == ("F", 70)
        assert "PatientAge" not in applied(small(PatientAge=age))


def test_of_a_description_only_known_words_stay() -> None:
    text = "T1 sag PLANTED^Person (brain), 19570302"
    assert applied(small(SeriesDescription=text), descriptors=True).SeriesDescription == "T1 SAG BRAIN"
    assert "SeriesDescription" not in applied(small(SeriesDescription=text))


def report() -> FileDataset:
    dataset = small(SOPClassUID=BasicTextSRStorage, Modality="SR")
    del dataset.PixelData
    text, code = Dataset(), Dataset()
    text.ValueType, text.TextValue = "TEXT", "PLANTED"
    code.ValueType, code.ConceptCodeSequence = "CODE", Sequence([coded("SCT")])
    dataset.ValueType, dataset.ContentSequence = "CONTAINER", Sequence([text, code])
    return dataset


def test_reports_are_refused_or_reduced_to_codes() -> None:
    with pytest.raises(Refused) as refused:
        check_kind(report(), Options())
    assert refused.value.reason is Reason.NOT_AN_IMAGE
    check_kind(report(), Options(structured=True))
    dataset = applied(report(), structured=True)
    (item,) = dataset.ContentSequence
    assert item.ConceptCodeSequence[0].CodeMeaning == "Chest"
    assert b"PLANTED" not in written(dataset)


@pytest.mark.parametrize(
    ("tags", "without", "reason"),
    [
        ({"SOPClassUID": EncapsulatedPDFStorage, "EncapsulatedDocument": b"PDF!"}, "PixelData", Reason.NOT_AN_IMAGE),
        ({"EncapsulatedDocument": b"PDF!"}, None, Reason.NOT_AN_IMAGE),
        ({"SOPClassUID": "1.3.12.2.1107.5.9.1"}, None, Reason.NOT_AN_IMAGE),
        ({}, "PixelData", Reason.NO_PIXELS),
        ({}, "StudyInstanceUID", Reason.DAMAGED),
        ({}, "SOPClassUID", Reason.DAMAGED),
    ],
)
def test_what_is_not_an_image_is_refused(tags: dict[str, object], without: str | None, reason: Reason) -> None:
    dataset = small(**tags)
    if without:
        delattr(dataset, without)
    with pytest.raises(Refused) as refused:
        check_kind(dataset, Options(structured=True))
    assert refused.value.reason is reason


def deep(values: np.ndarray, *, stored: int = 12, signed: int = 0, overlay: int | None = None) -> FileDataset:
    dataset = small(pixels=values, BitsStored=stored, HighBit=stored - 1, PixelRepresentation=signed)
    if overlay is not None:
        dataset.add_new(0x60000100, "US", 16)
        dataset.add_new(0x60000102, "US", overlay)
    return dataset


def test_an_overlay_in_unused_bits_is_cleared_and_anything_unexplained_there_is_refused() -> None:
    clean = picture().astype(np.uint16) * 16
    drawn = clean.copy()
    drawn[3, 2:9] |= 1 << 13
    with pytest.raises(Refused) as refused:
        clear_hidden_bits(deep(drawn))
    assert refused.value.reason is Reason.OUT_OF_RANGE
    dataset = deep(drawn, overlay=13)
    clear_hidden_bits(dataset)
    np.testing.assert_array_equal(np.frombuffer(dataset.PixelData, "<u2"), clean.ravel())


def test_a_sign_that_fills_the_unused_bits_is_no_secret() -> None:
    values = picture().astype(np.int16) - 100
    dataset = deep(values.view(np.uint16), signed=1)
    clear_hidden_bits(dataset)
    assert dataset.PixelData == values.tobytes()
    drawn = values.copy().view(np.uint16)
    drawn[0, 0] ^= 1 << 14
    dataset = deep(drawn, signed=1, overlay=14)
    clear_hidden_bits(dataset)
    assert dataset.PixelData == values.tobytes()


@pytest.mark.parametrize("change", [b"PLANTED!", None])
def test_pixel_data_that_is_longer_or_shorter_than_the_picture_is_refused(change: bytes | None) -> None:
    dataset = small()
    dataset.PixelData = dataset.PixelData + change if change else dataset.PixelData[:-2]
    with pytest.raises(Refused) as refused:
        clear_hidden_bits(dataset)
    assert refused.value.reason is Reason.LAYOUT


def test_a_deflated_file_is_written_so_that_it_can_be_searched(tmp_path: Path) -> None:
    dataset = small()
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    read = dcmread(save(dataset, tmp_path / "x.dcm"))
    content = written(applied(read))
    after = dcmread(io.BytesIO(content))
    assert after.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian
    assert after.PatientID.encode() in content
    np.testing.assert_array_equal(after.pixel_array, picture())


def test_counts_tell_what_happened_to_each_attribute() -> None:
    counts = Deidentifier(SECRET, Options()).apply(small(SeriesDescription="PLANTED"))
    assert counts["SeriesDescription", "removed"] == 1
    assert counts["PatientName", "replaced"] == 1
    assert counts["PatientBirthDate", "emptied"] == 1
    assert counts["StudyDate", "shifted"] == 1
    assert counts["Rows", "kept"] == 1
    assert counts["SOPClassUID", "kept"] == 1


def test_values_are_not_quoted_in_warnings_or_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                   recwarn: pytest.WarningsRecorder) -> None:  # fmt: skip
    with quiet():
        path = save(small(FrameOfReferenceUID="PLANTED", BodyPartExamined="planted thing", StudyDate="PLANTED"),
                    tmp_path / "x.dcm")  # fmt: skip
        caplog.set_level("DEBUG")
        written(applied(dcmread(path)))
    assert "planted" not in caplog.text.lower()
    assert not [warning for warning in recwarn if "planted" in str(warning.message).lower()]
