from __future__ import annotations

import json
from pathlib import Path

import pytest

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
