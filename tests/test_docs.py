"""The guide to a new method is run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "adding-a-method.md").read_text()

FOLLOW_THE_GUIDE = """
import sys
import crossward.methods
crossward.methods.__path__.append(sys.argv[1])
from crossward.cli.main import main
from crossward.imaging.phantom import write_hospitals
from pathlib import Path

work = Path(sys.argv[2])
write_hospitals(work / "hospitals", sites=2, patients=24, seed=1)
sys.argv = ["crossward", "simulate", "--method", "evenper", "--data", str(work / "hospitals"),
            "--out", str(work / "run"),
            "--rounds", "2", "--epochs", "1", "--size", "16", "--width", "0.0625", "--batch-size", "8"]
main()
"""

RUN_ITS_TEST = """
import sys
import crossward.methods
crossward.methods.__path__.append(sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", sys.argv[2], sys.argv[2]]))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


def in_a_fresh_process(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def added(tmp_path: Path) -> Path:
    """The guide's first file, in a folder that the registry looks into."""
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "evenper.py").write_text(blocks("python")[0])
    return folder


def test_the_guide_touches_three_files() -> None:
    named = re.findall(r"^## \d\. .*`([^`]+)`$", GUIDE, flags=re.MULTILINE)
    assert named == ["custom/crossward/methods/evenper.py", "tests/methods/test_evenper.py", "docs/methods.md"]


def test_the_guides_method_runs(added: Path, tmp_path: Path) -> None:
    done = in_a_fresh_process(FOLLOW_THE_GUIDE, added, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()
    reports = list((tmp_path / "run" / "sites").glob("*/vault/local-*.safetensors"))
    assert reports, "the head was not kept in the vault"


def test_the_guides_test_passes(added: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_evenper.py").write_text(blocks("python")[1])
    done = in_a_fresh_process(RUN_ITS_TEST, added, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_guides_row_fits_the_table_of_methods() -> None:
    (row,) = blocks("text")
    table = (ROOT / "docs" / "methods.md").read_text()
    header = next(line for line in table.splitlines() if line.startswith("| method |"))
    assert row.strip().count("|") == header.count("|")
