"""How a benchmark shows its rows: a table on the screen, Markdown, or JSON."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text


def show(rows: list[dict[str, Any]], *, title: str, as_json: bool = False, markdown: bool = False) -> None:
    """Print rows as a table, as Markdown, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2, allow_nan=False))
        return
    if markdown:
        typer.echo(f"{title}\n\n{_markdown(rows)}\n")
        return
    table = Table(title=Text(title), title_justify="left")
    for heading in rows[0]:
        justify: JustifyMethod = "right" if isinstance(rows[0][heading], int | float) else "left"
        table.add_column(Text(heading), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    Console().print(table)


def show_tables(
    tables: dict[str, list[dict[str, Any]]], *, title: str, seeds: str, as_json: bool, markdown: bool
) -> None:
    """Print a table for every metric; as JSON, one object for several."""
    if as_json and len(tables) > 1:
        typer.echo(json.dumps(tables, indent=2, allow_nan=False))
        return
    for name, rows in tables.items():
        what = f"{name} in % {title}, mean ± spread over seeds {seeds}"
        show(rows, title=what, as_json=as_json, markdown=markdown)


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
