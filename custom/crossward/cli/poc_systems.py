"""The FLARE systems that ./poc/run has made in its work folder: in use, kept on purpose, or left by a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console as Screen

from crossward.federation.errors import BadInput
from crossward.federation.storage import private_folder
from crossward.flare.system import LocalSystem
from crossward.site.runfolder import hold

_LOCK = ".lock"
_KEPT = "KEPT.txt"


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold the folder of a run: while it is held, nobody takes its processes for leftovers."""
    lock = hold(private_folder(out) / _LOCK)
    try:
        yield
    finally:
        os.close(lock)


def stop_leftovers(workdir: Path, screen: Screen, *, kept_ones_too: bool) -> None:
    """Stop the systems of earlier runs that still have processes; those in use or kept on purpose are left alone."""
    found = False
    for description in sorted(workdir.glob("*/system/system.json")):
        folder = description.parent
        system = _opened(folder)
        running = sum(len(pids) for pids in system.pids().values()) if system else 0
        if system is None or not running:
            continue
        found = True
        if (folder / _KEPT).exists() and not kept_ones_too:
            screen.print(f"Note: the system kept in {folder} is up; ./poc/run --stop ends it", soft_wrap=True)
        elif _in_use(folder.parent):
            screen.print(f"Note: another ./poc/run is at work in {folder.parent}", soft_wrap=True)
        else:
            system.stop()
            screen.print(f"Stopped {running} processes that an earlier run left in {folder}", soft_wrap=True)
    if kept_ones_too and not found:
        screen.print(f"Nothing to stop: no system in {workdir} is up", soft_wrap=True)


def keep(system: LocalSystem, screen: Screen) -> None:
    """Leave a system up, and say how to use it."""
    kit = system.admin_kit
    text = f"""The system is up, and stays up: a server and {len(system.sites)} hospitals on port {system.port}.
  console:  {kit}/startup/fl_admin.sh
            user name {kit.name}; submit_job takes the full path of a job folder
  command:  crossward job submit jobs/fedavg --kit {kit}
            crossward job list --kit {kit}
  FLARE's:  nvflare job list --startup-kit {kit}
  logs:     {system.folder}/logs
  stop:     ./poc/run --stop
"""
    (system.folder / _KEPT).write_text(text, encoding="utf-8")
    screen.print(text, soft_wrap=True, highlight=False, markup=False)


def _opened(folder: Path) -> LocalSystem | None:
    try:
        return LocalSystem(folder)
    except BadInput:
        return None


def _in_use(out: Path) -> bool:
    try:
        os.close(hold(out / _LOCK))
    except BlockingIOError:
        return True
    return False
