"""``crossward audit``: attacks on what leaves a site, tried out, and checks of what protects it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossward.cli import audit_run
from crossward.cli.audit_page import write_page
from crossward.cli.audit_run import AuditedRun
from crossward.cli.progress import counting
from crossward.cli.study_options import check_folder
from crossward.evaluate.facts import versions
from crossward.federation.errors import BadInput
from crossward.federation.storage import read_json, write_json
from crossward.imaging.data import Cohort, load
from crossward.privacy.audit import setup, small
from crossward.privacy.audit.findings import Finding, Findings, shown
from crossward.site.handover import Handover, read_handover
from crossward.site.runfolder import DESCRIPTION, check_same

FAILED = 1
_STATES = {True: "pass", False: "FAIL", None: ""}


def audit(
    out: Annotated[Path, typer.Option(help="Folder for audit.json, audit.html and pictures.")],
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a finished run; only the built-in set-up if not given.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The images that the run was trained on.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try less: for a first look, and for tests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print audit.json; everything else to stderr.")] = False,
) -> None:
    """Attack updates without protection, with differential privacy, with secure aggregation and with both.

    The exit code is 1 where a protection fails, or an attack that has to work does not.

    Example: crossward audit runs/private --data phantoms --out runs/private-audit
    """
    if (run is None) != (data is None):
        raise BadInput("a run is attacked with the images that it was trained on: give both RUN and --data, or neither")
    check_folder(out)
    console = Console(stderr=as_json, highlight=False)
    began, processor = time.perf_counter(), time.process_time()
    with _one_thread(), counting(Console(stderr=True)) as progress:
        given = _read(run, data, progress) if run is not None and data is not None else None
        found = small.audit_small(setup.QUICK if quick else setup.FULL, progress=progress)
        if given is not None and run is not None:
            handover, cohort = given
            effort = audit_run.QUICK if quick else audit_run.FULL
            found.extend(AuditedRun(run, handover, cohort, effort).attack(progress))
    seconds = time.perf_counter() - began
    facts: dict[str, Any] = {
        "run": None if run is None else str(run),
        "data": None if data is None else str(data),
        "phantom": given is None or given[1].phantom,
        "quick": quick,
        "passed": not found.failed,
        "findings": found.facts(),
        "seconds": round(seconds, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "versions": versions(),
    }
    write_json(out / "audit.json", facts)
    write_page(out, facts, found.pictures)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
    _show(console, found, facts)
    console.print(f"Audit: {out / 'audit.json'}\nPage: {out / 'audit.html'}", soft_wrap=True)
    if found.failed:
        raise typer.Exit(FAILED)


def _read(run: Path, data: Path, progress: Any) -> tuple[Handover, Cohort]:
    """A run and its images, which have to be those that it was trained on: else nobody was a member."""
    handover = read_handover(run)
    folder, task = run if run.is_dir() else run.parent, handover.study.task
    described = (folder / DESCRIPTION).is_file()
    cohort = load(
        data,
        size=task.size,
        classes=task.classes,
        channels=task.channels,
        sites=list(read_json(folder / DESCRIPTION)["sites"]) if described else None,
        seed=task.seed,
        lenient=True,
        progress=progress,
    )
    if described:
        try:
            check_same(folder, handover.study, cohort)
        except BadInput as error:
            raise BadInput(f"the images in {data} are not those that {run} was trained on ({error})") from error
    return handover, cohort


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small steps on several threads wait for each other most of the time, on a busy machine far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show(console: Console, found: Findings, facts: dict[str, Any]) -> None:
    table = Table(title="leakage audit", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("attacked", "attack", "setting", "figure", "rule", "", "minutes"):
        right = heading in ("figure", "minutes")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, _cells(row)), style="bold red" if row.passed is False else "")
    console.print(table)
    for row in found.failed:
        console.print(f"FAIL {row.subject}, {row.attack}, {row.setting}: {row.words}", soft_wrap=True, markup=False)
    verdict = "every rule holds" if facts["passed"] else f"{len(found.failed)} of the rules broken"
    console.print(
        f"{verdict}; {facts['seconds'] / 60:.1f} minutes, {facts['processor_seconds']:.0f} s of the processor. "
        "An attack that failed here is not one that nobody could make succeed.",
        soft_wrap=True,
    )


def _cells(row: Finding) -> tuple[str, ...]:
    figure = shown(row.figure, row.unit)
    return (row.subject, row.attack, row.setting, figure, row.rule, _STATES[row.passed], f"{row.seconds / 60:.2f}")
