from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from crossward.federation.errors import BadInput, RunFailure
from crossward.flare import machine, names, system
from crossward.flare.kits import SERVER, SiteKit
from crossward.flare.machine import free_port, port_holder, port_taken
from crossward.flare.system import (
    DESCRIPTION,
    PARENT,
    WATCHDOG,
    LocalSystem,
)

SITES = ("hospital-a", "hospital-b")


def wait_for(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def described(tmp_path: Path) -> LocalSystem:
    """A system whose kits are folders without FLARE in them."""
    kits = tmp_path / "kits" / "prod_00"
    for name in (SERVER, *SITES):
        (kits / name / "startup").mkdir(parents=True)
    said = {"kits": "kits/prod_00", "sites": list(SITES), "port": free_port(), "admin": "admin@x.example"}
    (tmp_path / DESCRIPTION).write_text(json.dumps(said))
    return LocalSystem(tmp_path)


@pytest.fixture
def stand_in(described: LocalSystem) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes with the command lines that FLARE's have, and ends them."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*words: str, code: str = "import time; time.sleep(60)") -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen([sys.executable, "-c", code, *words], start_new_session=True))
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


# without FLARE


def test_a_folder_without_a_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no FLARE system"):
        LocalSystem(tmp_path)
    (tmp_path / DESCRIPTION).write_text("{}")
    with pytest.raises(BadInput, match="no FLARE system"):
        LocalSystem(tmp_path)


def test_a_folder_that_is_in_use_or_has_blanks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(BadInput, match="not empty"):
        LocalSystem.make(tmp_path / "full", {"a": tmp_path})
    with pytest.raises(BadInput, match="blanks"):
        LocalSystem.make(tmp_path / "my system", {"a": tmp_path})
    with pytest.raises(BadInput, match="site's name"):
        LocalSystem.make(tmp_path / "new", {"server": tmp_path})
    assert not (tmp_path / "new").exists()


def test_state_is_where_the_policy_says(described: LocalSystem, tmp_path: Path) -> None:
    for name, said in ((SERVER, ""), ("hospital-a", "/somewhere/else")):
        local = described.kit(name) / "local"
        local.mkdir()
        scope = {"name": names.SCOPE, "properties": {"state_root": said}}
        (local / "privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": names.SCOPE}))
    assert described.state(SERVER) == described.kit(SERVER) / "state"
    assert described.state("hospital-a") == Path("/somewhere/else")


def test_a_port_that_something_listens_on_is_taken_and_its_holder_named() -> None:
    port = free_port()
    assert not port_taken(port)
    assert port_holder(port) is None
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, port)):
            assert port_taken(port)
            assert f"(process {os.getpid()})" in str(port_holder(port))
    assert not port_taken(port)


def test_a_port_with_connections_that_fade_out_is_free() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the connection in TIME_WAIT
    lines = Path("/proc/net/tcp").read_text().splitlines()
    assert any(f":{port:04X} " in line and " 06 " in line for line in lines)
    assert not port_taken(port)


def test_ports_are_below_those_for_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < free_port() < max(lowest, 32768)


