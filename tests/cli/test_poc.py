"""./poc/run as a person meets it: real processes, none of which stays behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from crossward.cli import closer
from crossward.cli import poc as command
from crossward.flare.outcome import Outcome
from crossward.flare.system import LocalSystem
from crossward.imaging.data import load
from crossward.imaging.held_out import load_held_out
from crossward.imaging.phantom import write_hospitals
from crossward.methods import create
from crossward.site.handover import HANDOVER
from crossward.site.inprocess import simulate
from crossward.site.study import Study

MAIN = "from crossward.cli.main import main; main()"
LONG = 400


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poc") / "hospitals"
    write_hospitals(folder, sites=2, patients=48, seed=1, unseen=True, spoiled=True)
    return folder


class Poc:
    """./poc/run in a work folder of its own."""

    def __init__(self, workdir: Path, hospitals: Path) -> None:
        self.workdir = workdir
        # Two hospitals, which are too few for secure aggregation.
        command = [sys.executable, "-u", "-c", MAIN, "poc", "--no-secagg"]
        self._base = [*command, "--workdir", str(workdir), "--data", str(hospitals)]

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": ""}
        return subprocess.Popen(
            [*self._base, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.workdir,
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


class Finished:
    """A run that has come to its end in process, laid out as FLARE's sites leave it."""

    def __init__(self, folder: Path, hospitals: Path) -> None:
        self.out = folder / "run"
        self.cohort = load(hospitals)
        self.held_out = load_held_out(hospitals, classes=self.cohort.classes, size=32, channels=1, at_most=8)
        self.study = Study.usual(create("rfeddis"), self.cohort, rounds=1, seed=0)
        result = simulate(self.cohort, self.study, folder / "simulated", jobs=1)
        for name in self.cohort.sites:
            shutil.copytree(folder / "simulated" / "sites" / name, self.out / "sites" / name / "runs" / "R")
        download = self.out / "job-results" / "J" / "workspace" / "crossward"
        download.mkdir(parents=True)
        shutil.copy(folder / "simulated" / "server" / HANDOVER, download)
        self.outcome = Outcome(status="completed", job="J", jobs=("J",), run="R", result=result)

    def conclude(self) -> str:
        screen = Console(file=io.StringIO(), width=100, record=True)
        clock = command.Clock()
        command.finish(
            screen, self.cohort, self.held_out, self.study, self.outcome, self.out, clock=clock, compare=False
        )
        assert {"flags", "diagnostics"} <= clock.laps.keys()
        return screen.export_text()

    def result(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return read


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, hospitals: Path) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"), hospitals)


def check_flags(result: dict[str, Any], *, each: int) -> None:
    """Every site read its own test scans and some of both held-out sets, and lists what is above its threshold."""
    flags = result["flags"]
    assert flags["percentile"] == 95
    assert set(flags["sites"]) == {"hospital-a", "hospital-b"}
    for name, site in flags["sites"].items():
        assert list(site["sets"]) == ["own test", "unseen scanner", "spoiled"]
        assert site["sets"]["own test"]["n"] == result["sites"][name]["n_test"]
        assert site["sets"]["unseen scanner"]["n"] == site["sets"]["spoiled"]["n"] == each
        assert site["n_validation"] == result["sites"][name]["n_val"] > 0
        assert all(0 <= value <= 1 for value in site["auroc"].values())
        assert set(site["sets"]["spoiled"]["kinds"]) == {"wrong-anatomy", "inverted", "blurred", "empty"}
        for what, counts in site["sets"].items():
            listed = [scan for scan in flags["scans"] if (scan["site"], scan["set"]) == (name, what)]
            assert len(listed) == counts["flagged"]
    for scan in flags["scans"]:
        assert scan["uncertainty"] > scan["threshold"] == flags["sites"][scan["site"]]["threshold"]
        for head in ("global", "local"):
            assert scan[head]["class"] in result["data"]["classes"]
            assert 0 <= scan[head]["belief"] <= 1 - scan[head]["uncertainty"] + 1e-6


def test_a_finished_run_ends_with_flags_and_diagnostics(finished: Finished) -> None:
    out = finished.conclude()
    result = finished.result()
    check_flags(result, each=8)
    assert result["diagnostics"]
    assert result["laps"]["flags"] > 0
    assert f"of {len(result['flags']['scans'])}, the most uncertain of each set" in out
    assert "Flagged: own test" in out
    page = (finished.out / "report.html").read_text()
    assert "Scans that the models should not be trusted on" in page
    assert 'alt="Flagged scan ' in page


