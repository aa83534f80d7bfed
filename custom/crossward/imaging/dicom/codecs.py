"""Compressed frames to stored samples: what a stream says of itself is held against the header before it is decoded.

Decoders by transfer syntax, all under licences that Apache-2.0 software may use:

* JPEG with 8 bits: Pillow (libjpeg-turbo), which reports truncation and lets the colour space be chosen.
* JPEG with more bits, and lossless JPEG: GDCM, the only one here that has them; gives nothing for a stream cut short.
* JPEG-LS: pyjpegls (CharLS). JPEG 2000 and HTJ2K: OpenJPEG, which knows signed samples and all depths; Pillow does not.
* RLE: below.

They are C libraries fed by strangers: callers decode files that they do not trust in processes of their own.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydicom import uid

from crossward.imaging.refusals import Reason, Refused

Samples = NDArray[Any]
Colour = Literal["RGB", "YBR", "as the header says"]


@dataclass(frozen=True)
class Expected:
    """What the header says of a frame."""

    rows: int
    columns: int
    samples: int
    bits_allocated: int
    bits_stored: int
    photometric: str


@dataclass(frozen=True)
class Decoded:
    """The samples of one frame.

    Attributes:
        samples: integers [h,w,s].
        precision: bits per sample in the stream.
        signed: whether the samples have their sign already; else they are bit patterns.
        colour: the colour space that the samples are in.
        lossy: whether the samples went through a transform that loses some.
    """

    samples: Samples
    precision: int
    signed: bool = False
    colour: Colour = "as the header says"
    lossy: bool = False


@dataclass(frozen=True)
class _Stream:
    """What a JPEG or JPEG-LS stream says of itself."""

    kind: int
    precision: int
    rows: int
    columns: int
    samples: int
    subsampled: bool
    colour: Colour


def _bad_stream() -> Refused:
    return Refused(Reason.NOT_DECODED, "its compressed data are damaged")


def _contradiction() -> Refused:
    return Refused(Reason.LAYOUT, "its compressed data and its header differ in size or depth")


def _colour_contradiction() -> Refused:
    return Refused(Reason.PHOTOMETRIC, "its compressed data and its header name different colour spaces")


# Start-of-frame markers by the processes that each transfer syntax may use.
_SEQUENTIAL, _EXTENDED, _PROGRESSIVE, _LOSSLESS, _JPEG_LS = 0xC0, 0xC1, 0xC2, 0xC3, 0xF7
_STANDALONE = {0x01, *range(0xD0, 0xD8)}


def syntax_name(syntax: str) -> str:
    """The standard's name of a transfer syntax; "other" for one that it does not name."""
    # Not by a UID's own name: making one of a malformed text warns, and quotes it.
    return str(uid.UID_dictionary[syntax][0]) if syntax in uid.UID_dictionary else "other" if syntax else "none given"


def decode(data: bytes, syntax: str, expected: Expected) -> Decoded:
    """Decodes one frame.

    Raises:
        Refused: the syntax is not read, the stream is damaged, or it contradicts the header.
    """
    if syntax not in _DECODERS:
        raise Refused(Reason.COMPRESSION, f"transfer syntax {syntax_name(syntax)}")
    try:
        decoded = _DECODERS[syntax](data, expected)
    except (Refused, MemoryError):
        raise
    except Exception as error:
        # Decoders raise whatever they like, and their texts may quote the data: only the kind is passed on.
        kind = f"{type(error).__name__}; transfer syntax {syntax_name(syntax)}"
        raise Refused(Reason.NOT_DECODED, kind) from None
    if decoded.samples.shape != (expected.rows, expected.columns, expected.samples):
        raise _contradiction()
    return decoded


def starts_frame(data: bytes) -> bool:
    """Whether a fragment begins a new JPEG, JPEG-LS or JPEG 2000 stream."""
    return data[:3] == b"\xff\xd8\xff" or data[:4] == _CODESTREAM


