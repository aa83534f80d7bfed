"""What runs on this machine and who listens where, read from the kernel's own files (Linux)."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from crossward.federation.errors import RunFailure

_PORT_WAIT: Final = 20.0
_PAUSE: Final = 0.1


def free_port() -> int:
    """A port that nothing listens on, below those that the system hands out for outgoing connections."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    top = lowest if lowest > 12000 else 32768
    for port in random.SystemRandom().sample(range(top - 2000, top), 200):
        if not port_taken(port):
            return port
    raise RunFailure(f"no port from {top - 2000} to {top} is free on this machine")


def port_taken(port: int) -> bool:
    """Whether something listens on the port; connections that are only fading out do not count."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        # It may be bound over connections in TIME_WAIT, as FLARE's server does it (SO_REUSEADDR).
        with socket.create_server(("", port), family=family, dualstack_ipv6=both):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


def freed(port: int) -> bool:
    """Wait until nothing listens on a port any more; false when something still does after a while."""
    deadline = time.monotonic() + _PORT_WAIT
    while port_taken(port) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return not port_taken(port)


def port_holder(port: int) -> str | None:
    """The program that listens on a port, with its number; None where that cannot be seen."""
    tables = [table.read_text(encoding="ascii") for table in Path("/proc/net").glob("tcp*")]
    rows = [row.split() for table in tables for row in table.splitlines()]
    listening = [row for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    inodes = {int(row[9]) for row in listening}
    for pid, words in command_lines():
        with suppress(OSError):  # another user's, or it has just ended
            if any(file.is_socket() and file.stat().st_ino in inodes for file in Path(f"/proc/{pid}/fd").iterdir()):
                return f"'{' '.join(words).strip()[:80]}' (process {pid})"
    return None


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Every process of this machine that can be seen, with the words of its command."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # it has just ended
        if words[0]:
            yield int(entry.name), words


def process_state(pid: int) -> tuple[bool, int]:
    """Whether a process lives, and its parent."""
    try:
        # The name stands in brackets and may hold anything; what counts comes after.
        state, parent = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
    except OSError:
        return False, 0
    return state not in ("X", "Z"), int(parent)
