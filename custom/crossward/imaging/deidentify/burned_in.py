"""Text that is drawn into the pixels: what the header says about it, and what the picture looks like.

Letters that a machine draws are small, of one grey, sharply set off from what is behind them, and stand in rows. Tissue
hardly ever is all of that at once. The search finds rows of such shapes; it does not read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import UID
from scipy import ndimage

from crossward.imaging.dicom.files import read_scan

Grey = NDArray[np.float32]

# Letters in a row that make a line of text; a marker of the side, "L" or "R", is not one.
LEAST_LETTERS = 4
# Programs write along the edges. Inside, where vessels and ribs are, it takes a longer row.
_LEAST_INSIDE = 5
_EDGE = 0.2
_SMALLEST, _TALLEST = 5, 90
# A letter differs from what is around it by this part of the picture's range, and within itself by less.
_CONTRAST = 0.25
_UNEVEN = 0.12
_OTHER_GREY = 0.1
_THINNEST = 0.15
_LONGEST_WORD = 15
_STROKES = 1.25
_MOST_FRAMES = 8

# Kinds of images that are made by, or pass through, a program that writes onto them.
_SUSPECT_MODALITIES = frozenset(("US", "IVUS", "ES", "XC", "OT", "SC", "GM", "OP", "OPT", "RF", "XA", "DOC"))
_SUSPECT_TYPES = frozenset(("SCREEN SAVE", "SCREENSHOT", "SCREEN CAPTURE", "SECONDARY CAPTURE"))


@dataclass(frozen=True)
class Suspicion:
    """Why a file is held: said by its header, likely by its kind, or seen in its pixels (letters in rows)."""

    said: bool = False
    kind: bool = False
    letters: int = 0

    def __bool__(self) -> bool:
        return self.said or self.kind or self.letters > 0

    @property
    def words(self) -> str:
        parts = (
            ("its header says so", self.said),
            ("its kind often has it and its header does not say", self.kind),
            (f"{self.letters} letter-like shapes in rows", self.letters),
        )
        return "; ".join(text for text, holds in parts if holds)


def suspicion(path: Path, dataset: Dataset) -> Suspicion:
    """Whether a file may show text.

    Args:
        path: of the file.
        dataset: what is in it.

    Raises:
        Refused: its pixels cannot be read, so nobody can say.
    """
    tag = str(dataset.get("BurnedInAnnotation") or "").strip().upper()
    letters = max((text_letters(picture) for picture in _pictures(path, dataset)), default=0)
    return Suspicion(said=tag == "YES", kind=tag not in ("YES", "NO") and _often_has_text(dataset), letters=letters)


def _often_has_text(dataset: Dataset) -> bool:
    kind = UID(str(dataset.get("SOPClassUID") or "")).keyword
    types = {str(part).strip().upper() for part in dataset.get("ImageType") or ()}
    return (
        "SecondaryCapture" in kind
        or "Ultrasound" in kind
        or "ConversionType" in dataset
        or str(dataset.get("Modality") or "") in _SUSPECT_MODALITIES
        or bool(types & _SUSPECT_TYPES)
    )


def _pictures(path: Path, dataset: Dataset) -> Iterator[Grey]:
    """Some frames, evenly spread, first and last among them; of a colour its brightest part."""
    frames = max(1, int(dataset.get("NumberOfFrames") or 1))
    chosen = sorted({round(place) for place in np.linspace(0, frames - 1, min(frames, _MOST_FRAMES))})
    for frame in read_scan(path, frames=chosen).frames:
        yield frame.values.max(axis=-1) if frame.colour else frame.values


def text_letters(picture: Grey) -> int:
    """How many letter-like shapes stand in rows, bright on dark and dark on bright together."""
    if min(picture.shape) < 2 * _SMALLEST:
        return 0
    low, high = np.percentile(picture[np.isfinite(picture)], (0.05, 99.95)) if np.isfinite(picture).any() else (0, 0)
    top = float(np.nanmax(picture[np.isfinite(picture)], initial=float(high)))
    if not high > low:
        high = top
    if not high > low:
        return 0
    unit = np.clip(np.nan_to_num((picture - low) / (high - low)), 0.0, 1.0).astype(np.float32)
    return _letters(unit) + _letters(1.0 - unit)


def _letters(unit: Grey) -> int:
    """Bright letters in rows: strokes that an opening wipes out, of one grey, shaped and placed like letters."""
    wide = _stroke_window(unit.shape)
    behind = ndimage.grey_opening(unit, size=(wide, wide))
    strokes = (unit - behind) > _CONTRAST
    labels, count = ndimage.label(strokes, structure=np.ones((3, 3)))
    if not count:
        return 0
    found = 0
    for row in _rows(list(_shapes(unit, labels))):
        letters = sum(shape.letters for shape in row)
        found += letters if letters >= (LEAST_LETTERS if _near_edge(row, unit.shape) else _LEAST_INSIDE) else 0
    return found


def _near_edge(row: list[_Shape], size: tuple[int, ...]) -> bool:
    height, width = size
    top, bottom = min(each.top for each in row), max(each.bottom for each in row)
    across, down = _EDGE * width, _EDGE * height
    return bottom <= down or top >= height - down or row[-1].right <= 2 * across or row[0].left >= width - 2 * across


def _stroke_window(shape: tuple[int, ...]) -> int:
    return 2 * max(4, min(12, min(shape) // 80)) + 1


@dataclass(frozen=True)
class _Shape:
    """A component that could be a letter, or several that touch: its box, how many letters wide, how bright."""

    top: int
    left: int
    height: int
    width: int
    letters: int
    grey: float

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def right(self) -> int:
        return self.left + self.width


def _shapes(unit: Grey, labels: NDArray[np.int32]) -> Iterator[_Shape]:
    tallest = min(_TALLEST, unit.shape[0] // 4)
    for number, place in enumerate(ndimage.find_objects(labels), start=1):
        height, width = (part.stop - part.start for part in place)
        if not (_SMALLEST <= height <= tallest and 1 <= width <= _LONGEST_WORD * height):
            continue
        mask = labels[place] == number
        if mask.sum() < _SMALLEST or mask.mean() < _THINNEST:
            continue
        letters = max(1, round(width / (0.75 * height)))
        if letters > 2 and not _has_strokes(mask, letters):
            continue
        values = np.sort(unit[place][mask])
        # The edge of a smooth letter is a mixture with what is behind it: only the brightest part must be even.
        core = values[len(values) * 2 // 3 :]
        if core.std() <= _UNEVEN:
            yield _Shape(place[0].start, place[1].start, height, width, letters, float(core.mean()))


def _has_strokes(mask: NDArray[np.bool_], letters: int) -> bool:
    """Whether a line through the middle of a wide shape crosses about two strokes a letter, as it does in a word."""
    middle = mask[mask.shape[0] // 3 : max(mask.shape[0] // 3 + 1, mask.shape[0] * 2 // 3)]
    crossings = np.count_nonzero(np.diff(middle.astype(np.int8), axis=1) == 1, axis=1)
    return bool(np.median(crossings) >= _STROKES * letters)


def _rows(shapes: list[_Shape]) -> list[list[_Shape]]:
    """Shapes joined into lines: about the same height, on one base line, close to one another."""
    rows: list[list[_Shape]] = []
    for shape in sorted(shapes, key=lambda each: each.left):
        row = next((row for row in rows if _goes_on(row[-1], shape)), None)
        if row is None:
            rows.append([shape])
        else:
            row.append(shape)
    return rows


def _goes_on(last: _Shape, shape: _Shape) -> bool:
    height = max(last.height, shape.height)
    level = abs(shape.bottom - last.bottom) <= 0.35 * height
    alike = 0.6 <= shape.height / last.height <= 1.67 and abs(shape.grey - last.grey) <= _OTHER_GREY
    return level and alike and -0.2 * height <= shape.left - last.right <= 1.2 * height
