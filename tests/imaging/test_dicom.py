from __future__ import annotations

import logging
import os
import stat
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread, uid
from tests.imaging.dicom_files import item, write_scan

from crossward.imaging.dicom.files import read_header, read_scan
from crossward.imaging.dicom.pixels import Limits
from crossward.imaging.refusals import Reason, Refused

RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4)
PREAMBLE = 132


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "scan.dcm"


def refusal(path: Path, **options: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        read_scan(path, **options)
    return refused.value


def without_group_2(path: Path) -> bytes:
    """The data set alone: what some devices write instead of a file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[PREAMBLE + 8 : PREAMBLE + 12])
    return content[PREAMBLE + 12 + length :]


def test_a_header_as_plain_values(file: Path) -> None:
    write_scan(
        file,
        RAMP,
        PatientID="PLANTED-1",
        PatientBirthDate="19000101",
        PatientSex="O",
        AccessionNumber="PLANTED-2",
        Modality="CT",
        Manufacturer="Maker",
        ManufacturerModelName="Model 1",
        SoftwareVersions=["1.0", "2.0"],
        ConvolutionKernel="B30f",
        KVP="120",
        SliceThickness="2.5",
        PixelSpacing=[0.5, 0.75],
        ImageType=["ORIGINAL", "PRIMARY"],
        InstanceNumber="7",
        ImagePositionPatient=[1, 2, 3],
        ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
        ViewPosition="PA",
        BurnedInAnnotation="NO",
        ImageLaterality="L",
    )
    header = read_header(file)
    assert (header.patient_name, header.patient_id, header.birth_date) == ("PLANTED^NAME", "PLANTED-1", "19000101")
    assert (header.modality, header.manufacturer, header.model, header.software) == (
        "CT",
        "Maker",
        "Model 1",
        "1.0\\2.0",
    )
    assert (header.kernel, header.kvp, header.slice_thickness, header.field_strength) == ("B30f", 120.0, 2.5, None)
    assert (header.spacing, header.position, header.orientation) == ((0.5, 0.75), (1, 2, 3), (1, 0, 0, 0, 1, 0))
    assert (header.rows, header.columns, header.frames, header.bits_stored, header.signed) == (3, 4, 1, 8, False)
    assert (header.image_type, header.instance_number, header.laterality) == ("ORIGINAL\\PRIMARY", 7, "L")
    assert (header.transfer_syntax, header.has_pixels) == (uid.ExplicitVRLittleEndian, True)


def test_shared_functional_groups_speak_for_an_enhanced_file(file: Path) -> None:
    groups = item(
        PixelMeasuresSequence=item(PixelSpacing=[0.5, 0.75], SliceThickness=3),
        CTXRayDetailsSequence=item(KVP=100),
        CTReconstructionSequence=item(ConvolutionKernel="B70"),
        PlaneOrientationSequence=item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
    )
    write_scan(file, np.zeros((2, 3, 4), np.uint8), NumberOfFrames=2, SharedFunctionalGroupsSequence=groups)
    header = read_header(file)
    assert (header.spacing, header.slice_thickness, header.kvp, header.kernel) == ((0.5, 0.75), 3.0, 100.0, "B70")
    assert (header.frames, header.orientation) == (2, (1, 0, 0, 0, 1, 0))


@pytest.mark.parametrize(
    ("charset", "name"), [("ISO_IR 192", "PLANTED^Ünï"), ("ISO_IR 100", "PLANTED^Müller"), ("GB18030", "PLANTED^王")]
)
def test_names_are_decoded_by_their_character_set(charset: str, name: str, file: Path) -> None:
    assert read_header(write_scan(file, RAMP, SpecificCharacterSet=charset, PatientName=name)).patient_name == name


def test_numbers_that_are_none_are_not_there(file: Path) -> None:
    write_scan(file, RAMP, KVP="120", PixelSpacing=[0.5, 0.5], InstanceNumber="15")
    content = file.read_bytes()
    for old, new in ((b"DS\4\x00120 ", b"DS\4\x0012O "), (b"0.5\\0.5 ", b"0.5;0.5 "), (b"IS\2\x0015", b"IS\2\x001.")):
        assert content.count(old) == 1
        content = content.replace(old, new)
    file.write_bytes(content)
    header = read_header(file)
    assert (header.kvp, header.spacing, header.instance_number) == (None, None, 1)


def test_a_header_beyond_the_first_bytes_is_found(file: Path) -> None:
    write_scan(file, RAMP)
    dataset = dcmread(file)
    dataset.add_new(0x00090010, "LO", "PLANTED")
    dataset.add_new(0x00091001, "OB", bytes(300_000))
    dataset.save_as(file)
    assert read_header(file).rows == 3
    np.testing.assert_array_equal(read_scan(file).frames[0].values, RAMP)


def test_the_preamble_may_be_missing_where_the_rest_is_clearly_dicom(file: Path) -> None:
    write_scan(file, RAMP)
    bare = without_group_2(file)
    with_group_2 = file.read_bytes()[PREAMBLE:]
    for content in (bare, with_group_2):
        file.write_bytes(content)
        np.testing.assert_array_equal(read_scan(file).frames[0].values, RAMP)
    write_scan(file, RAMP, syntax=uid.ImplicitVRLittleEndian)
    file.write_bytes(without_group_2(file))
    np.testing.assert_array_equal(read_scan(file).frames[0].values, RAMP)
    file.write_bytes(bare.replace(b"1.2.840.10008.5.1.4.1.1.2", b"9.9.999.99999.9.9.9.9.9.9"))
    assert refusal(file).reason is Reason.NOT_DICOM


def test_a_compressed_file_that_does_not_say_how_is_refused(file: Path) -> None:
    write_scan(file, RAMP, syntax=uid.JPEGBaseline8Bit, compressed=[b"\xff\xd8\xff\xd9"])
    file.write_bytes(without_group_2(file))
    assert refusal(file).reason is Reason.COMPRESSION


def test_a_file_may_be_implicit_against_its_transfer_syntax(file: Path) -> None:
    write_scan(file, RAMP, syntax=uid.ImplicitVRLittleEndian)
    implicit, explicit = b"\x12\x001.2.840.10008.1.2\0", b"\x14\x001.2.840.10008.1.2.1\0"
    content = file.read_bytes().replace(implicit, explicit)
    (length,) = struct.unpack("<I", content[PREAMBLE + 8 : PREAMBLE + 12])
    file.write_bytes(content[: PREAMBLE + 8] + struct.pack("<I", length + 2) + content[PREAMBLE + 12 :])
    np.testing.assert_array_equal(read_scan(file).frames[0].values, RAMP)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", Reason.NOT_DICOM),
        (b"plain text, and rather a lot of it" * 20, Reason.NOT_DICOM),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), Reason.NOT_DICOM),
        (bytes(500), Reason.NOT_DICOM),
        (bytes(128) + b"DICM", Reason.DAMAGED),
        (bytes(128) + b"DICM" + b"\2\0\0\0UL\4\0", Reason.DAMAGED),
        (bytes(128) + b"DICM" + b"\xff" * 100, Reason.DAMAGED),
        (b"\x08\0\x05\0CS\x0a\0ISO_IR 100", Reason.NOT_DICOM),
    ],
)
def test_other_files_are_not_taken_for_dicom(content: bytes, reason: Reason, file: Path) -> None:
    file.write_bytes(content)
    for read in (read_header, read_scan):
        with pytest.raises(Refused) as refused:
            read(file)
        assert refused.value.reason is reason


def test_what_is_no_file_is_unreadable(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("gone", "pipe", "loop", "."):
        assert refusal(tmp_path / name).reason is Reason.UNREADABLE


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_unreadable(file: Path) -> None:
    write_scan(file, RAMP).chmod(stat.S_IWUSR)
    assert refusal(file).reason is Reason.UNREADABLE


ABSURD: list[tuple[dict[str, Any], Reason]] = [
    ({"Rows": 0}, Reason.NO_SIZE),
    ({"without": ("Columns",)}, Reason.NO_SIZE),
    ({"Rows": 65535, "Columns": 65535}, Reason.TOO_LARGE),
    ({"NumberOfFrames": "1000000000"}, Reason.TOO_LARGE),
    ({"NumberOfFrames": "0"}, Reason.LAYOUT),
    ({"NumberOfFrames": "-3"}, Reason.LAYOUT),
    ({"SamplesPerPixel": 3}, Reason.LAYOUT),
    ({"without": ("PixelRepresentation",)}, Reason.LAYOUT),
    ({"without": ("BitsAllocated",)}, Reason.LAYOUT),
    ({"without": ("HighBit",)}, Reason.LAYOUT),
    ({"BitsAllocated": 12, "BitsStored": 12}, Reason.LAYOUT),
    ({"BitsStored": 9, "HighBit": 8}, Reason.LAYOUT),
    ({"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0}, Reason.LAYOUT),
    ({"PixelRepresentation": 2}, Reason.LAYOUT),
    ({"PhotometricInterpretation": "PLANTED NAME OF SOMEBODY"}, Reason.PHOTOMETRIC),
    ({"without": ("PhotometricInterpretation",)}, Reason.PHOTOMETRIC),
    ({"without": ("PixelData",)}, Reason.NO_PIXELS),
    ({"PixelData": b""}, Reason.NO_PIXELS),
    ({"PixelData": RAMP.tobytes()[:10]}, Reason.DAMAGED),
    ({"RescaleSlope": "0", "RescaleIntercept": "0"}, Reason.RESCALE),
    ({"RescaleSlope": "1e39", "RescaleIntercept": "0"}, Reason.RESCALE),
    ({"RescaleSlope": "1e-9", "RescaleIntercept": "1e9"}, Reason.RESCALE),
    ({"PixelPaddingValue": 3, "without": ("PixelData",)}, Reason.NO_PIXELS),
]


@pytest.mark.parametrize(("tags", "reason"), ABSURD, ids=[str(tags)[:50] for tags, _ in ABSURD])
def test_absurd_headers_are_refused(tags: dict[str, Any], reason: Reason, file: Path) -> None:
    refused = refusal(write_scan(file, RAMP, **tags))
    assert refused.reason is reason
    assert "PLANTED" not in str(refused)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x10\0SS\2\0\xfd\xff", Reason.NO_SIZE),
        (b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x10\0OW\2\0\3\0", Reason.DAMAGED),
        (b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x10\0AT\2\0\3\0", Reason.LAYOUT),
        (b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x10\0LO\2\0\3\0", Reason.LAYOUT),
        (b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x11\0US\2\0\3\0", Reason.DAMAGED),
        (b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x10\0US\2\xff\3\0", Reason.DAMAGED),
    ],
    ids=["negative rows", "a long VR", "VR of tags", "VR of text", "twice the same element", "length"],
)
def test_wrong_bytes_in_a_header(old: bytes, new: bytes, reason: Reason, file: Path) -> None:
    write_scan(file, RAMP)
    content = file.read_bytes()
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, new))
    assert refusal(file).reason is reason


def test_rows_may_be_written_as_another_kind_of_number(file: Path) -> None:
    write_scan(file, RAMP)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\x28\0\x10\0US\2\0\3\0", b"\x28\0\x10\0IS\2\x003 "))
    assert read_scan(file).header.rows == 3


def test_every_cut_of_a_plain_file_is_refused(file: Path) -> None:
    write_scan(file, RAMP, RescaleSlope="2", RescaleIntercept="0")
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        refusal(file)


def test_no_room_is_made_for_what_is_too_large(file: Path) -> None:
    write_scan(file, RAMP, Rows=20000, Columns=20000, NumberOfFrames="30000")
    tracemalloc.start()
    try:
        assert refusal(file).reason is Reason.TOO_LARGE
        assert refusal(file, frames=(0,)).reason is Reason.TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_limits_are_the_callers(file: Path) -> None:
    write_scan(file, np.zeros((4, 10, 10), np.uint8), NumberOfFrames=4)
    assert len(read_scan(file, limits=Limits(pixels_per_frame=100, frames=4, bytes_total=1600)).frames) == 4
    for limits in (Limits(pixels_per_frame=99), Limits(frames=3), Limits(bytes_total=1599)):
        assert refusal(file, limits=limits).reason is Reason.TOO_LARGE
    assert len(read_scan(file, frames=(3,), limits=Limits(frames=1)).frames) == 1


def deflated(path: Path, rest: bytes) -> Path:
    """A deflated file whose data set goes on with other bytes."""
    write_scan(path, RAMP, syntax=uid.DeflatedExplicitVRLittleEndian, without=("PixelData",))
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[PREAMBLE + 8 : PREAMBLE + 12])
    start = PREAMBLE + 12 + length
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = compressor.compress(zlib.decompress(content[start:], -zlib.MAX_WBITS) + rest) + compressor.flush()
    path.write_bytes(content[:start] + packed)
    return path


def test_a_deflated_bomb_is_not_inflated(file: Path) -> None:
    many = 40_000_000
    in_pixels = b"\xe0\x7f\x10\0OB\0\0" + struct.pack("<I", many) + bytes(many)
    in_header = b"\x29\0\x10\0LO\x04\0BOMB\x29\0\0\x10OB\0\0" + struct.pack("<I", many) + bytes(many)
    for rest, reason in ((in_pixels, Reason.LAYOUT), (in_header, Reason.TOO_LARGE)):
        deflated(file, rest)
        assert file.stat().st_size < 500_000
        tracemalloc.start()
        try:
            assert refusal(file, limits=Limits(header_bytes=1 << 20)).reason is reason
            assert tracemalloc.get_traced_memory()[1] < 8_000_000
        finally:
            tracemalloc.stop()


def test_deflated_data_that_end_early_are_refused(file: Path) -> None:
    write_scan(file, RAMP, syntax=uid.DeflatedExplicitVRLittleEndian)
    np.testing.assert_array_equal(read_scan(file).frames[0].values, RAMP)
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    assert refusal(file).reason is Reason.DAMAGED


def test_a_length_of_gigabytes_makes_no_room(file: Path) -> None:
    write_scan(file, RAMP)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\x10\0\x10\0PN\x0c\0", b"\x10\0\x10\0UT\0\0\xf0\xff\xff\xff"))
    tracemalloc.start()
    try:
        refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_what_has_no_pixels_by_nature_is_no_image(file: Path) -> None:
    tags = ("PixelData", "Rows", "Columns")
    write_scan(file, RAMP, without=tags, SOPClassUID="1.2.840.10008.5.1.4.1.1.88.11")
    assert refusal(file).reason is Reason.NOT_AN_IMAGE
    assert not read_header(file).has_pixels


def test_nothing_of_a_broken_file_is_said(
    file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    write_scan(file, RAMP, PatientID="PLANTED-1", StudyInstanceUID="1.2.3", SpecificCharacterSet="ISO_IR 100")
    content = file.read_bytes()
    for old, new in ((b"1.2.3\0", b"PLANTE"), (b"ISO_IR 100", b"PLANTED-CS"), (b"PLANTED-1", b"PLANTED\xff\xfe")):
        file.write_bytes(content.replace(old, new))
        with warnings.catch_warnings(record=True):
            read_header(file)
            read_scan(file)
    for length in range(140, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(Refused) as refused:
            read_scan(file)
        assert "PLANT" not in str(refused.value)
    said = capfd.readouterr()
    assert "PLANT" not in caplog.text + said.out + said.err
