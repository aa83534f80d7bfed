from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossward.methods import available
from tests.cli.conftest import SMALL, Command


def test_simulate_writes_a_result_and_a_report_that_the_report_command_shows(
    crossward: Command, phantoms: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = crossward("simulate", "--method", "fedbn", "--data", phantoms, "--out", out, *SMALL, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result == json.loads((out / "result.json").read_text())
    assert result["method"] == "fedbn"
    assert result["data"]["phantom"] is True
    assert set(result["sites"]) == {"hospital-a", "hospital-b"}
    assert [record["round"] for record in result["rounds"]] == [1, 2]
    assert "validation" in done.err
    assert "phantom" in (out / "report.html").read_text().lower()

    shown = crossward("report", out, "--html", tmp_path / "again.html")
    assert shown.code == 0, shown.err
    assert "hospital-a" in shown.out
    assert (tmp_path / "again.html").stat().st_size > 1000


def test_a_run_is_not_overwritten_and_a_finished_one_resumes_to_the_same_result(
    crossward: Command, phantoms: Path, tmp_path: Path
) -> None:
    base = ("simulate", "--method", "fedavg", "--data", phantoms, "--out", tmp_path / "run", *SMALL, "--json")
    first = crossward(*base)
    assert first.code == 0, first.err
    again = crossward(*base)
    assert again.code == 2
    assert "--resume" in again.err
    resumed = crossward(*base, "--resume")
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["sites"] == json.loads(first.out)["sites"]
    other = crossward(*base, "--resume", "--lr", "0.5")
    assert other.code == 2
    assert "learning_rate" in other.err


def test_methods_lists_every_method(crossward: Command) -> None:
    assert crossward("methods").code == 0
    rows = json.loads(crossward("methods", "--json").out)
    assert set(rows) == set(available())
    assert rows["local"]["values_sent"] == 0
    assert rows["fedavg"]["values_sent"] > rows["fedbn"]["values_sent"] > 0
    assert rows["fedprox"]["options"]["mu"]["default"] == 0.01


def test_data_phantom_writes_hospitals_and_a_sheet(crossward: Command, tmp_path: Path) -> None:
    out = tmp_path / "made"
    done = crossward("data", "phantom", "--out", out, "--sites", 1, "--patients", 8, "--spoiled", "--sheet")
    assert done.code == 0, done.err
    assert (out / "hospital-a" / "labels.csv").exists()
    assert (out / "held-out" / "spoiled" / "labels.csv").exists()
    assert (out / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "Computer-drawn" in done.out


@pytest.mark.parametrize(
    "words",
    [
        ("simulate",),
        ("methods",),
        ("report",),
        ("poc",),
        ("provision",),
        ("job", "export"),
        ("job", "submit"),
        ("job", "watch"),
        ("job", "explain"),
        ("job", "simulator"),
        ("data", "phantom"),
        ("bench", "table"),
        ("bench", "combine"),
        ("bench", "flare"),
    ],
    ids=" ".join,
)
def test_help_has_an_example(crossward: Command, words: tuple[str, ...]) -> None:
    done = crossward(*words, "--help")
    assert done.code == 0
    assert "Example:" in done.out
