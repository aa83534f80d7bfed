"""Bad input gets one clear line, an exit code that is not zero, and loses nothing."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL, Command, Outcome


def one_line(outcome: Outcome) -> str:
    """The error line; there is one, it is the last thing said, and no traceback is in sight."""
    assert outcome.code not in (0, 70), outcome
    assert "Traceback" not in outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, outcome.err
    return lines[0]


def relabel(hospital: Path, change: dict[str, str], *, only: int | None = None) -> None:
    path = hospital / "labels.csv"
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows[:only]:
        row["label"] = change.get(row["label"], change.get("*", row["label"]))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def simulate(crossward: Command, tmp_path: Path):
    def run(data: Path, *more: object, method: str = "fedavg") -> Outcome:
        return crossward("simulate", "--method", method, "--data", data, "--out", tmp_path / "run", *SMALL, *more)

    return run


def test_unknown_method_and_option(simulate, phantoms: Path) -> None:
    assert "fedavg" in one_line(simulate(phantoms, method="fedavgg"))
    assert "mu" in one_line(simulate(phantoms, "-o", "nu=1", method="fedprox"))
    assert "name=value" in one_line(simulate(phantoms, "-o", "mu", method="fedprox"))
    assert "float" in one_line(simulate(phantoms, "-o", "mu=strong", method="fedprox"))
    assert "negative" in one_line(simulate(phantoms, "-o", "mu=-1", method="fedprox"))


def test_an_option_that_the_command_does_not_have(crossward: Command) -> None:
    done = crossward("simulate", "--methods", "fedavg")
    assert done.code == 2
    assert "No such option" in done.err


@pytest.mark.parametrize(
    "more",
    [("--norm", "layer"), ("--depth", 34), ("--width", 0), ("--block", "magic"), ("--head", "two"), ("--size", 4),
     ("--schedule", "linear"), ("--lr", -1), ("--lr", "nan"), ("--participation", 0), ("--fraction", 2)],
    ids=lambda pair: " ".join(map(str, pair)),
)  # fmt: skip
def test_settings_that_make_no_sense(simulate, phantoms: Path, more: tuple[object, ...]) -> None:
    one_line(simulate(phantoms, *more))


def test_folder_missing_empty_or_without_labels(simulate, own_phantoms: Path, tmp_path: Path) -> None:
    assert "nowhere" in one_line(simulate(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    one_line(simulate(tmp_path / "empty"))
    (own_phantoms / "hospital-b" / "labels.csv").unlink()
    assert "labels.csv" in one_line(simulate(own_phantoms))
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_label_that_no_other_site_has(simulate, own_phantoms: Path) -> None:
    relabel(own_phantoms / "hospital-b", {"nodule": "nodul"}, only=12)
    line = one_line(simulate(own_phantoms))
    assert "nodul" in line
    assert "hospital-b" in line


def test_a_one_class_site_is_refused_and_lenient_goes_on_without_nan(simulate, own_phantoms: Path) -> None:
    relabel(own_phantoms / "hospital-b", {"*": "normal"})
    classes = ("--classes", "normal,nodule,effusion,pneumothorax")
    assert "hospital-b" in one_line(simulate(own_phantoms, *classes))
    done = simulate(own_phantoms, *classes, "--lenient", "--json")
    assert done.code == 0, done.err
    assert "NaN" not in done.out
    assert "warning" in done.err


def test_fewer_samples_than_a_batch(simulate, phantoms: Path) -> None:
    line = one_line(simulate(phantoms, "--batch-size", 500))
    assert "batch" in line


def test_a_file_that_is_not_dicom(simulate, own_phantoms: Path) -> None:
    victim = next((own_phantoms / "hospital-a" / "images").iterdir())
    victim.write_bytes(b"this is a text")
    listed = (own_phantoms / "hospital-a" / "labels.csv").read_text().splitlines()
    number = next(number for number, line in enumerate(listed, start=1) if victim.name in line)
    line = one_line(simulate(own_phantoms))
    assert f"hospital-a: labels.csv line {number}: not a DICOM file" in line
    assert victim.name not in line


def test_a_loss_that_becomes_nan_names_site_and_round(simulate, phantoms: Path, tmp_path: Path) -> None:
    line = one_line(simulate(phantoms, "--lr", "1e30"))
    assert "hospital-a, round 1" in line
    assert "not aggregated" in line
    assert not (tmp_path / "run" / "server" / "checkpoint.safetensors").exists()


def test_unwritable_output(crossward: Command, phantoms: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    one_line(crossward("simulate", "--method", "local", "--data", phantoms, "--out", blocked / "run", *SMALL))
    assert blocked.read_text() == "in the way"
    one_line(crossward("data", "phantom", "--out", blocked / "made", "--patients", 8))


@pytest.mark.slow
def test_disk_full_while_writing_a_checkpoint(crossward: Command, phantoms: Path, tmp_path: Path) -> None:
    full = tmp_path / "small-disk"
    full.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=1500k tmpfs '{full}' 2>/dev/null"):
        pytest.skip("a small disk can be mounted by root only")
    try:
        base = ("--method", "fedavg", "--data", phantoms, "--out", full / "run", "--rounds", 3, "--size", 16,
                "--width", 0.125, "--batch-size", 8, "--jobs", 1)  # fmt: skip
        line = one_line(crossward("simulate", *base))
        assert "disk full" in line
        assert not list((full / "run").rglob("*.part"))
        moved = tmp_path / "more-room"
        shutil.copytree(full / "run", moved)
    finally:
        os.system(f"umount '{full}'")
    again = list(base)
    again[again.index(full / "run")] = moved
    resumed = crossward("simulate", *again, "--resume") if (moved / "run.json").exists() else None
    assert resumed is not None
    assert resumed.code == 0, resumed.err


def test_a_report_of_something_that_is_no_result(crossward: Command, tmp_path: Path) -> None:
    one_line(crossward("report", tmp_path))
    (tmp_path / "result.json").write_text('{"method": 3}')
    one_line(crossward("report", tmp_path))
