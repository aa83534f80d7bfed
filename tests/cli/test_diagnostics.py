from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossward.evaluate.plots import Html
from tests.cli.conftest import SMALL, Command


def test_a_run_is_looked_into_unless_that_is_not_wanted(crossward: Command, phantoms: Path, tmp_path: Path) -> None:
    found = {}
    for name, more in {"with": (), "without": ("--no-diagnostics",)}.items():
        out = tmp_path / name
        done = crossward("simulate", "--method", "fedavg", "--data", phantoms, "--out", out, *SMALL, *more)
        assert done.code == 0
        found[name] = json.loads((out / "result.json").read_text(encoding="utf-8"))
        report = (out / "report.html").read_text(encoding="utf-8")
        assert ("Where the model looked" in report) == (name == "with")
    assert len(found["with"]["diagnostics"]["noise"]["sites"]) == 2
    assert "diagnostics" not in found["without"]
    assert found["with"]["summary"] == found["without"]["summary"]


def test_diagnostics_that_fail_do_not_cost_the_result(
    crossward: Command, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        assert (tmp_path / "run" / "result.json").exists()
        raise RuntimeError("out of luck")

    monkeypatch.setattr("crossward.cli.closer.diagnose", fail)
    done = crossward("simulate", "--method", "fedavg", "--data", phantoms, "--out", tmp_path / "run", *SMALL)
    assert done.code == 0
    assert "diagnostics could not be worked out (RuntimeError)" in done.out + done.err
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["summary"]["avg"] is not None
    assert (tmp_path / "run" / "report.html").exists()


def test_a_damaged_vault_costs_warnings_only(
    crossward: Command, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("not readable")

    monkeypatch.setattr("crossward.cli.closer.deployed_models", fail)
    done = crossward("simulate", "--method", "fedavg", "--data", phantoms, "--out", tmp_path / "run", *SMALL)
    assert done.code == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert [warning.split(" could")[0] for warning in result["warnings"][-3:]] == ["flags", "newcomer", "diagnostics"]
    assert not {"flags", "newcomer", "diagnostics"} & set(result)


def test_a_report_that_cannot_be_drawn_with_the_additions_is_left_without_them(
    crossward: Command, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> str:
        if any(arguments):
            raise ValueError("cannot be drawn")
        return Html()

    monkeypatch.setattr("crossward.evaluate.report_features._noise", fail)
    done = crossward("simulate", "--method", "fedavg", "--data", phantoms, "--out", tmp_path / "run", *SMALL)
    assert done.code == 0
    assert "the closer look could not be worked out (ValueError)" in done.out + done.err
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["summary"]["avg"] is not None
    assert "diagnostics" not in result
    assert "the closer look could not be worked out" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
