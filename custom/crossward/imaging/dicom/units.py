"""Stored samples to frames: the units of the modality for grey, red, green and blue for colour, padding, VOI."""

from __future__ import annotations

import math
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.elements import MALFORMED, Elements
from crossward.imaging.dicom.pixels import Layout
from crossward.imaging.dicom.scans import Frame, Table, Vector3, Window
from crossward.imaging.refusals import Reason, Refused

Function = Literal["LINEAR", "LINEAR_EXACT", "SIGMOID"]
Orientation = tuple[float, float, float, float, float, float]
_PALETTE = tuple(f"{colour}PaletteColorLookupTable" for colour in ("Red", "Green", "Blue"))
# Luminance and the two colour differences to red, green and blue (PS3.3 C.7.6.3.1.2, turned round).
_FROM_YBR = np.array([[1.0, 0.0, 1.402], [1.0, -0.344136, -0.714136], [1.0, 1.772, 0.0]])


class Groups:
    """Where the facts of each frame are: functional groups of the frame, those shared by all, or the file itself."""

    def __init__(self, elements: Elements, frames: int | None) -> None:
        self._file = elements
        self._shared = elements.items("SharedFunctionalGroupsSequence")[:1]
        self._frames = elements.items("PerFrameFunctionalGroupsSequence") if frames else []
        if self._frames and len(self._frames) != frames:
            raise Refused(Reason.LAYOUT, "it describes more or fewer frames than it has")

    def of(self, frame: int, sequence: str) -> Elements:
        """The group by the name of its sequence; the file's own elements where there is none."""
        for place in (*self._frames[frame : frame + 1], *self._shared):
            items = place.items(sequence)
            if items:
                return items[0]
        return self._file


def make_frame(stored: NDArray[Any], *, index: int, rgb: bool, layout: Layout, groups: Groups, file: Elements) -> Frame:
    """One frame of stored samples in the units that its file gives them.

    Args:
        stored: integers [h,w] or [h,w,3].
        index: of the frame.
        rgb: whether the decoder has turned the samples into red, green and blue.
        layout: of the file.
        groups: of the file.
        file: its elements.
    """
    position, orientation = plane(groups, index)
    place: dict[str, Any] = {
        "index": index,
        "spacing": spacing_of(groups.of(index, "PixelMeasuresSequence")),
        "position": position,
        "orientation": orientation,
    }
    if not layout.grey:
        return Frame(values=_colour(stored, rgb, layout, file), valid=None, low=0.0, high=1.0, **place)
    values, low, high = _modality(stored, layout, groups.of(index, "PixelValueTransformationSequence"))
    voi = groups.of(index, "FrameVOILUTSequence")
    return Frame(
        values=values,
        valid=_valid(stored, layout, file),
        low=low,
        high=high,
        windows=_windows(voi),
        table=_voi_table(voi, signed=low < 0),
        inverted=layout.photometric == "MONOCHROME1",
        **place,
    )


def _modality(stored: NDArray[Any], layout: Layout, elements: Elements) -> tuple[NDArray[np.float32], float, float]:
    tables = elements.items("ModalityLUTSequence")
    slope, intercept = _rescale(elements)
    if tables:
        if (slope, intercept) != (1.0, 0.0):
            raise Refused(Reason.RESCALE, "both a rescale and a modality lookup table")
        first, outputs, bits = _table(tables[0], "LUT", signed=layout.signed, reason=Reason.RESCALE)
        mapped = outputs[np.clip(stored.astype(np.int64) - first, 0, len(outputs) - 1)]
        return mapped.astype(np.float32), 0.0, float((1 << bits) - 1)
    with np.errstate(over="ignore"):
        low, high = sorted(float(np.float32(slope * end + intercept)) for end in (layout.lowest, layout.highest))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise Refused(Reason.RESCALE, "its rescale slope and intercept leave no usable range of values")
    return (stored.astype(np.float64) * slope + intercept).astype(np.float32), low, high


def _rescale(elements: Elements) -> tuple[float, float]:
    numbers = []
    for keyword, default in (("RescaleSlope", 1.0), ("RescaleIntercept", 0.0)):
        try:
            number = elements.number(keyword)
        except MALFORMED:
            number = math.nan
        number = default if number is None else number
        if not math.isfinite(number):
            raise Refused(Reason.RESCALE, f"its {keyword} is not a number")
        numbers.append(number)
    if numbers[0] == 0:
        raise Refused(Reason.RESCALE, "its rescale slope is 0")
    return numbers[0], numbers[1]


def _table(elements: Elements, name: str, *, signed: bool, reason: Reason) -> tuple[int, NDArray[np.int64], int]:
    """A lookup table: its first input, its outputs, and the bits that they are given in."""
    try:
        entries, first, bits = (int(number) for number in elements.numbers(f"{name}Descriptor"))
        data, order = elements.words(f"{name}Data")
    except (*MALFORMED, TypeError):
        raise Refused(reason, "a lookup table") from None
    # 65536 entries do not fit the descriptor's 16 bits, and its sign is the pixels', whatever it is written as.
    entries = entries % (1 << 16) or 1 << 16
    first = (first + (1 << 15)) % (1 << 16) - (1 << 15) if signed else first % (1 << 16)
    if not 8 <= bits <= 16:
        raise Refused(reason, f"a lookup table of {bits} bits")
    if len(data) == 2 * entries:
        outputs = np.frombuffer(data, dtype=f"{order}u2")
    elif bits == 8 and len(data) == entries + entries % 2:
        words = np.frombuffer(data, dtype=f"{order}u2")
        outputs = words.astype("<u2").view(np.uint8)[:entries]
    else:
        raise Refused(reason, "a lookup table is shorter or longer than it says")
    if outputs.max() >= 1 << bits:
        raise Refused(reason, f"a lookup table with more than its {bits} bits")
    return first, outputs.astype(np.int64), bits


