"""A consortium from the template: kits by `nvflare provision`, processes from the kits, a job from the real console."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pexpect
import pytest

from crossward.flare.console import Console
from crossward.flare.explain import explain
from crossward.flare.jobs import CLIENT, Timing, export, usual_study
from crossward.flare.machine import free_port
from crossward.flare.watch import follow
from crossward.imaging.data import load
from crossward.imaging.phantom import write_hospitals
from crossward.privacy.secagg.settings import Settings
from tests.flare.real import BATCH, PACE, SIZE, TIMING, small_study

pytestmark = [pytest.mark.slow, pytest.mark.flare]

ROOT = Path(__file__).resolve().parents[2]
ADMIN = "admin@example.org"
SERVER = "localhost"
SITES = ("hospital-a", "hospital-b", "hospital-c")
ROUNDS = 2
LONG = 300


@dataclass
class Consortium:
    """Kits from the template, and the processes started from them."""

    kits: Path
    processes: list[subprocess.Popen[bytes]]
    folder: Path

    @property
    def admin(self) -> Path:
        return self.kits / ADMIN

    def state(self, site: str) -> list[str]:
        """What a site keeps, except its lock and the journal of what left."""
        found = (self.kits / site / "state").rglob("*") if (self.kits / site / "state").exists() else ()
        return sorted(path.name for path in found if path.is_file() and path.name not in ("lock", "journal.jsonl"))


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    folder = tmp_path_factory.mktemp("consortium")
    write_hospitals(folder / "data", sites=len(SITES), patients=48, seed=2)
    project = (ROOT / "provisioning" / "project.yml").read_text()
    # One machine, so the server's name is this machine's, and its port must be free here.
    project = project.replace("server.example.org", SERVER).replace("8002", str(free_port()))
    for site in SITES:
        project = re.sub(
            rf'(name: {site}\n(?:.*\n)*?\s+data_root: )""', rf'\g<1>"{folder / "data" / site}"', project, count=1
        )
    (folder / "project.yml").write_text(project)
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "consortium", "--force"]
    made = subprocess.run(
        command, cwd=folder, env={**environment(), "HOME": str(folder)}, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    kits = folder / "consortium" / "crossward_example" / "prod_00"
    processes = []
    try:
        for name in (SERVER, *SITES):
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        ["bash", str(kits / name / "startup" / "sub_start.sh"), "--once"],
                        env=environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        started = Consortium(kits, processes, folder)
        wait_for(lambda: sites_of(started) == sorted(SITES), "the sites did not register")
        yield started
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=20)


def wait_for(condition: Callable[[], bool], otherwise: str, *, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.5)


def sites_of(consortium: Consortium) -> list[str]:
    try:
        with Console.open(consortium.admin) as console:
            return console.sites()
    except Exception:
        return []


@pytest.fixture
def shell(consortium: Consortium) -> Iterator[pexpect.spawn[str]]:
    """The administrator's console, logged in."""
    child = pexpect.spawn(
        "bash",
        [str(consortium.admin / "startup" / "fl_admin.sh")],
        env={**environment(), "HOME": str(consortium.folder), "TERM": "dumb"},
        encoding="utf-8",
        timeout=120,
        dimensions=(50, 300),
    )
    child.expect("User Name:")
    child.sendline(ADMIN)
    child.expect("> ")
    yield child
    child.sendline("bye")
    child.expect(pexpect.EOF)
    child.close()


def asked(shell: pexpect.spawn[str], command: str) -> str:
    """What the console answers to a command."""
    shell.sendline(command)
    shell.expect(r"Done \[\d+ usecs\]")
    answer = str(shell.before)
    shell.expect("> ")
    return answer


def submitted(shell: pexpect.spawn[str], job: Path) -> str:
    answer = asked(shell, f"submit_job {job}")
    found = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", answer)
    assert found, answer
    return found[0]


def small_job(consortium: Consortium, folder: Path) -> Path:
    cohort = load(consortium.folder / "data", size=SIZE, batch_size=BATCH)
    return export(small_study("fedavg", cohort, rounds=1).masked(Settings()), folder, timing=TIMING, min_sites=3)


def test_a_job_from_the_console_runs_to_its_end(
    consortium: Consortium, shell: pexpect.spawn[str], tmp_path: Path
) -> None:
    # jobs/fedavg with fewer rounds, which add nothing here: test_jobs holds that folder against what is written so.
    usual = usual_study("fedavg", secagg=False)
    study = replace(usual, task=replace(usual.task, rounds=ROUNDS)).masked(Settings())
    job_id = submitted(shell, export(study, tmp_path / "fedavg", timing=Timing(), min_sites=len(SITES)))
    wait_for(lambda: "RUNNING" in asked(shell, "list_jobs"), "the job did not start")
    with Console.open(consortium.admin) as console:
        # On a busy machine FLARE takes a while to end a job, which must not be mistaken for one that has died.
        outcome = follow(console, job_id, pace=replace(PACE, process=60.0))
    assert outcome.status == "completed", outcome.reason
    wait_for(lambda: "FINISHED:COMPLETED" in asked(shell, "list_jobs"), "the console does not call the job completed")
    assert outcome.result is not None
    assert set(outcome.result["sites"]) == set(SITES)
    assert len(outcome.result["rounds"]) == ROUNDS
    for site in SITES:
        assert "deployed.safetensors" in consortium.state(site)


def test_code_in_a_job_is_refused(consortium: Consortium, shell: pexpect.spawn[str], tmp_path: Path) -> None:
    job = small_job(consortium, tmp_path / "job")
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "intruder.py").write_text("raise SystemExit('this must never run')\n")
    assert_refused(consortium, shell, job, "code")


def test_a_class_outside_the_allow_list_is_refused(
    consortium: Consortium, shell: pexpect.spawn[str], tmp_path: Path
) -> None:
    job = small_job(consortium, tmp_path / "job")
    configuration: dict[str, Any] = json.loads((job / CLIENT).read_text())
    intruder = {"id": "intruder", "path": "crossward.site.journal.Journal", "args": {"path": "x"}}
    configuration["components"].append(intruder)
    (job / CLIENT).write_text(json.dumps(configuration))
    assert_refused(consortium, shell, job, "Journal")


def assert_refused(consortium: Consortium, shell: pexpect.spawn[str], job: Path, word: str) -> None:
    """The job ends without having run, the explanation says why, and no site's state has changed."""
    before = {site: consortium.state(site) for site in SITES}
    job_id = submitted(shell, job)
    with Console.open(consortium.admin) as console:
        outcome = follow(console, job_id, pace=PACE, resume=False)
        assert outcome.status == "failed"
        lines = explain(console, job_id, kits=consortium.kits)
    told = " ".join(f"{line.cause} {line.log} {line.next_step}" for line in lines)
    assert word.lower() in told.lower(), told
    assert {site: consortium.state(site) for site in SITES} == before
    shutil.rmtree(job)


def test_files_of_server_and_sites_cannot_be_read_from_the_console(shell: pexpect.spawn[str]) -> None:
    for target in ("server", *SITES):
        answer = asked(shell, f"cat {target} local/privacy.json")
        assert "state_root" not in answer
        assert re.search("authoriz|not allowed|denied|permission", answer, re.IGNORECASE), answer
