"""``crossward simulate``: a whole federation in one process, for study and for trying things out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from crossward.cli.progress import RoundDisplay, counting
from crossward.cli.show import sample_images, show_cohort, show_result
from crossward.evaluate.facts import write_result
from crossward.evaluate.report import write_report
from crossward.federation.errors import BadInput
from crossward.imaging.data import Cohort, load
from crossward.methods import Task, create
from crossward.methods.base import BLOCKS, HEADS
from crossward.site.inprocess import simulate as run_in_process
from crossward.site.participant import Plugs
from crossward.site.runfolder import check_free
from crossward.site.study import Study
from crossward.site.trainer import Training

INTERRUPTED = 130


def simulate(
    method: Annotated[str, typer.Option(help="See: crossward methods.")],
    data: Annotated[Path, typer.Option(help="Folder of hospitals (DICOM and labels.csv each), or a pack (.npz each).")],
    out: Annotated[Path, typer.Option(help="Folder of the run: result.json, report.html, checkpoint, vaults.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 10,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="Option of the method, as mu=0.1.")] = None,
    block: Annotated[str | None, typer.Option(help="Feature block; the method's own if not given.")] = None,
    head: Annotated[str | None, typer.Option(help="Head; the method's own if not given.")] = None,
    epochs: Annotated[int, typer.Option(help="Local epochs a round.")] = 2,
    steps: Annotated[int, typer.Option(help="Local steps a round instead of epochs; 0: use epochs.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate of the first round.")] = 0.03,
    schedule: Annotated[str, typer.Option(help="Learning rate over rounds: cosine or constant.")] = "cosine",
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0: no clipping.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides splits, start and order; the same seed, the same model.")] = 0,
    size: Annotated[int, typer.Option(help="Side of the images in pixels.")] = 32,
    depth: Annotated[int, typer.Option(help="ResNet-10 or ResNet-18.")] = 10,
    width: Annotated[float, typer.Option(help="Width of the net; 1 is 64-128-256-512.")] = 0.25,
    norm: Annotated[str, typer.Option(help="batch or group.")] = "batch",
    classes: Annotated[str | None, typer.Option(help="Only these labels, with commas, in this order.")] = None,
    sites: Annotated[str | None, typer.Option(help="Only these sites, with commas.")] = None,
    fraction: Annotated[float, typer.Option(help="Part of the training patients to use.")] = 1.0,
    participation: Annotated[float, typer.Option(help="Part of the sites invited to a round.")] = 1.0,
    quorum: Annotated[
        int | None, typer.Option(help="Reports that a round needs; all the invited if not given.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Sites that train at once; one per core if not given.")] = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Go on with one-class or tiny sites.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json; everything else to stderr.")] = False,
) -> None:
    """Train a federation in one process, with the same methods, sites and files that will run on FLARE.

    Example: crossward simulate --method fedprox -o mu=0.1 --data phantoms --rounds 10 --out runs/fedprox
    """
    chosen = create(method, **parse_options(option or []))
    check_choices(block=block, head=head, depth=depth, norm=norm, width=width)
    training = Training(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        learning_rate=lr,
        schedule=schedule,  # type: ignore[arg-type]
        clip=clip,
        seed=seed,
    )
    check_folder(out)
    check_free(out, resume=resume)
    console = Console(stderr=as_json)
    with counting(Console(stderr=True)) as progress:
        cohort = load(
            data,
            size=size,
            classes=parse_names(classes),
            sites=parse_names(sites),
            seed=seed,
            fraction=fraction,
            lenient=lenient,
            batch_size=batch_size,
            progress=progress,
        )
    show_cohort(console, cohort)
    task = Task(
        classes=cohort.classes,
        channels=cohort.channels,
        size=size,
        rounds=rounds,
        seed=seed,
        depth=depth,
        width=width,
        norm=norm,  # type: ignore[arg-type]
    )
    study = Study(
        method=chosen,
        task=task,
        training=training,
        plugs=Plugs(block, head),
        participation=participation,
        quorum=quorum,
    )
    result = run_study(console, cohort, study, out, resume=resume, jobs=jobs)
    if as_json:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))


def run_study(
    console: Console, cohort: Cohort, study: Study, out: Path, *, resume: bool, jobs: int | None
) -> dict[str, Any]:
    """Run a study with a progress display, write its result and report, and show them."""
    try:
        with RoundDisplay(console, rounds=study.task.rounds, sites=len(cohort.sites)) as display:
            result = run_in_process(cohort, study, out, resume=resume, jobs=jobs, listen=display)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"stopped: finished rounds are kept in {out}; the command with --resume goes on", soft_wrap=True
        )
        # Sites that are still training would hold a normal exit up; nothing of theirs is half-written.
        os._exit(INTERRUPTED)
    write_result(out / "result.json", result)
    write_report(out / "report.html", result, sample_images(cohort))
    show_result(console, result)
    console.print(f"Result: {out / 'result.json'}\nReport: {out / 'report.html'}", soft_wrap=True, highlight=False)
    return result


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read method options given as name=value."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise BadInput(f"'{pair}' is not an option; write it as name=value, such as mu=0.1")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def parse_names(text: str | None) -> list[str] | None:
    """Read a list with commas."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def check_choices(*, block: str | None, head: str | None, depth: int, norm: str, width: float) -> None:
    """Refuse a net that does not exist, before any image is read."""
    for name, value, known in (
        ("block", block, [None, *BLOCKS]),
        ("head", head, [None, *HEADS]),
        ("depth", depth, [10, 18]),
        ("norm", norm, ["batch", "group"]),
    ):
        if value not in known:
            raise BadInput(f"--{name} {value} is not there; there is: {', '.join(str(each) for each in known if each)}")
    if not 0 < width <= 4:
        raise BadInput(f"--width {width} is not above 0 and at most 4")


def check_folder(out: Path) -> None:
    """Refuse an output folder that cannot be written, before any image is read."""
    nearest = out
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise BadInput(f"cannot write to {out}; choose another --out")
