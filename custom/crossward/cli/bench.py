"""``crossward bench``: figures as ratios in one run, each with its command beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli import (
    bench_adapt,
    bench_combine,
    bench_dp,
    bench_efficiency,
    bench_epsilon,
    bench_flare,
    bench_ingest,
    bench_secagg,
    bench_skew,
    bench_table,
    bench_trace,
    bench_training,
    bench_uncertainty,
)
from crossward.cli.bench_options import AsJson, AsMarkdown, Classes, Jobs, Sites, metrics_of, numbers_of
from crossward.cli.bench_show import show, show_tables
from crossward.cli.bench_variants import parse_variant, parse_variants
from crossward.cli.study_options import check_choices, check_folder, parse_names
from crossward.federation.errors import BadInput
from crossward.imaging.data import load
from crossward.site.diagnostics import NOISE
from crossward.site.trainer import Training

app = typer.Typer(help="Measure speed, memory and methods, as ratios in one run.", no_args_is_help=True)

Noise = Annotated[float, typer.Option(min=0, help="Standard deviation of the noise, in normalised units.")]


@app.callback()
def root() -> None:
    """Measure speed, memory and methods, as ratios in one run."""


@app.command("combine")
def combine(
    methods: Annotated[str, typer.Option(help="Methods with commas; options in brackets.")] = "fedavg,fedcode,fdse",
    sites: Annotated[str, typer.Option(help="Numbers of sites, with commas.")] = "4,16,64",
    depth: Annotated[int, typer.Option(help="ResNet-10 or ResNet-18.")] = 18,
    width: Annotated[float, typer.Option(help="Width of the net; 1 is the full one.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 3,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """Memory and time of the server's combining, each method and number of sites in a process of its own.

    Peak memory is in models of what a site sends, and in FedAvg's. The time's ratio is to a plain numpy average of
    FedAvg's model, the median of the repeats' ratios.

    Example: crossward bench combine --methods fedavg,fdse --sites 50
    """
    variants = parse_variants(methods)
    numbers = numbers_of(sites)
    if min(numbers) < 1:
        raise BadInput(f"--sites {sites}: there is nothing to combine without a site")
    check_choices(depth=depth, width=width)
    rows = [
        bench_combine.in_own_process(variant, number, depth=depth, width=width, repeats=repeats)
        for variant in variants
        for number in numbers
    ]
    title = f"Combining reports of ResNet-{depth} of width {width:g}"
    show(rows, title=title, as_json=as_json, markdown=markdown)


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
        for number in numbers_of(sites)
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
    methods: Annotated[
        str, typer.Option(help="Methods with commas; options, block, head, lr, batch, width, dp and more in brackets.")
    ] = "local,fedavg,fedprox,fedbn",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    preset: Annotated[
        str | None, typer.Option(help="cpu: 16 rounds on half the training patients, images moved and mirrored.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds a run; 16 if not given.")] = None,
    fraction: Annotated[float | None, typer.Option(help="Part of the training patients; 1 if not given.")] = None,
    augment: Annotated[str | None, typer.Option(help="none, shift or shift-flip; none if not given.")] = None,
    classes: Classes = None,
    sites: Sites = None,
    metric: Annotated[str, typer.Option(help="accuracy, balanced_accuracy or auc; several with commas.")] = "accuracy",
    against: Annotated[
        str | None, typer.Option(help="Method that the others are compared with; fedavg, or the first one.")
    ] = None,
    jobs: Jobs = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Score validation images; do not look at test images. To choose settings by.")
    ] = False,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """Methods by sites, mean and spread over seeds, with the linear baseline on twelve global numbers beside them.

    Beside the sites: their average, all images together, the worst site, and for accuracy what models reach on other
    scanners (GATA) and which part that is of what they reach on their own (CPRR). The last column is the difference
    from one method with its 95 % interval, paired by seed. Cells that are finished are only read, interrupted ones
    resumed.

    Example: crossward bench table --data phantoms --out runs/table --methods "fedavg,f2dc[lambda1=0;lr=0.01]"
    """
    metrics = metrics_of(metric)
    variants = parse_variants(methods)
    names = [variant.text for variant in variants]
    reference = against or ("fedavg" if "fedavg" in names else names[0])
    if reference not in names:
        raise BadInput(f"--against {reference} is none of the methods; there is: {', '.join(names)}")
    budget = bench_table.budget(preset, rounds=rounds, fraction=fraction, augment=augment)
    Training(augment=budget.augment)
    check_folder(out)
    sweep = bench_table.Sweep(
        data=data,
        out=out,
        variants=variants,
        seeds=numbers_of(seeds),
        budget=budget,
        classes=parse_names(classes),
        sites=parse_names(sites),
        jobs=jobs,
        console=Console(stderr=True),
        tuning=tune,
    )
    cells = bench_table.run(sweep)
    tables = {name: bench_table.table(cells, metric=name, against=reference) for name in metrics}
    show_tables(
        tables,
        title="on validation images" if tune else "at every site",
        seeds=seeds,
        as_json=as_json,
        markdown=markdown,
    )


@app.command("adapt")
def adapt(
    data: Annotated[Path, typer.Option(help="Folder of hospitals, or a pack.")],
    out: Annotated[Path, typer.Option(help="One run per cell is kept here, so that a table can be finished later.")],
    methods: Annotated[str, typer.Option(help="Methods with commas; options in brackets.")] = "fedavg,fedbn,fdse",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    preset: Annotated[str | None, typer.Option(help="cpu: as for crossward bench table.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds a run; 16 if not given.")] = None,
    classes: Classes = None,
    sites: Sites = None,
    metric: Annotated[str, typer.Option(help="accuracy, balanced_accuracy or auc; several with commas.")] = "accuracy",
    jobs: Jobs = None,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """Leave one hospital out: the others' model at that hospital, before and after it is fitted without labels.

    Example: crossward bench adapt --data phantoms --out runs/without --methods fedavg,fdse --rounds 10
    """
    metrics = metrics_of(metric)
    budget = bench_table.budget(preset, rounds=rounds)
    check_folder(out)
    sweep = bench_table.Sweep(
        data=data,
        out=out,
        variants=parse_variants(methods),
        seeds=numbers_of(seeds),
        budget=budget,
        classes=parse_names(classes),
        sites=parse_names(sites),
        jobs=jobs,
        console=Console(stderr=True),
    )
    runs = bench_adapt.run(sweep)
    tables = {name: bench_adapt.table(runs, metric=name) for name in metrics}
    show_tables(tables, title="at the hospital left out", seeds=seeds, as_json=as_json, markdown=markdown)


@app.command("efficiency")
def efficiency(
    methods: Annotated[str, typer.Option(help="Methods with commas; the first is what time is compared with.")],
    width: Annotated[float, typer.Option(help="Width of ResNet-10; 1 is the full one.")] = 1.0,
    size: Annotated[int, typer.Option(min=8, help="Side of the images.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 5,
    batch_size: Annotated[int, typer.Option(min=2, help="Images a step.")] = 32,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """What a round costs one site: upload, parameters, FLOPs of training, and time of an epoch on one thread.

    Time is the processor's, or what passes on a graphics card. Its ratio is the median of the repeats' ratios, with the
    lowest and the highest of them.

    Example: crossward bench efficiency --methods fedavg,f2dc,rfeddis
    """
    variants = parse_variants(methods)
    check_choices(width=width)
    rows = bench_efficiency.measure(variants, width=width, size=size, repeats=repeats, batch_size=batch_size)
    title = f"A round of one site: ResNet-10 of width {width:g}, {size} px, epochs of {bench_efficiency.EPOCH} images"
    show(rows if as_json else bench_efficiency.table(rows), title=title, as_json=as_json, markdown=markdown)


@app.command("dp")
def dp(
    depths: Annotated[str, typer.Option(help="Depths of the ResNet with GroupNorm, with commas.")] = "10,18",
    width: Annotated[float, typer.Option(help="Width of the net; 1 is the full one.")] = 1.0,
    size: Annotated[int, typer.Option(min=8, help="Side of the images.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 5,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """What a step of differential privacy costs beside plain SGD, by our way and Opacus's, in turns on one thread.

    Time is the processor's. Its ratio is the median of the repeats' ratios, with the lowest and the highest of them.
    Norms of single images are compared with those of batches of one.

    Example: crossward bench dp --depths 10 --batch-size 8
    """
    chosen = numbers_of(depths)
    for depth in chosen:
        check_choices(depth=depth, width=width)
    rows = bench_dp.measure(chosen, width=width, size=size, batch_size=batch_size, repeats=repeats)
    title = f"A step of DP-SGD: width {width:g}, {size} px, {batch_size} images"
    show(rows if as_json else bench_dp.table(rows), title=title, as_json=as_json, markdown=markdown)


@app.command("uncertainty")
def uncertainty(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs that differ in the seed alone.")],
    data: Annotated[Path | None, typer.Option(help="The runs' data; where they were read from if not given.")] = None,
    sites: Sites = None,
    ood: Annotated[list[Path] | None, typer.Option(help="An .npz file with images x that are none of ours.")] = None,
    noise: Noise = NOISE,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """How well each site's uncertainty tells noised images, other images and wrong answers, by AUROC.

    Classes, sites and seed are those of the run.

    Example: crossward bench uncertainty runs/table/rfeddis-0 runs/table/rfeddis-1 --ood other.npz
    """
    facts = bench_uncertainty.measure(runs, data=data, sites=parse_names(sites), ood=ood or [], noise=noise)
    rows = bench_uncertainty.table(facts)
    if as_json:
        typer.echo(json.dumps({**facts, "table": rows}, indent=2, allow_nan=False))
        return
    show(rows, title=f"Uncertainty of {facts['method']}, mean ± spread over {len(runs)} run(s)", markdown=markdown)


@app.command("uncertainty-trace")
def uncertainty_trace(
    data: Annotated[Path, typer.Option(help="Folder of hospitals, or a pack.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; resumed where it was interrupted.")],
    method: Annotated[str, typer.Option(help="Method; options in brackets.")] = "rfeddis",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 16,
    fraction: Annotated[float, typer.Option(help="Part of the training patients.")] = 1.0,
    classes: Classes = None,
    sites: Sites = None,
    seed: Annotated[int, typer.Option(help="Decides splits, start, order and noise.")] = 0,
    noise: Noise = NOISE,
    jobs: Jobs = None,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """Train, and show by round each site's mean uncertainty on clean and noised test images, and the AUROC between.

    Example: crossward bench uncertainty-trace --data phantoms --method rfeddis --rounds 16 --out runs/trace
    """
    variant = parse_variant(method)
    check_folder(out)
    cohort = load(data, classes=parse_names(classes), sites=parse_names(sites), seed=seed, fraction=fraction)
    facts = bench_trace.run(
        cohort, variant, out, rounds=rounds, seed=seed, noise=noise, jobs=jobs, console=Console(stderr=True)
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    show(bench_trace.table(facts), title=f"{method}: uncertainty clean / noised / AUROC", markdown=markdown)


@app.command()
def ingest(
    site: Annotated[Path, typer.Argument(help="Folder of a hospital with a site.yaml.")],
    size: Annotated[int, typer.Option(help="Height and width of the pictures.")] = 32,
    processes: Annotated[int | None, typer.Option(min=1, help="Workers; one per processor if not given.")] = None,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """Rates of inventory, preparation and loading against bare pydicom on one core; also killed half-way.

    Example: crossward bench ingest hospital
    """
    rows = bench_ingest.run(site, size=size, processes=processes)
    show(rows, title=f"DICOM to cached pictures of {size} px", as_json=as_json, markdown=markdown)


app.command("secagg")(bench_secagg.secagg)
app.command("epsilon")(bench_epsilon.epsilon)
