"""``crossward bench secagg``: what secure aggregation costs a site and the server, in turns with Flower's SecAgg+."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossward.cli.bench_secagg_turns import (
    FLOWER,
    OURS,
    Bench,
    Row,
    Sizes,
    Worker,
    flower_command,
    our_command,
    working,
)
from crossward.cli.progress import counting
from crossward.cli.study_options import check_folder
from crossward.evaluate.secagg_plot import scaling_picture
from crossward.federation.errors import BadInput
from crossward.federation.storage import atomic_file, write_json
from crossward.privacy.secagg.masks import WORD

RESULT = "result.json"
PICTURE = "secagg.png"

REAL = Sizes(
    parameters=5_000_000,
    peers=(4, 9),
    more_peers=(2, 19, 49),
    more_parameters=(100_000, 500_000, 1_000_000, 10_000_000, 25_000_000, 50_000_000),
    usual=9,
    large=(50_000_000, 19),
    error_sites=(3, 5, 10, 20, 50),
    error_parameters=(1_000_000, 5_000_000, 25_000_000),
    flower_parameters=5_000_000,
    flower_peers=19,
)
QUICK = Sizes(
    parameters=20_000,
    peers=(2, 4),
    more_peers=(3,),
    more_parameters=(5_000, 50_000),
    usual=2,
    large=(80_000, 3),
    error_sites=(3, 5),
    error_parameters=(5_000, 20_000),
    flower_parameters=20_000,
    flower_peers=4,
)

_FEWEST_PEERS, _MOST_PEERS = 2, 255
_WITHOUT_FLOWER = (
    "Flower is not compared: {python} has no '{missing}'. Install it in an environment of its own, "
    "'python -m venv flower && flower/bin/pip install flwr', and add --flower-python flower/bin/python."
)


def secagg(
    parameters: Annotated[int | None, typer.Option(min=1, help="Parameters of the model; 5 million.")] = None,
    peers: Annotated[str | None, typer.Option(help="Numbers of other sites, with commas; 4,9.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns; figures are their medians.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads that make masks; Flower has one.")] = 1,
    flower_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with flwr; this one if not given.")
    ] = None,
    flower_large: Annotated[
        bool, typer.Option("--flower-large", help="Flower with the largest models and most peers too: minutes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and secagg.png.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Time, bytes, memory and error of secure aggregation, in turns with Flower's SecAgg+ and a plain numpy sum.

    A ratio is the median of the turns' ratios, with the lowest and the highest. The limit is what AES-256 and adding
    take at best for so many masks, measured in the same turns. Extra memory is the peak above what held the update.

    Example: crossward bench secagg --flower-python flower/bin/python --out runs/secagg
    """
    sizes = _sizes(QUICK if quick else REAL, parameters=parameters, peers=peers, flower_large=flower_large)
    if out is not None:
        check_folder(out)
    screen = Console(stderr=True, soft_wrap=True)
    with ExitStack() as stack:
        workers = {OURS: stack.enter_context(working(our_command(threads), threads=threads))}
        flower = stack.enter_context(working(flower_command(flower_python)))
        if flower.missing:
            told = _WITHOUT_FLOWER.format(python=flower_python or "this environment", missing=flower.missing)
            screen.print(told, highlight=False, markup=False)
        else:
            workers[FLOWER] = flower
        bench = Bench(workers, repetitions=repetitions, threads=threads)
        with counting(screen) as progress:
            rows = bench.run(sizes, progress)
        facts = {"machine": _machine(workers), "threads": threads, "repetitions": repetitions, **rows}
    if out is not None:
        write_json(out / RESULT, facts)
        with atomic_file(out / PICTURE) as stream:
            stream.write(scaling_picture(rows["site"], parameters=sizes.parameters, peers=sizes.usual))
    if as_json:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    for title, table in tables(rows).items():
        _show(title, table)
    versions = "; ".join(f"{name}: {_versions(worker)}" for name, worker in workers.items())
    typer.echo(f"Medians of {repetitions} turns, {threads} thread(s). {versions}.")


