"""Methods by sites: one run per cell, kept on disk, so that a table can be finished later."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from crossward.cli.progress import RoundDisplay
from crossward.evaluate.facts import read_result, write_result
from crossward.evaluate.metrics import score
from crossward.imaging.data import Cohort, load
from crossward.imaging.skew import linear_probabilities, plain_numbers
from crossward.methods import create
from crossward.site.inprocess import simulate
from crossward.site.runfolder import DESCRIPTION
from crossward.site.study import Study


def run(
    data: Path,
    out: Path,
    *,
    methods: Sequence[str],
    seeds: Sequence[int],
    rounds: int,
    fraction: float,
    classes: Sequence[str] | None,
    sites: Sequence[str] | None,
    metric: str,
    console: Console,
) -> list[dict[str, Any]]:
    """Run the cells that are not there yet, and put the table together."""
    cells: dict[str, list[dict[str, Any]]] = {}
    baselines = []
    for seed in seeds:
        cohort = load(data, size=32, classes=classes, sites=sites, seed=seed, fraction=fraction)
        baselines.append(_baseline(cohort))
        for method in methods:
            result = _cell(cohort, out / f"{method}-{seed}", method, seed=seed, rounds=rounds, console=console)
            cells.setdefault(method, []).append(result["sites"])
    rows = {"twelve global numbers": baselines, **cells}
    return [{"method": name, **_row(results, metric)} for name, results in rows.items()]


def _cell(cohort: Cohort, out: Path, method: str, *, seed: int, rounds: int, console: Console) -> dict[str, Any]:
    finished = out / "result.json"
    if finished.exists():
        return read_result(finished)
    study = Study.usual(create(method), cohort, rounds=rounds, seed=seed)
    console.print(f"{method}, seed {seed}", highlight=False)
    with RoundDisplay(console, rounds=rounds, sites=len(cohort.sites)) as display:
        result = simulate(cohort, study, out, resume=(out / DESCRIPTION).exists(), listen=display)
    write_result(finished, result)
    return result


def _baseline(cohort: Cohort) -> dict[str, Any]:
    """Score a linear model on global brightness, colour and contrast at every site."""
    results = {}
    for name, site in cohort.sites.items():
        answers = linear_probabilities(
            plain_numbers(site.train.images.numpy()),
            site.train.labels.numpy(),
            plain_numbers(site.test.images.numpy()),
            len(cohort.classes),
        )
        results[name] = score(answers, site.test.labels.numpy(), cohort.classes)
    return results


def _row(results: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    row = {site: _spread([result[site][metric] for result in results]) for site in results[0]}
    averages = [_mean([figures[metric] for figures in result.values()]) for result in results]
    worst = [min((f[metric] for f in result.values() if f[metric] is not None), default=None) for result in results]
    received = [
        _mean([figures["as_received"][metric] for figures in result.values() if "as_received" in figures])
        for result in results
    ]
    return {**row, "avg": _spread(averages), "worst": _spread(worst), "as received": _spread(received)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _spread(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "n/a"
    return f"{statistics.fmean(known):.1f} ± {statistics.stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"
