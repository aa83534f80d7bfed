"""``crossward data scan``: what it prints, what it does not, and how it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydicom import dcmread

from crossward.cli import data_scan
from tests.cli.conftest import Command

USUAL = ("--processes", "1")


def test_phantoms_are_counted(crossward: Command, own_phantoms: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = crossward("data", "scan", own_phantoms, "--json", "--page", page, *USUAL)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    # The files themselves say how many there are; every hospital has a labels.csv, and the folder a note.
    images = len(list(own_phantoms.rglob("*.dcm")))
    others = sum(path.is_file() for path in own_phantoms.rglob("*") if ".crossward-scan" not in path.parts) - images
    assert (told["read"], told["images"], told["files"]) == (images, images, images + others)
    assert told["patients"] == 48
    assert sum(told["refused"].values()) == others
    assert len(told["scanners"]) == 2
    assert page.read_text().count("<img ") == 16

    again = crossward("data", "scan", own_phantoms, *USUAL)
    assert again.code == 0, again.err
    assert f"{images:,} files read, {others} refused." in again.out
    assert told["scanners"][0]["name"] in again.out


def test_nothing_that_names_anybody_is_printed(crossward: Command, phantoms: Path, tmp_path: Path) -> None:
    folder = tmp_path / "PLANTEDFOLDER"
    folder.mkdir()
    dataset = dcmread(next(phantoms.rglob("*.dcm")))
    dataset.PatientName, dataset.PatientID, dataset.PatientBirthDate = "PLANTEDNAME^X", "PLANTEDID", "19510203"
    dataset.AccessionNumber, dataset.InstitutionName, dataset.StationName = "PLANTEDACC", "PLANTEDPLACE", "PLANTEDBOX"
    dataset.SoftwareVersions = "PLANTEDNAME"
    dataset.save_as(folder / "PLANTEDFILE.dcm")
    (folder / "PLANTEDNOTES.txt").write_text("none")
    for words in ([], ["--json", "--pixels", "--fresh"]):
        done = crossward("data", "scan", folder, *words, *USUAL)
        assert done.code == 0, done.err
        assert "PLANTED" not in done.out + done.err
        assert "19510203" not in done.out + done.err


def test_a_folder_without_dicom_ends_with_2(crossward: Command, tmp_path: Path) -> None:
    (tmp_path / "PLANTED.txt").write_text("none")
    done = crossward("data", "scan", tmp_path, "--json", *USUAL)
    assert done.code == 2
    assert done.err.startswith("error: no DICOM file was read among 1 files; not a DICOM file (1)")
    assert "PLANTED" not in done.err


@pytest.mark.parametrize(("writable", "said"), [(True, "what was read is kept"), (False, "nothing was kept")])
def test_an_interrupt_says_what_is_kept(
    crossward: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool, said: str
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data_scan, "take_inventory", interrupted)
    monkeypatch.setattr(os, "access", lambda path, mode: writable or mode != os.W_OK)
    done = crossward("data", "scan", tmp_path, *USUAL)
    assert done.code == 130
    assert f"stopped: {said}" in done.err


def test_a_missing_folder_ends_with_2(crossward: Command, tmp_path: Path) -> None:
    done = crossward("data", "scan", tmp_path / "PLANTED", *USUAL)
    assert done.code == 2
    assert done.err.startswith("error: there is no such folder to scan")


def test_a_folder_that_cannot_be_written_to_is_scanned_without_a_journal(
    crossward: Command, own_phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To root every folder can be written to: only the question is answered otherwise.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    done = crossward("data", "scan", own_phantoms, *USUAL)
    assert done.code == 0
    assert "--state keeps it elsewhere" in done.err
    assert not (own_phantoms / ".crossward-scan").exists()
    kept = crossward("data", "scan", own_phantoms, "--state", tmp_path / "state", *USUAL)
    assert kept.code == 0
    assert "--state" not in kept.err
    assert list((tmp_path / "state").glob("*.jsonl"))