def _sizes(sizes: Sizes, *, parameters: int | None, peers: str | None, flower_large: bool) -> Sizes:
    if peers is not None:
        asked = _numbers(peers)
        sizes = replace(sizes, peers=asked, flower_peers=max(sizes.flower_peers, *asked))
    if parameters is not None:
        sizes = replace(sizes, parameters=parameters, flower_parameters=parameters)
    if flower_large:
        sizes = replace(sizes, flower_parameters=max(sizes.more_parameters), flower_peers=_MOST_PEERS)
    return sizes


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise BadInput(f"--peers {text} is not a list of whole numbers with commas") from None
    if min(found) < _FEWEST_PEERS or max(found) > _MOST_PEERS:
        raise BadInput(f"--peers {text}: a sum is over {_FEWEST_PEERS} to {_MOST_PEERS} other sites")
    return found


def _versions(worker: Worker) -> str:
    return ", ".join(f"{name} {number}" for name, number in worker.about.items())


def _machine(workers: dict[str, Worker]) -> Row:
    return {
        "cores": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
        **{name: worker.about for name, worker in workers.items()},
    }


def tables(rows: dict[str, list[Row]]) -> dict[str, list[dict[str, str]]]:
    """What is shown, by title: a site's work, the server's, and errors."""
    errors: dict[int, dict[str, str]] = {}
    for row in rows["error"]:
        cells = errors.setdefault(row["sites"], {"sites": str(row["sites"])})
        cells[f"{row['parameters'] / 1e6:g}M"] = f"{row['ours']:.1e} ({row['float32']:.1e})"
    return {
        "A site, from its update to what it sends": [_site_cells(row) for row in rows["site"]],
        "The server, once all vectors are there": [_server_cells(row) for row in rows["server"]],
        "Error of the average relative to float64, and in brackets that of FedAvg in float32": list(errors.values()),
    }


def _site_cells(row: Row) -> dict[str, str]:
    size = WORD * row["parameters"]
    cells = {
        "parameters": f"{row['parameters']:,}",
        "peers": str(row["peers"]),
        "ms": _ms(row[OURS]["seconds"]),
        "Flower ms": "",
        "Flower / ours": "",
        "ours / limit": _times(row["ours / limit"]),
        "keys, once a job": _ms(row["keys once a job, seconds"]),
        "sent / float32": f"{row[OURS]['bytes'] / size:.4f}",
        "Flower sent / float32": "",
        "extra MB": _mb(row[OURS]["memory"]),
        "Flower extra MB": "",
    }
    if FLOWER in row:
        cells |= {
            "Flower ms": _ms(row[FLOWER]["seconds"]),
            "Flower / ours": _times(row["flower / ours"]),
            "Flower sent / float32": f"{row[FLOWER]['bytes'] / size:.4f}",
            "Flower extra MB": _mb(row[FLOWER]["memory"]),
        }
    return cells


def _server_cells(row: Row) -> dict[str, str]:
    steps = row["steps"]
    cells = {
        "parameters": f"{row['parameters']:,}",
        "sites": str(row["sites"]),
        "ms": _ms(row[OURS]["seconds"]),
        "of it sum, open, decode": ", ".join(_ms(steps[step]) for step in ("sum", "open", "decode")),
        "shares before": _ms(steps["shares"]),
        "numpy sum ms": _ms(row["plain seconds"]),
        "ours / numpy sum": _times(row["ours / plain"]),
        "Flower ms": "",
        "Flower / ours": "",
        "error": f"{row[OURS]['error']:.1e}",
        "Flower error (fitted)": "",
    }
    if FLOWER in row:
        cells |= {
            "Flower ms": _ms(row[FLOWER]["seconds"]),
            "Flower / ours": _times(row["flower / ours"]),
            "Flower error (fitted)": f"{row[FLOWER]['error']:.1e} ({row[FLOWER]['error, fitted']:.1e})",
        }
    return cells


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _mb(size: int | None) -> str:
    return "n/a" if size is None else f"{size / 1e6:.1f}"


def _times(ratio: Row) -> str:
    low, high = ratio["range"]
    return f"{ratio['median']:.1f} ({low:.1f}-{high:.1f})"


def _show(title: str, rows: list[dict[str, str]]) -> None:
    """Print a table, without the columns that nobody filled."""
    filled = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    table = Table(title=Text(title), title_justify="left")
    for heading in filled:
        table.add_column(Text(heading), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[heading]) for heading in filled))
    Console().print(table)
