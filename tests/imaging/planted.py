"""DICOM files with made-up identifiers in every place that can hold one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydicom.datadict import DicomDictionary
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian

NAME, ID, BIRTH, ACCESSION, PLACE = "PLANTED^PERSON", "PLANTED-ID-77", "19570302", "PLANTEDACC99", "PLANTED CLINIC"
UID_ROOT = "1.2.3.4.5.77777"
# Every planted value has one of these in it.
MARKS = ("planted", BIRTH, UID_ROOT)

_BY_VR = {
    "PN": NAME,
    "AE": "PLANTEDAE",
    "SH": "PLANTEDSH",
    "LO": "PLANTED text",
    "ST": "PLANTED text",
    "LT": "PLANTED text",
    "UC": "PLANTED text",
    "UT": "PLANTED text",
    "UR": "http://planted.invalid",
    "DA": BIRTH,
    "DT": f"{BIRTH}101112",
    "UI": f"{UID_ROOT}.99",
    "OB": b"PLANTED!",
    "UN": b"PLANTED!",
}
# What the reader needs, or what a file is known by; planted by hand or not at all.
_LEFT_OUT = {"SpecificCharacterSet", "SOPClassUID", "PixelData", "EncapsulatedDocument"}


def picture(number: int = 0, *, shape: tuple[int, int] = (24, 20)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 200, shape).astype(np.uint8)


def small(number: int = 0, *, patient: str = ID, pixels: np.ndarray | None = None, **tags: Any) -> FileDataset:
    """A small valid image of a patient."""
    pixels = picture(number) if pixels is None else pixels
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = DigitalXRayImageStorageForPresentation
    meta.MediaStorageSOPInstanceUID = f"{UID_ROOT}.3.{number}"
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", Dataset(), file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID = meta.MediaStorageSOPClassUID
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = f"{UID_ROOT}.1", f"{UID_ROOT}.2"
    dataset.PatientName, dataset.PatientID, dataset.PatientBirthDate = NAME, patient, BIRTH
    dataset.AccessionNumber, dataset.InstitutionName = ACCESSION, PLACE
    dataset.StudyDate, dataset.StudyTime, dataset.Modality = "20200115", "101112", "DX"
    dataset.Manufacturer, dataset.ManufacturerModelName = "Maker", "Model 1"
    dataset.BurnedInAnnotation, dataset.ImageType = "NO", ["ORIGINAL", "PRIMARY"]
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = pixels.dtype.itemsize * 8
    dataset.HighBit, dataset.PixelRepresentation = dataset.BitsStored - 1, 0
    dataset.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(dataset, name, value)
    return dataset


def plant_everywhere(dataset: FileDataset, *, without: set[str]) -> int:
    """Puts identifiers into every attribute of the standard that holds text, dates, UIDs or bytes, also in a depth."""
    planted = 0
    for tag, (vr, _, _, _, keyword) in DicomDictionary.items():
        if vr in _BY_VR and keyword and tag >> 16 not in (0, 2, 0xFFFE) and keyword not in without | _LEFT_OUT:
            dataset.add_new(tag, vr, _BY_VR[vr])
            planted += 1
    inner = Dataset()
    inner.PatientName, inner.PatientID, inner.StudyDate = NAME, ID, BIRTH
    inner.ReferencedSOPInstanceUID = f"{UID_ROOT}.98"
    for keyword in ("ReferencedImageSequence", "SharedFunctionalGroupsSequence", "RequestAttributesSequence"):
        outer = Dataset()
        outer.DerivationImageSequence = Sequence([inner])
        setattr(dataset, keyword, Sequence([outer]))
    for block, creator in ((0x0009, "PLANTED MAKER"), (0x0019, "SIEMENS MR HEADER")):
        private = dataset.private_block(block, creator, create=True)
        private.add_new(0x30, "LO", NAME)
    dataset.add_new(0x60003000, "OW", b"PLANTED!")
    dataset.add_new(0x60000022, "LO", NAME)
    dataset.add_new(0x50003000, "OW", b"PLANTED!")
    dataset.preamble = b"PLANTED!" * 16
    dataset.file_meta.SourceApplicationEntityTitle = "PLANTEDAE"
    dataset.file_meta.PrivateInformationCreatorUID = f"{UID_ROOT}.97"
    dataset.file_meta.PrivateInformation = b"PLANTED!"
    return planted


def save(dataset: FileDataset, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def marks_in(content: bytes) -> list[str]:
    """Which planted marks bytes hold, in any of the usual codes."""
    low = content.lower()
    return [mark for mark in MARKS if mark.encode() in low or mark.encode("utf-16-le") in low]
