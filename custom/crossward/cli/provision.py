"""``crossward provision``: kits for the server, the hospitals and the people who run jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.flare import kits


def provision(
    project: Annotated[Path, typer.Argument(help="The project file; provisioning/project.yml is a template.")],
    out: Annotated[Path, typer.Option(help="Folder for the kits and the project's keys.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print where the kits are as JSON.")] = False,
) -> None:
    """Make one kit per participant: its certificate, and the policy that only lets Crossward's own code run.

    Called again with the same project and folder, it keeps every certificate and adds those of new participants.

    Example: crossward provision project.yml --out consortium
    """
    folder = kits.provision(project, out)
    made = {kit.name: str(kit) for kit in sorted(folder.iterdir())}
    keys = folder.parent / "state"
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "kits": made, "keys": str(keys)}, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(made)} kits in {folder}:")
    for name in made:
        console.print(f"  {name}")
    console.print("Give each participant only its own kit, over a channel that you trust: it holds a private key.")
    console.print(f"Keep {keys} offline: who reads it can pose as any participant.")
