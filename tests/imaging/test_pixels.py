"""Golden numbers: every file is written with known pixels, and what is read is worked out by hand."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydicom import dcmread, uid
from tests.imaging.dicom_files import elements, frame_of, item, lookup_table, reason_of, write_scan

from crossward.imaging.dicom.files import read_scan
from crossward.imaging.refusals import Reason, Refused

NATIVE = [
    uid.ImplicitVRLittleEndian,
    uid.ExplicitVRLittleEndian,
    uid.ExplicitVRBigEndian,
    uid.DeflatedExplicitVRLittleEndian,
]
RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4)
COLOUR = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "scan.dcm"


def test_rescale(file: Path) -> None:
    pixels = np.array([[0, 1000, 4095]], dtype=np.uint16)
    frame = frame_of(write_scan(file, pixels, BitsStored=12, RescaleSlope="2.5", RescaleIntercept="-1024"))
    np.testing.assert_array_equal(frame.values, [[-1024, 1476, 9213.5]])
    assert (frame.low, frame.high, frame.inverted, frame.valid) == (-1024.0, 9213.5, False, None)
    turned = frame_of(write_scan(file, pixels, BitsStored=12, RescaleSlope="-1", RescaleIntercept="0"))
    assert (turned.low, turned.high, turned.values.max()) == (-4095.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("descriptor", "data", "expected", "high"),
    [
        ([4, 2, 16], struct.pack("<4H", 100, 200, 400, 65535), [100, 100, 100, 200, 400, 65535, 65535], 65535.0),
        ([4, 2, 12], struct.pack("<4H", 1, 2, 3, 4095), [1, 1, 1, 2, 3, 4095, 4095], 4095.0),
        ([4, 2, 8], bytes([9, 8, 7, 6]), [9, 9, 9, 8, 7, 6, 6], 255.0),
        ([3, 2, 8], bytes([9, 8, 7, 0]), [9, 9, 9, 8, 7, 7, 7], 255.0),
        ([4, 2, 8], struct.pack("<4H", 9, 8, 7, 6), [9, 9, 9, 8, 7, 6, 6], 255.0),
    ],
)
def test_modality_table(descriptor: list[int], data: bytes, expected: list[int], high: float, file: Path) -> None:
    pixels = np.arange(7, dtype=np.uint16)[None]
    frame = frame_of(write_scan(file, pixels, ModalityLUTSequence=lookup_table(descriptor, data)))
    np.testing.assert_array_equal(frame.values, [expected])
    assert (frame.low, frame.high) == (0.0, high)


def test_a_modality_table_for_signed_pixels_starts_below_zero(file: Path) -> None:
    pixels = np.array([[-3, -2, -1, 0]], dtype=np.int16)
    table = lookup_table([3, -2, 16], struct.pack("<3H", 10, 20, 30))
    frame = frame_of(write_scan(file, pixels, ModalityLUTSequence=table))
    np.testing.assert_array_equal(frame.values, [[10, 10, 20, 30]])


@pytest.mark.parametrize(
    "table",
    [
        lookup_table([4, 0, 16], b"\0\1\2"),
        lookup_table([4, 0, 12], struct.pack("<4H", 1, 2, 3, 4096)),
        lookup_table([4, 0, 40], bytes(8)),
        item(LUTDescriptor=[4, 0, 16]),
    ],
)
def test_a_broken_modality_table_is_refused(table: Any, file: Path) -> None:
    assert reason_of(write_scan(file, RAMP, ModalityLUTSequence=table)) is Reason.RESCALE


def test_a_table_beside_a_rescale_is_refused(file: Path) -> None:
    table = lookup_table([4, 0, 8], bytes(4))
    write_scan(file, RAMP, ModalityLUTSequence=table, RescaleSlope="2", RescaleIntercept="0")
    assert reason_of(file) is Reason.RESCALE


@settings(max_examples=40)
@given(
    bits=st.sampled_from([(8, 8), (16, 10), (16, 12), (16, 16), (8, 6), (32, 32), (32, 20)]),
    signed=st.booleans(),
    syntax=st.sampled_from(NATIVE),
    data=st.data(),
)
def test_every_depth_sign_and_byte_order_comes_back(
    tmp_path_factory: pytest.TempPathFactory, bits: tuple[int, int], signed: bool, syntax: str, data: st.DataObject
) -> None:
    allocated, stored = bits
    low = -(1 << (stored - 1)) if signed else 0
    high = low + (1 << stored) - 1
    dtype = np.dtype(f"{'i' if signed else 'u'}{allocated // 8}")
    pixels = data.draw(arrays.arrays(dtype, (3, 5), elements=st.integers(low, high)))
    path = write_scan(tmp_path_factory.mktemp("bits") / "scan.dcm", pixels, syntax=syntax, BitsStored=stored)
    if allocated == 32 and syntax == uid.ExplicitVRBigEndian:
        assert reason_of(path) is Reason.LAYOUT
        return
    frame = frame_of(path)
    np.testing.assert_array_equal(frame.values, pixels.astype(np.float32))
    assert (frame.low, frame.high) == (float(np.float32(low)), float(np.float32(high)))


def test_bytes_in_big_endian_words_are_put_back(file: Path) -> None:
    pixels = np.arange(15, dtype=np.uint8).reshape(3, 5)
    words = np.frombuffer(pixels.tobytes() + b"\0", dtype="<u2").byteswap().tobytes()
    write_scan(file, pixels, syntax=uid.ExplicitVRBigEndian)
    content = file.read_bytes().replace(b"\x7f\xe0\0\x10OB", b"\x7f\xe0\0\x10OW")
    file.write_bytes(content.replace(pixels.tobytes() + b"\0", words))
    np.testing.assert_array_equal(frame_of(file).values, pixels)


def test_every_frame_of_odd_size_in_big_endian_words(file: Path) -> None:
    pixels = np.arange(45, dtype=np.uint8).reshape(3, 3, 5)
    words = np.frombuffer(pixels.tobytes() + b"\0", dtype="<u2").byteswap().tobytes()
    write_scan(file, pixels, syntax=uid.ExplicitVRBigEndian, NumberOfFrames=3)
    content = file.read_bytes().replace(b"\x7f\xe0\0\x10OB", b"\x7f\xe0\0\x10OW")
    file.write_bytes(content.replace(pixels.tobytes() + b"\0", words))
    for number in range(3):
        np.testing.assert_array_equal(frame_of(file, number).values, pixels[number])


@pytest.mark.parametrize("signed", [False, True])
def test_a_high_bit_above_the_lowest_place_shifts(signed: bool, file: Path) -> None:
    expected = np.array([[0, 1, 2047, -1 if signed else 4095]])
    raw = ((expected & 0xFFF) << 4).astype(np.uint16)
    write_scan(file, raw, BitsStored=12, HighBit=15, PixelRepresentation=int(signed))
    np.testing.assert_array_equal(frame_of(file).values, expected)
    assert reason_of(write_scan(file, raw + 1, BitsStored=12, HighBit=15)) is Reason.OUT_OF_RANGE


def write_overlay(path: Path, raw: np.ndarray, *, position: int, allocated: int = 16, **tags: Any) -> Path:
    write_scan(path, raw, **tags)
    dataset = dcmread(path)
    dataset.add_new(0x60000100, "US", allocated)
    dataset.add_new(0x60000102, "US", position)
    dataset.save_as(path)
    return path


def test_only_an_overlay_that_says_so_may_use_the_upper_bits(file: Path) -> None:
    pixels = np.array([[0, 5, 4095]], dtype=np.uint16)
    raw = pixels | np.array([[1 << 14, 0, 1 << 14]], dtype=np.uint16)
    np.testing.assert_array_equal(frame_of(write_overlay(file, raw, position=14, BitsStored=12)).values, pixels)
    assert reason_of(write_overlay(file, raw, position=13, BitsStored=12)) is Reason.OUT_OF_RANGE
    # An overlay of one bit has its data elsewhere, so it does not explain the bits here.
    assert reason_of(write_overlay(file, raw, position=14, allocated=1, BitsStored=12)) is Reason.OUT_OF_RANGE
    assert reason_of(write_scan(file, raw, BitsStored=12)) is Reason.OUT_OF_RANGE
    assert reason_of(write_overlay(file, pixels, position=3, BitsStored=12)) is Reason.LAYOUT


@pytest.mark.parametrize("extended", [True, False])
def test_signed_pixels_under_an_overlay(extended: bool, file: Path) -> None:
    values = np.array([[-1, -2048, 2047, 3]])
    patterns = values & (0xFFFF if extended else 0xFFF)
    raw = ((patterns & ~(1 << 15)) | (np.array([[1, 0, 1, 0]]) << 15)).astype(np.uint16)
    write_overlay(file, raw, position=15, BitsStored=12, PixelRepresentation=1)
    np.testing.assert_array_equal(frame_of(file).values, values)


@pytest.mark.parametrize(
    ("tags", "padding"),
    [
        ({"PixelPaddingValue": -2000}, [True, False, False, False]),
        ({"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -1999}, [True, True, False, False]),
        ({"PixelPaddingValue": 100, "PixelPaddingRangeLimit": 5}, [False, False, True, True]),
    ],
)
def test_padding_is_marked_and_keeps_its_value(tags: dict[str, int], padding: list[bool], file: Path) -> None:
    pixels = np.array([[-2000, -1999, 5, 100]], dtype=np.int16)
    frame = frame_of(write_scan(file, pixels, RescaleSlope="2", RescaleIntercept="1", **tags))
    assert frame.valid is not None
    np.testing.assert_array_equal(~frame.valid, [padding])
    np.testing.assert_array_equal(frame.values, pixels * 2 + 1)


def test_padding_written_with_the_other_sign(file: Path) -> None:
    pixels = np.array([[-2000, 5]], dtype=np.int16)
    write_scan(file, pixels, PixelPaddingValue=-2000)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\x28\0\x20\x01SS", b"\x28\0\x20\x01US"))
    assert frame_of(file).valid is not None
    np.testing.assert_array_equal(frame_of(file).valid, [[False, True]])


def test_no_pixel_of_padding_means_no_mask(file: Path) -> None:
    assert frame_of(write_scan(file, RAMP, PixelPaddingValue=200)).valid is None


# Worked out from PS3.3 C.7.6.3.1.2 for pure colours: luminance and colour differences, rounded.
PURE = {
    (255, 0, 0): (76, 85, 255),
    (0, 255, 0): (150, 44, 21),
    (0, 0, 255): (29, 255, 107),
    (128, 128, 128): (128, 128, 128),
}


@pytest.mark.parametrize("planar", [0, 1])
def test_ybr_becomes_red_green_and_blue(planar: int, file: Path) -> None:
    ybr = np.array([list(PURE.values())], dtype=np.uint8)
    data = np.moveaxis(ybr, -1, 0).tobytes() if planar else ybr.tobytes()
    write_scan(file, ybr, PhotometricInterpretation="YBR_FULL", PlanarConfiguration=planar, PixelData=data)
    frame = frame_of(file)
    assert frame.colour
    np.testing.assert_allclose(frame.values * 255, [list(PURE)], atol=1.5)


def test_ybr_422_shares_colour_between_two_pixels(file: Path) -> None:
    data = bytes([76, 29, 85, 255, 128, 0, 128, 128])
    pixels = np.zeros((1, 4, 3), dtype=np.uint8)
    write_scan(file, pixels, PhotometricInterpretation="YBR_FULL_422", PixelData=data)
    # Red as it is, then a darker pixel with the red's colour; then grey and black.
    expected = [[[254, 1, 0], [207, -46, -47], [128, 128, 128], [0, 0, 0]]]
    np.testing.assert_allclose(frame_of(file).values * 255, np.clip(expected, 0, 255), atol=1)


@pytest.mark.parametrize("planar", [0, 1])
@pytest.mark.parametrize("syntax", NATIVE)
def test_rgb_by_pixel_and_by_plane(planar: int, syntax: str, file: Path) -> None:
    data = np.moveaxis(COLOUR, -1, 0).tobytes() if planar else COLOUR.tobytes()
    write_scan(file, COLOUR, syntax=syntax, PlanarConfiguration=planar, PixelData=data)
    np.testing.assert_array_equal(frame_of(file).values, (COLOUR / 255).astype(np.float32))


def palette(bits: int, *tables: bytes, entries: int = 4, first: int = 1) -> dict[str, Any]:
    names = ("Red", "Green", "Blue")
    found: dict[str, Any] = {f"{name}PaletteColorLookupTableDescriptor": [entries, first, bits] for name in names}
    return found | {f"{name}PaletteColorLookupTableData": data for name, data in zip(names, tables, strict=True)}


def test_palettes_of_eight_and_sixteen_bits(file: Path) -> None:
    index = np.array([[0, 1, 2, 3, 4, 9]], dtype=np.uint8)
    red, green, blue = [0, 51, 102, 255], [255, 0, 0, 0], [0, 0, 255, 51]
    expected = np.array([[[table[place] / 255 for table in (red, green, blue)] for place in (0, 0, 1, 2, 3, 3)]])
    tags = palette(8, bytes(red), bytes(green), bytes(blue))
    write_scan(file, index, PhotometricInterpretation="PALETTE COLOR", **tags)
    np.testing.assert_allclose(frame_of(file).values, expected, atol=1e-7)
    wide = [struct.pack("<4H", *(257 * value for value in table)) for table in (red, green, blue)]
    write_scan(file, index, PhotometricInterpretation="PALETTE COLOR", **palette(16, *wide))
    np.testing.assert_allclose(frame_of(file).values, expected, atol=1e-7)


@pytest.mark.parametrize(
    "tags",
    [
        {},
        palette(8, b"\0" * 4, b"\0" * 4, b"\0" * 3 + b"\1\2\3"),
        palette(16, *[struct.pack("<4H", 0, 90, 180, 255)] * 3),
        palette(24, *[bytes(12)] * 3),
    ],
    ids=["missing", "too long", "only the lower half is filled", "24 bits"],
)
def test_a_broken_palette_is_refused(tags: dict[str, Any], file: Path) -> None:
    assert reason_of(write_scan(file, RAMP, PhotometricInterpretation="PALETTE COLOR", **tags)) is Reason.PALETTE


def test_frames_are_read_one_by_one(file: Path) -> None:
    pixels = np.arange(5 * 12, dtype=np.uint16).reshape(5, 3, 4)
    write_scan(file, pixels, NumberOfFrames=5)
    scan = read_scan(file, frames=(4, 1))
    assert [frame.index for frame in scan.frames] == [4, 1]
    np.testing.assert_array_equal(np.stack([frame.values for frame in scan.frames]), pixels[[4, 1]])
    assert len(read_scan(file).frames) == 5
    with pytest.raises(Refused):
        read_scan(file, frames=(5,))


def test_functional_groups_of_the_frame_go_before_shared_ones(file: Path) -> None:
    """As enhanced CT and MR say it: units, windows, position and spacing by frame."""
    pixels = np.full((2, 2, 2), 100, dtype=np.uint16)
    shared = item(
        PixelMeasuresSequence=item(PixelSpacing=[0.5, 0.75], SliceThickness=3),
        PlaneOrientationSequence=item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
        PixelValueTransformationSequence=item(RescaleSlope="1", RescaleIntercept="-1024"),
    )
    frames = [
        elements(
            PlanePositionSequence=item(ImagePositionPatient=[0, 0, 3 * number]),
            FrameVOILUTSequence=item(WindowCenter=["40", "50"], WindowWidth=["400", "350"]),
        )
        for number in range(2)
    ]
    frames[1].PixelValueTransformationSequence = item(RescaleSlope="2", RescaleIntercept="0")
    tags = {"SharedFunctionalGroupsSequence": shared, "PerFrameFunctionalGroupsSequence": frames}
    first, second = read_scan(write_scan(file, pixels, NumberOfFrames=2, **tags)).frames
    assert (first.values[0, 0], second.values[0, 0]) == (-924.0, 200.0)
    assert [(window.centre, window.width) for window in second.windows] == [(40.0, 400.0), (50.0, 350.0)]
    assert (first.spacing, first.orientation) == ((0.5, 0.75), (1, 0, 0, 0, 1, 0))
    assert (first.position, second.position) == ((0.0, 0.0, 0.0), (0.0, 0.0, 3.0))
    tags["PerFrameFunctionalGroupsSequence"] = frames[:1]
    assert reason_of(write_scan(file, pixels, NumberOfFrames=2, **tags)) is Reason.LAYOUT


def test_two_pad_bytes_too_many_mean_a_wrong_size(file: Path) -> None:
    odd = np.arange(15, dtype=np.uint8).reshape(3, 5)
    np.testing.assert_array_equal(frame_of(write_scan(file, odd, PixelData=odd.tobytes() + b"\0")).values, odd)
    assert reason_of(write_scan(file, odd, PixelData=odd.tobytes() + b"\0" * 3)) is Reason.LAYOUT
    assert reason_of(write_scan(file, odd, PixelData=odd.tobytes()[:14])) is Reason.DAMAGED
