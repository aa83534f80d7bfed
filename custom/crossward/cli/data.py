"""``crossward data``: what a hospital does with its images before it trains: look, check, prepare, clean, fetch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli.data_check import check
from crossward.cli.data_deidentify import deidentify_folder
from crossward.cli.data_look import look
from crossward.cli.data_prepare import prepare
from crossward.cli.data_pull import pull
from crossward.cli.data_receive import receive
from crossward.cli.data_scan import scan
from crossward.cli.progress import counting
from crossward.imaging.phantom import USUAL_PATIENTS, write_hospitals
from crossward.imaging.sheet import contact_sheet

app = typer.Typer(help="Make, inspect, prepare, clean and fetch DICOM images.", no_args_is_help=True)
for command in (scan, look, check, prepare, pull, receive):
    app.command()(command)
app.command("deidentify")(deidentify_folder)


@app.callback()
def root() -> None:
    """Make, inspect, prepare, clean and fetch DICOM images."""


@app.command("phantom")
def phantom(
    out: Annotated[Path, typer.Option(help="Folder to make; must not exist, or be empty.")],
    sites: Annotated[int, typer.Option(help="Hospitals, each with its own scanner.")] = 4,
    patients: Annotated[int, typer.Option(help="Made-up patients per hospital.")] = USUAL_PATIENTS,
    seed: Annotated[int, typer.Option(help="The same seed writes the same files.")] = 0,
    unseen: Annotated[bool, typer.Option("--unseen", help="Add films of a scanner that no hospital has.")] = False,
    spoiled: Annotated[bool, typer.Option("--spoiled", help="Add wrong, inverted, blurred and empty films.")] = False,
    sheet: Annotated[bool, typer.Option("--sheet", help="Also write sheet.png, a contact sheet to look at.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write made-up hospitals: computer-drawn chest films as real DICOM files, with a labels.csv each.

    Example: crossward data phantom --out phantoms --sites 4 --unseen --spoiled --sheet
    """
    console = Console()
    with counting(Console(stderr=True)) as progress:
        made = write_hospitals(
            out, sites=sites, patients=patients, seed=seed, unseen=unseen, spoiled=spoiled, progress=progress
        )
    picture = contact_sheet(out, out / "sheet.png") if sheet else None
    if as_json:
        typer.echo(json.dumps({**asdict(made), "folder": str(out), "sheet": picture and str(picture)}, indent=2))
        return
    held_out = ", held-out sets included" if unseen or spoiled else ""
    console.print(
        f"{len(made.hospitals)} phantom hospitals in {out}: {made.patients} made-up patients, {made.files} DICOM "
        f"files, findings {', '.join(made.classes)}{held_out}. Computer-drawn: no patient is in them.",
        soft_wrap=True,
    )
    if picture:
        console.print(f"Contact sheet: {picture}", soft_wrap=True)
    console.print(f"Next: crossward simulate --method fedbn --data {out} --rounds 10 --out runs/first", soft_wrap=True)
