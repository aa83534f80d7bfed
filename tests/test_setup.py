from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Stands in for python3.11: makes an environment of copies of itself, and writes down what pip was asked to do.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    "-V ") echo "Python ${FAKE_VERSION:-3.11.9}" ;;
    "-c import ensurepip"*) exit "${FAKE_WITHOUT_VENV:-0}" ;;
    "-c "*) echo 2.12.0+fake ;;
    "-m venv")
        echo "venv" >>"$FAKE_CALLS"
        mkdir -p "$3/bin"
        touch "$3/pyvenv.cfg"
        cp "$0" "$3/bin/python"
        for tool in ruff mypy pytest crossward; do
            printf '#!/bin/sh\\necho "%s|$*" >>"$FAKE_CALLS"\\n' $tool >"$3/bin/$tool"
            printf '[ "$FAKE_FAILING" != "%s" ]\\n' $tool >>"$3/bin/$tool"
            chmod +x "$3/bin/$tool"
        done
        ;;
    "-m pip")
        for last; do :; done
        echo "pip|$last" >>"$FAKE_CALLS"
        sleep "${FAKE_SECONDS:-0}"
        case "$last" in
            ${FAKE_PIP_FAILS:-nothing}) echo "ERROR: no such wheel"; exit 1 ;;
        esac
        ;;
    *) exit 9 ;;
