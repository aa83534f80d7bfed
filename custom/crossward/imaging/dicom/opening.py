"""A DICOM file opened with bounds: its header parsed up to the pixel data, which are read only when asked for."""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pydicom.charset import convert_encodings
from pydicom.filereader import read_dataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian

from crossward.imaging.dicom.elements import UNDEFINED_LENGTH, Elements
from crossward.imaging.refusals import Reason, Refused

PIXELS = 0x7FE00010
# The two others are of floating-point numbers.
_PIXEL_TAGS = frozenset({PIXELS, 0x7FE00008, 0x7FE00009})
_PREAMBLE = 128
_HEAD = 1 << 16
_CHARSET = 0x00080005
_STANDARD_UID = "1.2.840.10008."
_LONG_VRS = frozenset({b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"UN"})


@dataclass(frozen=True)
class PixelElement:
    """Where the pixel data are: their element, its bytes, and its length, None for compressed frames in fragments."""

    number: int
    vr: str
    offset: int
    length: int | None


class Source(Protocol):
    """The bytes that a data set is in."""

    def streams(self, most: int) -> Iterator[tuple[BinaryIO, bool]]:
        """Streams to look for the pixel data in, each longer than the one before; and whether there is no more."""

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes from there on; Refused where there are fewer."""


class _Plain:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def streams(self, most: int) -> Iterator[tuple[BinaryIO, bool]]:  # noqa: ARG002
        self._file.seek(0)
        # Almost every header is within the first bytes, and parsing memory is twice as fast as parsing a file.
        yield io.BytesIO(self._file.read(_HEAD)), self._size <= _HEAD
        if self._size > _HEAD:
            yield self._file, True

    def read(self, offset: int, count: int) -> bytes:
        # Asked before reading, since a length of four gigabytes must not be made room for.
        if offset + count > self._size:
            raise Refused(Reason.DAMAGED, "the file ends early")
        self._file.seek(offset)
        found = self._file.read(count)
        if len(found) != count:
            raise Refused(Reason.DAMAGED, "the file ends early")
        return found


class _Inflated:
    """Deflated data, inflated no further than is asked for."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        file.seek(start)
        self._file = file
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._bytes = bytearray()
        self._waiting = b""

    def _inflate(self, count: int) -> None:
        while len(self._bytes) < count and not self._inflater.eof:
            self._waiting = self._waiting or self._file.read(_HEAD)
            if not self._waiting:
                return
            try:
                self._bytes += self._inflater.decompress(self._waiting, count - len(self._bytes))
            except zlib.error:
                raise Refused(Reason.DAMAGED, "its deflated data") from None
            self._waiting = self._inflater.unconsumed_tail

    def streams(self, most: int) -> Iterator[tuple[BinaryIO, bool]]:
        for count in (_HEAD, most):
            self._inflate(count)
            whole = len(self._bytes) < count
            if whole and not self._inflater.eof:
                raise Refused(Reason.DAMAGED, "the file ends early")
            yield io.BytesIO(bytes(self._bytes[:count])), whole

    def read(self, offset: int, count: int) -> bytes:
        self._inflate(offset + count)
        found = bytes(self._bytes[offset : offset + count])
        if len(found) != count:
            raise Refused(Reason.DAMAGED, "the file ends early")
        return found


@dataclass(frozen=True)
class Opened:
    """A file whose header is parsed.

    Attributes:
        elements: those that were asked for.
        syntax: transfer syntax, empty where the file does not name one.
        little: whether the bytes of a word come in rising order.
        pixels: where the pixel data are, None where there are none.
        source: to read them from.
    """

    elements: Elements
    syntax: str
    little: bool
    pixels: PixelElement | None
    source: Source


