"""Methods by sites: one run per cell, kept on disk, so that a table can be finished later."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy import stats

from crossward.cli.bench_variants import Variant
from crossward.cli.progress import RoundDisplay
from crossward.evaluate.facts import read_result, write_result
from crossward.evaluate.metrics import across_domains, score, summarise
from crossward.evaluate.transfer import transfer_of
from crossward.federation.errors import BadInput
from crossward.imaging.data import Cohort, load
from crossward.imaging.skew import linear_probabilities, plain_numbers
from crossward.site.augment import Augmentation
from crossward.site.inprocess import simulate
from crossward.site.runfolder import DESCRIPTION, check_same

METRICS = ("accuracy", "balanced_accuracy", "auc")
BASELINE = "twelve global numbers"
_SIZE = 32
_TRANSFER = ("GATA", "CPRR")

Sites = Mapping[str, Any]
"""Per site what ``score`` gave, as in a result."""
Result = Mapping[str, Any]
"""What a run came to; of `result.json` a row needs `sites`, `summary` and, where it was measured, `cross_site`."""
Cells = Mapping[str, Sequence[Result]]
"""Per row of the table its runs, in the order of the seeds."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a run trains, on how much, and with which random changes to its images."""

    rounds: int = 16
    fraction: float = 1.0
    augment: Augmentation = "none"


PRESETS = {"cpu": Budget(rounds=16, fraction=0.5, augment="shift-flip")}
"""``cpu``: 32 px, a quarter of the width, 2 epochs a round, SGD 0.03 with momentum 0.9 as always; half the data, moved
and mirrored as in the papers."""


