"""No identifier of a patient is printed, logged, or written outside a site's own folders, whatever command is run.

A command that reads DICOM belongs into COMMANDS.
"""

from __future__ import annotations

import csv
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydicom.uid import BasicTextSRStorage
from tests.imaging.planted import BIRTH, UID_ROOT, marks_in, picture, plant_everywhere, save, small
from tests.imaging.test_deidentify_rules import MAY_STAY

from crossward.cli.main import main
from crossward.imaging.deidentify.apply import quiet

SITE_YAML = """version: 1
data: images
cache: cache
labels:
  source: csv
  file: labels.csv
  patient_column: patient
"""


@dataclass(frozen=True)
class Place:
    """A site's own folder, and one for what is shown to others."""

    site: Path
    shown: Path

    @property
    def images(self) -> Path:
        return self.site / "images"


Arguments = Callable[[Place], tuple[object, ...]]
# What to run; the exit code that shows that it did what it is for comes first.
COMMANDS: dict[str, tuple[int, Arguments]] = {
    "scan": (0, lambda at: ("data", "scan", at.images, "--processes", 1, "--page", at.shown / "scan.html")),
    "scan --json": (0, lambda at: ("data", "scan", at.images, "--processes", 1, "--json")),
    "look": (0, lambda at: ("data", "look", at.images, "--processes", 1, "--sheet", at.shown / "look.png")),
    "check": (0, lambda at: ("data", "check", at.site / "site.yaml", "--processes", 0)),
    "check --json": (0, lambda at: ("data", "check", at.site / "site.yaml", "--processes", 0, "--json")),
    "prepare": (0, lambda at: (
        "data", "prepare", at.site / "site.yaml", "--processes", 0, "--report", at.shown / "domains",
    )),
    "prepare --json": (0, lambda at: ("data", "prepare", at.site / "site.yaml", "--processes", 0, "--json")),
    "simulate": (0, lambda at: (
        "simulate", "--method", "fedavg", "--data", at.site, "--rounds", 1, "--lenient", "--out", at.shown / "run",
    )),
    "deidentify": (5, lambda at: (
        "data", "deidentify", at.images, "--out", at.site / "out", "--secret", at.site / "keys" / "secret",
        "--processes", 1, "--mapping",
    )),
    "deidentify --json": (5, lambda at: (
        "data", "deidentify", at.images, "--out", at.site / "out-2", "--secret", at.site / "keys" / "secret",
        "--processes", 0, "--json",
    )),
    "a folder that is not there": (2, lambda at: ("data", "scan", at.shown / "missing")),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Images with identifiers in their headers and names, in order and damaged in the ways that make readers talk."""
    root = tmp_path_factory.mktemp("hospital")
    at = Place(root / "site", root / "shown")
    at.shown.mkdir()
    rows = []
    with quiet():
        for number in range(24):
            dataset = small(number, patient=f"PLANTED-ID-{number}", pixels=picture(number, shape=(40, 40)))
            if number < 4:
                plant_everywhere(dataset, without=MAY_STAY | {"SOPInstanceUID", "PatientID"})
            name = f"PLANTED^PERSON {number}/PLANTED {BIRTH} {number}.dcm"
            save(dataset, at.images / name)
            rows.append((name, f"PLANTED-ID-{number}", ("planted-no", "normal", "nodule")[1 + number % 2]))
        _damaged(at.images / "PLANTED^PERSON damaged")
    with (at.site / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("file", "patient", "label"), *rows, ("PLANTED gone.dcm", "PLANTED", "normal")])
    (at.site / "site.yaml").write_text(SITE_YAML)
    return at


def _damaged(folder: Path) -> None:
    whole = save(small(90), folder / "PLANTED cut.dcm")
    whole.write_bytes(whole.read_bytes()[:-100])
    save(small(91, FrameOfReferenceUID="PLANTED", StudyDate="PLANTED", BodyPartExamined="Planted"), folder / "P.dcm")
    save(small(92, Rows=30000, PatientName="PLANTED^" * 40), folder / "PLANTED large.dcm")
    save(small(93, PhotometricInterpretation="PLANTED"), folder / "PLANTED photometric.dcm")
    save(small(94, RescaleSlope="0"), folder / "PLANTED slope.dcm")
    save(small(95, SOPClassUID=BasicTextSRStorage), folder / "PLANTED report.dcm")
    save(small(96, SOPClassUID=f"{UID_ROOT}.96"), folder / "PLANTED kind.dcm")
    save(small(97, BurnedInAnnotation="YES"), folder / "PLANTED marked.dcm")
    (folder / "PLANTED.txt").write_text("PLANTED")


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_that_is_printed_logged_or_shown_names_anybody(
    place: Place,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    expected, arguments = COMMANDS[name]
    monkeypatch.setattr(sys, "argv", ["crossward", *map(str, arguments(place))])
    # As a program has it: a warning goes to standard error, and is not put away by the test runner.
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: print(message, file=sys.stderr))
    code: int | str | None = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    printed = capfd.readouterr()
    assert code == expected, printed.err
    assert printed.out + printed.err
    for text in (printed.out, printed.err, caplog.text):
        assert marks_in(text.encode()) == []
    for path in place.shown.rglob("*"):
        assert marks_in(str(path.relative_to(place.shown)).encode()) == []
        if path.is_file():
            assert marks_in(path.read_bytes()) == []


def test_only_the_sites_own_folders_were_written_to(place: Place) -> None:
    beside = {path.name for path in place.site.iterdir()} - {"images", "labels.csv", "site.yaml"}
    assert beside <= {"cache", "out", "out-2", "keys"}
    for clean in place.site.glob("out*/clean"):
        for path in clean.rglob("*"):
            assert marks_in(str(path.relative_to(clean)).encode()) == []
            if path.is_file():
                assert marks_in(path.read_bytes()) == []