@contextmanager
def opened(path: Path, tags: Sequence[int], *, header_bytes: int) -> Iterator[Opened]:
    """Opens a file and parses the wanted elements before its pixel data.

    A file without the preamble is read only if it begins with an element of group 2 or 8 and names a SOP class of the
    standard.

    Args:
        path: of the file.
        tags: elements to keep; everything else is skipped over.
        header_bytes: the largest element that is read, and the longest header of deflated data.

    Raises:
        Refused: it cannot be read or is not DICOM.
    """
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Refused(Reason.UNREADABLE, "no such file") from None
    except OSError as error:
        raise Refused(Reason.UNREADABLE, os.strerror(error.errno or 0)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise Refused(Reason.UNREADABLE, "not a file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield _parse(file, status.st_size, tags, header_bytes)
        except Refused:
            raise
        except MemoryError:
            raise Refused(Reason.TOO_LARGE) from None
        except OSError as error:
            raise Refused(Reason.UNREADABLE, os.strerror(error.errno or 0)) from None
        except Exception as error:
            # A header can be broken in more ways than were thought of, and texts of errors may quote it.
            raise Refused(Reason.DAMAGED, type(error).__name__) from None


def _parse(file: BinaryIO, size: int, tags: Sequence[int], header_bytes: int) -> Opened:
    start = file.read(_PREAMBLE + 4)
    preamble = start[_PREAMBLE:] == b"DICM"
    if not preamble and not _begins_like_dicom(start):
        raise Refused(Reason.NOT_DICOM)
    before = _PREAMBLE + 4 if preamble else 0
    file.seek(before)
    # Group 2 is short; a bound keeps a bad length in it from reading the file.
    meta = io.BytesIO(file.read(_HEAD))
    group2 = _elements(meta, implicit=False, little=True, stop=lambda number, *_: number >> 16 != 2, tags=[0x00020010])
    syntax = group2.text("TransferSyntaxUID")
    beginning = before + meta.tell()
    little = syntax != ExplicitVRBigEndian
    deflated = syntax == DeflatedExplicitVRLittleEndian
    source: Source = _Inflated(file, beginning) if deflated else _Plain(file, size)
    for stream, last in source.streams(header_bytes):
        stream.seek(0 if deflated else beginning)
        order = _Order()
        try:
            implicit = _is_implicit(stream)
            elements = _elements(stream, implicit=implicit, little=little, stop=order, tags=tags, largest=header_bytes)
            pixels = _pixel_element(stream, little=little) if order.at_pixels else None
            if last and pixels is None and stream.tell() != stream.seek(0, os.SEEK_END):
                raise Refused(Reason.DAMAGED, "the file ends early")
        except Refused:
            if last:
                raise
            continue
        if pixels or last:
            break
    else:
        raise Refused(Reason.TOO_LARGE, "its header")
    elements.check_whole()
    if not preamble and not elements.text("SOPClassUID").startswith(_STANDARD_UID):
        raise Refused(Reason.NOT_DICOM)
    if order.last == 0 or (implicit and not little):
        raise Refused(Reason.DAMAGED, "its header")
    return Opened(elements, syntax, little, pixels, source)


def _is_implicit(stream: BinaryIO) -> bool:
    """Whether elements lack a value representation; some writers contradict their transfer syntax in this."""
    vr = stream.read(6)[4:]
    stream.seek(-4 - len(vr), os.SEEK_CUR)
    return not (vr.isalpha() and vr.isupper())


def _begins_like_dicom(start: bytes) -> bool:
    """Whether the first element is one of group 2 or 8, the lowest that a data set may begin with."""
    if len(start) < 8:
        return False
    group, element, vr = struct.unpack("<HH2s", start[:6])
    lowest = (group == 2 and element <= 2) or (group == 8 and element <= 0x18)
    explicit = vr.isalpha() and vr.isupper()
    return bool(lowest and (explicit or struct.unpack("<I", start[4:8])[0] <= 0x100))


class _Order:
    """Stops at the pixel data, and refuses elements that are not in rising order, as after a wrong length."""

    def __init__(self) -> None:
        self.last = 0
        self.at_pixels = False

    def __call__(self, number: int, vr: str | None, length: int) -> bool:  # noqa: ARG002
        # pydicom's tags are slow to compare.
        plain = int(number)
        if plain <= self.last:
            raise Refused(Reason.DAMAGED, "its elements are out of order")
        self.last = plain
        self.at_pixels = plain in _PIXEL_TAGS
        return self.at_pixels


def _elements(
    stream: BinaryIO, *, implicit: bool, little: bool, stop: Any, tags: Sequence[int], largest: int = _HEAD
) -> Elements:
    try:
        dataset = read_dataset(
            stream,
            is_implicit_VR=implicit,
            is_little_endian=little,
            stop_when=stop,
            defer_size=largest,
            specific_tags=list(tags),
        )
        charset = dataset.get_item(_CHARSET) if _CHARSET in dataset else None
        names = (getattr(charset, "value", None) or b"").decode("ascii").strip(" \0")
        return Elements(dataset, convert_encodings(names.split("\\")) if names else ["iso8859"])
    except (Refused, MemoryError):
        raise
    except Exception as error:
        # Without a number it is pydicom's word for a broken sequence, not the disk's.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Refused(Reason.DAMAGED, type(error).__name__) from None


def _pixel_element(stream: BinaryIO, *, little: bool) -> PixelElement:
    order = "<" if little else ">"
    head = stream.read(12)
    if len(head) < 8:
        raise Refused(Reason.DAMAGED, "the file ends early")
    group, element = struct.unpack(order + "HH", head[:4])
    # A data set may be implicit in spite of its transfer syntax, and pydicom has found its way by what is there.
    explicit = head[4:6] in _LONG_VRS
    if explicit and len(head) < 12:
        raise Refused(Reason.DAMAGED, "the file ends early")
    (length,) = struct.unpack(order + "I", head[8:12] if explicit else head[4:8])
    offset = stream.tell() - len(head) + (12 if explicit else 8)
    vr = head[4:6].decode("ascii") if explicit else "OW"
    return PixelElement(group << 16 | element, vr, offset, None if length == UNDEFINED_LENGTH else length)
