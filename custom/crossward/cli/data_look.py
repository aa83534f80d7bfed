"""``crossward data look``: every file of a folder at a glance, so that a person can see whether it is read right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.look import contact_sheet, lines, table


def look(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with DICOM files, at any depth.")],
    sheet: Annotated[Path | None, typer.Option(help="Also write a contact sheet (PNG) of what was read.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Files read at once; else one per processor.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Read every file whole and say what it is, or why it is refused; for a few hundred files, not for an archive.

    Files are numbered by name. The sheet shows images of patients: it belongs where they do.

    Example: crossward data look archive/2026 --sheet look.png
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; check the path")
    rows = contact_sheet(folder, sheet, processes=processes) if sheet else table(folder, processes=processes)
    if as_json:
        fields = ("number", "modality", "size", "photometric", "syntax", "reason")
        typer.echo(json.dumps([{name: getattr(row, name) for name in fields} for row in rows], indent=2))
        return
    for line in lines(rows):
        typer.echo(line)
    refused = sum(bool(row.reason) for row in rows)
    console = Console()
    console.print(f"{len(rows) - refused} files read, {refused} refused", highlight=False)
    if sheet:
        console.print(f"Contact sheet, with images of patients: {sheet}", soft_wrap=True, highlight=False)
