"""``crossward poc``, behind ./poc/run: the whole system on one machine, in real FLARE processes.

At the end come the scans that the deployed models should not be trusted on, and what the models learned. The result
is written before either is worked out: a failure there costs a warning, not the result.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console as Screen

from crossward.cli import poc_systems
from crossward.cli.closer import Finished, conclude
from crossward.cli.job import show_lines
from crossward.cli.progress import JobDisplay, counting
from crossward.cli.show import show_cohort
from crossward.cli.simulate import INTERRUPTED
from crossward.cli.study_options import (
    DpClip,
    DpDelta,
    DpDistributed,
    DpEpsilon,
    DpNoise,
    DpUnit,
    MethodOptions,
    RingBits,
    Rounds,
    Secagg,
    check_folder,
    masked,
    parse_options,
    private,
)
from crossward.federation.errors import BadInput, RunFailure
from crossward.flare.console import Console
from crossward.flare.explain import explain
from crossward.flare.jobs import Timing, export
from crossward.flare.kits import SERVER, SiteKit
from crossward.flare.system import LocalSystem
from crossward.flare.watch import Outcome, Pace, follow
from crossward.imaging.data import Cohort, load
from crossward.imaging.held_out import NamedScans, load_held_out
from crossward.imaging.phantom import is_whole, write_hospitals
from crossward.methods import create
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.settings import Settings
from crossward.site.gathered import alone, gathered
from crossward.site.study import Study

_TIMING = Timing(join=300, round=1800, grace=20)
_PACE = Pace(poll=0.5, process=10.0, settle=2.0)
_READY = 90.0


def poc(
    method: Annotated[str, typer.Option(help="See: crossward methods.")] = "rfeddis",
    rounds: Rounds = 10,
    sites: Annotated[int, typer.Option(help="Phantom hospitals to make.")] = 4,
    data: Annotated[
        Path | None, typer.Option(help="Use this folder of hospitals, or pack, instead of phantoms.")
    ] = None,
    workdir: Annotated[Path, typer.Option(help="Where phantoms and runs are kept.")] = Path("runs"),
    option: MethodOptions = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same result.")] = 0,
    secagg: Secagg = True,
    ring_bits: RingBits = Settings.bits,
    dp: DpEpsilon = None,
    dp_noise: DpNoise = None,
    dp_clip: DpClip = Privacy.clip,
    dp_delta: DpDelta = Privacy.delta,
    dp_unit: DpUnit = Privacy.unit,
    dp_distributed: DpDistributed = Privacy.distributed,
    compare: Annotated[bool, typer.Option(help="Also train every hospital alone, for comparison.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the system up, and say how to use it.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Only stop what earlier runs left up in --workdir.")] = False,
) -> None:
    """Make four phantom hospitals, train them together on FLARE on this machine, and show what came of it.

    Every hospital and the server get a kit with certificates and run as processes of their own, over TLS. At the end,
    each hospital's model reads its own test scans, scans from a scanner that no hospital has, and spoiled ones, and
    flags those that it should not be trusted on. Your own --data has such sets where it has a folder 'held-out'.

    Example: ./poc/run --method fedavg --rounds 5
    """
    screen = Screen()
    workdir = workdir.absolute()
    check_folder(workdir)
    poc_systems.stop_leftovers(workdir, screen, kept_ones_too=stop)
    if stop:
        return
    chosen = create(method, **parse_options(option or []))
    clock = Clock()
    with counting(Screen(stderr=True)) as progress:
        if data is None:
            data = workdir / f"phantoms-{sites}-{seed}-held-out"
            if not is_whole(data):
                shutil.rmtree(data, ignore_errors=True)
                screen.print(f"Drawing {sites} phantom hospitals as DICOM files in {data} ...", soft_wrap=True)
                write_hospitals(data, sites=sites, seed=seed, unseen=True, spoiled=True, progress=progress)
        cohort = load(data, seed=seed, progress=progress)
        held_out = load_held_out(
            data, classes=cohort.classes, size=cohort.size, channels=cohort.channels, seed=seed, progress=progress
        )
    show_cohort(screen, cohort)
    clock.lap("images")
    study = Study.usual(chosen, cohort, rounds=rounds, seed=seed, quorum=len(cohort.sites) // 2 + 1)
    if secagg:
        study = _summed_only(study, len(cohort.sites), ring_bits)
    study = private(
        study,
        epsilon=dp,
        noise=dp_noise,
        clip=dp_clip,
        delta=dp_delta,
        unit=dp_unit,
        distributed=dp_distributed,
    )
    out = workdir / f"poc-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    with interruptible(), poc_systems.claimed(out):
        run_on_flare(screen, cohort, held_out, study, data.absolute(), out, clock=clock, keep=keep, compare=compare)


def _summed_only(study: Study, sites: int, ring_bits: int) -> Study:
    """The study under secure aggregation, where there are sites enough for it."""
    found = masked(study, ring_bits=ring_bits)
    if found.masking is not None and sites < found.masking.fewest:
        raise BadInput(
            f"{study.method.name} under secure aggregation takes at least {found.masking.fewest} hospitals, and there "
            f"are {sites}; use more, or --no-secagg"
        )
    return found


class Clock:
    """Where the time went."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Note the time since the last lap under a name."""
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now
        return self.laps[name]

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.laps.items())


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the command as Ctrl-C does, with everything stopped on the way."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_on_flare(
    screen: Screen,
    cohort: Cohort,
    held_out: Mapping[str, NamedScans],
    study: Study,
    data: Path,
    out: Path,
    *,
    clock: Clock,
    keep: bool,
    compare: bool,
) -> None:
    """Make kits, start, run the job, show the result; whatever happens, no process stays behind unless asked."""
    kits = {
        name: SiteKit(
            data_root=data / name if (data / name).is_dir() else data,
            state_root=out / "sites" / name,
            secure_aggregation=study.masking is not None,
            max_delta=study.privacy.delta if study.privacy else SiteKit.max_delta,
            privacy_unit=study.privacy.unit if study.privacy else SiteKit.privacy_unit,
        )
        for name in cohort.sites
    }
    system = LocalSystem.make(out / "system", kits)
    failed = True
    try:
        screen.print(f"Starting FLARE: a server and {len(kits)} hospitals on port {system.port} ...", soft_wrap=True)
        system.start()
        system.wait_until_ready(_READY)
        screen.print(f"FLARE is ready after {clock.lap('starting FLARE'):.0f} s")
        outcome = _run_job(screen, system, study, out)
        clock.lap("job")
        finish(screen, cohort, held_out, study, outcome, out, clock=clock, compare=compare)
        failed = False
        if keep:
            poc_systems.keep(system, screen)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Once is enough: a second one while processes are being ended would leave some behind.
            signal.signal(number, signal.SIG_IGN)
        system.stop()
        Screen(stderr=True).print(f"stopped: every process is ended; what was finished is in {out}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if failed or not keep:
            system.stop()
        if not failed and not keep:
            shutil.rmtree(system.folder)


def _run_job(screen: Screen, system: LocalSystem, study: Study, out: Path) -> Outcome:
    job = export(study, out / "job", timing=_TIMING, min_sites=study.quorum or 1)
    protected = "with secure aggregation" if study.masking else "without secure aggregation: the server sees updates"
    screen.print(
        f"Training together with {study.method.title} ({study.method.name}), {study.task.rounds} rounds, on FLARE, "
        f"{protected}",
        soft_wrap=True,
    )
    with (
        Console.open(system.admin_kit) as console,
        JobDisplay(screen) as display,
    ):
        outcome = follow(console, console.submit(job), listen=display, job=job, pace=_PACE, out=out / "job-results")
        if outcome.status != "completed":
            show_lines(explain(console, outcome.job, kits=system.kit(SERVER).parent))
            raise RunFailure(f"{outcome.reason}. Everything is stopped; kits, logs and state are kept in {out}")
    return outcome


def finish(
    screen: Screen,
    cohort: Cohort,
    held_out: Mapping[str, NamedScans],
    study: Study,
    outcome: Outcome,
    out: Path,
    *,
    clock: Clock,
    compare: bool,
) -> None:
    """Gather, write and show what came of a finished run, then add flags and diagnostics and write it again."""
    folders = {name: out / "sites" / name / "runs" / outcome.run for name in cohort.sites}
    result: dict[str, Any] = gathered(outcome.result or {}, cohort, study, folders)
    if compare:
        screen.print("Training every hospital alone, for comparison ...")
        result["alone"] = alone(cohort, study, out / "alone")
        clock.lap("comparison")
    result["laps"] = clock.laps
    run = Finished(cohort=cohort, held_out=held_out, study=study, folders=folders, handover=out, out=out)
    conclude(screen, run, result, lap=clock.lap)
    screen.print(f"Time: {clock}")
