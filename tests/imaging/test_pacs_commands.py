from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import typer
from tests.imaging.orthanc import (
    LOGIN,
    OUR_TITLE,
    TITLE,
    Orthanc,
    assert_same_images,
    free_port,
    phantom_studies,
    study_uid,
)
from typer.testing import CliRunner

from crossward.cli.data_pull import pull
from crossward.cli.data_receive import receive
from crossward.federation.errors import BadInput

app = typer.Typer()
app.command()(pull)
app.command()(receive)
RUNNER = CliRunner()
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return phantom_studies(tmp_path_factory.mktemp("films"), 8)


def test_a_pull_over_dicomweb_prints_counts_and_fails_while_something_is_missing(
    archive: Orthanc, films: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "login").write_text(LOGIN)
    (tmp_path / "uids").write_text(f"{study_uid(0)}\n{study_uid(1)}\n1.2.3.4\n")
    common = ["pull", "--out", str(tmp_path / "out"), "--url", archive.url, "--login-file", str(tmp_path / "login")]
    result = RUNNER.invoke(app, [*common, "--studies", str(tmp_path / "uids")])
    assert result.exit_code == 3
    assert "2 studies: 4 files came" in result.stdout
    assert "1 of --studies not found (line 3)." in result.stdout
    result = RUNNER.invoke(app, [*common, "--since", "2024-01-01", "--modality", "DX", "--json"])
    assert result.exit_code == 0
    counts = json.loads(result.stdout)
    assert (counts["studies"], counts["files"], counts["present"], counts["complete"]) == (4, 4, 4, True)
    assert "1.2.826" not in result.output
    assert_same_images(tmp_path / "out" / "images", films)


def test_a_pull_by_c_move_prints_counts(archive: Orthanc, films: dict[str, Path], tmp_path: Path) -> None:
    peer = f"{TITLE}@127.0.0.1:{archive.dicom_port}"
    where = ["--pacs", peer, "--port", str(archive.our_port), "--bind", "127.0.0.1"]
    result = RUNNER.invoke(app, ["pull", "--out", str(tmp_path / "out"), *where, "--until", "2024-01-31", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["files"] == 8
    assert_same_images(tmp_path / "out" / "images", films)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "give --url"),
        (["--url", "http://a.example", "--pacs", "A@b:1"], "only one"),
        (["--url", "http://127.0.0.1:1"], "no study is asked for"),
        (["--url", "http://127.0.0.1:1", "--since", "yesterday"], "not a day"),
        (["--url", "http://127.0.0.1:1", "--studies", "no-such-list"], "cannot be read"),
        (["--pacs", "nobody", "--since", "2024-01-01"], "TITLE@host:port"),
    ],
)
def test_a_pull_that_cannot_be_asked_for_is_refused(tmp_path: Path, options: list[str], line: str) -> None:
    result = RUNNER.invoke(app, ["pull", "--out", str(tmp_path / "out"), *options])
    assert isinstance(result.exception, BadInput)
    assert line in str(result.exception)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_receiver_counts_until_it_is_told_to_stop(
    films: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    storescu = shutil.which("storescu")
    if storescu is None:
        pytest.skip("dcmtk is not installed (see tests/debian)")
    port = free_port()
    command = [storescu, "-aet", "SCANNER", "-aec", OUR_TITLE, "127.0.0.1", str(port), *map(str, films.values())]
    outcome: list[int] = []

    def send_and_stop() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    outcome.append(subprocess.run(command, capture_output=True, timeout=20).returncode)
                    os.kill(os.getpid(), number)
                    return
            time.sleep(0.02)

    sender = threading.Thread(target=send_and_stop)
    sender.start()
    before = signal.getsignal(number)
    where = ["--port", str(port), "--bind", "127.0.0.1", "--caller", "SCANNER"]
    result = RUNNER.invoke(app, ["receive", "--out", str(tmp_path / "out"), *where, "--idle", "30", "--json"])
    sender.join()
    assert signal.getsignal(number) is before
    assert (result.exit_code, outcome) == (0, [0])
    assert json.loads(result.stdout)["files"] == len(films)
    assert_same_images(tmp_path / "out" / "images", films)


def test_a_receiver_that_nobody_calls_ends_when_it_is_idle(tmp_path: Path) -> None:
    where = ["--port", "0", "--bind", "127.0.0.1", "--caller", "SCANNER", "--idle", "0.5"]
    result = RUNNER.invoke(app, ["receive", "--out", str(tmp_path / "out"), *where])
    assert result.exit_code == 0
    assert "0 files received" in result.stdout


def test_help_shows_an_example() -> None:
    for command in ("pull", "receive"):
        assert f"Example: crossward data {command} --out scans" in " ".join(
            RUNNER.invoke(app, [command, "--help"]).stdout.split()
        )


FAKE_APT = "#!/bin/sh\necho \"$*\" >>'{calls}'\nexit {code}\n"


def run_debian(folder: Path, *, user: int, missing: bool, code: int) -> tuple[int, str, list[str]]:
    """Runs tests/debian on a machine with made-up packages and apt."""
    scripts = {
        "id": f"#!/bin/sh\necho {user}\n",
        "dpkg-query": "#!/bin/sh\n" + ("exit 1\n" if missing else "echo 'install ok installed'\n"),
        "apt-get": FAKE_APT.format(calls=folder / "calls", code=code),
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    process = subprocess.run(
        [str(ROOT / "tests" / "debian")],
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return process.returncode, process.stdout + process.stderr, calls


@pytest.mark.parametrize(
    ("user", "missing", "code", "calls", "said"),
    [
        (0, False, 0, 0, ""),
        (0, True, 0, 2, ""),
        (0, True, 100, 2, "could not be installed"),
        (1000, True, 0, 0, "apt-get install dcmtk orthanc orthanc-dicomweb"),
    ],
)
def test_debian_installs_what_is_missing_or_says_so(
    tmp_path: Path, user: int, missing: bool, code: int, calls: int, said: str
) -> None:
    returned, output, asked = run_debian(tmp_path, user=user, missing=missing, code=code)
    assert returned == 0
    assert len(asked) == calls
    assert said in output
    assert bool(output) == bool(said or calls)
