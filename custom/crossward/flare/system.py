"""A whole FLARE system on this machine: a server and sites from their kits, each in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crossward.federation.errors import BadInput, RunFailure
from crossward.flare import names
from crossward.flare.kits import ADMIN, SERVER, SiteKit, check_sites, provision, write_project
from crossward.flare.machine import command_lines, free_port, freed, port_holder, process_state

PROJECT: Final = "crossward"
DESCRIPTION: Final = "system.json"
_STARTER: Final = "startup/sub_start.sh"

WATCHDOG: Final = "watchdog"
PARENT: Final = "parent"
JOB: Final = "job"
_PAUSE: Final = "pause"

_END_WAIT: Final = 15.0
_KINDLY: Final = 3.0
_POLL: Final = 0.1
# A process that is just turning into another program has no command line: it is looked for again.
_UNSEEN: Final = 1.0
_DEATHS: Final = 2

# A kit's own watchdog waits five seconds before it starts anything. So the first parent is started beside it, and
# its number is left where the watchdog looks; "--once" removes that file before it turns into Python, hence the wait.
_WATCHED: Final = """
rm -f pid.fl daemon_pid.fl shutdown.fl restart.fl
bash "$1" --once &
until grep -qs 'nvflare[.]private' "/proc/$!/cmdline" || ! kill -0 $! 2>/dev/null; do sleep 0.02; done
echo $! > pid.fl
echo "new pid $!"
exec bash "$1"
"""


@dataclass(frozen=True)
class Process:
    """A process of the system: a kit's watchdog, its parent, or one of a job."""

    pid: int
    kind: str
    participant: str


