"""``crossward bench epsilon``: what differential privacy costs, method by method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from crossward.cli import bench_table
from crossward.cli.bench_options import AsJson, AsMarkdown, Classes, Jobs, Sites, metrics_of, numbers_of
from crossward.cli.bench_show import show_tables
from crossward.cli.bench_table import BASELINE, Cells, Result
from crossward.cli.bench_variants import Variant, parse_variant, parse_variants
from crossward.cli.study_options import check_folder, parse_names
from crossward.evaluate.epsilon_plot import Panel, epsilon_picture
from crossward.evaluate.metrics import across_domains
from crossward.federation.errors import BadInput
from crossward.federation.storage import atomic_file
from crossward.methods import available

NONE = "none"
LARGER = "always the larger class"


def epsilon(
    data: Annotated[Path, typer.Option(help="Folder of hospitals, or a pack.")],
    out: Annotated[Path, typer.Option(help="One run per cell is kept here, so that a table can be finished later.")],
    methods: Annotated[
        str | None, typer.Option(help="Methods with commas, options in brackets; all federated ones if not given.")
    ] = None,
    epsilons: Annotated[str, typer.Option(help="Of the whole run, with commas; none is without.")] = "1,2,4,8,none",
    settings: Annotated[
        str,
        typer.Option(
            help="Settings of the private runs, as batch=256;lr=0.3: noise wants others than usual. After a comma and "
            "a method's name those of that method alone, as batch=256;lr=0.3,fdse:lr=1."
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0",
    preset: Annotated[str | None, typer.Option(help="cpu: as for crossward bench table.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds a run; 16 if not given.")] = None,
    fraction: Annotated[float | None, typer.Option(help="Part of the training patients; 1 if not given.")] = None,
    classes: Classes = None,
    sites: Sites = None,
    metric: Annotated[
        str, typer.Option(help="accuracy, balanced_accuracy or auc; several with commas.")
    ] = "accuracy,auc",
    jobs: Jobs = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the metrics against epsilon into this PNG.")] = None,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """What differential privacy costs: each method at several epsilons, and without.

    Choose the settings of the private runs with: crossward bench table --tune. Beside the methods stand what ignoring
    the image scores, and a linear model on twelve global numbers, which has no noise.

    Example: crossward bench epsilon --data phantoms --out runs/epsilon --methods fedavg,f2dc --plot epsilon.png
    """
    metrics = metrics_of(metric)
    names = [variant.text for variant in parse_variants(methods or ",".join(n for n in available() if n != "local"))]
    common, own = _settings(settings, names)
    grid = {name: _row(name, epsilons, common | own.get(name, {})) for name in names}
    budget = bench_table.budget(preset, rounds=rounds, fraction=fraction)
    check_folder(out)
    sweep = bench_table.Sweep(
        data=data,
        out=out,
        variants=[variant for row in grid.values() for variant in row.values()],
        seeds=numbers_of(seeds),
        budget=budget,
        classes=parse_names(classes),
        sites=parse_names(sites),
        jobs=jobs,
        console=Console(stderr=True),
    )
    cells = bench_table.run(sweep)
    found = {name: {column: cells[variant.text] for column, variant in row.items()} for name, row in grid.items()}
    if plot is not None:
        with atomic_file(plot) as stream:
            stream.write(epsilon_picture([_panel(found, cells[BASELINE], name) for name in metrics]))
    tables = {name: table(found, cells, metric=name) for name in metrics}
    show_tables(tables, title="by epsilon, average of the sites", seeds=seeds, as_json=as_json, markdown=markdown)
    if plot is not None:
        typer.echo(f"Plot: {plot}", err=True)


def _panel(found: Mapping[str, Mapping[str, Sequence[Result]]], linear: Sequence[Result], metric: str) -> Panel:
    curves = {name: {column: averages(runs, metric) for column, runs in row.items()} for name, row in found.items()}
    return Panel(metric, curves, statistics.fmean(_ignoring(linear, metric)))


def _settings(text: str, names: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Settings of all methods, and those of single ones, as names and values."""
    common: dict[str, str] = {}
    own: dict[str, dict[str, str]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, rest = part.rpartition(":")
        if colon and name not in names:
            raise BadInput(f"--settings: '{name}' is none of the methods; there is: {', '.join(names)}")
        pairs = [pair.partition("=") for pair in rest.split(";") if pair.strip()]
        (own.setdefault(name, {}) if colon else common).update((key.strip(), value) for key, _, value in pairs)
    return common, own


def _row(name: str, epsilons: str, settings: Mapping[str, str]) -> dict[str, Variant]:
    """A method's variants, by epsilon as it was given."""
    columns = parse_names(epsilons) or []
    for column in columns:
        if column != NONE and not _positive(column):
            raise BadInput(f"--epsilons: '{column}' is neither a number above 0 nor {NONE}")
    if not columns:
        raise BadInput("--epsilons names none; give some, as 1,2,4,8,none")
    if parse_variant(name).privacy is not None:
        raise BadInput(f"{name} has an epsilon or noise of its own; leave that to --epsilons")
    texts = [name if column == NONE else with_settings(name, {"dp": column, **settings}) for column in columns]
    return dict(zip(columns, parse_variants(",".join(texts)), strict=True))


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def with_settings(text: str, settings: Mapping[str, str]) -> str:
    """A variant's text with more settings in its brackets."""
    pairs = ";".join(f"{name}={value}" for name, value in settings.items())
    return f"{text[:-1]};{pairs}]" if text.endswith("]") else f"{text}[{pairs}]"


def averages(runs: Sequence[Result], metric: str) -> list[float]:
    """The average over sites of every run in which it is defined."""
    found = (across_domains([site[metric] for site in run["sites"].values()])[0] for run in runs)
    return [value for value in found if value is not None]


def table(found: Mapping[str, Mapping[str, Sequence[Result]]], cells: Cells, *, metric: str) -> list[dict[str, Any]]:
    """A row per method, a column per epsilon; what needs no training of a net comes first."""
    columns = list(next(iter(found.values())))
    linear = cells[BASELINE]
    ignoring = bench_table.spread(_ignoring(linear, metric))
    return [
        {"method": LARGER, **dict.fromkeys(columns, ignoring)},
        {
            "method": BASELINE,
            **{column: bench_table.spread(averages(linear, metric)) if column == NONE else "–" for column in columns},
        },
        *(
            {"method": name, **{column: bench_table.spread(averages(runs, metric)) for column, runs in row.items()}}
            for name, row in found.items()
        ),
    ]


def _ignoring(runs: Sequence[Result], metric: str) -> list[float]:
    """What answering every image of a site with its larger class scores, average of the sites, run by run."""
    return [statistics.fmean(_ignored(site, metric) for site in run["sites"].values()) for run in runs]


def _ignored(site: Mapping[str, Any], metric: str) -> float:
    counts = [each["n"] for each in site["per_class"].values()]
    if metric == "accuracy":
        return float(max(counts) / sum(counts))
    return 0.5 if metric == "auc" else 1 / sum(map(bool, counts))
