"""./poc/run as a person meets it: real processes, none of which stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossward.flare.system import LocalSystem
from crossward.imaging.phantom import write_hospitals

pytestmark = [pytest.mark.slow, pytest.mark.flare]

MAIN = "from crossward.cli.main import main; main()"
LONG = 400


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poc") / "hospitals"
    write_hospitals(folder, sites=2, patients=48, seed=1)
    return folder


class Poc:
    """./poc/run in a work folder of its own."""

    def __init__(self, workdir: Path, hospitals: Path) -> None:
        self.workdir = workdir
        self._base = [sys.executable, "-u", "-c", MAIN, "poc", "--workdir", str(workdir), "--data", str(hospitals)]

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": ""}
        command = [*self._base, "--method", "fedavg", *words]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.workdir
        )

    def run(self, *words: str) -> tuple[int, str]:
        with self.start(*words) as process:
            out, _ = process.communicate(timeout=LONG)
        return process.returncode, out

    def until(self, process: subprocess.Popen[str], text: str) -> str:
        """Read what the command prints until a line has the text."""
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"'{text}' was never printed:\n{seen}")

    def systems(self) -> list[LocalSystem]:
        return [LocalSystem(path.parent) for path in self.workdir.glob("*/system/system.json")]

    def running(self) -> int:
        return sum(len(pids) for system in self.systems() for pids in system.pids().values())

    def only_run(self) -> Path:
        (run,) = (path.parent for path in self.workdir.glob("poc-*/result.json"))
        return run


@pytest.fixture
def poc(tmp_path: Path, hospitals: Path) -> Iterator[Poc]:
    made = Poc(tmp_path, hospitals)
    yield made
    for system in made.systems():
        system.stop()


def test_a_killed_run_leaves_processes_which_the_next_one_stops_before_it_trains(poc: Poc) -> None:
    with poc.start("--rounds", "1") as first:
        poc.until(first, "FLARE is ready")
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=60)
    assert poc.running()

    code, out = poc.run("--rounds", "2")
    assert code == 0, out
    assert "that an earlier run left" in out
    assert not poc.running()
    assert "hospital-a joined" in out
    assert "round   2/2" in out
    assert "each hospital alone" in out
    run = poc.only_run()
    result = json.loads((run / "result.json").read_text())
    assert set(result["sites"]) == {"hospital-a", "hospital-b"}
    assert all(site["accuracy"] is not None and site["scanner"] for site in result["sites"].values())
    assert result["data"]["phantom"] is True
    assert result["alone"]["avg"] is not None
    assert (run / "report.html").stat().st_size > 1000
    # Keys and certificates go with the system; what the sites keep stays.
    assert not (run / "system").exists()
    assert list((run / "sites" / "hospital-a" / "runs").glob("*/vault/deployed.safetensors"))


def test_ctrl_c_ends_every_process_and_says_so(poc: Poc) -> None:
    with poc.start("--rounds", "50") as process:
        seen = poc.until(process, "round   1/50")
        assert poc.running()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, seen + rest
    assert "every process is ended" in rest
    assert "Traceback" not in rest
    assert not poc.running()


def test_keep_leaves_a_system_that_can_be_used_and_stopped(poc: Poc) -> None:
    code, out = poc.run("--rounds", "1", "--no-compare", "--keep")
    assert code == 0, out
    for word in ("fl_admin.sh", "crossward job", "nvflare job", "--stop"):
        assert word in out
    (system,) = poc.systems()
    assert set(system.pids()) == {"server", "hospital-a", "hospital-b"}
    listing = [sys.executable, "-c", MAIN, "job", "list", "--kit", str(system.admin_kit), "--json"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=False, timeout=120)
    assert listed.returncode == 0, listed.stderr
    assert "crossward-fedavg" in listed.stdout

    code, out = poc.run("--stop")
    assert code == 0, out
    assert "Stopped" in out
    until = time.monotonic() + 30
    while poc.running():
        assert time.monotonic() < until
        time.sleep(0.2)
