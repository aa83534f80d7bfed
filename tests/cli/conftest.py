from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from crossward.cli.main import main
from crossward.imaging.phantom import write_hospitals

SMALL = ("--rounds", "2", "--epochs", "1", "--size", "16", "--width", "0.0625", "--batch-size", "8", "--jobs", "1")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def crossward(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process, as the shell would: arguments in, exit code and text out."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["crossward", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms") / "hospitals"
    write_hospitals(folder, sites=2, patients=24, seed=3)
    return folder


@pytest.fixture
def own_phantoms(phantoms: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(phantoms, tmp_path / "hospitals"))
