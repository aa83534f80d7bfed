"""``crossward poc``, behind ./poc/run: the whole system on one machine."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli.progress import counting
from crossward.cli.show import show_cohort
from crossward.cli.simulate import check_folder, run_study
from crossward.imaging.data import load
from crossward.imaging.phantom import is_whole, write_hospitals
from crossward.methods import create
from crossward.site.study import Study


def poc(
    method: Annotated[str, typer.Option(help="See: crossward methods.")] = "fedbn",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 8,
    sites: Annotated[int, typer.Option(help="Phantom hospitals to make.")] = 4,
    data: Annotated[Path | None, typer.Option(help="Use this folder of hospitals instead of phantoms.")] = None,
    workdir: Annotated[Path, typer.Option(help="Where phantoms and runs are kept.")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="The same seed, the same result.")] = 0,
) -> None:
    """Make four phantom hospitals, train them together on this machine, and show what came of it.

    Example: ./poc/run --method fedavg --rounds 5
    """
    chosen = create(method)
    check_folder(workdir)
    console = Console()
    with counting(Console(stderr=True)) as progress:
        if data is None:
            data = workdir / f"phantoms-{sites}-{seed}"
            if not is_whole(data):
                shutil.rmtree(data, ignore_errors=True)
                console.print(f"Drawing {sites} phantom hospitals as DICOM files in {data} ...", soft_wrap=True)
                write_hospitals(data, sites=sites, seed=seed, progress=progress)
        cohort = load(data, seed=seed, progress=progress)
    show_cohort(console, cohort)
    study = Study.usual(chosen, cohort, rounds=rounds, seed=seed)
    out = workdir / f"poc-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    console.print(f"Training together with {chosen.title} ({method}), {rounds} rounds, in one process", soft_wrap=True)
    run_study(console, cohort, study, out, resume=False, jobs=None)