def _inspect_jpeg(data: bytes) -> _Stream:
    """Reads the markers up to the first scan.

    A colour space counts as named by an Adobe marker or by the component names R, G and B; JFIF means YBR.
    """
    if data[:2] != b"\xff\xd8" or b"\xff\xd9" not in data[-16:]:
        raise _bad_stream()
    frame: tuple[int, int, int, int, list[tuple[int, int]]] | None = None
    jfif, adobe, place = False, None, 2
    while True:
        while data[place : place + 2] == b"\xff\xff":
            place += 1
        marker_start, marker = data[place : place + 2]
        if marker_start != 0xFF:
            raise _bad_stream()
        place += 2
        if marker in _STANDALONE:
            continue
        (length,) = struct.unpack(">H", data[place : place + 2])
        body = data[place + 2 : place + length]
        if length < 2 or len(body) != length - 2:
            raise _bad_stream()
        place += length
        if marker in (0xC0, 0xC1, 0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), _JPEG_LS):
            precision, rows, columns, count = struct.unpack(">BHHB", body[:6])
            if frame is not None or len(body) != 6 + 3 * count:
                raise _bad_stream()
            frame = marker, precision, rows, columns, [(body[6 + 3 * i], body[7 + 3 * i]) for i in range(count)]
        jfif |= marker == 0xE0 and body[:5] == b"JFIF\0"
        if marker == 0xEE and body[:5] == b"Adobe" and len(body) >= 12:
            adobe = body[11]
        if marker == 0xDA:
            break
    if frame is None:
        raise _bad_stream()
    kind, precision, rows, columns, components = frame
    colour: Colour = "as the header says"
    if len(components) == 3:
        if adobe == 0 or [name for name, _ in components] == list(b"RGB"):
            colour = "RGB"
        elif adobe == 1 or jfif:
            colour = "YBR"
    subsampled = len({sampling for _, sampling in components}) > 1
    return _Stream(kind, precision, rows, columns, len(components), subsampled, colour)


def _check(stream: _Stream, expected: Expected, kinds: set[int]) -> None:
    if stream.kind not in kinds:
        raise Refused(Reason.COMPRESSION, "its stream is of another kind than its transfer syntax")
    size = (stream.rows, stream.columns, stream.samples)
    if size != (expected.rows, expected.columns, expected.samples) or stream.precision > expected.bits_allocated:
        raise _contradiction()


def _jpeg(data: bytes, expected: Expected, kinds: set[int]) -> Decoded:
    stream = _inspect_jpeg(data)
    _check(stream, expected, kinds)
    lossy = stream.kind != _LOSSLESS
    if stream.precision == 8 and lossy:
        return _jpeg_8(data, expected, stream)
    if expected.samples != 1 and (lossy or stream.subsampled):
        raise Refused(Reason.COMPRESSION, "colour with more than 8 bits")
    return Decoded(_gdcm(data, expected, stream), stream.precision, lossy=lossy)


def _jpeg_8(data: bytes, expected: Expected, stream: _Stream) -> Decoded:
    # Takes a moment to import, and most files are not JPEG.
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        if expected.samples == 1:
            return Decoded(np.asarray(image)[..., None], 8, lossy=True)
        header_rgb = expected.photometric == "RGB"
        if stream.colour != "as the header says" and (stream.colour == "RGB") != header_rgb:
            raise _colour_contradiction()
        if header_rgb and stream.subsampled:
            raise _colour_contradiction()
        if header_rgb and stream.colour != "RGB":
            # Asks libjpeg for the components as they are: without a marker it would take them for YBR.
            image.draft("YCbCr", image.size)
        elif image.mode != "RGB":
            raise _colour_contradiction()
        return Decoded(np.asarray(image), 8, colour="RGB", lossy=True)


