"""One made-up film as a real DICOM file: Digital X-Ray or Computed Radiography, with every attribute they require."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    ComputedRadiographyImageStorage,
    DigitalXRayImageStorageForPresentation,
    ExplicitVRLittleEndian,
)

from crossward.imaging.anatomy import Array
from crossward.imaging.scanner import Scanner, store

NOTICE = "PHANTOM: computer-drawn, not a patient"


@dataclass(frozen=True)
class Label:
    """Who a film claims to show: the set's letter, the number of the made-up person and of the film, and the seed."""

    letter: str
    person: int
    film: int
    seed: int

    @property
    def patient(self) -> str:
        """The pseudonym in PatientID and in ``labels.csv``."""
        return f"PHANTOM-{self.letter}-{self.person:04d}"

    @property
    def file_name(self) -> str:
        """The film's file name."""
        return f"{self.letter}{self.person:04d}-{self.film}.dcm"


def write_film(path: Path, film: Array, *, scanner: Scanner, label: Label) -> None:
    """Write brightness from 0 to 1 as this scanner would store it."""
    dicom = _header(path, scanner, label)
    _describe_image(dicom, scanner)
    dicom.PixelData = store(scanner, film).tobytes()
    dicom.save_as(path, enforce_file_format=True)


def _uid(label: Label, *parts: object) -> UID:
    """A UUID-derived identifier (2.25) that depends only on the seed and on what it names."""
    name = "/".join(str(part) for part in ("crossward phantom", label.seed, label.letter, label.person, *parts))
    return UID(f"2.25.{uuid.uuid5(uuid.NAMESPACE_OID, name).int}")


def _header(path: Path, scanner: Scanner, label: Label) -> FileDataset:
    """Patient, study, series, equipment: everything but the image."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = (
        ComputedRadiographyImageStorage if scanner.modality == "CR" else DigitalXRayImageStorageForPresentation
    )
    meta.MediaStorageSOPInstanceUID = _uid(label, "film", label.film)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dicom = FileDataset(path, {}, file_meta=meta, preamble=b"\0" * 128)
    dicom.SOPClassUID = meta.MediaStorageSOPClassUID
    dicom.SOPInstanceUID = meta.MediaStorageSOPInstanceUID

    dicom.PatientName = f"PHANTOM^{label.letter}{label.person:04d}"
    dicom.PatientID = label.patient
    dicom.PatientBirthDate = dicom.PatientSex = ""
    dicom.PatientIdentityRemoved = "YES"
    dicom.DeidentificationMethod = NOTICE
    dicom.StudyInstanceUID = _uid(label, "study")
    dicom.StudyDate = dicom.StudyTime = dicom.ReferringPhysicianName = dicom.AccessionNumber = ""
    dicom.StudyID = f"{label.person}"
    dicom.StudyDescription = "PHANTOM chest"
    dicom.SeriesInstanceUID = _uid(label, "series", label.film)
    dicom.SeriesNumber = label.film
    dicom.InstanceNumber = 1
    dicom.Modality = scanner.modality
    dicom.PresentationIntentType = "FOR PRESENTATION"
    dicom.BodyPartExamined = "CHEST"
    dicom.ViewPosition = scanner.view
    dicom.Laterality = ""

    dicom.Manufacturer = scanner.maker
    dicom.ManufacturerModelName = scanner.model
    dicom.SoftwareVersions = scanner.software
    dicom.DeviceSerialNumber = f"PHANTOM-{label.letter}"
    dicom.InstitutionName = f"Phantom Hospital {label.letter}"
    dicom.DetectorType = scanner.detector
    dicom.KVP = str(scanner.kvp)
    return dicom


def _describe_image(dicom: Dataset, scanner: Scanner) -> None:
    """The image and what its numbers mean."""
    top = 2**scanner.bits - 1
    chest = Dataset()
    chest.CodeValue, chest.CodingSchemeDesignator, chest.CodeMeaning = "51185008", "SCT", "Chest"
    dicom.ImageType = ["ORIGINAL", "PRIMARY"]
    dicom.ImageComments = NOTICE
    dicom.BurnedInAnnotation = "NO"
    dicom.LossyImageCompression = "00"
    dicom.ImageLaterality = "U"
    dicom.AnatomicRegionSequence = Sequence([chest])
    dicom.AcquisitionContextSequence = Sequence([])
    dicom.PatientOrientation = ["L", "F"]
    dicom.Rows, dicom.Columns = scanner.rows, scanner.columns
    dicom.ImagerPixelSpacing = [f"{scanner.spacing[0]:g}", f"{scanner.spacing[1]:g}"]
    dicom.SamplesPerPixel = 1
    dicom.PhotometricInterpretation = "MONOCHROME1" if scanner.inverted else "MONOCHROME2"
    dicom.PresentationLUTShape = "INVERSE" if scanner.inverted else "IDENTITY"
    dicom.BitsAllocated = 8 if scanner.bits <= 8 else 16
    dicom.BitsStored = scanner.bits
    dicom.HighBit = scanner.bits - 1
    dicom.PixelRepresentation = 0
    dicom.PixelIntensityRelationship = "LOG"
    dicom.PixelIntensityRelationshipSign = 1 if scanner.inverted else -1
    dicom.RescaleSlope, dicom.RescaleIntercept = f"{scanner.slope:g}", f"{scanner.intercept:g}"
    dicom.RescaleType = "US"
    dicom.WindowCenter = f"{scanner.intercept + scanner.slope * (top + 1) / 2:g}"
    dicom.WindowWidth = f"{scanner.slope * (top + 1):g}"
