from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from crossward.cli.data_prepare import prepare
from crossward.federation.errors import BadInput
from tests.imaging.prepared_sites import SITE, Hospital

runner = CliRunner()
app = typer.Typer()
app.command("prepare")(prepare)


@app.command("other")
def other() -> None:
    """A second command, so that the first keeps its name."""


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    hospital = Hospital(tmp_path / "hospital").films(12)
    hospital.film("PLANTED-NAME.dcm", "PLANTED-p", "x", pixels=np.full((2, 400), 7, np.uint8))
    return hospital


def run(*arguments: object) -> str:
    done = runner.invoke(app, ["prepare", *map(str, arguments), "--processes", "0"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_person_sees_counts_reasons_classes_and_domains(hospital: Hospital) -> None:
    said = run(hospital.folder / "site.yaml", "--size", 8)
    assert "17 files seen: 16 accepted, 1 rejected. 16 pictures of 12 patients" in said.replace("\n", " ")
    for words in (r"is too narrow for a picture\W+1\b", r"\bx\W+\d+\W+\d+\W+\d+", "maker-model-1", "8x8x1"):
        assert re.search(words, said), words
    assert "PLANTED" not in said.replace(str(hospital.folder), "")
    assert "SECRET" not in said


def test_json_has_the_counts_of_the_manifest(hospital: Hospital) -> None:
    said = json.loads(run(hospital.folder, "--size", 8, "--json"))
    kept = json.loads((hospital.cache / "manifest.json").read_text())["summary"]
    assert said == {**kept, "report": None}
    assert said["reasons"] == {"is too narrow for a picture": 1}


def test_the_page_of_domains_is_written_on_request(hospital: Hospital, tmp_path: Path) -> None:
    said = json.loads(run(hospital.folder, "--size", 8, "--json", "--report", tmp_path / "page"))
    page = Path(said["report"]).read_text()
    assert "maker-model-1" in page
    assert "PLANTED" not in page
    assert Path(said["report"]).stat().st_mode & 0o077 == 0


def test_classes_are_given_with_commas(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(12, labels=("x", "y", "z"))
    said = json.loads(run(hospital.folder, "--size", 8, "--json", "--classes", "x, z"))
    assert list(said["parts"]["train"]) == ["x", "z"]


def test_what_is_wrong_is_one_line(hospital: Hospital) -> None:
    with pytest.raises(BadInput, match=r"site\.yaml"):
        run(hospital.folder / "gone" / "site.yaml")
    hospital.rules(SITE + "frames: volume\n")
    with pytest.raises(BadInput, match="3-D") as refusal:
        run(hospital.folder, "--size", 8)
    assert "\n" not in str(refusal.value)


def test_no_image_at_all_is_an_error_with_its_reasons(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h")
    hospital.film("strip.dcm", "PLANTED-p", "x", pixels=np.full((2, 400), 7, np.uint8))
    with pytest.raises(BadInput, match="no image could be prepared"):
        run(hospital.folder, "--size", 8)
    assert json.loads((hospital.cache / "manifest.json").read_text())["rejected"][0]["reason"] == "TOO_NARROW"


def test_help_has_an_example() -> None:
    done = runner.invoke(app, ["prepare", "--help"])
    assert "Example: crossward data prepare site.yaml" in done.output
