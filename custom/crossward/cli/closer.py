"""The end of a run whose sites' folders are all here: its result and report, then a closer look at the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from crossward.cli.show import sample_images, show_comparison, show_flags, show_newcomer, show_personal, show_result
from crossward.evaluate.facts import finite, write_result
from crossward.evaluate.report import write_report
from crossward.imaging.data import Cohort
from crossward.imaging.held_out import NamedScans
from crossward.site.deployed import deployed_models
from crossward.site.diagnostics import diagnose
from crossward.site.flags import find_flags
from crossward.site.handover import read_handover
from crossward.site.newcomer import try_newcomer
from crossward.site.study import Study

Pictures = Mapping[str, npt.NDArray[np.uint8]]
Addition = Callable[[], tuple[dict[str, Any] | None, Pictures]]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has come to its end.

    Attributes:
        cohort: all sites' images.
        held_out: sets of scans that belong to no site.
        study: what was run.
        folders: of the run at every site.
        handover: what the run hands to a hospital that did not train; a file, or a folder that has it.
        out: folder for result.json and report.html.
    """

    cohort: Cohort
    held_out: Mapping[str, NamedScans]
    study: Study
    folders: Mapping[str, Path]
    handover: Path
    out: Path

    def write(self, result: Mapping[str, Any], pictures: Pictures) -> None:
        """Write result and report."""
        write_result(self.out / "result.json", result)
        write_report(self.out / "report.html", result, sample_images(self.cohort), pictures)


def conclude(
    screen: Console,
    run: Finished,
    result: dict[str, Any],
    *,
    closer: bool = True,
    lap: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Write and show a result with its report; then look closer, and write and show what that adds.

    The result is complete on disk before the closer look begins: a failure there costs a warning.

    Args:
        screen: to show things on.
        run: that has ended.
        result: of it.
        closer: whether to look closer.
        lap: called with the name of every addition when it is done.
    """
    run.write(result, {})
    show_result(screen, result)
    show_personal(screen, result)
    show_comparison(screen, result)
    if closer:
        longer, pictures = _longer(screen, run, result, lap=lap)
        try:
            run.write(longer, pictures)
            show_flags(screen, longer)
            show_newcomer(screen, longer)
            result = longer
        except Exception as error:
            result = _warned(screen, result, "the closer look", error)
            run.write(result, {})
    files = f"Result: {run.out / 'result.json'}\nReport: {run.out / 'report.html'}"
    screen.print(files, soft_wrap=True, highlight=False)
    return result


def _longer(
    screen: Console, run: Finished, result: Mapping[str, Any], *, lap: Callable[[str], object]
) -> tuple[dict[str, Any], Pictures]:
    """A result with flags, a newcomer and diagnostics, and their pictures; one that fails becomes a warning."""
    longer = dict(result)
    pictures: dict[str, npt.NDArray[np.uint8]] = {}
    for name, work_out in _additions(run):
        try:
            facts, shown = work_out()
            if facts is not None:
                longer[name] = finite(facts)
                pictures.update(shown)
        except Exception as error:
            longer = _warned(screen, longer, name, error)
        lap(name)
    return longer, pictures


def _additions(run: Finished) -> Iterator[tuple[str, Addition]]:
    # Read with the first addition, so that a damaged vault costs a warning too.
    models = cache(lambda: deployed_models(run.study, run.folders))
    yield "flags", lambda: find_flags(run.cohort, models(), run.held_out)
    yield "newcomer", lambda: (try_newcomer(read_handover(run.handover), models(), run.held_out), {})
    yield "diagnostics", lambda: diagnose(run.cohort, run.study, models(), seed=run.study.training.seed)


def _warned(screen: Console, result: Mapping[str, Any], name: str, error: Exception) -> dict[str, Any]:
    """The result with a warning, which is shown too. No text of the error: it may name a scan."""
    warning = f"{name} could not be worked out ({type(error).__name__}); all other results are complete"
    screen.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True, highlight=False)
    return {**result, "warnings": [*result["warnings"], warning]}