esac
"""
FULL_SETUP = ["venv", "pip|setuptools", "pip|torch==2.13.0", "pip|{root}[test,bench]"]


class Copy:
    """A copy of the scripts in a folder of its own, on a machine with a made-up Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.venv = self.root / ".venv"
        for name in (
            "setup.sh",
            "constraints.txt",
            "pyproject.toml",
            "tests/run",
            "tests/debian",
            "poc/run",
            ".ci/run",
        ):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        self.bin.mkdir()
        for name in ("python3.11", "python3.12", "python3", "python"):
            self.install_python(name)

    def install_python(self, name: str, text: str = FAKE_PYTHON) -> None:
        (self.bin / name).write_text(text, encoding="utf-8")
        (self.bin / name).chmod(0o755)

    def start(self, script: str, *args: str, **environment: str) -> subprocess.Popen[str]:
        known = {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "FAKE_CALLS": str(self.calls_file)}
        return subprocess.Popen(
            [str(self.root / script), *args],
            cwd=self.bin,
            env={**known, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *args: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(script, *args, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """What was called since the last time this was asked."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text(encoding="utf-8").splitlines()
        self.calls_file.unlink()
        return lines

    def add_line(self, name: str) -> None:
        with (self.root / name).open("a", encoding="utf-8") as file:
            file.write("# another line\n")

    def full_setup(self) -> list[str]:
        return [call.format(root=self.root) for call in FULL_SETUP]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_the_first_start_installs_and_the_second_does_nothing(copy: Copy) -> None:
    code, out, err = copy.run("setup.sh")
    assert (code, out) == (0, "")
    assert "[3/4] torch==2.13.0: done" in err
    assert copy.calls() == copy.full_setup()
    assert copy.run("setup.sh") == (0, "", "")
    assert copy.calls() == []
    assert copy.run("setup.sh", "--check") == (0, "", "")


def test_check_answers_no_and_changes_nothing_before_the_first_start(copy: Copy) -> None:
    assert copy.run("setup.sh", "--check") == (1, "", "")
    assert copy.calls() == []
    assert not copy.venv.exists()


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_pins_are_brought_up_to_date_in_place(copy: Copy, name: str) -> None:
    copy.run("setup.sh")
    copy.calls()
    copy.add_line(name)
    assert copy.run("setup.sh")[0] == 0
    assert copy.calls() == copy.full_setup()[1:]


def test_another_python_makes_the_environment_anew(copy: Copy) -> None:
    copy.run("setup.sh")
    copy.calls()
    assert copy.run("setup.sh", FAKE_VERSION="3.12.4")[0] == 0
    assert copy.calls() == copy.full_setup()


def test_a_moved_clone_makes_its_environment_anew(copy: Copy) -> None:
    copy.run("setup.sh")
    copy.calls()
    copy.root = copy.root.rename(copy.root.with_name("moved"))
    assert copy.run("setup.sh")[0] == 0
    assert copy.calls() == copy.full_setup()


def test_a_failed_step_shows_the_log_and_the_next_start_begins_from_nothing(copy: Copy) -> None:
    code, _, err = copy.run("setup.sh", FAKE_PIP_FAILS="torch*")
    assert code == 1
    assert "ERROR: no such wheel" in err
    assert "step [3/4] torch==2.13.0 failed" in err.splitlines()[-1]
    assert copy.calls() == copy.full_setup()[:3]
    left_over = copy.venv / "lib"
    left_over.touch()
    assert copy.run("setup.sh")[0] == 0
    assert copy.calls() == copy.full_setup()
    assert not left_over.exists()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_setup_is_repeated(copy: Copy, stop: signal.Signals) -> None:
    process = copy.start("setup.sh", FAKE_SECONDS="30")
    give_up = time.monotonic() + 30
    while not (copy.calls_file.exists() and "pip|" in copy.calls_file.read_text(encoding="utf-8")):
        assert time.monotonic() < give_up, "the set-up never came to pip"
        time.sleep(0.02)
    os.killpg(process.pid, stop)
    process.communicate(timeout=20)
    assert process.returncode != 0
    copy.calls()
    assert copy.run("setup.sh")[0] == 0
    assert copy.calls() == copy.full_setup()


def test_an_interrupted_update_is_made_anew(copy: Copy) -> None:
    copy.run("setup.sh")
    copy.add_line("constraints.txt")
    assert copy.run("setup.sh", FAKE_PIP_FAILS="*bench]")[0] == 1
    copy.calls()
    assert copy.run("setup.sh")[0] == 0
    assert copy.calls() == copy.full_setup()


def test_of_two_started_at_once_one_installs(copy: Copy) -> None:
    both = [copy.start("setup.sh", FAKE_SECONDS="0.3") for _ in range(2)]
    messages = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert copy.calls() == copy.full_setup()
    assert sum("waiting for it" in message for message in messages) == 1


def test_an_environment_of_somebody_else_is_left_alone(copy: Copy) -> None:
    copy.venv.mkdir()
    (copy.venv / "pyvenv.cfg").touch()
    code, _, err = copy.run("setup.sh")
    assert code == 1
    assert "was not made by setup.sh" in err
    assert copy.calls() == []
    assert [path.name for path in copy.venv.iterdir()] == ["pyvenv.cfg"]


def test_another_torch_takes_the_place_of_the_pinned_one_and_is_remembered(copy: Copy) -> None:
    wheel = copy.bin / "torch-2.12.0+gpu-py3-none-any.whl"
    wheel.touch()
    assert copy.run("setup.sh", CROSSWARD_TORCH=wheel.name)[0] == 0
    with_wheel = [call.replace("torch==2.13.0", str(wheel)) for call in copy.full_setup()]
    assert copy.calls() == with_wheel
    pins = (copy.venv / "crossward" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.12.0+fake"]
    assert not [pin for pin in pins if pin.startswith(("nvidia-", "cuda-", "triton"))]
    assert copy.run("setup.sh") == (0, "", "")
    assert copy.run("setup.sh", CROSSWARD_TORCH="pinned")[0] == 0
    assert copy.calls() == copy.full_setup()[1:]
    assert copy.run("setup.sh") == (0, "", "")


def test_a_python_that_does_not_work_is_passed_over(copy: Copy) -> None:
    copy.install_python("python3.11", "#!/bin/sh\nexit 127\n")
    code, _, err = copy.run("setup.sh", FAKE_VERSION="3.12.1")
    assert code == 0
    assert "with python3.12 " in err


def test_without_a_fitting_python_the_line_names_the_package(copy: Copy) -> None:
    code, _, err = copy.run("setup.sh", FAKE_VERSION="3.9.2")
    assert code == 1
    assert "needs Python 3.11 or 3.12" in err
    assert "python3 is 3.9." in err
    assert "apt-get install python3 python3-venv" in err


def test_without_venv_the_line_names_the_package(copy: Copy) -> None:
    code, _, err = copy.run("setup.sh", FAKE_WITHOUT_VENV="1")
    assert code == 1
    assert "apt-get install python3.11-venv" in err


CHECKS = [
    "ruff|check .",
    "ruff|format --check .",
    "mypy|",
    "pytest|-n 2 --dist loadfile -m not flare",
    "pytest|-m flare --durations 10",
]


@pytest.mark.parametrize("script", ["tests/run", ".ci/run"])
def test_a_full_run_does_every_step(copy: Copy, script: str) -> None:
    code, out, _ = copy.run(script, CI="true")
    assert code == 0
    assert copy.calls() == copy.full_setup() + CHECKS
    summary = [re.fullmatch(r"(.+?) +ok +\d+ s", line) for line in out.splitlines()[-5:]]
    names = ["ruff check", "ruff format --check", "mypy", "pytest", "pytest on FLARE"]
    assert [line and line[1] for line in summary] == names


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
def test_a_failed_check_does_not_stop_the_others_but_counts(copy: Copy, failing: str) -> None:
    code, out, _ = copy.run("tests/run", FAKE_FAILING=failing)
    assert code == 1
    assert copy.calls()[4:] == CHECKS
    failed = [line for line in out.splitlines()[-5:] if "FAILED" in line]
    assert {line.split()[0] for line in failed} == {failing}


def test_with_arguments_only_pytest_runs(copy: Copy) -> None:
    code, _, _ = copy.run("tests/run", "tests/nets", "-k", "a b")
    assert code == 0
    assert copy.calls()[4:] == ["pytest|tests/nets -k a b"]
    assert copy.run("tests/run", "-q", FAKE_FAILING="pytest")[0] == 1


@pytest.mark.parametrize("script", ["tests/run", "poc/run"])
def test_a_failed_setup_ends_the_run(copy: Copy, script: str) -> None:
    assert copy.run(script, FAKE_PIP_FAILS="setuptools")[0] == 1
    assert copy.calls() == copy.full_setup()[:2]


def test_poc_hands_its_arguments_on_also_through_a_symlink(copy: Copy) -> None:
    link = copy.bin / "a link"
    link.symlink_to(copy.root / "poc" / "run")
    code, out, _ = copy.run(str(link), "--method", "fdse")
    assert (code, out) == (0, "")
    assert copy.calls() == [*copy.full_setup(), "crossward|poc --method fdse"]
    assert copy.run("poc/run", FAKE_FAILING="crossward")[0] == 1


@pytest.mark.parametrize("script", ["setup.sh", "tests/run", "poc/run"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_needs_no_setup(copy: Copy, script: str, option: str) -> None:
    code, out, err = copy.run(script, option)
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: ./{script}")
    assert copy.calls() == []
    assert not copy.venv.exists()


def test_help_of_poc_is_the_full_one_after_setup(copy: Copy) -> None:
    copy.run("setup.sh")
    copy.calls()
    assert copy.run("poc/run", "--help")[:2] == (0, "")
    assert copy.calls() == ["crossward|poc --help"]


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        assert "*" not in specifier.version, line
        assert (requirement.marker, requirement.url, requirement.extras) == (None, None, set()), line
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is pinned twice"
        found[name] = specifier.version
    return found


def declared() -> list[str]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    everything = [PROJECT["project"]["dependencies"], *extras, PROJECT["build-system"]["requires"]]
    return [line for group in everything for line in group]


@pytest.mark.parametrize("line", declared())
def test_every_declared_dependency_is_pinned_within_its_range(line: str) -> None:
    requirement = Requirement(line)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def installed_needs(line: str, seen: set[str]) -> Iterator[str]:
    """Names of all packages that a requirement draws in here, as far as they are installed."""
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    if name in seen:
        return
    seen.add(name)
    yield name
    try:
        needs = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for need in needs:
        marker = Requirement(need).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in requirement.extras or {""}):
            yield from installed_needs(need, seen)


def test_every_package_behind_the_declared_ones_is_pinned() -> None:
    seen: set[str] = set()
    needed = {name for line in declared() for name in installed_needs(line, seen)}
    assert len(needed) > len(declared())
    # Another build of torch brings GPU libraries of its own, which are the hospital's choice.
    unpinned = {name for name in needed - pins().keys() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert unpinned == set()


def test_the_package_declares_its_command_and_its_types() -> None:
    assert PROJECT["project"]["scripts"] == {"crossward": "crossward.cli.main:main"}
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["crossward"]
    assert (ROOT / "custom" / "crossward" / "py.typed").is_file()


def test_torch_runs_on_one_thread_in_tests() -> None:
    import torch

    assert torch.get_num_threads() == 1
