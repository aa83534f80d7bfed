from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import JPEGLSLossless

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.film import read_image

EIGHT_BIT = np.array([[0, 51, 255], [102, 153, 204]], dtype=np.uint8)
FIFTHS = [[0.0, 0.2, 1.0], [0.4, 0.6, 0.8]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "scan.dcm"


def test_eight_bits_fill_zero_to_one(file: Path, write_dicom) -> None:
    film = read_image(write_dicom(file, EIGHT_BIT, PixelSpacing=[0.5, 0.25]))
    np.testing.assert_allclose(film.pixels, FIFTHS, atol=1e-7)
    assert film.pixels.dtype == np.float32
    assert (film.scanner, film.bits, film.photometric, film.spacing) == ("Maker Model 1", 8, "MONOCHROME2", (0.5, 0.25))
    assert film.sop_uid.startswith("1.2.826")


def test_monochrome1_is_inverted(file: Path, write_dicom) -> None:
    film = read_image(write_dicom(file, EIGHT_BIT, PhotometricInterpretation="MONOCHROME1"))
    np.testing.assert_allclose(film.pixels, 1 - np.array(FIFTHS), atol=1e-7)


def test_the_stored_bits_count_not_the_allocated_ones(file: Path, write_dicom) -> None:
    pixels = np.array([[0, 819, 4095]], dtype=np.uint16)
    np.testing.assert_allclose(read_image(write_dicom(file, pixels, BitsStored=12)).pixels, [[0, 0.2, 1]], atol=1e-7)


def test_signed_values_start_at_the_lowest(file: Path, write_dicom) -> None:
    pixels = np.array([[-2048, 0, 2047]], dtype=np.int16)
    film = read_image(write_dicom(file, pixels, BitsStored=12))
    np.testing.assert_allclose(film.pixels, [[0, 2048 / 4095, 1]], atol=1e-7)


@pytest.mark.parametrize(
    ("slope", "intercept", "expected"), [("2", "-1024", FIFTHS), ("-1", "255", [[1.0, 0.8, 0.0], [0.6, 0.4, 0.2]])]
)
def test_rescale_moves_the_range_with_it(
    slope: str, intercept: str, expected: list[list[float]], file: Path, write_dicom
) -> None:
    film = read_image(write_dicom(file, EIGHT_BIT, RescaleSlope=slope, RescaleIntercept=intercept))
    np.testing.assert_allclose(film.pixels, expected, atol=1e-7)


def test_rgb_keeps_its_channels(file: Path, write_dicom) -> None:
    pixels = np.array([[[255, 0, 51], [0, 102, 0]]], dtype=np.uint8)
    np.testing.assert_allclose(read_image(write_dicom(file, pixels)).pixels, [[[1, 0, 0.2], [0, 0.4, 0]]], atol=1e-7)


def test_planes_are_put_together(file: Path, write_dicom) -> None:
    pixels = np.array([[[255, 0, 51], [0, 102, 0]]], dtype=np.uint8)
    planes = np.moveaxis(pixels, -1, 0).tobytes()
    film = read_image(write_dicom(file, pixels, PlanarConfiguration=1, PixelData=planes))
    np.testing.assert_allclose(film.pixels, pixels / 255, atol=1e-7)


@given(
    pixels=arrays.arrays(np.int16, (4, 4), elements=st.integers(-2048, 2047)),
    slope=st.sampled_from(["0.5", "1", "3.25", "-2"]),
    inverted=st.booleans(),
)
def test_order_of_greys_follows_the_rescaled_values(
    tmp_path_factory: pytest.TempPathFactory, write_dicom, pixels: np.ndarray, slope: str, inverted: bool
) -> None:
    photometric = "MONOCHROME1" if inverted else "MONOCHROME2"
    path = tmp_path_factory.mktemp("read") / "scan.dcm"
    film = read_image(
        write_dicom(path, pixels, BitsStored=12, RescaleSlope=slope, PhotometricInterpretation=photometric)
    )
    assert film.pixels.min() >= 0
    assert film.pixels.max() <= 1
    upwards = (float(slope) > 0) != inverted
    expected = (pixels + 2048) / 4095 if upwards else (2047 - pixels) / 4095
    np.testing.assert_allclose(film.pixels, expected, atol=1e-6)


def test_only_what_is_known_is_said_of_the_scanner(file: Path, write_dicom) -> None:
    film = read_image(write_dicom(file, EIGHT_BIT, without=("Manufacturer", "ManufacturerModelName")))
    assert (film.scanner, film.spacing) == ("unknown scanner", None)
    film = read_image(write_dicom(file, EIGHT_BIT, PixelSpacing=[0, 0], ImagerPixelSpacing=[0.1, 0.2]))
    assert film.spacing == (0.1, 0.2)


def lookup_table(outputs: bytes) -> Sequence:
    table = Dataset()
    table.LUTDescriptor = [2, 0, 8]
    table.LUTData = outputs
    return Sequence([table])


def test_a_modality_table_is_applied(file: Path, write_dicom) -> None:
    film = read_image(write_dicom(file, EIGHT_BIT, ModalityLUTSequence=lookup_table(bytes([51, 204]))))
    np.testing.assert_allclose(film.pixels, [[0.2, 0.8, 0.8], [0.8, 0.8, 0.8]], atol=1e-7)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"NumberOfFrames": 2, "PixelData": EIGHT_BIT.tobytes() * 2}, "several frames"),
    ({"PhotometricInterpretation": "PALETTE COLOR"}, "colour palette"),
    ({"PhotometricInterpretation": "YBR_FULL"}, "YBR_FULL"),
    ({"PhotometricInterpretation": "YBR_PARTIAL_420"}, "YBR_PARTIAL_420"),
    ({"without": ("PhotometricInterpretation",)}, "photometric interpretation (none)"),
    ({"without": ("PixelData",)}, "no pixel data"),
    ({"PixelData": b""}, "no pixel data"),
    ({"PixelData": EIGHT_BIT.tobytes()[:3]}, "cannot be decoded"),
    ({"Rows": 0}, "no rows or no columns"),
    ({"without": ("Columns",)}, "no rows or no columns"),
    ({"SamplesPerPixel": 3}, "samples per pixel"),
    ({"without": ("PixelRepresentation",)}, "how its pixel values are stored"),
    ({"BitsStored": 1}, "one bit"),
    ({"HighBit": 6}, "start at the lowest bit"),
    ({"BitsStored": 7}, "do not fit its 7 stored bits"),
    ({"RescaleSlope": "0", "RescaleIntercept": "0"}, "slope is 0"),
    ({"RescaleSlope": "NaN"}, "RescaleSlope is not a number"),
    ({"RescaleIntercept": "Infinity"}, "RescaleIntercept is not a number"),
    ({"RescaleSlope": "1e-300", "RescaleIntercept": "1e9"}, "no usable range"),
    ({"ModalityLUTSequence": lookup_table(b"\0\1\2\3\4\5")}, "lookup table"),
]


