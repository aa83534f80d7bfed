"""Small DICOM files with known pixels, in every transfer syntax; what the golden tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmwrite
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import CTImageStorage, ExplicitVRBigEndian, ExplicitVRLittleEndian, generate_uid

from crossward.imaging.dicom.files import read_scan
from crossward.imaging.dicom.scans import Frame
from crossward.imaging.refusals import Reason, Refused


def write_scan(
    path: Path,
    pixels: np.ndarray,
    *,
    syntax: str = ExplicitVRLittleEndian,
    compressed: list[bytes] | bytes | None = None,
    without: tuple[str, ...] = (),
    **tags: Any,
) -> Path:
    """Writes integers [h,w], [h,w,3] or, with NumberOfFrames, [n,h,w] and [n,h,w,3].

    Args:
        path: of the file.
        pixels: gives size and depth, and the pixel data where they are not compressed.
        syntax: transfer syntax.
        compressed: the frames as streams, or the pixel data element as it is.
        without: keywords of elements to leave out.
        tags: elements by keyword.
    """
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = syntax
    dataset = Dataset()
    dataset.file_meta = meta
    dataset.SOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    dataset.PatientName = "PLANTED^NAME"
    frame = pixels[0] if "NumberOfFrames" in tags and pixels.ndim > 2 else pixels
    dataset.Rows, dataset.Columns = frame.shape[:2]
    dataset.SamplesPerPixel = 3 if frame.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if frame.ndim == 3 else "MONOCHROME2"
    if frame.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = dataset.BitsStored = pixels.dtype.itemsize * 8
    dataset.HighBit = tags.get("BitsStored", dataset.BitsStored) - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    for keyword, value in tags.items():
        setattr(dataset, keyword, value)
    if "PixelData" not in tags:
        big = syntax == ExplicitVRBigEndian
        data = pixels.astype(pixels.dtype.newbyteorder(">" if big else "<")).tobytes()
        if compressed is not None:
            data = compressed if isinstance(compressed, bytes) else encapsulate(compressed, has_bot=False)
        dataset.PixelData = data if compressed is not None or len(data) % 2 == 0 else data + b"\0"
    if "PixelData" in dataset:
        dataset["PixelData"].VR = "OB" if compressed is not None or dataset.BitsAllocated == 8 else "OW"
        dataset["PixelData"].is_undefined_length = compressed is not None
    for keyword in without:
        delattr(dataset, keyword)
    path.parent.mkdir(parents=True, exist_ok=True)
    dcmwrite(path, dataset, enforce_file_format=True)
    return path


def item(**tags: Any) -> Sequence:
    """A sequence of one item."""
    return Sequence([elements(**tags)])


def elements(**tags: Any) -> Dataset:
    dataset = Dataset()
    for keyword, value in tags.items():
        setattr(dataset, keyword, value)
    return dataset


def lookup_table(descriptor: list[int], data: bytes) -> Sequence:
    return item(LUTDescriptor=descriptor, LUTData=data)


def frame_of(path: Path, number: int = 0) -> Frame:
    return read_scan(path, frames=(number,)).frames[0]


def reason_of(path: Path) -> Reason:
    with pytest.raises(Refused) as refusal:
        read_scan(path)
    assert "PLANTED" not in str(refusal.value)
    return refusal.value.reason
