"""What reading a DICOM file gives: its header's facts, and its frames in the units of the modality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Vector3 = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a header says, as plain values; a text is empty and a number None where the file does not say.

    The first group names people and things that are linked to them: it is for joining and counting inside the site, and
    is never printed or logged.
    """

    patient_id: str = ""
    patient_name: str = ""
    birth_date: str = ""
    sex: str = ""
    issuer: str = ""
    accession: str = ""
    study_uid: str = ""
    series_uid: str = ""
    sop_uid: str = ""
    frame_of_reference: str = ""

    sop_class: str = ""
    modality: str = ""
    manufacturer: str = ""
    model: str = ""
    software: str = ""
    station: str = ""
    serial: str = ""
    institution: str = ""
    body_part: str = ""
    view: str = ""
    laterality: str = ""
    image_type: str = ""
    kernel: str = ""
    kvp: float | None = None
    field_strength: float | None = None
    slice_thickness: float | None = None
    spacing: tuple[float, float] | None = None

    transfer_syntax: str = ""
    photometric: str = ""
    samples: int | None = None
    bits_allocated: int | None = None
    bits_stored: int | None = None
    signed: bool | None = None
    frames: int = 1
    rows: int | None = None
    columns: int | None = None
    burned_in: str = ""
    instance_number: int | None = None
    position: Vector3 | None = None
    orientation: tuple[float, float, float, float, float, float] | None = None
    has_pixels: bool = False


@dataclass(frozen=True)
class Window:
    """One VOI window in the units of the modality (DICOM PS3.3 C.11.2)."""

    centre: float
    width: float
    function: Literal["LINEAR", "LINEAR_EXACT", "SIGMOID"] = "LINEAR"


@dataclass(frozen=True)
class Table:
    """A VOI lookup table: the output for ``first``, ``first + 1``, ...; inputs outside take the nearest end.

    Attributes:
        first: the first input value.
        outputs: by input, scaled to [0, 1] by the bits the table is given in.
    """

    first: float
    outputs: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One picture of a file.

    Attributes:
        index: of the frame in its file, from 0.
        values: float32 [h,w] in the units of the modality (rescaled, or through its table), or [h,w,3] red, green,
            blue in [0, 1] (colour by YBR or palette is red, green, blue here).
        valid: False where a pixel is padding; None where there is none.
        low: the smallest value that the stored bits allow, in the units of ``values``.
        high: the largest.
        windows: VOI windows in the file's order.
        table: the VOI lookup table, where the file has one; it goes before windows.
        inverted: whether larger values are darker (MONOCHROME1). ``values`` are *not* turned round.
        spacing: millimetres between rows and between columns.
        position: of the first pixel's centre, in millimetres (image position patient).
        orientation: direction cosines of rows and columns (image orientation patient).
    """

    index: int
    values: NDArray[np.float32]
    valid: NDArray[np.bool_] | None
    low: float
    high: float
    windows: tuple[Window, ...] = ()
    table: Table | None = None
    inverted: bool = False
    spacing: tuple[float, float] | None = None
    position: Vector3 | None = None
    orientation: tuple[float, float, float, float, float, float] | None = None

    @property
    def colour(self) -> bool:
        return self.values.ndim == 3


@dataclass(frozen=True)
class Scan:
    """A file: its header and the frames that were asked for."""

    header: Header
    frames: tuple[Frame, ...]