def _colour(stored: NDArray[Any], rgb: bool, layout: Layout, elements: Elements) -> NDArray[np.float32]:
    if elements.items("ModalityLUTSequence") or _rescale(elements) != (1.0, 0.0):
        raise Refused(Reason.RESCALE, "colour with a rescale")
    if layout.photometric == "PALETTE COLOR":
        return _palette(stored, layout, elements)
    top = float(layout.highest)
    if rgb or layout.photometric == "RGB":
        return np.asarray(stored / top, dtype=np.float32)
    half = 1 << (layout.bits_stored - 1)
    mixed = (stored.astype(np.float64) - np.array([0, half, half])) @ _FROM_YBR.T
    return np.asarray(np.clip(mixed / top, 0.0, 1.0), dtype=np.float32)


def _palette(stored: NDArray[Any], layout: Layout, elements: Elements) -> NDArray[np.float32]:
    tables = [_table(elements, name, signed=layout.signed, reason=Reason.PALETTE) for name in _PALETTE]
    if len({bits for _, _, bits in tables}) != 1:
        raise Refused(Reason.PALETTE, "its colours have different depths")
    bits = tables[0][2]
    if bits > 8 and max(outputs.max() for _, outputs, _ in tables) < 256:
        # Written by software that fills only the lower half of 16-bit entries: the picture would be black.
        raise Refused(Reason.PALETTE, f"its {bits}-bit colours use 8 bits")
    index = stored.astype(np.int64)
    channels = [outputs[np.clip(index - first, 0, len(outputs) - 1)] for first, outputs, _ in tables]
    shares: NDArray[np.float64] = np.stack(channels, axis=-1) / ((1 << bits) - 1)
    return shares.astype(np.float32)


def _valid(stored: NDArray[Any], layout: Layout, elements: Elements) -> NDArray[np.bool_] | None:
    try:
        ends = [elements.integer(keyword) for keyword in ("PixelPaddingValue", "PixelPaddingRangeLimit")]
    except MALFORMED:
        raise Refused(Reason.LAYOUT, "its padding value is not a whole number") from None
    if ends[0] is None:
        return None
    # The elements have 16 bits whose sign is the pixels', though some writers state the other one.
    wrapped = [_as_stored(end, layout) for end in ends if end is not None]
    low, high = min(wrapped), max(wrapped)
    valid = (stored < low) | (stored > high)
    return None if valid.all() else valid


def _as_stored(value: int, layout: Layout) -> int:
    if layout.signed and value >= 1 << 15 and layout.bits_allocated <= 16:
        return value - (1 << 16)
    return value + (1 << 16) if not layout.signed and value < 0 else value


def _windows(elements: Elements) -> tuple[Window, ...]:
    """The file's windows; none where one of them makes no sense, so that the others keep their numbers."""
    function = elements.text("VOILUTFunction") or "LINEAR"
    try:
        centres, widths = elements.numbers("WindowCenter"), elements.numbers("WindowWidth")
    except MALFORMED:
        return ()
    narrowest = 1.0 if function == "LINEAR" else 0.0
    sensible = all(math.isfinite(number) for number in (*centres, *widths)) and all(
        width >= narrowest and width > 0 for width in widths
    )
    if len(centres) != len(widths) or not sensible or function not in get_args(Function):
        return ()
    return tuple(Window(centre, width, cast(Function, function)) for centre, width in zip(centres, widths, strict=True))


def _voi_table(elements: Elements, *, signed: bool) -> Table | None:
    tables = elements.items("VOILUTSequence")
    if not tables:
        return None
    first, outputs, bits = _table(tables[0], "LUT", signed=signed, reason=Reason.RESCALE)
    return Table(float(first), (outputs / ((1 << bits) - 1)).astype(np.float32))


def spacing_of(elements: Elements) -> tuple[float, float] | None:
    """Millimetres between rows and between columns; at the detector where that is all the file says."""
    for keyword in ("PixelSpacing", "ImagerPixelSpacing"):
        found = vector(elements, keyword, 2)
        if found is not None and min(found) > 0:
            return found[0], found[1]
    return None


def plane(groups: Groups, frame: int) -> tuple[Vector3 | None, Orientation | None]:
    """Where a frame lies in the patient."""
    position = vector(groups.of(frame, "PlanePositionSequence"), "ImagePositionPatient", 3)
    orientation = vector(groups.of(frame, "PlaneOrientationSequence"), "ImageOrientationPatient", 6)
    return cast("Vector3 | None", position), cast("Orientation | None", orientation)


def vector(elements: Elements, keyword: str, length: int) -> tuple[float, ...] | None:
    """So many finite numbers, None where there are others or none."""
    try:
        numbers = elements.numbers(keyword)
    except MALFORMED:
        return None
    return tuple(numbers) if len(numbers) == length and all(map(math.isfinite, numbers)) else None
