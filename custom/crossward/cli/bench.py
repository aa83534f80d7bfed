"""``crossward bench``: figures as ratios in one run, each with its command beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from crossward.cli import bench_combine, bench_flare, bench_skew, bench_table, bench_training
from crossward.cli.study_options import parse_names
from crossward.federation.errors import BadInput

app = typer.Typer(help="Measure speed, memory and methods, as ratios in one run.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@app.callback()
def root() -> None:
    """Measure speed, memory and methods, as ratios in one run."""


def show(rows: list[dict[str, Any]], *, title: str, as_json: bool) -> None:
    """Print rows as a table, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2, allow_nan=False))
        return
    table = Table(title=title, title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, justify="right" if isinstance(rows[0][heading], int | float) else "left")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


@app.command("combine")
def combine(
    sites: Annotated[str, typer.Option(help="Numbers of sites, with commas.")] = "4,16,64",
    depth: Annotated[int, typer.Option(help="ResNet-10 or ResNet-18.")] = 18,
    as_json: AsJson = False,
) -> None:
    """Peak memory of the combining (in models, in a process of its own), and time against a plain numpy sum.

    Example: crossward bench combine --sites 4,16,64
    """
    numbers = _numbers(sites)
    rows = [
        bench_combine.in_own_process(number, depth=depth, gram=gram) for gram in (False, True) for number in numbers
    ]
    show(rows, title="Combining reports (memory in models; time against numpy)", as_json=as_json)


@app.command("training")
def training(
    width: Annotated[float, typer.Option(help="Width of ResNet-10.")] = 0.25,
    size: Annotated[int, typer.Option(help="Side of the images.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Training images a second against a bare PyTorch loop on the same net and images, interleaved.

    Example: crossward bench training --width 0.25
    """
    rows = bench_training.against_bare_loop(width=width, size=size, repeats=repeats)
    show(rows, title="Training against a bare PyTorch loop", as_json=as_json)


@app.command("flare")
def flare(
    sites: Annotated[str, typer.Option(help="Numbers of sites, with commas.")] = "4,8",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds a job.")] = 20,
    method: Annotated[str, typer.Option(help="See: crossward methods.")] = "fedavg",
    width: Annotated[float, typer.Option(help="Width of ResNet-10; 1 is the full one.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Seconds and bytes a round beside training, and memory by round, on real FLARE processes on this machine.

    Example: crossward bench flare --sites 4,8 --rounds 20
    """
    screen = Console(stderr=True)
    rows = [
        bench_flare.measure(number, rounds=rounds, method=method, width=width, screen=screen)
        for number in _numbers(sites)
    ]
    show(rows, title="A round on FLARE beside training", as_json=as_json)


@app.command("skew")
def skew(
    data: Annotated[Path, typer.Option(help="Folder of hospitals, or a pack.")],
    rounds: Annotated[int, typer.Option(help="Rounds of two epochs of local training.")] = 16,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: AsJson = False,
) -> None:
    """How far the scanners are apart: the train-site by test-site matrix, histogram matching, a linear model.

    Example: crossward bench skew --data phantoms
    """
    facts = bench_skew.measure(data, rounds=rounds, seed=seed)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    bench_skew.show(Console(), facts)


@app.command("table")
def table(
    data: Annotated[Path, typer.Option(help="Folder of hospitals, or a pack.")],
    out: Annotated[Path, typer.Option(help="One run per cell is kept here, so that a table can be finished later.")],
    methods: Annotated[str, typer.Option(help="Methods, with commas.")] = "local,fedavg,fedprox,fedbn",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    rounds: Annotated[int, typer.Option(help="Rounds a run.")] = 16,
    fraction: Annotated[float, typer.Option(help="Part of the training patients.")] = 1.0,
    classes: Annotated[str | None, typer.Option(help="Only these labels, with commas.")] = None,
    sites: Annotated[str | None, typer.Option(help="Only these sites, with commas.")] = None,
    metric: Annotated[str, typer.Option(help="accuracy, balanced_accuracy or auc.")] = "accuracy",
    as_json: AsJson = False,
) -> None:
    """Methods by sites, mean and spread over seeds, with the linear baseline on twelve global numbers beside them.

    Example: crossward bench table --data phantoms --out runs/table
    """
    if metric not in ("accuracy", "balanced_accuracy", "auc"):
        raise BadInput(f"--metric {metric} is not there; there is: accuracy, balanced_accuracy, auc")
    rows = bench_table.run(
        data,
        out,
        methods=parse_names(methods) or [],
        seeds=_numbers(seeds),
        rounds=rounds,
        fraction=fraction,
        classes=parse_names(classes),
        sites=parse_names(sites),
        metric=metric,
        console=Console(stderr=True),
    )
    show(rows, title=f"{metric}, mean ± spread over seeds {seeds}", as_json=as_json)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"'{text}' is not a list of whole numbers with commas") from None
