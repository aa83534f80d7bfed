"""``crossward report``: show a finished run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli.show import show_flags, show_newcomer, show_result
from crossward.evaluate.facts import read_result
from crossward.evaluate.report import write_report


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or its result.json.")],
    html: Annotated[Path | None, typer.Option(help="Also write the report page here (without sample images).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    """Print the tables of a finished run, and write its report page.

    Example: crossward report runs/first --html first.html
    """
    result = read_result(run / "result.json" if run.is_dir() else run)
    if html is not None:
        write_report(html, result, None)
    if as_json:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))
        return
    console = Console()
    show_result(console, result)
    show_flags(console, result)
    show_newcomer(console, result)
    if html is not None:
        console.print(f"Report: {html}", soft_wrap=True)