def test_processes_are_known_by_their_kit(
    described: LocalSystem, stand_in: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    kit = str(described.kit("hospital-a"))
    flare = "nvflare.private.fed.app.client."
    parent = stand_in("-m", f"{flare}client_train", "-m", kit)
    job = stand_in("-m", f"{flare}worker_process", "-m", kit)
    stand_in("-m", f"{flare}client_train", "-m", f"{kit}-2")  # another system's
    stand_in("-m", "http.server", kit)
    stand_in(f"{kit}/startup/sub_start.sh")  # somebody reads the script
    wait_for(lambda: described.pids() == {"hospital-a": [parent.pid, job.pid]}, 5)
    assert {process.kind for process in described.processes()} == {PARENT, system.JOB}


def test_stop_ends_what_is_halted_or_does_not_listen(
    described: LocalSystem,
    stand_in: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(system, "_KINDLY", 0.5)
    flare = ("-m", "nvflare.private.fed.app.client.worker_process", "-m", str(described.kit("hospital-b")))
    deafen = "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf = stand_in(*flare, code=f"{deafen}; pathlib.Path({str(tmp_path / 'deaf')!r}).touch(); time.sleep(60)")
    halted = stand_in(*flare)
    os.kill(halted.pid, signal.SIGSTOP)
    wait_for(lambda: len(described.processes()) == 2 and (tmp_path / "deaf").exists(), 10)
    # They are this test's children: zombies until somebody looks, as those are that the system has started.
    monkeypatch.setattr(described, "_started", [deaf, halted])
    described.stop()
    assert described.pids() == {}
    assert (halted.wait(), deaf.wait()) == (-signal.SIGTERM, -signal.SIGKILL)


def test_settings_of_one_kit_do_not_reach_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVFL_WORKSPACE", "NVFL_JOB_STORE_ROOT", names.DATA_VARIABLE, names.STATE_VARIABLE):
        monkeypatch.setenv(name, "/somewhere")
    monkeypatch.setenv("no_proxy", "example.org")
    for participant in (SERVER, "hospital-a"):
        environment = system._environment(participant)
        assert "/somewhere" not in environment.values()
        assert environment["no_proxy"].startswith("example.org,localhost")
        assert environment["OMP_NUM_THREADS"] == "1"
        python = shutil.which("python3", path=environment["PATH"])
        assert Path(str(python)).parent == Path(sys.executable).parent
    assert "MALLOC_MMAP_THRESHOLD_" in system._environment(SERVER)
    assert "MALLOC_MMAP_THRESHOLD_" not in system._environment("hospital-a")


# with FLARE


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSystem]:
    folder = tmp_path_factory.mktemp("flare")
    data = {name: folder / "data" / name for name in SITES}
    for place in data.values():
        place.mkdir(parents=True)
    made = LocalSystem.make(folder / "system", {**data, "hospital-b": SiteKit(data_root=data["hospital-b"])})
    try:
        yield made
    finally:
        made.stop()


def parent_of(system: LocalSystem, name: str) -> int:
    (pid,) = [each.pid for each in system.processes() if each.participant == name and each.kind == PARENT]
    return pid


@pytest.mark.flare
@pytest.mark.slow
def test_a_system_starts_heals_stops_and_starts_again_on_its_port(real: LocalSystem) -> None:
    assert real.start() == {}
    real.wait_until_ready()
    assert port_taken(real.port)
    for name in (SERVER, *SITES):
        kinds = sorted(each.kind for each in real.processes() if each.participant == name)
        assert kinds == [PARENT, WATCHDOG]
    assert set(real.pids()) == {SERVER, *SITES}

    killed = parent_of(real, "hospital-a")
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: killed not in real.pids()["hospital-a"], 5)
    real.wait_until_ready()
    assert parent_of(real, "hospital-a") != killed

    # The sites stay up, and tell the new server that they are there.
    before = {name: real.pids()[name] for name in SITES}
    served = parent_of(real, SERVER)
    real.restart(SERVER)
    real.wait_until_ready()
    assert parent_of(real, SERVER) != served
    assert {name: sorted(real.pids()[name]) for name in SITES} == {name: sorted(was) for name, was in before.items()}

    real.stop()
    assert real.pids() == {}
    assert not port_taken(real.port)
    # The next start is by a process that then crashes.
    crash = "import os, pathlib, sys; from crossward.flare.system import LocalSystem;"
    crash += "LocalSystem(pathlib.Path(sys.argv[1])).start(); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", crash, str(real.folder)], check=False).returncode == -signal.SIGKILL
    real.wait_until_ready()
    storage = real.kit(SERVER) / "storage"
    assert (storage / "jobs").is_dir()
    assert (storage / "snapshots").is_dir()

    left = real.pids()
    later = LocalSystem(real.folder)
    assert later.start() == left
    later.wait_until_ready()
    assert not {*chain(*left.values())} & {*chain(*later.pids().values())}
    later.stop()
    real.stop()
    assert real.pids() == {}


@pytest.mark.flare
@pytest.mark.slow
def test_a_foreign_program_on_the_port_is_named_and_one_that_goes_away_is_waited_for(
    real: LocalSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    real.stop()
    monkeypatch.setattr(machine, "_PORT_WAIT", 1.0)
    foreign = [sys.executable, "-m", "http.server", str(real.port)]
    with subprocess.Popen(foreign, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as holder:
        try:
            wait_for(lambda: port_taken(real.port), 10)
            with pytest.raises(RunFailure, match=rf"port {real.port}.*http\.server.*process {holder.pid}"):
                real.start()
            assert real.pids() == {}
            assert holder.poll() is None
        finally:
            holder.kill()
    assert real.start() == {}
    real.stop()  # in the middle of starting
    assert real.pids() == {}


@pytest.mark.flare
@pytest.mark.slow
def test_a_site_that_cannot_start_is_named_with_its_cause(real: LocalSystem) -> None:
    real.stop()
    policy = real.kit("hospital-b") / "local" / "resources.json"
    sound = policy.read_text()
    try:
        policy.write_text(sound.replace('"num_of_gpus": 0', '"num_of_gpus": -1'))
        real.start()
        with pytest.raises(RunFailure, match=r"hospital-b cannot start: .*num_of_gpus") as caught:
            real.wait_until_ready()
        assert str(real.log("hospital-b")) in str(caught.value)
    finally:
        policy.write_text(sound)
        real.stop()
    assert real.pids() == {}
