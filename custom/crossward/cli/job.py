"""``crossward job``: write, submit, follow and explain FLARE jobs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console as Screen
from rich.table import Table

from crossward.cli.job_simulator import simulator
from crossward.cli.progress import JobDisplay
from crossward.cli.study_options import (
    Augment,
    BatchSize,
    Block,
    Clip,
    Depth,
    DpClip,
    DpDelta,
    DpDistributed,
    DpEpsilon,
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
from crossward.federation.errors import BadInput, RunFailure
from crossward.federation.outliers import TIMES
from crossward.flare.console import Console
from crossward.flare.explain import Line
from crossward.flare.explain import explain as explain_job
from crossward.flare.jobs import (
    META,
    PHANTOM_CLASSES,
    SMALLEST_FEDERATION,
    Timing,
    notes_of,
    read_study,
    with_resume,
)
from crossward.flare.jobs import export as export_job
from crossward.flare.outcome import FINISHED
from crossward.flare.watch import Event, Outcome, follow
from crossward.methods import Task, create
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.settings import Settings
from crossward.site.participant import Plugs
from crossward.site.study import Study
from crossward.site.trainer import Training

app = typer.Typer(help="Write, submit, follow and explain FLARE jobs.", no_args_is_help=True)
app.command("simulator")(simulator)

Kit = Annotated[
    Path, typer.Option("--kit", envvar="CROSSWARD_ADMIN_KIT", help="An administrator's kit: the folder with startup/.")
]
JobId = Annotated[str, typer.Argument(help="FLARE's id of the job; see: crossward job list.")]
LEFT_OVER = "RUNNING, no process"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@app.callback()
def root() -> None:
    """Write, submit, follow and explain FLARE jobs."""


@app.command("export")
def export(
    method: Annotated[str, typer.Argument(help="See: crossward methods.")],
    out: Annotated[Path, typer.Option(help="Folder to make; must not exist, or be empty.")],
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
    classes: Annotated[str, typer.Option(help="The findings, with commas, in this order.")] = ",".join(PHANTOM_CLASSES),
    channels: Annotated[int, typer.Option(help="1 for grey images, 3 for colour.")] = 1,
    participation: Participation = 1.0,
    quorum: Annotated[int, typer.Option(help="Reports that a round needs; 0: all the invited.")] = SMALLEST_FEDERATION,
    min_sites: Annotated[
        int | None,
        typer.Option(help="Sites that must be connected to start; the quorum, and enough for a sum, if not given."),
    ] = None,
    outlier: Outlier = TIMES,
    secagg: Secagg = True,
    min_sum: MinSum = Settings.min_sites,
    ring_bits: RingBits = Settings.bits,
    dp: DpEpsilon = None,
    dp_noise: DpNoise = None,
    dp_clip: DpClip = Privacy.clip,
    dp_delta: DpDelta = Privacy.delta,
    dp_unit: DpUnit = Privacy.unit,
    dp_distributed: DpDistributed = Privacy.distributed,
    gpus: Annotated[int, typer.Option(help="GPUs that every site reserves for the job.")] = 0,
    join_timeout: Annotated[int, typer.Option(help="Seconds for sites to read their images and join.")] = Timing.join,
    round_timeout: Annotated[int, typer.Option(help="Seconds for a round, at the longest.")] = Timing.round,
    grace: Annotated[int, typer.Option(help="Seconds for the rest, once enough sites have reported.")] = Timing.grace,
    resume: Annotated[str, typer.Option(help="Go on with this run, with the options it was started with.")] = "",
) -> None:
    """Write a FLARE job folder: configuration only, for crossward job submit, nvflare job submit or the console.

    Example: crossward job export fedprox -o mu=0.1 --rounds 20 --classes effusion,normal --out effusion
    """
    chosen = create(method, **parse_options(option or []))
    check_choices(block=block, head=head, net=net, depth=depth, norm=norm, width=width)
    check_folder(out)
    study = Study(
        method=chosen,
        task=Task(
            classes=_findings(classes),
            channels=_channels(channels),
            size=size,
            rounds=rounds,
            seed=seed,
            net=net,  # type: ignore[arg-type]
            depth=depth,
            width=width,
            norm=norm,  # type: ignore[arg-type]
        ),
        training=Training(
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            learning_rate=lr,
            schedule=schedule,  # type: ignore[arg-type]
            clip=clip,
            augment=augment,  # type: ignore[arg-type]
            seed=seed,
        ),
        plugs=Plugs(block, head),
        participation=_part(participation),
        quorum=quorum or None,
        outlier=outlier,
    )
    timing = Timing(join=join_timeout, round=round_timeout, grace=grace)
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
    fewest = study.masking.fewest if study.masking else SMALLEST_FEDERATION
    needed = max(fewest, quorum) if min_sites is None else min_sites
    export_job(study, out, timing=timing, min_sites=needed, gpus=gpus, resume=resume)
    _say(f"Job folder: {out}. Next: crossward job submit {out} --kit KIT --watch")


@app.command("submit")
def submit(
    job: Annotated[Path, typer.Argument(help="A job folder, such as jobs/fedavg.")],
    kit: Kit,
    again: Annotated[bool, typer.Option("--again", help="Even if the same study waits or runs already.")] = False,
    resume: Annotated[str | None, typer.Option(help="Go on with this run instead of starting a new one.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --watch: keep the job's files in this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job to the server; it runs when enough sites are connected.

    Example: crossward job submit jobs/fedavg --kit kits/admin@crossward.org --watch
    """
    study = read_study(job)
    with Console.open(kit) as console:
        if not again:
            refuse_twice(console, job, study)
        job_id = _submit(console, job, resume)
        if not watch:
            if as_json:
                typer.echo(json.dumps({"job": job_id}))
                return
            _say(f"Submitted: {job_id}. Next: crossward job watch {job_id} --kit {kit}")
            return
        if not as_json:
            _say(f"Submitted: {job_id}")
        _follow(console, job_id, job=job, resume=True, out=out, as_json=as_json)