def budget(preset: str | None, **given: Any) -> Budget:
    """The budget of a preset, or the usual one; what is given explicitly, and is not None, wins."""
    if preset is not None and preset not in PRESETS:
        raise BadInput(f"--preset {preset} is not there; there is: {', '.join(PRESETS)}")
    usual = Budget() if preset is None else PRESETS[preset]
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Many runs of one data set, each in a folder of its own.

    Attributes:
        data: folder of hospitals, or a pack.
        out: where the runs are.
        variants: what is run.
        seeds: with which it is run again.
        budget: of every run.
        classes: only these labels.
        sites: only these sites.
        jobs: sites that train at once.
        console: for the progress.
        tuning: whether validation images stand for the test images, which are not looked at then.
    """

    data: Path
    out: Path
    variants: Sequence[Variant]
    seeds: Sequence[int]
    budget: Budget
    classes: Sequence[str] | None
    sites: Sequence[str] | None
    jobs: int | None
    console: Console
    tuning: bool = False

    def cohort(self, seed: int, sites: Sequence[str] | None) -> Cohort:
        """The images of some sites."""
        part = self.budget.fraction
        cohort = load(self.data, size=_SIZE, classes=self.classes, sites=sites, seed=seed, fraction=part)
        return for_tuning(cohort) if self.tuning else cohort

    def run(self, cohort: Cohort, variant: Variant, seed: int, *, where: str = "") -> tuple[Path, Result]:
        """Read a finished run, or start or resume it."""
        study = variant.study(cohort, rounds=self.budget.rounds, seed=seed, augment=self.budget.augment)
        out = self.out / f"{variant.folder}{where}-{seed}"
        finished = out / "result.json"
        if finished.exists():
            check_same(out, study, cohort)
            return out, read_result(finished)
        self.console.print(f"{variant.text}{where.replace('-', ' ')}, seed {seed}", highlight=False, markup=False)
        with RoundDisplay(self.console, rounds=study.task.rounds, sites=len(cohort.sites)) as display:
            resume = (out / DESCRIPTION).exists()
            result = simulate(cohort, study, out, resume=resume, jobs=self.jobs, listen=display)
        write_result(finished, result)
        return out, result


def for_tuning(cohort: Cohort) -> Cohort:
    """The same hospitals with validation images for test images, so that settings can be chosen without those."""
    without = [name for name, data in cohort.sites.items() if not len(data.val)]
    if without:
        raise BadInput(f"{', '.join(without)}: no validation images to choose settings by; leave out --tune")
    return replace(cohort, sites={name: replace(data, test=data.val) for name, data in cohort.sites.items()})


def run(sweep: Sweep) -> Cells:
    """Run the cells that are not there yet, and give the results of all of them."""
    cells: dict[str, list[Result]] = {BASELINE: []}
    for seed in sweep.seeds:
        cohort = sweep.cohort(seed, sweep.sites)
        cells[BASELINE].append(_baseline(cohort))
        for variant in sweep.variants:
            cells.setdefault(variant.text, []).append(sweep.run(cohort, variant, seed)[1])
    return cells


def _baseline(cohort: Cohort) -> Result:
    """Score a linear model on global brightness, colour and contrast at every site."""
    sites = {}
    for name, site in cohort.sites.items():
        answers = linear_probabilities(
            plain_numbers(site.train.images.numpy()),
            site.train.labels.numpy(),
            plain_numbers(site.test.images.numpy()),
            len(cohort.classes),
        )
        sites[name] = score(answers, site.test.labels.numpy(), cohort.classes)
    return {"sites": sites, "summary": summarise(sites)}


def table(cells: Cells, *, metric: str, against: str) -> list[dict[str, Any]]:
    """A row per method: every site, then what summarises the sites, and the paired difference from one method.

    The matrix of models by test images is one of accuracies, so its figures stand beside accuracy alone.
    """
    reference = [_average(run["sites"], metric) for run in cells[against]]
    accuracy, rows = metric == "accuracy", []
    for name, runs in cells.items():
        scores = [run["sites"] for run in runs]
        averages = [_average(sites, metric) for sites in scores]
        rows.append(
            {
                "method": name,
                **{site: spread([sites[site][metric] for sites in scores]) for site in scores[0]},
                "avg": spread(averages),
                **({"all": spread([run["summary"]["all"] for run in runs])} if accuracy else {}),
                "worst": spread([_worst(sites, metric) for sites in scores]),
                "std over sites": spread([across_domains(_column(sites, metric))[1] for sites in scores]),
                "as received": spread([_as_received(sites, metric) for sites in scores]),
                **({figure: _transfer(runs, figure) for figure in _TRANSFER} if accuracy else {}),
                f"against {against}": "–" if name == against else _difference(averages, reference),
            }
        )
    return rows


def paired_interval(differences: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean of paired differences with its 95 % interval from Student's t; None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    mean = statistics.fmean(differences)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def _difference(averages: Sequence[float | None], reference: Sequence[float | None]) -> str:
    """The difference in points, seed by seed, so that what a seed does to both is not counted."""
    points = [
        100 * (own - other)
        for own, other in zip(averages, reference, strict=True)
        if own is not None and other is not None
    ]
    interval = paired_interval(points)
    if interval is None:
        return f"{points[0]:+.1f}" if points else "n/a"
    mean, low, high = interval
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _column(sites: Sites, metric: str) -> list[float | None]:
    return [figures[metric] for figures in sites.values()]


def _average(sites: Sites, metric: str) -> float | None:
    return across_domains(_column(sites, metric))[0]


def _worst(sites: Sites, metric: str) -> float | None:
    return min((value for value in _column(sites, metric) if value is not None), default=None)


def _as_received(sites: Sites, metric: str) -> float | None:
    return across_domains([figures["as_received"][metric] for figures in sites.values() if "as_received" in figures])[0]


def _transfer(runs: Sequence[Result], figure: str) -> str:
    measured = [facts[figure] for run in runs if (facts := transfer_of(run)) is not None]
    return spread(measured) if measured else "–"


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation in per cent."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "n/a"
    return f"{statistics.fmean(known):.1f} ± {statistics.stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"
