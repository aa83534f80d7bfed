"""Compressed files with known pixels, and streams that are broken or contradict their header."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import jpeg_ls
import numpy as np
import pytest
from openjpeg.utils import encode_array
from PIL import Image
from pydicom import uid
from pydicom.encaps import encapsulate, fragment_frame
from pydicom.pixels.encoders import RLELosslessEncoder
from tests.imaging.dicom_files import frame_of, reason_of, write_scan

from crossward.imaging.refusals import Reason

# Smooth, so that lossy streams come close to it; each channel its own.
COLOUR = np.stack(np.meshgrid(np.arange(48) * 4 + 60, np.arange(40) * 5 + 40), axis=-1).astype(np.uint8)
COLOUR = np.concatenate([COLOUR, 255 - COLOUR[..., :1]], axis=-1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "scan.dcm"


def saved(pixels: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=100, **options)
    return stream.getvalue()


GREY = COLOUR[..., 0].copy()
SIGNED = (COLOUR[..., 0].astype(np.int16) - 128) * 200
DEEP = COLOUR[..., 1].astype(np.uint16) * 16


def rle(pixels: np.ndarray) -> bytes:
    samples = 3 if pixels.ndim == 3 else 1
    return RLELosslessEncoder.encode(
        pixels,
        rows=pixels.shape[0],
        columns=pixels.shape[1],
        samples_per_pixel=samples,
        bits_allocated=pixels.dtype.itemsize * 8,
        bits_stored=pixels.dtype.itemsize * 8,
        pixel_representation=int(pixels.dtype.kind == "i"),
        photometric_interpretation="RGB" if samples == 3 else "MONOCHROME2",
        number_of_frames=1,
        planar_configuration=0,
    )


def patterns(pixels: np.ndarray) -> np.ndarray:
    return pixels.view(pixels.dtype.str.replace("i", "u"))


LOSSLESS = {
    "JPEG-LS grey": (GREY, uid.JPEGLSLossless, bytes(jpeg_ls.encode_array(GREY)), {}),
    "JPEG-LS 12 bits": (DEEP, uid.JPEGLSLossless, bytes(jpeg_ls.encode_array(DEEP)), {"BitsStored": 12}),
    "JPEG-LS signed": (SIGNED, uid.JPEGLSLossless, bytes(jpeg_ls.encode_array(patterns(SIGNED))), {}),
    "JPEG-LS by pixel": (COLOUR, uid.JPEGLSLossless, bytes(jpeg_ls.encode_array(COLOUR, interleave_mode=2)), {}),
    "JPEG-LS by line": (COLOUR, uid.JPEGLSLossless, bytes(jpeg_ls.encode_array(COLOUR, interleave_mode=1)), {}),
    "JPEG 2000 grey": (GREY, uid.JPEG2000Lossless, encode_array(GREY, photometric_interpretation=2), {}),
    "JPEG 2000 12 bits": (
        DEEP,
        uid.JPEG2000Lossless,
        encode_array(DEEP, bits_stored=12, photometric_interpretation=2),
        {"BitsStored": 12},
    ),
    "JPEG 2000 signed": (SIGNED, uid.JPEG2000Lossless, encode_array(SIGNED, photometric_interpretation=2), {}),
    "JPEG 2000 unsigned stream, signed header": (
        SIGNED,
        uid.JPEG2000Lossless,
        encode_array(patterns(SIGNED), photometric_interpretation=2),
        {},
    ),
    "JPEG 2000 RGB": (
        COLOUR,
        uid.JPEG2000Lossless,
        encode_array(COLOUR, photometric_interpretation=1, use_mct=False),
        {},
    ),
    "JPEG 2000 YBR_RCT": (
        COLOUR,
        uid.JPEG2000Lossless,
        encode_array(COLOUR, photometric_interpretation=1, use_mct=True),
        {"PhotometricInterpretation": "YBR_RCT"},
    ),
    "RLE grey": (GREY, uid.RLELossless, rle(GREY), {}),
    "RLE signed": (SIGNED, uid.RLELossless, rle(SIGNED), {}),
    "RLE RGB": (COLOUR, uid.RLELossless, rle(COLOUR), {}),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_streams_come_back_bit_by_bit(name: str, file: Path) -> None:
    pixels, syntax, stream, tags = LOSSLESS[name]
    write_scan(file, pixels, syntax=syntax, compressed=[stream], **tags)
    expected = pixels / 255 if pixels.ndim == 3 else pixels
    np.testing.assert_array_equal(frame_of(file).values, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("photometric", "options"),
    [("YBR_FULL_422", {"subsampling": "4:2:2"}), ("YBR_FULL", {"subsampling": "4:4:4"}), ("RGB", {"keep_rgb": True})],
)
def test_jpeg_colours_are_red_green_and_blue(photometric: str, options: dict[str, Any], file: Path) -> None:
    stream = saved(COLOUR, **options)
    write_scan(file, COLOUR, syntax=uid.JPEGBaseline8Bit, compressed=[stream], PhotometricInterpretation=photometric)
    np.testing.assert_allclose(frame_of(file).values * 255, COLOUR, atol=6)


def without_marker(stream: bytes) -> bytes:
    """The stream without its Adobe marker, and its components named 1, 2 and 3: nothing tells its colour space."""
    start = stream.index(b"\xff\xee")
    length = struct.unpack(">H", stream[start + 2 : start + 4])[0]
    bare = bytearray(stream[:start] + stream[start + 2 + length :])
    for marker, count, step in ((b"\xff\xc0", 10, 3), (b"\xff\xda", 5, 2)):
        place = bare.index(marker) + count
        for number in range(3):
            bare[place + step * number] = number + 1
    return bytes(bare)


def test_a_jpeg_that_is_silent_is_what_the_header_says(file: Path) -> None:
    bare = without_marker(saved(COLOUR, keep_rgb=True))
    write_scan(file, COLOUR, syntax=uid.JPEGBaseline8Bit, compressed=[bare], PhotometricInterpretation="RGB")
    np.testing.assert_allclose(frame_of(file).values * 255, COLOUR, atol=3)


@pytest.mark.parametrize(
    ("photometric", "options"), [("RGB", {"subsampling": "4:4:4"}), ("YBR_FULL", {"keep_rgb": True})]
)
def test_a_jpeg_that_contradicts_the_header_is_refused(photometric: str, options: dict[str, Any], file: Path) -> None:
    stream = saved(COLOUR, **options)
    write_scan(file, COLOUR, syntax=uid.JPEGBaseline8Bit, compressed=[stream], PhotometricInterpretation=photometric)
    assert reason_of(file) is Reason.PHOTOMETRIC


@pytest.mark.parametrize("photometric", ["YBR_RCT", "YBR_ICT"])
def test_a_colour_space_of_jpeg_2000_is_refused_elsewhere(photometric: str, file: Path) -> None:
    tags = {"PhotometricInterpretation": photometric}
    assert reason_of(write_scan(file, COLOUR, **tags)) is Reason.PHOTOMETRIC
    stream = bytes(jpeg_ls.encode_array(COLOUR, interleave_mode=2))
    write_scan(file, COLOUR, syntax=uid.JPEGLSLossless, compressed=[stream], **tags)
    assert reason_of(file) is Reason.PHOTOMETRIC


def test_a_jpeg_2000_that_contradicts_the_header_is_refused(file: Path) -> None:
    plain = encode_array(COLOUR, photometric_interpretation=1, use_mct=False)
    write_scan(file, COLOUR, syntax=uid.JPEG2000Lossless, compressed=[plain], PhotometricInterpretation="YBR_RCT")
    assert reason_of(file) is Reason.PHOTOMETRIC


@pytest.mark.parametrize(
    ("options", "pixels", "stored", "tolerance"),
    [
        (["+e1"], DEEP, 12, 0),
        (["+e1"], SIGNED, 16, 0),
        (["+e1"], GREY, 8, 0),
        (["+e1"], COLOUR, 8, 0),
        (["+el"], DEEP, 12, 0),
        (["+ee", "+q", "100"], DEEP, 12, 8),
        (["+eb", "+q", "100"], GREY, 8, 2),
    ],
    ids=["lossless 12", "lossless signed", "lossless 8", "lossless colour", "process 14", "extended 12", "baseline"],
)
def test_jpeg_written_by_dcmtk(
    options: list[str], pixels: np.ndarray, stored: int, tolerance: int, file: Path, tmp_path: Path
) -> None:
    if shutil.which("dcmcjpeg") is None:
        pytest.skip("dcmtk is not installed, and nothing else here writes these kinds of JPEG")
    write_scan(tmp_path / "plain.dcm", pixels, BitsStored=stored)
    subprocess.run(["dcmcjpeg", *options, str(tmp_path / "plain.dcm"), str(file)], check=True)
    expected = pixels / 255 if pixels.ndim == 3 else pixels
    scale = 255 if pixels.ndim == 3 else 1
    np.testing.assert_allclose(frame_of(file).values * scale, expected * scale, atol=max(tolerance, 1e-4))


def test_fragments_find_their_frames(file: Path) -> None:
    frames = np.stack([GREY, GREY[::-1], GREY[:, ::-1]])
    streams = [bytes(jpeg_ls.encode_array(frame.copy())) for frame in frames]
    pieces = [list(fragment_frame(stream, 3)) for stream in streams]
    layouts = {
        "a table of offsets": encapsulate(streams, fragments_per_frame=3, has_bot=True),
        "by the start of each stream": encapsulate([piece for each in pieces for piece in each], has_bot=False),
        "one each": encapsulate(streams, has_bot=False),
    }
    for name, data in layouts.items():
        write_scan(file, frames, syntax=uid.JPEGLSLossless, compressed=data, NumberOfFrames=3)
        read = [frame_of(file, number).values for number in (2, 0, 1)]
        np.testing.assert_array_equal(np.stack(read), frames[[2, 0, 1]], err_msg=name)
    wrong = bytearray(layouts["a table of offsets"])
    wrong[12] += 2
    write_scan(file, frames, syntax=uid.JPEGLSLossless, compressed=bytes(wrong), NumberOfFrames=3)
    assert reason_of(file) is Reason.DAMAGED


@pytest.mark.parametrize(
    ("syntax", "stream", "tags", "expected"),
    [
        (uid.JPEGBaseline8Bit, saved(GREY[:8]), {}, Reason.LAYOUT),
        (uid.JPEGBaseline8Bit, saved(COLOUR), {}, Reason.LAYOUT),
        (uid.JPEGBaseline8Bit, saved(GREY)[:-400], {}, Reason.NOT_DECODED),
        (uid.JPEGBaseline8Bit, saved(GREY, progressive=True), {}, Reason.COMPRESSION),
        (uid.JPEGBaseline8Bit, b"no stream at all", {}, Reason.NOT_DECODED),
        (uid.JPEGLSLossless, saved(GREY), {}, Reason.COMPRESSION),
        (uid.JPEGLSLossless, bytes(jpeg_ls.encode_array(GREY))[:60], {}, Reason.NOT_DECODED),
        (uid.JPEG2000, encode_array(GREY[:32], photometric_interpretation=2), {}, Reason.LAYOUT),
        (uid.JPEG2000, encode_array(GREY, photometric_interpretation=2)[:90], {}, Reason.NOT_DECODED),
        (uid.RLELossless, rle(GREY)[:80], {}, Reason.NOT_DECODED),
        (uid.RLELossless, rle(GREY), {"Rows": 39}, Reason.NOT_DECODED),
        (uid.RLELossless, rle(DEEP), {}, Reason.LAYOUT),
        (uid.MPEG2MPML, b"\0\0\1\xb3", {}, Reason.COMPRESSION),
    ],
)
def test_streams_that_do_not_fit_are_refused(
    syntax: str, stream: bytes, tags: dict[str, Any], expected: Reason, file: Path
) -> None:
    assert reason_of(write_scan(file, GREY, syntax=syntax, compressed=[stream], **tags)) is expected


def test_a_lossy_stream_has_no_certain_sign(file: Path) -> None:
    pixels = (GREY.astype(np.int16) - 128).astype(np.int8)
    write_scan(file, pixels, syntax=uid.JPEGBaseline8Bit, compressed=[saved(patterns(pixels))])
    assert reason_of(file) is Reason.LAYOUT
