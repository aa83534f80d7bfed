"""A job folder in FLARE's simulator: the same controller and executor, without kits, certificates and policies.

The simulator gives its clients neither a scope nor a site's filters, so the executor takes its answers through the
gate by hand, and data and state folders come from the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossward.federation.errors import BadInput, RunFailure
from crossward.federation.storage import private_folder
from crossward.flare.names import (
    CERTIFICATES,
    DATA_VARIABLE,
    OUTCOME,
    ROOT,
    RUN_FILES,
    SERVER_CLASSES,
    SITE_CLASSES,
    STATE_VARIABLE,
)
from crossward.privacy.secagg.throwaway import Authority
from crossward.site.troubles import words

_RUN = """
import sys
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner
if __name__ == "__main__":
    job, workspace, clients, threads = sys.argv[1:]
    sys.exit(SimulatorRunner(job, workspace, clients=clients, threads=int(threads)).run())
"""


def simulate_job(job: Path, *, data: Path, sites: Sequence[str], out: Path, timeout: float | None = None) -> Path:
    """Run a job folder in the simulator, in a process of its own.

    Args:
        job: folder that ``crossward job export`` wrote.
        data: folder of hospitals; every site finds its own by name.
        sites: names of the sites.
        out: an empty folder; gets the simulator's workspace and, under ``state``, the server's and the sites' state.
        timeout: seconds after which to give up.

    Returns:
        The folder with the server's outcome.json and result.json.

    Raises:
        BadInput: the output folder is not empty.
        RunFailure: the job did not complete; the log is named.
    """
    check_empty(out)
    workspace, state = out / "simulator", out / "state"
    (workspace / "local").mkdir(parents=True)
    policy = {"class_allow_list": [*SERVER_CLASSES, *SITE_CLASSES], "allow_log_streaming": False}
    (workspace / "local" / "resources.json").write_text(json.dumps({"format_version": 2, **policy}))
    environment = {
        **os.environ,
        DATA_VARIABLE: str(data.absolute()),
        STATE_VARIABLE: str(state.absolute()),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    _certify(state / CERTIFICATES, sites)
    log = out / "simulator.log"
    # As many threads as sites: with fewer, FLARE swaps clients out between tasks and reads their images anew.
    command = [sys.executable, "-c", _RUN, str(job), str(workspace), ",".join(sites), str(len(sites))]
    with log.open("wb") as stream:
        try:
            subprocess.run(command, env=environment, stdout=stream, stderr=stream, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise RunFailure(f"the simulator did not end within {timeout:.0f} s; its log is {log}") from None
    return _checked(workspace / "server" / "simulate_job" / RUN_FILES, log)


def _certify(folder: Path, sites: Sequence[str]) -> None:
    """Certificates for secure aggregation: the simulator has no kits, and whoever runs it has all the images anyway."""
    authority = Authority()
    private_folder(folder)
    (folder / ROOT).write_bytes(authority.roots)
    for site in sites:
        identity = authority.identity(site)
        (folder / f"{site}.crt").write_bytes(identity.certificate)
        (folder / f"{site}.key").write_bytes(identity.key)


def check_empty(out: Path) -> None:
    """Refuse a folder that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} is not an empty folder; choose another")


def _checked(results: Path, log: Path) -> Path:
    try:
        outcome: dict[str, Any] = json.loads((results / OUTCOME).read_text())
    except (OSError, ValueError):
        raise RunFailure(f"the job did not run in the simulator; its log is {log}") from None
    if outcome["status"] != "completed":
        place = f"{outcome['site']}: " if outcome["site"] else ""
        raise RunFailure(f"{place}{words(outcome['code'], outcome['numbers'])}. The simulator's log is {log}")
    return results
