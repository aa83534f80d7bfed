"""A closer look at a finished run whose sites' folders are all here: flags, a newcomer, what the models learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from crossward.evaluate.facts import finite
from crossward.imaging.data import Cohort
from crossward.imaging.held_out import NamedScans
from crossward.site.deployed import deployed_models
from crossward.site.diagnostics import diagnose
from crossward.site.flags import find_flags
from crossward.site.newcomer import try_newcomer
from crossward.site.study import Study

Pictures = Mapping[str, npt.NDArray[np.uint8]]
Addition = Callable[[], tuple[dict[str, Any] | None, Pictures]]


def look_closer(
    screen: Console,
    cohort: Cohort,
    held_out: Mapping[str, NamedScans],
    study: Study,
    folders: Mapping[str, Path],
    result: dict[str, Any],
    *,
    lap: Callable[[str], object] = lambda name: None,
) -> Pictures:
    """Add flags, a newcomer and diagnostics to a result, and give their pictures; one that fails becomes a warning.

    Args:
        screen: for warnings.
        cohort: all sites' images.
        held_out: sets of scans that belong to no site.
        study: what was run.
        folders: of the run at every site.
        result: already written once, since nothing of this may lose it; gets the additions.
        lap: called with the name of every addition when it is done.
    """
    pictures: dict[str, npt.NDArray[np.uint8]] = {}
    for name, work_out in _additions(cohort, held_out, study, folders):
        try:
            facts, shown = work_out()
            if facts is not None:
                result[name] = finite(facts)
                pictures.update(shown)
        except Exception as error:
            # No text of the error: it may name a scan.
            warning = f"{name} could not be worked out ({type(error).__name__}); all other results are complete"
            result["warnings"] = [*result["warnings"], warning]
            screen.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True, highlight=False)
        lap(name)
    return pictures


def _additions(
    cohort: Cohort, held_out: Mapping[str, NamedScans], study: Study, folders: Mapping[str, Path]
) -> Iterator[tuple[str, Addition]]:
    models = deployed_models(study, folders)
    yield "flags", lambda: find_flags(cohort, models, held_out)
    yield "newcomer", lambda: (try_newcomer(study, models, held_out), {})
    yield "diagnostics", lambda: diagnose(cohort, study, models, seed=study.training.seed)
