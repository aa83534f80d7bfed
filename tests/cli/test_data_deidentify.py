from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line
from tests.imaging.planted import marks_in, save, small


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    folder = tmp_path / "originals"
    for number in range(3):
        save(small(number), folder / f"PLANTED^PERSON-{number}.dcm")
    return folder


@pytest.fixture
def deidentify(crossward: Command, originals: Path, tmp_path: Path):
    def run(*more: object, folder: Path = originals, secret: Path = tmp_path / "keys" / "secret"):
        out = tmp_path / "out"
        return crossward("data", "deidentify", folder, "--out", out, "--secret", secret, "--processes", 0, *more)

    return run


def test_help_has_an_example(crossward: Command) -> None:
    done = crossward("data", "deidentify", "--help")
    assert done.code == 0
    assert "Example:" in done.out


def test_a_folder_is_cleaned_and_nothing_printed_names_anybody(deidentify, tmp_path: Path) -> None:
    done = deidentify()
    assert done.code == 0, done.err
    assert "3 files are in" in done.out
    assert marks_in((done.out + done.err).encode()) == []
    assert len(list((tmp_path / "out" / "clean").rglob("*.dcm"))) == 3
    assert (tmp_path / "keys" / "secret").stat().st_mode & 0o777 == 0o600
    again = deidentify("--json")
    facts = json.loads(again.out)
    assert (facts["ok"], facts["held"], facts["refused"]) == (3, 0, 0)
    assert "rows" not in facts
    assert facts["attributes"]["PatientName"] == {"replaced": 3}


def test_what_is_held_sets_the_exit_code_until_it_is_reviewed(deidentify, originals: Path, tmp_path: Path) -> None:
    save(small(5, BurnedInAnnotation="YES"), originals / "marked.dcm")
    done = deidentify()
    assert done.code == 5
    assert "may show burned-in text" in done.out
    assert "--accept-burned-in" in done.out
    (held,) = (tmp_path / "out" / "held").rglob("*.dcm")
    reviewed = tmp_path / "reviewed.txt"
    reviewed.write_text(f"# looked at\n\nheld/{held.relative_to(tmp_path / 'out' / 'held')}\n")
    accepted = deidentify("--accept-burned-in", reviewed)
    assert accepted.code == 0
    assert "warning" not in accepted.err
    reviewed.write_text("held/PLANTED/nowhere.dcm\n")
    assert "1 lines of the list name no file" in deidentify("--accept-burned-in", reviewed).err
    assert deidentify().code == 0


def test_an_identifier_that_is_left_sets_the_exit_code(deidentify, originals: Path) -> None:
    save(small(5, Manufacturer="Planted Works"), originals / "left.dcm")
    done = deidentify()
    assert done.code == 5
    assert "still holds an identifier" in done.out
    assert marks_in(done.out.encode()) == []


def test_bad_input_is_one_line(deidentify, originals: Path, tmp_path: Path) -> None:
    assert "no folder" in one_line(deidentify(folder=tmp_path / "missing"))
    assert "folder of its own" in one_line(deidentify(secret=tmp_path / "out" / "secret"))
    assert "folder of its own" in one_line(deidentify(secret=originals / "secret"))
    assert "text file" in one_line(deidentify("--accept-burned-in", tmp_path / "missing.txt"))
    (tmp_path / "weak").write_bytes(b"short")
    (tmp_path / "weak").chmod(0o600)
    assert "32 bytes" in one_line(deidentify(secret=tmp_path / "weak"))
    assert not (originals / "secret").exists()


def test_a_folder_without_images_is_bad_input(deidentify, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    assert "no file was de-identified" in one_line(deidentify(folder=tmp_path / "texts"))
