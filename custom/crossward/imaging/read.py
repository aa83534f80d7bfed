"""One DICOM file in, one picture in [0, 1] out; what cannot be read without guessing is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, dcmread
from pydicom.errors import InvalidDicomError

from crossward.federation.errors import BadInput

UNKNOWN_SCANNER = "unknown scanner"
CHANNELS = {"MONOCHROME1": 1, "MONOCHROME2": 1, "RGB": 3}

# Nothing else is parsed, so names and dates of patients never enter memory, a warning or a traceback.
TAGS = [
    "SOPInstanceUID",
    "Manufacturer",
    "ManufacturerModelName",
    "PixelSpacing",
    "ImagerPixelSpacing",
    "Rows",
    "Columns",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "PlanarConfiguration",
    "NumberOfFrames",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "ModalityLUTSequence",
    "RescaleSlope",
    "RescaleIntercept",
    "ExtendedOffsetTable",
    "ExtendedOffsetTableLengths",
    "PixelData",
]


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
    """Reads a single-frame grey or RGB image.

    Values are scaled by the range that the stored bits allow, not by the picture's own extremes, so the same
    value means the same grey in every file of a scanner.

    Raises:
        BadInput: the file cannot be read, or not without guessing; names the file and the reason.
    """
    dataset = _open(path)
    try:
        _check(dataset)
        # By default unused bits are masked away, which would turn a wrong BitsStored into wrapped-round greys.
        dataset.pixel_array_options(correct_unused_bits=False)
        pixels = _scale(dataset.pixel_array, dataset)
    except _RefusedError as error:
        raise BadInput(_refusal(path, str(error))) from None
    except Exception as error:
        # Decoders raise whatever they like, and their texts may quote the header: only the kind is passed on.
        what = f"its pixel data cannot be decoded ({type(error).__name__}; {_syntax(dataset)})"
        raise BadInput(_refusal(path, what)) from None
    return Film(
        pixels=pixels,
        scanner=_scanner(dataset),
        sop_uid=str(dataset.get("SOPInstanceUID", "") or ""),
        spacing=_spacing(dataset),
        bits=int(dataset.BitsStored),
        photometric=str(dataset.PhotometricInterpretation),
    )


class _RefusedError(Exception):
    """Why a file is not read, in words that fit after its name."""


def _refusal(path: Path, reason: str) -> str:
    return f"{path.name}: {reason}; convert the file or take it out of the list"


def _open(path: Path) -> Dataset:
    try:
        return dcmread(path, specific_tags=TAGS)
    except InvalidDicomError:
        raise BadInput(_refusal(path, "not a DICOM file")) from None
    except FileNotFoundError:
        raise BadInput(f"{path.name}: no such file; check the name and the folder") from None
    except OSError as error:
        raise BadInput(f"{path.name}: cannot be read ({error.strerror}); check the file's permissions") from None
    except Exception as error:
        raise BadInput(_refusal(path, f"a damaged DICOM file ({type(error).__name__})")) from None


def _check(dataset: Dataset) -> None:
    """Refuses everything whose picture would have to be guessed."""
    if "PixelData" not in dataset or not dataset.PixelData:
        raise _RefusedError("it has no pixel data")
    if int(dataset.get("NumberOfFrames") or 1) != 1:
        raise _RefusedError("it has several frames, and only single images are read")
    if not dataset.get("Rows") or not dataset.get("Columns"):
        raise _RefusedError("it has no rows or no columns")
    photometric = dataset.get("PhotometricInterpretation")
    if photometric not in CHANNELS:
        raise _RefusedError(f"photometric interpretation {photometric or '(none)'} is not one of {', '.join(CHANNELS)}")
    if dataset.get("SamplesPerPixel") != CHANNELS[photometric]:
        raise _RefusedError(f"its samples per pixel do not fit {photometric}")
    if dataset.get("PixelRepresentation") not in (0, 1) or not dataset.get("BitsStored"):
        raise _RefusedError("it does not say how its pixel values are stored")
    if dataset.get("HighBit") != dataset.BitsStored - 1:
        raise _RefusedError("its pixel values do not start at the lowest bit")
    if dataset.BitsStored < 2:
        raise _RefusedError("it has one bit per pixel: a mask, not a picture")
    if "ModalityLUTSequence" in dataset:
        raise _RefusedError("it carries a modality lookup table, which is not supported")


def _scale(stored: NDArray[np.generic], dataset: Dataset) -> NDArray[np.float32]:
    """Modality rescale, then the range that the stored bits allow onto [0, 1], then air to dark."""
    slope, intercept = (
        _number(dataset, tag, default) for tag, default in (("RescaleSlope", 1), ("RescaleIntercept", 0))
    )
    if slope == 0:
        raise _RefusedError("its rescale slope is 0")
    signed = dataset.PixelRepresentation == 1
    levels = 2 ** int(dataset.BitsStored)
    lowest = -(levels // 2) if signed else 0
    highest = lowest + levels - 1
    if stored.min() < lowest or stored.max() > highest:
        raise _RefusedError(f"it has pixel values that do not fit its {dataset.BitsStored} stored bits")
    ends = sorted((slope * lowest + intercept, slope * highest + intercept))
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise _RefusedError("its rescale slope and intercept leave no usable range of values")
    rescaled = stored.astype(np.float64) * slope + intercept
    unit: NDArray[np.float64] = np.clip((rescaled - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0)
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        unit = 1.0 - unit
    return unit.astype(np.float32)


def _number(dataset: Dataset, tag: str, default: float) -> float:
    value = dataset.get(tag)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _RefusedError(f"its {tag} is not a number")
    return number


def _scanner(dataset: Dataset) -> str:
    words = f"{dataset.get('Manufacturer') or ''} {dataset.get('ManufacturerModelName') or ''}".split()
    return " ".join(words) or UNKNOWN_SCANNER


def _spacing(dataset: Dataset) -> tuple[float, float] | None:
    for tag in ("PixelSpacing", "ImagerPixelSpacing"):
        try:
            rows, columns = (float(value) for value in dataset.get(tag) or ())
        except (TypeError, ValueError):
            continue
        if rows > 0 and columns > 0 and math.isfinite(rows) and math.isfinite(columns):
            return rows, columns
    return None


def _syntax(dataset: Dataset) -> str:
    syntax = getattr(dataset.file_meta, "TransferSyntaxUID", None)
    return f"transfer syntax {syntax.name}" if syntax else "no transfer syntax given"
