"""``crossward simulate``: a whole federation in one process, for study and for trying things out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from crossward.cli.closer import Finished, conclude
from crossward.cli.progress import RoundDisplay, counting
from crossward.cli.show import show_cohort
from crossward.cli.study_options import (
    Augment,
    BatchSize,
    Block,
    Clip,
    Depth,
    DpClip,
    DpDelta,
    DpDistributed,
    DpEpsilonOfARun,
    DpNoise,
    DpUnit,
    Epochs,
    HeadName,
    LearningRate,
    MethodOptions,
    MinSum,
    NetName,
    NormName,
    Outlier,
    Participation,
    RingBits,
    Rounds,
    Schedule,
    Secagg,
    Seed,
    Size,
    Steps,
    Width,
    check_choices,
    check_folder,
    masked,
    parse_names,
    parse_options,
    private,
)
from crossward.federation.outliers import TIMES
from crossward.imaging.data import Cohort, load
from crossward.imaging.held_out import NamedScans, load_held_out
from crossward.methods import Task, create
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.settings import Settings
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
    rounds: Rounds = 10,
    option: MethodOptions = None,
    block: Block = None,
    head: HeadName = None,
    epochs: Epochs = 2,
    steps: Steps = 0,
    batch_size: BatchSize = 32,
    lr: LearningRate = 0.03,
    schedule: Schedule = "cosine",
    clip: Clip = 0.0,
    augment: Augment = "none",
    seed: Seed = 0,
    size: Size = 32,
    net: NetName = "resnet",
    depth: Depth = 10,
    width: Width = 0.25,
    norm: NormName = "batch",
    classes: Annotated[str | None, typer.Option(help="Only these labels, with commas, in this order.")] = None,
    sites: Annotated[str | None, typer.Option(help="Only these sites, with commas.")] = None,
    fraction: Annotated[float, typer.Option(help="Part of the training patients to use.")] = 1.0,
    participation: Participation = 1.0,
    quorum: Annotated[
        int | None, typer.Option(help="Reports that a round needs; all the invited if not given.")
    ] = None,
    outlier: Outlier = TIMES,
    secagg: Secagg = False,
    min_sum: MinSum = Settings.min_sites,
    ring_bits: RingBits = Settings.bits,
    dp: DpEpsilonOfARun = None,
    dp_noise: DpNoise = None,
    dp_clip: DpClip = Privacy.clip,
    dp_delta: DpDelta = Privacy.delta,
    dp_unit: DpUnit = Privacy.unit,
    dp_distributed: DpDistributed = Privacy.distributed,
    jobs: Annotated[int | None, typer.Option(help="Sites that train at once; one per core if not given.")] = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Go on with one-class or tiny sites.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    diagnostics: Annotated[
        bool,
        typer.Option("--diagnostics/--no-diagnostics", help="Flag scans, and look into the models."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json; everything else to stderr.")] = False,
) -> None:
    """Train a federation in one process, with the same methods, sites and files that will run on FLARE.

    Example: crossward simulate --method fedprox -o mu=0.1 --data phantoms --rounds 10 --out runs/fedprox
    """
    chosen = create(method, **parse_options(option or []))
    check_choices(block=block, head=head, net=net, depth=depth, norm=norm, width=width)
    training = Training(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        learning_rate=lr,
        schedule=schedule,  # type: ignore[arg-type]
        clip=clip,
        augment=augment,  # type: ignore[arg-type]
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
        held_out = (
            load_held_out(
                data, classes=cohort.classes, size=size, channels=cohort.channels, seed=seed, progress=progress
            )
            if diagnostics
            else {}
        )
    show_cohort(console, cohort)
    task = Task(
        classes=cohort.classes,
        channels=cohort.channels,
        size=size,
        rounds=rounds,
        seed=seed,
        net=net,  # type: ignore[arg-type]
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
        outlier=outlier,
    )
    if secagg:
        study = masked(study, min_sum=min_sum, ring_bits=ring_bits)
    study = private(
        study,
        epsilon=dp,
        noise=dp_noise,
        clip=dp_clip,
        delta=dp_delta,
        unit=dp_unit,
        distributed=dp_distributed,
    )
    result = run_study(console, cohort, held_out, study, out, resume=resume, jobs=jobs, diagnostics=diagnostics)
    if as_json:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))


def run_study(
    console: Console,
    cohort: Cohort,
    held_out: Mapping[str, NamedScans],
    study: Study,
    out: Path,
    *,
    resume: bool,
    jobs: int | None,
    diagnostics: bool = True,
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
    folders = {name: out / "sites" / name for name in cohort.sites}
    run = Finished(cohort=cohort, held_out=held_out, study=study, folders=folders, handover=out, out=out)
    return conclude(console, run, result, closer=diagnostics)