@pytest.mark.parametrize(("tags", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_would_have_to_be_guessed_is_refused(tags: dict[str, Any], reason: str, file: Path, write_dicom) -> None:
    write_dicom(file, EIGHT_BIT, **tags)
    with pytest.raises(BadInput) as refusal:
        read_image(file)
    message = str(refusal.value)
    assert reason in message
    assert message.startswith("scan.dcm: ")
    assert "\n" not in message
    assert "SECRET" not in message
    assert str(file.parent) not in message


@pytest.mark.filterwarnings("ignore:The number of bytes of compressed pixel data")
def test_an_undecodable_syntax_is_named(file: Path, write_dicom) -> None:
    write_dicom(file, EIGHT_BIT)
    plain, lossless = b"1.2.840.10008.1.2.1\0", str(JPEGLSLossless).encode()
    file.write_bytes(file.read_bytes().replace(b"\x14\0" + plain, b"\x16\0" + lossless))
    with pytest.raises(BadInput, match=r"cannot be decoded .*transfer syntax JPEG-LS Lossless"):
        read_image(file)


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"plain text", b"\0" * 128 + b"DICM", b"\0" * 128 + b"DICM\2\0"])
def test_other_files_are_not_taken_for_images(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"^scan\.dcm: "):
        read_image(file)


def test_a_text_file_is_called_not_dicom(file: Path) -> None:
    file.write_text("hello")
    with pytest.raises(BadInput, match="not a DICOM file"):
        read_image(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone\.dcm: no such file"):
        read_image(tmp_path / "gone.dcm")
    with pytest.raises(BadInput, match="cannot be read"):
        read_image(tmp_path)


@pytest.mark.shared
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_real_files_are_read_or_refused_as_their_header_says(shared_data: Path) -> None:
    with (shared_data / "dicom" / "manifest.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    # 32-bit words in big-endian order, and floating-point pixels.
    refused = {"033_RTDOSE_MANUFAC_rtdose_expb_1frame.dcm", "054_OT_MYMANUF_parametric_map_float.dcm"}
    read = 0
    for row in rows:
        file = shared_data / "dicom" / "files" / row["file"]
        has_pixels = row["pydicom_decode"] != "no-pixel-data" and row["bits_allocated"] != "1"
        if has_pixels and row["frames"] in ("", "1") and row["file"] not in refused:
            film = read_image(file)
            assert film.pixels.shape[:2] == (int(row["rows"]), int(row["cols"]))
            assert film.pixels.min() >= 0
            assert film.pixels.max() <= 1
            read += 1
        else:
            with pytest.raises(BadInput, match="^" + row["file"][:3]):
                read_image(file)
    assert read == 42
