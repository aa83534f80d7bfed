from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian, generate_uid
from tests.imaging.orthanc import Orthanc, running

WriteDicom = Callable[..., Path]
WriteHospital = Callable[..., Path]
WritePack = Callable[..., Path]


def _write_dicom(path: Path, pixels: np.ndarray, *, without: tuple[str, ...] = (), **tags: Any) -> Path:
    """A small valid file; `tags` overwrite single attributes and `without` takes some away."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = DigitalXRayImageStorageForPresentation
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = tags.pop("TransferSyntaxUID", ExplicitVRLittleEndian)
    dataset = FileDataset(path, Dataset(), file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID = meta.MediaStorageSOPClassUID
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    dataset.PatientName = "SECRET^NAME"
    dataset.PatientID = "SECRET-ID"
    dataset.Manufacturer = "Maker"
    dataset.ManufacturerModelName = "Model 1"
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = dataset.BitsStored = pixels.dtype.itemsize * 8
    dataset.HighBit = tags.get("BitsStored", dataset.BitsStored) - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes()
    for tag, value in tags.items():
        setattr(dataset, tag, value)
    for tag in without:
        delattr(dataset, tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def _write_labels(hospital: Path, rows: list[tuple[str, str, str]]) -> None:
    hospital.mkdir(parents=True, exist_ok=True)
    with (hospital / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "patient", "label"), *rows])


def _write_hospital(hospital: Path, patients: dict[str, int], *, shape: tuple[int, ...] = (12, 10)) -> Path:
    """So many patients of every label; each has one image, and every third one a second."""
    rows = []
    for label, count in patients.items():
        for number in range(count):
            patient = f"{label}-{number}"
            for turn in range(2 if number % 3 == 0 else 1):
                name = f"images/{patient}-{turn}.dcm"
                rng = np.random.default_rng([number, turn, len(label)])
                _write_dicom(hospital / name, rng.integers(0, 256, shape).astype(np.uint8))
                rows.append((name, patient, label))
    _write_labels(hospital, rows)
    return hospital


def _write_pack(file: Path, labels: list[int], *, size: int = 16, colour: bool = False, **arrays: Any) -> Path:
    """One site's file: of every ten images seven are for training, one for validation, two for test."""
    count = len(labels)
    shape = (count, size, size, 3) if colour else (count, size, size)
    contents = {
        "x": np.random.default_rng(count).integers(0, 256, shape).astype(np.uint8),
        "y": np.array(labels, dtype=np.uint8),
        "split": np.array([(0, 0, 0, 0, 0, 0, 0, 1, 2, 2)[row % 10] for row in range(count)], dtype=np.uint8),
        "ids": np.array([f"image-{row}" for row in range(count)]),
        "classes": np.array(["nevus", "melanoma", "keratosis"]),
    } | arrays
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **{key: value for key, value in contents.items() if value is not None})
    return file


@pytest.fixture(scope="session")
def write_dicom() -> WriteDicom:
    return _write_dicom


@pytest.fixture(scope="session")
def write_labels() -> Callable[[Path, list[tuple[str, str, str]]], None]:
    return _write_labels


@pytest.fixture(scope="session")
def write_hospital() -> WriteHospital:
    return _write_hospital


@pytest.fixture(scope="session")
def write_pack() -> WritePack:
    return _write_pack


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, films: dict[str, Path]) -> Iterator[Orthanc]:
    """A real archive with the films of the test file in it."""
    with running(tmp_path_factory.mktemp("orthanc")) as orthanc:
        for film in films.values():
            orthanc.upload(film)
        yield orthanc
