"""Ctrl-C in the middle of a run: a word on what is kept, at once, and the run goes on afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

MAIN = "from crossward.cli.main import main; main()"


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on_and_does(crossward: Command, phantoms: Path, tmp_path: Path) -> None:
    words = ["simulate", "--method", "fedavg", "--data", str(phantoms), "--out", str(tmp_path / "run")]
    words += ["--rounds", "40", "--epochs", "1", "--size", "16", "--width", "0.0625", "--batch-size", "8"]
    command = [sys.executable, "-u", "-c", MAIN, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("round   2/40" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert "stopped: finished rounds are kept" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    resumed = crossward(*words, "--resume")
    assert resumed.code == 0, resumed.err
    assert "resumed after round" in resumed.out
