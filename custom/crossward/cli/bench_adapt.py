"""Leave one hospital out: the others train, and it gets their model without giving a label (FDSE, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from crossward.cli.bench_table import SIZE, Budget, cell, spread
from crossward.cli.bench_variants import Variant
from crossward.evaluate.metrics import across_domains, score
from crossward.federation.errors import BadInput
from crossward.federation.storage import read_json, write_json
from crossward.imaging.data import load, site_names
from crossward.site.adapt import adapt
from crossward.site.handover import read_handover

Stages = Mapping[str, Mapping[str, Any]]
"""By the name of a stage of the adaptation, what ``score`` gave on the left-out hospital's test images."""
Runs = Mapping[tuple[str, str], Sequence[Stages]]
"""By method and left-out hospital, its runs in the order of the seeds."""


def run(
    data: Path,
    out: Path,
    *,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    budget: Budget,
    classes: Sequence[str] | None,
    sites: Sequence[str] | None,
    jobs: int | None,
    console: Console,
) -> Runs:
    """Train without each hospital in turn, fit the result to its training images without labels, and test it."""
    names = sorted(sites or site_names(data))
    if len(names) < 3:
        raise BadInput(f"{data} has {len(names)} site(s); leaving one out needs three or more")
    found: dict[tuple[str, str], list[Stages]] = {}
    for seed in seeds:
        for left_out in names:
            rest = [name for name in names if name != left_out]
            cohort = load(data, size=SIZE, classes=classes, sites=rest, seed=seed, fraction=budget.fraction)
            alone = load(data, size=SIZE, classes=cohort.classes, sites=[left_out], seed=seed, channels=cohort.channels)
            newcomer = alone.sites[left_out]
            for variant in variants:
                study = variant.study(cohort, rounds=budget.rounds, seed=seed, augment=budget.augment)
                folder = out / f"{variant.folder}-without-{left_out}-{seed}"
                title = f"{variant.text} without {left_out}, seed {seed}"
                cell(cohort, study, folder, title=title, jobs=jobs, console=console)
                done = folder / "adaptation.json"
                if not done.exists():
                    fitted = adapt(study, read_handover(folder).tensors, newcomer.train, site=left_out)
                    labels = newcomer.test.labels.numpy()
                    scores = {
                        name: score(stage.answer(newcomer.test).probabilities.numpy(), labels, cohort.classes)
                        for name, stage in fitted.stages.items()
                    }
                    write_json(done, {"distance": fitted.distance, "stages": scores})
                found.setdefault((variant.text, left_out), []).append(read_json(done)["stages"])
    return found


def table(runs: Runs, *, metric: str) -> list[dict[str, Any]]:
    """A row per method and stage, a column per left-out hospital, then their average."""
    sites = list(dict.fromkeys(site for _, site in runs))
    rows = []
    for method in dict.fromkeys(method for method, _ in runs):
        for stage in runs[method, sites[0]][0]:
            values = {site: [run[stage][metric] for run in runs[method, site]] for site in sites}
            averages = [across_domains(list(each))[0] for each in zip(*values.values(), strict=True)]
            row = {"method": method, "model": stage, **{site: spread(own) for site, own in values.items()}}
            rows.append({**row, "avg": spread(averages)})
    return rows
