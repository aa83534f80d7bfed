"""Pixel data to frames: layout checked before anything is allocated, then samples, then the units of the modality."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.codecs import JPEG_2000, NATIVE, Decoded, Expected, decode, starts_frame, syntax_name
from crossward.imaging.dicom.elements import MALFORMED, Elements
from crossward.imaging.dicom.opening import PIXELS, Opened
from crossward.imaging.refusals import Reason, Refused

_GREY = frozenset({"MONOCHROME1", "MONOCHROME2"})
_NATIVE_COLOUR = frozenset({"RGB", "YBR_FULL", "YBR_FULL_422"})
SAMPLES = dict.fromkeys((*_GREY, "PALETTE COLOR"), 1) | dict.fromkeys((*_NATIVE_COLOUR, "YBR_RCT", "YBR_ICT"), 3)
_NOT_READ = ("YBR_PARTIAL_420", "YBR_PARTIAL_422", "XYB", "HSV", "ARGB", "CMYK")
_OVERLAYS = range(0x60000000, 0x60200000, 0x00020000)
OVERLAY_TAGS = tuple(group | element for group in _OVERLAYS for element in (0x0100, 0x0102))
_ITEM, _END = 0xFFFEE000, 0xFFFEE0DD
_MOST_FRAGMENTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is refused before room is made for it.

    Attributes:
        pixels_per_frame: rows times columns.
        frames: read at once.
        bytes_total: of the frames that are read at once, as they are stored and as float32.
        header_bytes: of the largest element before the pixel data.
    """

    pixels_per_frame: int = 1 << 26
    frames: int = 4096
    bytes_total: int = 1 << 31
    header_bytes: int = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the pixels of a file are stored."""

    rows: int
    columns: int
    frames: int
    samples: int
    photometric: str
    planar: bool
    bits_allocated: int
    bits_stored: int
    high_bit: int
    signed: bool
    overlay_bits: int

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits_stored - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits_stored) - 1

    @property
    def grey(self) -> bool:
        return self.photometric in _GREY

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame that is not compressed."""
        # Of every two pixels, two luminances and one pair of colour differences.
        samples = 2 if self.photometric == "YBR_FULL_422" else self.samples
        return self.rows * self.columns * samples * (self.bits_allocated // 8)


def _layout_refused(detail: str) -> Refused:
    return Refused(Reason.LAYOUT, detail)


def read_layout(opened: Opened, limits: Limits) -> Layout:
    """What the header says of the pixels, with every contradiction refused."""
    if opened.pixels is None:
        raise Refused(Reason.NO_PIXELS)
    if opened.pixels.number != PIXELS:
        raise _layout_refused("floating-point pixels, whose range the header does not say")
    elements = opened.elements
    try:
        rows, columns = elements.integer("Rows"), elements.integer("Columns")
        frames = elements.integer("NumberOfFrames")
        samples, planar = elements.integer("SamplesPerPixel"), elements.integer("PlanarConfiguration")
        allocated, stored = elements.integer("BitsAllocated"), elements.integer("BitsStored")
        high, sign = elements.integer("HighBit"), elements.integer("PixelRepresentation")
    except MALFORMED:
        raise _layout_refused("a size or depth is not a whole number") from None
    if not rows or not columns or rows < 0 or columns < 0:
        raise Refused(Reason.NO_SIZE)
    if rows * columns > limits.pixels_per_frame:
        raise Refused(Reason.TOO_LARGE, f"{rows} x {columns} pixels")
    frames = 1 if frames is None else frames
    if frames < 1:
        raise _layout_refused("it has no frames")
    photometric = elements.text("PhotometricInterpretation")
    if photometric not in SAMPLES:
        # Whatever else stands there may be anything, and is not repeated.
        known = photometric if photometric in _NOT_READ else "of no known name" if photometric else "(none)"
        raise Refused(Reason.PHOTOMETRIC, f"photometric interpretation {known}")
    if samples != SAMPLES[photometric]:
        raise _layout_refused(f"its samples per pixel do not fit {photometric}")
    if samples > 1 and planar not in (0, 1):
        raise _layout_refused("it does not say whether its colours are in planes")
    if sign not in (0, 1) or not stored or not allocated or high is None:
        raise _layout_refused("it does not say how its pixel values are stored")
    if stored == 1 or allocated == 1:
        raise _layout_refused("one bit per pixel: a mask, not a picture")
    if high < stored - 1:
        raise _layout_refused("its pixel values do not start at the lowest bit or above it")
    if allocated not in (8, 16, 32) or not 1 < stored <= allocated or high >= allocated:
        raise _layout_refused(f"{stored} bits stored of {allocated}, highest bit {high}")
    compressed = opened.syntax not in NATIVE
    if compressed and high != stored - 1:
        raise _layout_refused("compressed, and its pixel values do not start at the lowest bit")
    if samples == 3 and (sign == 1 or allocated == 32):
        raise _layout_refused("signed or 32-bit colour")
    if photometric == "YBR_FULL_422" and not compressed and (columns % 2 or planar):
        raise _layout_refused("colour for every second pixel does not fit its columns")
    if photometric in ("YBR_RCT", "YBR_ICT") and opened.syntax not in JPEG_2000:
        raise Refused(Reason.PHOTOMETRIC, "a colour space of JPEG 2000 only")
    return Layout(
        rows=rows,
        columns=columns,
        frames=frames,
        samples=samples,
        photometric=photometric,
        planar=planar == 1,
        bits_allocated=allocated,
        bits_stored=stored,
        high_bit=high,
        signed=sign == 1,
        overlay_bits=_overlay_bits(elements, allocated, stored, high),
    )


def _overlay_bits(elements: Elements, allocated: int, stored: int, high: int) -> int:
    """The unused bits that overlays say are theirs: an overlay of one bit has its data elsewhere."""
    bits = 0
    for group in _OVERLAYS:
        try:
            found = [elements.numbers_at(group | element) for element in (0x0100, 0x0102)]
        except MALFORMED:
            continue
        if all(found) and found[0][0] == allocated and 0 <= found[1][0] < allocated:
            bits |= 1 << int(found[1][0])
    used = ((1 << stored) - 1) << (high + 1 - stored)
    if bits & used:
        raise _layout_refused("an overlay in the bits of the picture")
    return bits


def stored_frames(
    opened: Opened, layout: Layout, wanted: Sequence[int], limits: Limits
) -> Iterator[tuple[int, NDArray[Any], bool]]:
    """The stored samples of the wanted frames, checked: (frame, integers [h,w] or [h,w,3], whether they are RGB)."""
    size = layout.rows * layout.columns * layout.samples * max(4, layout.bits_allocated // 8)
    if len(wanted) > limits.frames or size * len(wanted) > limits.bytes_total:
        raise Refused(Reason.TOO_LARGE, f"{len(wanted)} frames of {layout.rows} x {layout.columns} pixels")
    native = opened.syntax in NATIVE
    return (_native if native else _compressed)(opened, layout, wanted, limits)


def _native(
    opened: Opened, layout: Layout, wanted: Sequence[int], limits: Limits
) -> Iterator[tuple[int, NDArray[Any], bool]]:
    assert opened.pixels is not None
    if opened.pixels.length is None:
        raise Refused(Reason.COMPRESSION, "compressed, and it does not say how")
    if opened.pixels.length == 0:
        raise Refused(Reason.NO_PIXELS)
    total = layout.frame_bytes * layout.frames
    if total > limits.bytes_total and len(wanted) == layout.frames:
        raise Refused(Reason.TOO_LARGE, f"{layout.frames} frames of {layout.rows} x {layout.columns} pixels")
    # A pad byte makes an odd length even; anything else means that one of the sizes is wrong.
    if opened.pixels.length not in (total, total + total % 2):
        kind = Reason.DAMAGED if opened.pixels.length < total else Reason.LAYOUT
        raise Refused(kind, "its pixel data cannot be decoded: they are not as long as its size says")
    if layout.bits_allocated == 32 and not opened.little and opened.pixels.vr == "OW":
        raise _layout_refused("32 bits in big-endian 16-bit words, whose order differs from writer to writer")
    swapped = not opened.little and opened.pixels.vr == "OW" and layout.bits_allocated == 8
    # The last byte is touched first, so that a file that was cut off is refused whichever frame is asked for.
    opened.source.read(opened.pixels.offset + total - 1, 1)
    dtype = np.dtype(f"{'<' if opened.little else '>'}u{layout.bits_allocated // 8}")
    for number in wanted:
        start = number * layout.frame_bytes
        data = _bytes(opened, start, layout.frame_bytes, swapped=swapped)
        raw = _arranged(np.frombuffer(data, dtype=dtype), layout)
        yield number, _in_range(_aligned(raw, layout), layout), False


def _bytes(opened: Opened, start: int, count: int, *, swapped: bool) -> bytes:
    """A stretch of the pixel data; bytes that were written as big-endian words are put back into their order."""
    assert opened.pixels is not None
    if not swapped:
        return opened.source.read(opened.pixels.offset + start, count)
    first, end = start - start % 2, start + count + (start + count) % 2
    words = np.frombuffer(opened.source.read(opened.pixels.offset + first, end - first), dtype="<u2")
    return words.byteswap().tobytes()[start - first : start - first + count]


def _arranged(values: NDArray[Any], layout: Layout) -> NDArray[Any]:
    rows, columns = layout.rows, layout.columns
    if layout.samples == 1:
        return values.reshape(rows, columns)
    if layout.photometric == "YBR_FULL_422":
        pairs = values.reshape(rows, columns // 2, 4)
        colours = np.repeat(pairs[..., 2:], 2, axis=1)
        return np.concatenate([pairs[..., :2].reshape(rows, columns, 1), colours], axis=-1)
    if layout.planar:
        return np.moveaxis(values.reshape(3, rows, columns), 0, -1)
    return values.reshape(rows, columns, 3)


def _aligned(raw: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """Bit patterns to numbers: overlays cleared, the picture's bits moved down, and the sign extended.

    Bits above the picture's must be what they would be in a wider number; only an overlay may have put others there,
    since a wrong number of stored bits looks just the same.
    """
    width, shift = layout.bits_allocated, layout.high_bit + 1 - layout.bits_stored
    if not shift and not layout.overlay_bits:
        return raw.view(raw.dtype.str.replace("u", "i")) if layout.signed else raw
    patterns = raw.astype(np.int64) & ~layout.overlay_bits
    if patterns.size and (patterns & ((1 << shift) - 1)).any():
        raise Refused(Reason.OUT_OF_RANGE, "bits below the picture's are set")
    values = patterns >> shift
    if not layout.signed:
        return values
    width -= shift
    over = ((1 << width) - 1) & ~((1 << layout.bits_stored) - 1) & ~(layout.overlay_bits >> shift)
    negative = (values >> (layout.bits_stored - 1)) & 1 == 1
    above = values & over
    # Where overlays are in the upper bits, writers leave the others at zero as well as filling them with the sign.
    fits = (above == np.where(negative, over, 0)) | ((above == 0) & (layout.overlay_bits != 0))
    if not fits.all():
        raise Refused(Reason.OUT_OF_RANGE, f"do not fit its {layout.bits_stored} stored bits")
    values = values & ((1 << layout.bits_stored) - 1)
    return np.asarray(values - (negative.astype(np.int64) << layout.bits_stored))


def _in_range(values: NDArray[Any], layout: Layout) -> NDArray[Any]:
    if values.min() < layout.lowest or values.max() > layout.highest:
        raise Refused(Reason.OUT_OF_RANGE, f"pixel values that do not fit its {layout.bits_stored} stored bits")
    return values


def _compressed(
    opened: Opened, layout: Layout, wanted: Sequence[int], limits: Limits
) -> Iterator[tuple[int, NDArray[Any], bool]]:
    assert opened.pixels is not None
    if opened.pixels.length is not None:
        raise Refused(Reason.NOT_DECODED, f"not compressed, against its transfer syntax {syntax_name(opened.syntax)}")
    if layout.photometric == "PALETTE COLOR" and layout.signed:
        raise _layout_refused("signed palette indices")
    expected = Expected(
        layout.rows, layout.columns, layout.samples, layout.bits_allocated, layout.bits_stored, layout.photometric
    )
    frames = _Fragments(opened, layout.frames, limits)
    for number in wanted:
        decoded = decode(frames.read(number), opened.syntax, expected)
        values = _in_range(_signed(decoded, layout), layout)
        yield number, values if layout.samples == 3 else values[..., 0], decoded.colour == "RGB"


def _signed(decoded: Decoded, layout: Layout) -> NDArray[Any]:
    """The samples with their sign.

    Streams other than JPEG 2000 have none: a negative number is in them as the pattern of its bits. Where fewer bits
    are coded than are stored, a pattern that looks negative has two readings.
    """
    samples: NDArray[Any] = decoded.samples
    if decoded.signed or not layout.signed:
        return samples
    half = 1 << (decoded.precision - 1)
    negative = samples >= half
    if negative.any() and (decoded.precision < layout.bits_stored or decoded.lossy):
        raise _layout_refused("the sign of its compressed values is not certain")
    return samples.astype(np.int64) - negative * (2 * half)


class _Fragments:
    """Where each compressed frame is; every fragment belongs to one frame, and a frame may have several."""

    def __init__(self, opened: Opened, frames: int, limits: Limits) -> None:
        assert opened.pixels is not None
        self._source = opened.source
        self._most = limits.bytes_total
        base, *items = self._items(opened.pixels.offset)
        if not items or len(items) < frames:
            raise Refused(Reason.NO_PIXELS if not items else Reason.DAMAGED, "fewer fragments than frames")
        self._frames = self._assign(base, items, frames, _extended_offsets(opened.elements))

    def read(self, number: int) -> bytes:
        parts = self._frames[number]
        if sum(length for _, length in parts) > self._most:
            raise Refused(Reason.TOO_LARGE, "its compressed data")
        return b"".join(self._source.read(start, length) for start, length in parts)

    def _items(self, place: int) -> list[tuple[int, int]]:
        """Offset and length of every item up to the delimiter; the first is the table of offsets."""
        items: list[tuple[int, int]] = []
        while True:
            group, element, length = struct.unpack("<HHI", self._source.read(place, 8))
            number = group << 16 | element
            if number == _END:
                break
            if number != _ITEM or len(items) > _MOST_FRAGMENTS:
                raise Refused(Reason.DAMAGED, "its compressed data are not in fragments")
            items.append((place + 8, length))
            place += 8 + length
        if not items:
            raise Refused(Reason.NO_PIXELS)
        return items

    def _assign(
        self, table: tuple[int, int], items: list[tuple[int, int]], frames: int, extended: list[int]
    ) -> list[list[tuple[int, int]]]:
        if frames == 1:
            return [items]
        if len(items) == frames:
            return [[item] for item in items]
        offsets = extended
        if not offsets and table[1] == 4 * frames:
            offsets = list(struct.unpack(f"<{frames}I", self._source.read(*table)))
        places = {start - items[0][0]: number for number, (start, _) in enumerate(items)}
        if offsets:
            if len(offsets) != frames or offsets != sorted(set(offsets)) or not set(offsets) <= places.keys():
                raise Refused(Reason.DAMAGED, "its table of frames")
            firsts = [places[offset] for offset in offsets]
        else:
            firsts = [i for i, (start, length) in enumerate(items) if self._starts(start, length)]
        if len(firsts) != frames or firsts[0] != 0:
            raise Refused(Reason.DAMAGED, "it cannot be told which fragments are which frame")
        return [items[first:end] for first, end in zip(firsts, [*firsts[1:], len(items)], strict=True)]

    def _starts(self, start: int, length: int) -> bool:
        return length >= 4 and starts_frame(self._source.read(start, 4))


def _extended_offsets(elements: Elements) -> list[int]:
    try:
        value, order = elements.words("ExtendedOffsetTable")
    except ValueError:
        return []
    return [int(offset) for (offset,) in struct.iter_unpack(order + "Q", value)] if len(value) % 8 == 0 else []