def _gdcm(data: bytes, expected: Expected, stream: _Stream) -> Samples:
    import gdcm

    gdcm.Trace.WarningOff()
    gdcm.Trace.ErrorOff()
    fragment = gdcm.Fragment()
    fragment.SetByteStringValue(data)
    fragments = gdcm.SequenceOfFragments.New()
    fragments.AddFragment(fragment)
    element = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    element.SetValue(fragments.__ref__())
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((expected.columns, expected.rows, 1))
    image.SetDataElement(element)
    # As RGB, three components come out as they went in.
    photometric = "RGB" if expected.samples == 3 else "MONOCHROME2"
    kind = gdcm.PhotometricInterpretation.GetPIType(photometric)
    image.SetPhotometricInterpretation(gdcm.PhotometricInterpretation(kind))
    if expected.samples == 3:
        image.SetPlanarConfiguration(0)
    syntax = uid.JPEGLossless if stream.kind == _LOSSLESS else uid.JPEGExtended12Bit
    image.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.GetTSType(str(syntax))))
    dtype = np.dtype("u1") if stream.precision <= 8 else np.dtype("<u2")
    image.SetPixelFormat(
        gdcm.PixelFormat(expected.samples, dtype.itemsize * 8, stream.precision, stream.precision - 1, 0)
    )
    buffer = image.GetBuffer()
    if buffer is None:
        raise _bad_stream()
    values = np.frombuffer(buffer.encode("utf-8", "surrogateescape"), dtype=dtype)
    shape = (expected.rows, expected.columns, expected.samples)
    if values.size != np.prod(shape):
        raise _contradiction()
    return values.reshape(shape)


def _jpeg_ls(data: bytes, expected: Expected) -> Decoded:
    import jpeg_ls

    stream = _inspect_jpeg(data)
    _check(stream, expected, {_JPEG_LS})
    if stream.subsampled:
        raise Refused(Reason.COMPRESSION, "subsampled JPEG-LS")
    buffer, info = jpeg_ls.decode_pixel_data(data)
    dtype = np.dtype("u1") if stream.precision <= 8 else np.dtype("<u2")
    values = np.frombuffer(buffer, dtype=dtype)
    by_plane = expected.samples > 1 and info["interleave_mode"] == 0
    shape = (expected.rows, expected.columns)
    if by_plane:
        values = np.moveaxis(values.reshape(expected.samples, *shape), 0, -1)
    return Decoded(values.reshape(*shape, expected.samples), stream.precision)


_CODESTREAM = b"\xff\x4f\xff\x51"
# Whether the stream may ask for the colour transform, which the decoder undoes; RGB headers are seen with and without.
_MAY_TRANSFORM = {"YBR_RCT": (True,), "YBR_ICT": (True,), "YBR_FULL": (False,), "RGB": (True, False)}


def _jpeg_2000(data: bytes, expected: Expected) -> Decoded:
    from openjpeg.utils import decode_pixel_data

    # Some writers wrap the stream in a JP2 file, whose boxes say nothing that the header does not.
    data = data[max(0, data.find(_CODESTREAM)) :]
    if data[:4] != _CODESTREAM or len(data) < 50:
        raise _bad_stream()
    right, bottom, left, top = struct.unpack(">4I", data[8:24])
    (count,) = struct.unpack(">H", data[40:42])
    parts = [tuple(data[42 + 3 * i : 45 + 3 * i]) for i in range(min(count, 4))]
    if len(set(parts)) != 1 or len(parts) != count or parts[0][1:] != (1, 1):
        raise Refused(Reason.COMPRESSION, "components of different kinds")
    signed, precision = bool(parts[0][0] & 0x80), (parts[0][0] & 0x7F) + 1
    size = (bottom - top, right - left, count)
    if size != (expected.rows, expected.columns, expected.samples) or precision > expected.bits_allocated:
        raise _contradiction()
    transform, reversible = _coding_style(data)
    if count == 3 and transform not in _MAY_TRANSFORM.get(expected.photometric, ()):
        raise _colour_contradiction()
    # Whole bytes that hold the precision.
    width = next(each for each in (1, 2, 4) if precision <= 8 * each)
    buffer = decode_pixel_data(data, version=2)
    values = np.frombuffer(buffer, dtype=f"<{'i' if signed else 'u'}{width}")
    shape = (expected.rows, expected.columns, expected.samples)
    colour: Colour = "RGB" if transform else "as the header says"
    return Decoded(values.reshape(shape), precision, signed=signed, colour=colour, lossy=not reversible)


