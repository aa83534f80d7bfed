"""A small hospital with a site.yaml, to be prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.imaging.conftest import _write_dicom, _write_labels

from crossward.imaging.prepare.manifest import Manifest
from crossward.imaging.prepare.site import prepare
from crossward.imaging.rules.config import read_site_rules
from crossward.imaging.rules.site import SiteRules

SIZE = 8
SITE = """\
version: 1
data: images
cache: cache
labels:
  file: labels.csv
  patient_column: patient
"""


class Hospital:
    """Files, labels and rules that a test may change between two runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[tuple[str, str, str]] = []
        self.rules(SITE)

    def rules(self, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "site.yaml").write_text(text, encoding="utf-8")

    def film(self, name: str, patient: str, label: str, *, pixels: np.ndarray | None = None, **tags: Any) -> Path:
        """Add a file and its line of labels; pixels are random by name if none are given."""
        if pixels is None:
            pixels = np.random.default_rng(list(name.encode())).integers(0, 4096, (12, 10)).astype(np.uint16)
            tags = {"BitsStored": 12, **tags}
        path = _write_dicom(self.folder / "images" / name, pixels, **tags)
        self.label(name, patient, label)
        return path

    def label(self, name: str, patient: str, label: str) -> None:
        self.rows.append((name, patient, label))
        _write_labels(self.folder, self.rows)

    def films(self, patients: int, *, labels: tuple[str, ...] = ("x", "y"), **tags: Any) -> Hospital:
        """One film of each patient, every third with a second."""
        for number in range(patients):
            for turn in range(2 if number % 3 == 0 else 1):
                patient = f"PLANTED-{number:03d}"
                self.film(f"{number:03d}-{turn}.dcm", patient, labels[number % len(labels)], **tags)
        return self

    @property
    def read_rules(self) -> SiteRules:
        return read_site_rules(self.folder)

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / f"{SIZE}x{SIZE}x1"

    def prepare(self, **options: Any) -> Manifest:
        return prepare(self.read_rules, **{"size": SIZE, "processes": 0, **options})
