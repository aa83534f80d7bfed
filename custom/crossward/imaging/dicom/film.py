"""One DICOM file in, one picture in [0, 1] out; what cannot be read without guessing is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.display import unit
from crossward.imaging.dicom.files import read_scan
from crossward.imaging.dicom.scans import Header
from crossward.imaging.refusals import Reason, Refused

UNKNOWN_SCANNER = "unknown scanner"


@dataclass(frozen=True)
class Film:
    """One picture and what the file says about how it was made.

    Attributes:
        pixels: float32 [H,W] or [H,W,3] in [0, 1]; air is dark, whatever the photometric interpretation.
        scanner: manufacturer and model name.
        sop_uid: the file's SOP instance UID, empty where it has none.
        spacing: millimetres between rows and between columns, where the file gives them.
        bits: bits stored per sample.
        photometric: the photometric interpretation in the file.
    """

    pixels: NDArray[np.float32]
    scanner: str
    sop_uid: str
    spacing: tuple[float, float] | None
    bits: int
    photometric: str


def read_image(path: Path) -> Film:
    """Reads a single-frame grey or colour image.

    Values are scaled by the range that the stored bits allow, not by the picture's own extremes, so the same
    value means the same grey in every file of a scanner.

    Raises:
        BadInput: the file cannot be read, or not without guessing; names the file and the reason.
    """
    try:
        scan = read_scan(path, frames=(0,))
        if scan.header.frames != 1:
            raise Refused(Reason.TOO_MANY_FRAMES, "several frames, and only single images are read")
    except Refused as refused:
        raise BadInput(_words(path, refused)) from None
    return Film(
        pixels=unit(scan.frames[0]),
        scanner=_scanner(scan.header),
        sop_uid=scan.header.sop_uid,
        spacing=scan.frames[0].spacing,
        bits=scan.header.bits_stored or 0,
        photometric=scan.header.photometric,
    )


def _words(path: Path, refused: Refused) -> str:
    if refused.reason is Reason.UNREADABLE and not path.exists():
        return f"{path.name}: no such file; check the name and the folder"
    if refused.reason is Reason.UNREADABLE:
        return f"{path.name}: cannot be read ({refused.detail}); check the file's permissions"
    return f"{path.name}: {refused}; convert the file or take it out of the list"


def _scanner(header: Header) -> str:
    return " ".join(f"{header.manufacturer} {header.model}".split()) or UNKNOWN_SCANNER
