from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from pydicom import dcmread
from typer.testing import CliRunner, Result

from crossward.cli.data_check import check
from crossward.federation.errors import BadInput

SITE = """\
version: 1
data: images
labels: {file: labels.csv, patient_column: patient}
"""


@pytest.fixture
def site(phantoms: Path, tmp_path: Path) -> Path:
    """One phantom hospital with rules of its own; its table's paths count from the images."""
    folder = Path(shutil.copytree(phantoms / "hospital-a", tmp_path / "site"))
    table = folder / "labels.csv"
    table.write_text(table.read_text().replace("images/", ""))
    (folder / "site.yaml").write_text(SITE)
    return folder


def run(*arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(check)
    return CliRunner().invoke(app, [str(argument) for argument in (*arguments, "--processes", "0")])


def test_what_would_be_trained_on(site: Path) -> None:
    lines = (site / "labels.csv").read_text().splitlines()[1:]
    result = run(site / "site.yaml", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["images"] == len(lines)
    assert figures["patients"] == 24
    by_class = {label: sum(line.endswith(f",{label}") for line in lines) for label in figures["classes"]}
    parts = figures["parts"].values()
    assert {label: sum(part[label] for part in parts) for label in by_class} == by_class
    assert figures["domains"] == {"phantomworks-lumen-40": {"images": len(lines), "steps": []}}
    assert figures["problems"] == []


def test_it_is_shown_in_tables_and_words(site: Path) -> None:
    table = site / "labels.csv"
    first, second, third, *rest = table.read_text().splitlines()
    file, patient, label = second.split(",")
    other = {"normal": "nodule"}.get(label, "normal")
    table.write_text("\n".join([first, second, f"{file},{patient},{other}", f"gone-{third}", *rest]))
    (site / "site.yaml").write_text(SITE + "transforms: {mr: [percentile]}\n")
    result = run(site)
    assert result.exit_code == 0, result.output
    assert "1 files: has two different labels" in result.stdout
    assert "1 files: has no label" in result.stdout
    assert "1 labels are for files that are not there" in result.stdout
    assert "steps for the domain 'mr', and no image is of it" in result.stdout
    assert "phantomworks-lumen-40" in result.stdout


def test_nobody_is_named(site: Path) -> None:
    """Identifiers in headers, in file names, in the table, and in what is wrong with all of them."""
    for number, file in enumerate(sorted((site / "images").iterdir())):
        dataset = dcmread(file)
        dataset.PatientName, dataset.PatientID = "PLANTED^NAME", f"PLANTED-{number}"
        dataset.AccessionNumber = dataset.InstitutionName = dataset.StationName = "PLANTED"
        dataset.ManufacturerModelName = "PLANTED^NAME" if number % 2 else "Lumen"
        dataset.save_as(file.with_name(f"PLANTED-{number}.dcm"))
        file.unlink()
    lines = [f"PLANTED-{number}.dcm,,PLANTED label {number % 9}" for number in range(40)]
    (site / "labels.csv").write_text("\n".join(["file,patient,label", *lines, "PLANTED.dcm,PLANTED,PLANTED"]))
    for rules in (SITE, SITE.replace(", patient_column: patient", ", map: {PLANTED label 1: nodule}")):
        (site / "site.yaml").write_text(rules)
        for options in ((), ("--json",)):
            result = run(site, *options)
            assert "planted" not in (result.output + str(result.exception)).lower()
            assert "images" in result.stdout


def test_mistakes_in_the_rules_are_all_told(site: Path) -> None:
    (site / "site.yaml").write_text(SITE.replace("images", "pictures") + "frames: al\n")
    result = run(site)
    assert isinstance(result.exception, BadInput)
    assert [line.split(":")[0] for line in str(result.exception).splitlines()] == [
        "site.yaml line 2",
        "site.yaml line 4",
    ]


def test_a_site_without_anything_to_train_on_fails(site: Path) -> None:
    (site / "labels.csv").write_text("file,patient,label\nelsewhere.dcm,P,normal\n")
    result = run(site)
    assert result.exit_code == 2
    assert "the site cannot take part" in result.stdout
