from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.site.masked import ALGEBRA, Federation

from crossward.federation.algebra import Algebra
from crossward.site import member as members

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the tests and the processes they start share made_up_sites

RunScript = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def script_environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> RunScript:
    """Write a script and run it in a Python process of its own."""

    def run(text: str, *arguments: Any, without: str = "") -> subprocess.CompletedProcess[str]:
        script = tmp_path_factory.mktemp("script") / "script.py"
        script.write_text(text, encoding="utf-8")
        environment = {name: value for name, value in script_environment().items() if name != without}
        return subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def environment() -> dict[str, str]:
    return script_environment()


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a tmpfs may not be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 32 MB."""
    with _mounted(tmp_path / "small-disk", "size=32m") as folder:
        yield folder


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    with _mounted(tmp_path / "read-only-disk", "ro,size=1m") as folder:
        yield folder


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that write much and lose no power."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def small_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quicker, and less like the cosines that they stand for: for tests that are not about those."""
    monkeypatch.setattr("crossward.privacy.secagg.sketch._BUCKETS", 128)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Federation]:
    """Makes sites that have agreed on keys, and their server."""

    def make(algebra: Algebra = ALGEBRA, count: int = 4, **options: Any) -> Federation:
        return Federation(tmp_path / "run", algebra, count, **options)

    return make


@pytest.fixture
def trained(made: Any) -> Federation:
    """Four sites with a report of the first round."""
    federation: Federation = made()
    federation.train()
    return federation


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and labels that must not be looked at."""

    def read(*given: Any, **options: Any) -> Any:
        raise AssertionError("the site's data were read")

    monkeypatch.setattr(members, "labels_of", read)
    monkeypatch.setattr(members, "load_site", read)