class LocalSystem:
    """A server and its sites, started from the kits in a folder that ``make`` has filled.

    Nothing but the folder says what the system is: another process can open it, look at it and stop it.

    Attributes:
        folder: the system's.
        sites: names of the sites, sorted.
        port: of the server, on this machine.
        admin_kit: the administrator's kit, for console, API and command.

    Raises:
        BadInput: there is no system in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        try:
            said = json.loads((self.folder / DESCRIPTION).read_text(encoding="utf-8"))
            self._kits: Path = self.folder / said["kits"]
            self.sites: list[str] = sorted(said["sites"])
            self.port = int(said["port"])
            self.admin_kit = self._kits / said["admin"]
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(f"there is no FLARE system in {folder}: its {DESCRIPTION} is missing or broken") from None
        self._started: list[subprocess.Popen[bytes]] = []

    @classmethod
    def make(cls, folder: Path, sites: Mapping[str, Path | SiteKit], *, port: int | None = None) -> LocalSystem:
        """Make the kits of a system; nothing is started.

        Args:
            folder: must not exist, or be empty.
            sites: for every site the folder of its images, or all that its kit shall say.
            port: of the server; a free one is taken if none is given.

        Raises:
            BadInput: a name or a folder that FLARE cannot take.
        """
        folder = folder.resolve()
        check_sites(sites)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder} is not empty; choose another folder for the FLARE system")
        if not re.fullmatch(r"[\w./+@=,:-]+", str(folder)):
            # FLARE puts job processes' command lines together without quotes.
            raise BadInput(f"FLARE cannot run in '{folder}': its path has blanks or signs other than letters and -_.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        port = port or free_port()
        kits = {name: kit if isinstance(kit, SiteKit) else SiteKit(data_root=kit) for name, kit in sites.items()}
        write_project(folder / "project.yml", name=PROJECT, sites=kits, host="localhost", port=port)
        made = provision(folder / "project.yml", folder / "kits")
        said = {"kits": str(made.relative_to(folder)), "sites": sorted(sites), "port": port, "admin": ADMIN}
        (folder / DESCRIPTION).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        return cls(folder)

    @property
    def participants(self) -> list[str]:
        """The server, then the sites."""
        return [SERVER, *self.sites]

    def kit(self, name: str) -> Path:
        """The kit of the server or of a site."""
        return self._kits / name

    def state(self, name: str) -> Path:
        """Where the server or a site keeps what outlives jobs: what its policy says, else ``state`` in its kit."""
        policy = json.loads((self.kit(name) / "local" / "privacy.json").read_text(encoding="utf-8"))
        said = {scope["name"]: str(scope["properties"]["state_root"]) for scope in policy["scopes"]}[names.SCOPE]
        return Path(said) if said else self.kit(name) / "state"

    def log(self, name: str) -> Path:
        """What the processes of the server or of a site have printed since the last start."""
        return self.folder / "logs" / f"{name}.log"

    def processes(self) -> list[Process]:
        """Every process of this system that runs, whoever started it."""
        return [process for process in self._scan() if process.kind != _PAUSE]

    def pids(self) -> dict[str, list[int]]:
        """The processes of every participant that has any: its watchdog, its parent, and those of jobs."""
        found: dict[str, list[int]] = {}
        for process in self.processes():
            found.setdefault(process.participant, []).append(process.pid)
        return found

    def start(self) -> dict[str, list[int]]:
        """Start the server and all sites, and return before they are ready.

        Returns:
            Processes of an earlier run in this folder, which were stopped first.

        Raises:
            RunFailure: the port is taken by something else, or processes of an earlier run cannot be ended.
        """
        leftovers = self.pids()
        if leftovers:
            self.stop()
        self._await_port()
        for name in self.participants:
            self._launch(name)
        return leftovers

    def restart(self, name: str) -> None:
        """End every process of one participant, and start it again."""
        self._end([name])
        if name == SERVER:
            self._await_port()
        self._launch(name)

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the server takes commands and every site is registered with it.

        It is the present processes that count, not earlier ones: after a process was killed, this waits for the
        one that the watchdog starts in its place.

        Raises:
            RunFailure: it takes longer than ``timeout`` seconds, or a process cannot start.
        """
        deadline = time.monotonic() + timeout
        dead: dict[str, set[int]] = {name: set() for name in self.participants}
        seen = dict.fromkeys(self.participants, time.monotonic())
        while waiting := self._not_ready(dead):
            now = time.monotonic()
            seen |= {process.participant: now for process in self._scan()}
            for name, pids in dead.items():
                if len(pids) >= _DEATHS or now - seen[name] > _UNSEEN:
                    raise RunFailure(self._explain(name, "cannot start"))
            if time.monotonic() > deadline:
                raise RunFailure(self._explain(waiting[0], f"is not ready after {timeout:.0f} seconds"))
            time.sleep(_POLL)

    def stop(self) -> None:
        """End every process of the system, jobs and leftovers of earlier runs included, and free the port."""
        if self._scan():
            self._end(self.participants)
            freed(self.port)

    def _launch(self, name: str) -> None:
        log = self.log(name)
        log.parent.mkdir(exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        with log.open("wb") as output:
            self._started.append(
                subprocess.Popen(
                    ["bash", "-c", _WATCHED, "crossward", str(self.kit(name) / _STARTER)],
                    cwd=self.kit(name),
                    env=_environment(name),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    umask=0o077,
                )
            )

    def _scan(self) -> list[Process]:
        starters = {str(self.kit(name) / _STARTER): name for name in self.participants}
        kits = {str(self.kit(name)): name for name in self.participants}
        watchdogs: dict[int, str] = {}
        found, pauses = [], []
        for pid, words in command_lines():
            program = Path(words[0]).name
            started = [starters[word] for word in words if word in starters]
            if program in ("bash", "sh") and started:
                watchdogs[pid] = started[0]
            if program == "sleep":
                pauses.append((pid, process_state(pid)[1]))
            module = words[words.index("-m") + 1] if "-m" in words else ""
            if module.startswith("nvflare.private.fed.app."):
                kind = PARENT if module.endswith(("server_train", "client_train")) else JOB
                found += [Process(pid, kind, name) for name in {kits[word] for word in words if word in kits}]
        found += [Process(pid, WATCHDOG, name) for pid, name in watchdogs.items()]
        return found + [Process(pid, _PAUSE, watchdogs[parent]) for pid, parent in pauses if parent in watchdogs]

    def _not_ready(self, dead: dict[str, set[int]]) -> list[str]:
        """Those not ready; processes that were started and are gone are added to ``dead``."""
        parents = {process.pid for process in self._scan() if process.kind == PARENT}
        heard, waiting = "", []
        for name in self.participants:
            pid, said = self._present(name)
            if pid is not None and not process_state(pid)[0]:
                dead[name].add(pid)
            if name == SERVER:
                heard = said
                ready = "Server started" in said
            else:
                # A site tells a server that was started anew by its next heartbeat, without registering again.
                known = f"client {name}@" in heard or f"Re-activate the client: {name} at" in heard
                ready = known and f"Successfully registered client:{name} " in said
            # One that is being killed still counts as a process for a moment, but has no command line any more.
            if not ready or pid not in parents:
                waiting.append(name)
        return waiting

    def _present(self, name: str) -> tuple[int | None, str]:
        """The parent that was started last, and what it has said since."""
        try:
            text = self.log(name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None, ""
        starts = list(re.finditer(r"^new pid (\d+)$", text, re.MULTILINE))
        # The first parent may say something before its number is noted.
        after = starts[-1].end() if len(starts) > 1 else 0
        return (int(starts[-1].group(1)) if starts else None), text[after:]

    def _explain(self, name: str, what: str) -> str:
        _, said = self._present(name)
        lines = [line.strip() for line in said.splitlines() if re.search(r"error|exception|trouble", line, re.I)]
        cause = f": {lines[-1]}" if lines else ""
        return f"{name} {what}{cause}. Its log is {self.log(name)}"

    def _end(self, participants: list[str]) -> None:
        deadline = time.monotonic() + _END_WAIT
        unseen_since = time.monotonic()
        asked: dict[int, float] = {}
        while time.monotonic() - unseen_since < 2 * _POLL:
            # Watchdogs first, for they would start the rest again; then parents, then what is left of jobs.
            left = [process for process in self._scan() if process.participant in participants]
            kinds = [kind for kind in (WATCHDOG, _PAUSE, PARENT, JOB) if any(each.kind == kind for each in left)]
            for process in left:
                now = unseen_since = time.monotonic()
                if process.kind == kinds[0]:
                    _signal(process, rudely=now - asked.setdefault(process.pid, now) > _KINDLY)
            if left and time.monotonic() > deadline:
                numbers = ", ".join(str(process.pid) for process in left)
                raise RunFailure(f"processes of {left[0].participant} do not end: {numbers}; end them by hand")
            # Those that this process has started would stay as zombies.
            self._started = [process for process in self._started if process.poll() is None]
            time.sleep(_POLL / 4)

    def _await_port(self) -> None:
        # A server that has just been stopped, by whomever, needs a moment to give its port back.
        if freed(self.port):
            return
        who = port_holder(self.port) or "a program of another user"
        raise RunFailure(
            f"port {self.port}, which the FLARE server needs, is taken by {who}; end that program, or make the "
            "system anew: it then takes a free port"
        )


def _environment(name: str) -> dict[str, str]:
    # Settings for one kit, or for one site, must not reach them all.
    mine = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("NVFL_", "NVFLARE_")) and key not in (names.DATA_VARIABLE, names.STATE_VARIABLE)
    }
    local = ",".join(filter(None, (mine.get("no_proxy"), "localhost,127.0.0.1,::1")))
    mine |= {
        # The kits' scripts call python3 by name; it must be the one that has Crossward.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{mine.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "1",
        # A dozen processes start at once: none of them should compile what another has compiled before.
        "PYTHONDONTWRITEBYTECODE": "",
        "no_proxy": local,
        "NO_PROXY": local,
    }
    if name == SERVER:
        # Or the C library would keep the memory of every model that the server has received.
        mine["MALLOC_MMAP_THRESHOLD_"] = "1048576"
    return mine


def _signal(process: Process, *, rudely: bool) -> None:
    try:
        os.kill(process.pid, signal.SIGKILL if rudely else signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)  # one that was halted would not hear the other
    except ProcessLookupError:
        return
    except PermissionError:
        whose = f"process {process.pid} of {process.participant} is another user's"
        raise RunFailure(f"{whose}; end it as that user") from None
