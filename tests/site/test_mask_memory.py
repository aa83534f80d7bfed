from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crossward.federation.errors import PrivacyRefusal, StorageFailure
from crossward.privacy.secagg.memory import Use
from crossward.site.mask_memory import DurableMemory

MASKED = Use("job-1", 2, 1, ("a", "b", "c"), "update", "about", "masked")
OPENED = Use("job-1", 2, 1, ("a", "b", "c"), "update", "about", "opened")


def test_uses_are_there_after_a_restart_and_apart_by_run_and_model(tmp_path: Path) -> None:
    memory = DurableMemory(tmp_path / "masks")
    memory.keep("run", "model", MASKED)
    memory.keep("run", "model", OPENED)
    memory.keep("run", "other", MASKED)
    again = DurableMemory(tmp_path / "masks")
    assert again.uses("run", "model") == (MASKED, OPENED)
    assert again.uses("run", "other") == (MASKED,)
    assert again.uses("ru", "nmodel") == ()
    assert (tmp_path / "masks").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "masks").iterdir())


def record(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("change", [lambda data: b"x" + data[1:], lambda data: data.replace(b"job-1", b"job-2")])
def test_a_changed_record_is_refused(tmp_path: Path, change: object) -> None:
    memory = DurableMemory(tmp_path)
    memory.keep("run", "model", MASKED)
    path = record(tmp_path)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(PrivacyRefusal, match="damaged"):
        memory.uses("run", "model")


def test_a_line_that_a_crash_cut_off_is_a_step_that_was_not_taken(tmp_path: Path) -> None:
    memory = DurableMemory(tmp_path)
    memory.keep("run", "model", MASKED)
    path = record(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert memory.uses("run", "model") == (MASKED,)
    memory.keep("run", "model", OPENED)
    assert memory.uses("run", "model") == (MASKED, OPENED)


def test_a_disk_that_takes_no_more_is_an_error_before_anything_is_masked(tmp_path: Path) -> None:
    memory = DurableMemory(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with pytest.raises(StorageFailure, match="nothing was masked"):
            memory.keep("run", "model", MASKED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_use_is_on_disk_when_keep_returns(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from crossward.privacy.secagg.memory import Use\nfrom crossward.site.mask_memory import DurableMemory\n"
        "use = Use('job-1', 2, 1, ('a', 'b', 'c'), 'update', 'about', 'masked')\n"
        "DurableMemory(Path(sys.argv[1])).keep('run', 'model', use)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=os.environ.copy(), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert DurableMemory(tmp_path).uses("run", "model") == (MASKED,)