def _coding_style(data: bytes) -> tuple[bool, bool]:
    """Whether the main header asks for the colour transform, and for the reversible wavelet."""
    place = 2
    while data[place : place + 2] != b"\xff\x52":
        if data[place] != 0xFF or data[place + 1] == 0x90:
            raise _bad_stream()
        (length,) = struct.unpack(">H", data[place + 2 : place + 4])
        place += 2 + length
    return data[place + 8] == 1, data[place + 13] == 1


def _rle(data: bytes, expected: Expected) -> Decoded:
    """PS3.5 Annex G: a segment per byte of a sample, the highest byte first, each packed on its own."""
    width = expected.bits_allocated // 8
    count, *offsets = struct.unpack("<16I", data[:64])
    if count != width * expected.samples:
        raise _contradiction()
    ends = [*offsets[1:count], len(data)]
    pixels = expected.rows * expected.columns
    planes = np.empty((expected.samples, width, pixels), dtype=np.uint8)
    for number, (start, end) in enumerate(zip(offsets[:count], ends, strict=True)):
        if not 64 <= start < end <= len(data):
            raise _bad_stream()
        planes[number // width, number % width] = np.frombuffer(_unpack(data, start, end, pixels), dtype=np.uint8)
    words = np.ascontiguousarray(planes.transpose(2, 0, 1)).view(f">u{width}")
    return Decoded(words.reshape(expected.rows, expected.columns, expected.samples), expected.bits_allocated)


def _unpack(data: bytes, place: int, end: int, count: int) -> bytearray:
    out = bytearray()
    while place < end and len(out) < count:
        control = data[place]
        if control < 128:
            out += data[place + 1 : min(end, place + 2 + control)]
            place += 2 + control
        else:
            if control > 128:
                out += data[place + 1 : place + 2] * (257 - control)
            place += 1 if control == 128 else 2
    # Segments and fragments are padded to even lengths; more than that is left over only by a wrong size.
    if len(out) - count not in (0, 1) or end - place > 2:
        raise _bad_stream()
    return out[:count]


JPEG_2000 = (uid.JPEG2000Lossless, uid.JPEG2000, uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K)
_DECODERS: Mapping[str, Callable[[bytes, Expected], Decoded]] = {
    uid.JPEGBaseline8Bit: lambda data, expected: _jpeg(data, expected, {_SEQUENTIAL}),
    uid.JPEGExtended12Bit: lambda data, expected: _jpeg(data, expected, {_SEQUENTIAL, _EXTENDED}),
    # Full progression, retired: the same decoders read it.
    "1.2.840.10008.1.2.4.55": lambda data, expected: _jpeg(data, expected, {_PROGRESSIVE}),
    uid.JPEGLossless: lambda data, expected: _jpeg(data, expected, {_LOSSLESS}),
    uid.JPEGLosslessSV1: lambda data, expected: _jpeg(data, expected, {_LOSSLESS}),
    uid.JPEGLSLossless: _jpeg_ls,
    uid.JPEGLSNearLossless: _jpeg_ls,
    **dict.fromkeys(JPEG_2000, _jpeg_2000),
    uid.RLELossless: _rle,
}
NATIVE = frozenset(
    {
        "",
        uid.ImplicitVRLittleEndian,
        uid.ExplicitVRLittleEndian,
        uid.ExplicitVRBigEndian,
        uid.DeflatedExplicitVRLittleEndian,
    }
)
