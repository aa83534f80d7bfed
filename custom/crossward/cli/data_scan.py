"""``crossward data scan``: what a folder of DICOM files holds, before anything is done with it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossward.cli.progress import counting
from crossward.federation.errors import BadInput
from crossward.imaging.inventory.facts import Facts, facts
from crossward.imaging.inventory.page import write_page
from crossward.imaging.inventory.scan import scan as take_inventory
from crossward.imaging.inventory.walk import STATE_FOLDER
from crossward.imaging.inventory.words import cautions, counts_in_words, overview, range_in_words

_SCANNER_HEADINGS = ("scanner", "images", "patients", "modality", "software", "kV", "T", "kernel", "spacing", "bits")
_INTERRUPTED = 130


def scan(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with DICOM files, at any depth.")],
    page: Annotated[Path | None, typer.Option(help="Also write a page with pictures of every scanner.")] = None,
    state: Annotated[
        Path | None,
        typer.Option(help=f"Where to keep what was read, so that a scan can go on; else DIR/{STATE_FOLDER}."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Files read at once; else one per processor.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Read every file again.")] = False,
    pixels: Annotated[
        bool, typer.Option("--pixels", help="Compare all pixel data: finds copies under other UIDs; reads everything.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Say what a folder of DICOM files holds: scanners, kinds of image, copies, and what cannot be read and why.

    Only headers are read. A scan that was stopped goes on where it was. No name, id, date or file name is shown.

    Example: crossward data scan archive --page archive.html
    """
    errors = Console(stderr=True)
    state = state or _usual_state(folder, errors)
    try:
        with counting(errors) as progress:
            inventory = take_inventory(
                folder,
                state=state,
                processes=processes,
                progress=progress,
                pixels=pixels,
                fresh=fresh,
            )
            found = facts(inventory)
            if not found.read:
                raise BadInput(_nothing(found))
            if page is not None:
                write_page(page, folder, inventory, found, processes=processes, progress=progress)
    except KeyboardInterrupt:
        kept = "what was read is kept; the same command goes on from there" if state else "nothing was kept"
        errors.print(f"stopped: {kept}", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(found.as_json() | {"page": page and str(page)}, indent=2, allow_nan=False))
        return
    _show(Console(), found)
    if page is not None:
        typer.echo(f"Page with pictures: {page}")


def _usual_state(folder: Path, errors: Console) -> Path | None:
    """Beside the images, where what headers say is as well kept as they are."""
    if folder.is_dir() and not os.access(folder, os.W_OK):
        errors.print(
            "the folder cannot be written to, so a scan that is stopped begins anew; --state keeps it elsewhere",
            soft_wrap=True,
        )
        return None
    return folder / STATE_FOLDER if folder.is_dir() else None


def _nothing(found: Facts) -> str:
    why = f"; {counts_in_words(found.refused)}" if found.refused else ""
    return f"no DICOM file was read among {found.files:,} files{why}; check that this is the right folder"


def _show(console: Console, found: Facts) -> None:
    console.print(_table(("", ""), overview(found)))
    rows = [
        (
            scanner.name,
            f"{scanner.images:,}",
            f"{scanner.patients:,}",
            ", ".join(scanner.modalities),
            counts_in_words(scanner.software),
            range_in_words(scanner.kvp, ""),
            range_in_words(scanner.field_strength, ""),
            counts_in_words(scanner.kernels),
            range_in_words(scanner.spacing, "mm"),
            ", ".join(scanner.bits),
        )
        for scanner in found.scanners
    ]
    console.print(_table(_SCANNER_HEADINGS, rows, title="scanners"))
    refused = sum(found.refused.values())
    if refused:
        reasons = [(f"{count:,}", why) for why, count in found.refused_details.items()]
        console.print(_table(("files", "reason"), reasons, title="not read"))
    for caution in cautions(found):
        console.print(f"[yellow]warning:[/] {caution}", soft_wrap=True, highlight=False)
    console.print(f"{found.read:,} files read, {refused:,} refused.", soft_wrap=True, highlight=False)


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, title: str = "") -> Table:
    """Columns without anything in them are left out."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, show_header=any(headings), title_justify="left")
    filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    for place in filled:
        table.add_column(headings[place], overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[place]) for place in filled))
    return table