@pytest.mark.parametrize(("failing", "kept"), [("flags", "diagnostics"), ("diagnostics", "flags")])
def test_a_failure_in_one_addition_loses_neither_the_result_nor_the_other(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, failing: str, kept: str
) -> None:
    (finished.out / "result.json").unlink(missing_ok=True)
    (finished.out / "report.html").unlink(missing_ok=True)
    found: dict[str, Any] = {}

    def fail(*_: object, **__: object) -> None:
        # What is known so far is on disk before an addition is worked out.
        found.update(finished.result())
        raise ValueError("secret-patient-name")

    monkeypatch.setattr(closer, {"flags": "find_flags", "diagnostics": "diagnose"}[failing], fail)
    out = finished.conclude()
    assert all(site["accuracy"] is not None for site in found["sites"].values())
    result = finished.result()
    assert result["newcomer"]["stages"].keys() == {"own statistics"}
    assert result["sites"] == found["sites"]
    assert failing not in result
    assert result[kept]
    (warning,) = result["warnings"]
    assert warning.startswith(f"{failing} could not be worked out (ValueError)")
    assert f"{failing} could not be worked out" in out
    assert "secret-patient-name" not in out + json.dumps(result)
    assert warning in (finished.out / "report.html").read_text()


def test_phantoms_are_drawn_with_held_out_sets_beside_those_of_earlier_versions(
    crossward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tmp_path / "phantoms-2-3"
    write_hospitals(earlier, sites=2, patients=8, seed=3)
    written: dict[str, Any] = {}

    def small(folder: Path, **options: Any) -> None:
        written.update(options)
        write_hospitals(folder, **options | {"patients": 48})

    def ran(*words: Any, **options: Any) -> None:
        written["ran"] = words

    monkeypatch.setattr(command, "write_hospitals", small)
    monkeypatch.setattr(command, "run_on_flare", ran)
    done = crossward("poc", "--workdir", tmp_path, "--sites", 2, "--seed", 3, "--no-secagg")
    assert done.code == 0, done.err
    assert written["unseen"] is written["spoiled"] is True
    _, cohort, held_out, study, data, _ = written["ran"]
    assert (study.method.name, study.masking) == ("rfeddis", None)
    assert list(held_out) == ["unseen scanner", "spoiled"]
    assert list(cohort.sites) == ["hospital-a", "hospital-b"]
    assert (data / "held-out" / "spoiled").is_dir()
    assert not (earlier / "held-out").exists()

    # Data without held-out sets: flags come from the hospitals' own test scans only.
    shutil.rmtree(data / "held-out")
    done = crossward("poc", "--workdir", tmp_path, "--data", data, "--method", "fedbn", "--no-secagg")
    assert done.code == 0, done.err
    assert written["ran"][2] == {}
    assert written["ran"][3].method.name == "fedbn"

    # Two hospitals are too few for a sum, and nothing is run in the open because of that.
    del written["ran"]
    done = crossward("poc", "--workdir", tmp_path, "--data", data, "--method", "fedbn")
    assert done.code == 2
    assert "at least 3 hospitals, and there are 2; use more, or --no-secagg" in done.err
    assert "ran" not in written


def test_secure_aggregation_is_what_a_poc_uses(crossward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(command, "run_on_flare", lambda *words, **options: ran.append(words[3]))
    write_hospitals(tmp_path / "four", sites=4, patients=48, seed=3)
    given = ("poc", "--workdir", tmp_path, "--data", tmp_path / "four")
    for method, more, fewest, bits in (("fedavg", (), 3, 32), ("fdse", ("--ring-bits", 24), 4, 24)):
        done = crossward(*given, "--method", method, *more)
        assert done.code == 0, done.err
        assert (ran[-1].masking.fewest, ran[-1].masking.bits) == (fewest, bits)


@pytest.mark.slow
@pytest.mark.flare
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
    assert result["method"] == "rfeddis"
    check_flags(result, each=36)
    assert "Flagged: own test" in out
    assert "flags" in result["laps"]
    assert (run / "report.html").stat().st_size > 1000
    # Keys and certificates go with the system; what the sites keep stays.
    assert not (run / "system").exists()
    assert list((run / "sites" / "hospital-a" / "runs").glob("*/vault/deployed.safetensors"))


@pytest.mark.slow
@pytest.mark.flare
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


@pytest.mark.slow
@pytest.mark.flare
def test_keep_leaves_a_system_that_can_be_used_and_stopped(poc: Poc) -> None:
    code, out = poc.run("--method", "fedavg", "--rounds", "1", "--no-compare", "--keep")
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
