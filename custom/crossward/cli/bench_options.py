"""What the benchmarks' commands have in common: options, and how lists are read."""

from __future__ import annotations

from typing import Annotated

import typer

from crossward.cli import bench_table
from crossward.cli.study_options import parse_names
from crossward.federation.errors import BadInput

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")]
Classes = Annotated[str | None, typer.Option(help="Only these labels, with commas.")]
Sites = Annotated[str | None, typer.Option(help="Only these sites, with commas.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Sites that train at once; one per core if not given.")]


def metrics_of(text: str) -> list[str]:
    """Read names of metrics with commas between them."""
    metrics = parse_names(text) or [text]
    for name in metrics:
        if name not in bench_table.METRICS:
            raise BadInput(f"--metric {name} is not there; there is: {', '.join(bench_table.METRICS)}")
    return metrics


def numbers_of(text: str) -> list[int]:
    """Read whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"'{text}' is not a list of whole numbers with commas") from None
