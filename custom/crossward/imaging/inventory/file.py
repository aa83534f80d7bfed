"""One file of an inventory, as a worker process reads it: kept apart so that workers start without heavy imports."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from pydicom.uid import DeflatedExplicitVRLittleEndian

from crossward.imaging.dicom.files import read_header
from crossward.imaging.dicom.opening import PixelElement, opened
from crossward.imaging.dicom.scans import Header
from crossward.imaging.refusals import Reason, Refused

EMPTY = asdict(Header())
GONE = "it is gone"
_ARCHIVES = frozenset({".zip", ".gz", ".tgz", ".tar", ".bz2", ".xz", ".7z", ".rar", ".zst"})
_ARCHIVE = "an archive, which is not opened"
_BLOCK = 1 << 20
_LONGEST_HEADER = 1 << 26


@dataclass(frozen=True, slots=True)
class Place:
    """A file as the walk through the folder found it.

    Attributes:
        path: relative to the folder, with slashes.
        size: in bytes.
        changed: when it was last modified, in nanoseconds.
    """

    path: str
    size: int
    changed: int


def read_facts(item: tuple[str, Place]) -> dict[str, Any]:
    """What the header says, by the names of ``Header``'s fields; those that it says nothing about are left out.

    Raises:
        Refused: the file is not read, or is not the one that the walk found.
    """
    folder, place = item
    file = Path(folder, place.path)
    try:
        header = read_header(file)
    except Refused as refused:
        _check_unchanged(file, place)
        archive = refused.reason is Reason.NOT_DICOM and file.suffix.lower() in _ARCHIVES
        raise Refused(refused.reason, _ARCHIVE) if archive else refused from None
    except MemoryError:
        raise
    except OSError as error:
        _check_unchanged(file, place)
        raise Refused(Reason.UNREADABLE, type(error).__name__) from None
    except Exception as error:
        # Its text may quote the header.
        raise Refused(Reason.DAMAGED, type(error).__name__) from None
    _check_unchanged(file, place)
    return said(header)


def said(header: Header) -> dict[str, Any]:
    """The fields of a header that say something."""
    values = {name: getattr(header, name) for name in EMPTY}
    return {name: value for name, value in values.items() if value != EMPTY[name] and _finite(value)}


def pixel_digest(item: tuple[str, Place]) -> str:
    """A hash of the pixel data as it is stored, compressed or not; empty where it lies inside deflated data.

    Raises:
        Refused: the file cannot be read, or is not the one that the walk found.
    """
    folder, place = item
    file = Path(folder, place.path)
    try:
        with opened(file, [], header_bytes=_LONGEST_HEADER) as header, file.open("rb") as stream:
            pixels = None if header.syntax == DeflatedExplicitVRLittleEndian else header.pixels
            digest = "" if pixels is None else _digest(stream, pixels)
    except OSError as error:
        _check_unchanged(file, place)
        raise Refused(Reason.UNREADABLE, type(error).__name__) from None
    _check_unchanged(file, place)
    return digest


def _digest(stream: BinaryIO, pixels: PixelElement) -> str:
    stream.seek(pixels.offset)
    digest = blake2b(digest_size=16)
    # Compressed frames come without a length and go on to the end of the file.
    left = sys.maxsize if pixels.length is None else pixels.length
    while left and (block := stream.read(min(left, _BLOCK))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _check_unchanged(file: Path, place: Place) -> None:
    try:
        status = file.stat()
    except OSError:
        raise Refused(Reason.CHANGED, GONE) from None
    if (status.st_size, status.st_mtime_ns) != (place.size, place.changed):
        raise Refused(Reason.CHANGED)


def _finite(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return all(math.isfinite(number) for number in numbers if isinstance(number, float))