@app.command("watch")
def watch(
    job_id: JobId,
    kit: Kit,
    resume: Annotated[bool, typer.Option(help="Submit the job again when it died and its run can go on.")] = True,
    out: Annotated[Path | None, typer.Option(help="Keep the job's files in this folder, result.json included.")] = None,
    as_json: AsJson = False,
) -> None:
    """Follow a job to its end, and go on with its run when a process or the server died.

    Example: crossward job watch 6ab1f0c2-... --kit kits/admin@crossward.org --out runs/first
    """
    with Console.open(kit) as console:
        _follow(console, job_id, job=None, resume=resume, out=out, as_json=as_json)


@app.command("explain")
def explain(
    job_id: JobId,
    kit: Kit,
    kits: Annotated[Path | None, typer.Option(help="Folder with kits of sites whose logs may be read here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a job failed: site, round, cause, log line, next step.

    Example: crossward job explain 6ab1f0c2-... --kit kits/admin@crossward.org --kits kits
    """
    if kits is not None and not kits.is_dir():
        raise BadInput(f"there is no folder {kits}; --kits takes the folder that holds the sites' kits")
    with Console.open(kit) as console:
        lines = explain_job(console, job_id, kits=kits)
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2))
        return
    if not lines:
        _say("The run completed, and nothing went wrong.")
    show_lines(lines)


@app.command("list")
def list_jobs(kit: Kit, as_json: AsJson = False) -> None:
    """List the jobs of the server, and the sites that are connected.

    Example: crossward job list --kit kits/admin@crossward.org
    """
    with Console.open(kit) as console:
        metas, running, sites = console.jobs(), console.running_jobs(), console.sites()
    rows = [
        {
            "job": str(meta.get("job_id", "")),
            "name": str(meta.get("name", "")),
            "status": _shown_status(meta, running),
            "submitted": str(meta.get("submit_time_iso", ""))[:19],
            "run": _run_of(meta),
        }
        for meta in metas
    ]
    if as_json:
        typer.echo(json.dumps({"sites": sites, "jobs": rows}, indent=2))
        return
    table = Table()
    for heading in ("job", "name", "status", "submitted"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row["job"], row["name"], row["status"], row["submitted"])
    Screen().print(table)
    _say(f"Connected sites: {', '.join(sites) or 'none'}")


@app.command("abort")
def abort(job_id: JobId, kit: Kit) -> None:
    """Stop a job; finished rounds are kept, and its run can be resumed.

    Example: crossward job abort 6ab1f0c2-... --kit kits/admin@crossward.org
    """
    with Console.open(kit) as console:
        if not console.abort(job_id):
            raise RunFailure(f"job {job_id} has no process to stop; see: crossward job explain {job_id}")
    _say(f"Told to stop: {job_id}")


def _submit(console: Console, job: Path, resume: str | None) -> str:
    if resume is None:
        return console.submit(job)
    with tempfile.TemporaryDirectory(prefix="crossward-") as folder:
        return console.submit(with_resume(job, resume, Path(folder) / job.resolve().name))


def refuse_twice(console: Console, job: Path, study: Study) -> None:
    """Refuse a job whose study waits or runs under the same name already.

    Raises:
        BadInput: naming the job that is there.
    """
    name = json.loads((job / META).read_text(encoding="utf-8"))["name"]
    running, metas = console.running_jobs(), console.jobs()
    for place, meta in enumerate(metas):
        job_id, status = str(meta.get("job_id", "")), _shown_status(meta, running)
        same = meta.get("name") == name and notes_of(meta).get("digest") == study.digest()
        # A job that a restarted server lists as running for ever does not matter once its run has gone on.
        gone_on = status == LEFT_OVER and any(_run_of(later) == _run_of(meta) for later in metas[place + 1 :])
        if same and not gone_on and not status.startswith(FINISHED):
            raise BadInput(
                f"the same study is submitted already as job {job_id} ({status}); follow it with "
                f"crossward job watch {job_id}, or submit it once more with --again"
            )


def show_lines(lines: Sequence[Line]) -> None:
    """Print what went wrong with a job."""
    for line in lines:
        where = line.site if line.round_number is None else f"{line.site}, round {line.round_number}"
        _say(f"{where}: {line.cause}")
        if line.log:
            _say(f"    log:  {line.log}", style="dim")
        _say(f"    next: {line.next_step}")


def _follow(console: Console, job_id: str, *, job: Path | None, resume: bool, out: Path | None, as_json: bool) -> None:
    if as_json:
        outcome = follow(console, job_id, listen=_print_json, resume=resume, job=job, out=out)
        typer.echo(json.dumps({"outcome": _plain(outcome)}))
    else:
        with JobDisplay(Screen()) as display:
            outcome = follow(console, job_id, listen=display, resume=resume, job=job, out=out)
    if outcome.status != "completed":
        if not as_json:
            show_lines(explain_job(console, outcome.job))
        raise RunFailure(f"{outcome.reason} (job {outcome.job})")
    if not as_json:
        kept = f" Files: {outcome.folder}" if outcome.folder else ""
        _say(f"Completed: run {outcome.run}, best round {outcome.best_round} of {outcome.rounds}.{kept}")


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "folder": outcome.folder and str(outcome.folder)}


def _print_json(event: Event) -> None:
    typer.echo(json.dumps(asdict(event)))


def _shown_status(meta: dict[str, Any], running: list[str]) -> str:
    status = str(meta.get("status", ""))
    return LEFT_OVER if status == "RUNNING" and meta.get("job_id") not in running else status


def _run_of(meta: dict[str, Any]) -> str:
    return str(notes_of(meta).get("resume") or meta.get("job_id", ""))


def _findings(text: str) -> tuple[str, ...]:
    found = tuple(parse_names(text) or ())
    if len(found) < 2 or len(set(found)) < len(found):
        raise BadInput(f"--classes '{text}' are not at least two different findings, with commas")
    return found


def _channels(channels: int) -> int:
    if channels not in (1, 3):
        raise BadInput(f"--channels {channels} is neither 1 (grey) nor 3 (colour)")
    return channels


def _part(participation: float) -> float:
    if not 0 < participation <= 1:
        raise BadInput(f"--participation {participation} is not above 0 and at most 1")
    return participation


def _say(line: str, *, style: str = "") -> None:
    Screen().print(line, style=style, highlight=False, markup=False, soft_wrap=True)
