"""``crossward job simulator``: a job folder in FLARE's simulator, to see a job run before it is submitted anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli.show import show_result
from crossward.evaluate.facts import read_result
from crossward.federation.errors import BadInput
from crossward.flare.jobs import read_study
from crossward.flare.names import RESULT
from crossward.flare.simulator import check_empty, simulate_job
from crossward.imaging.data import site_names


def simulator(
    job: Annotated[Path, typer.Argument(help="A job folder, such as jobs/fedavg.")],
    data: Annotated[Path, typer.Option(help="Folder of hospitals, or a pack; every site finds its own by name.")],
    out: Annotated[Path, typer.Option(help="Empty folder for the simulator's workspace, logs and state.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    """Run a job folder in FLARE's simulator, without kits, certificates and sites' policies.

    Example: crossward job simulator jobs/fedavg --data phantoms --out runs/simulated
    """
    read_study(job)
    check_empty(out)
    sites = site_names(data)
    if not sites:
        raise BadInput(f"there is no site in {data}")
    console = Console(stderr=as_json)
    console.print(f"Simulating {job} with {', '.join(sites)}; the log is {out / 'simulator.log'}", soft_wrap=True)
    result = read_result(simulate_job(job, data=data, sites=sites, out=out) / RESULT)
    if as_json:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))
        return
    show_result(console, result)
    console.print(f"State of server and sites: {out / 'state'}", soft_wrap=True)
