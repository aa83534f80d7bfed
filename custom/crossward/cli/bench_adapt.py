"""Leave one hospital out: the others train, and it gets their model without giving a label (FDSE, Table 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crossward.cli.bench_table import Sweep, spread
from crossward.evaluate.metrics import across_domains, score
from crossward.federation.errors import BadInput
from crossward.federation.storage import read_json, write_json
from crossward.imaging.data import SiteData, site_names
from crossward.site.adapt import adapt
from crossward.site.handover import read_handover

Stages = Mapping[str, Mapping[str, Any]]
"""By the name of a stage of the adaptation, what ``score`` gave on the left-out hospital's test images."""
Runs = Mapping[tuple[str, str], Sequence[Stages]]
"""By method and left-out hospital, its runs in the order of the seeds."""


def run(sweep: Sweep) -> Runs:
    """Train without each hospital in turn, fit the result to its training images without labels, and test it."""
    names = sorted(sweep.sites or site_names(sweep.data))
    if len(names) < 3:
        raise BadInput(f"{sweep.data} has {len(names)} site(s); leaving one out needs three or more")
    found: dict[tuple[str, str], list[Stages]] = {}
    for seed in sweep.seeds:
        for left_out in names:
            cohort = sweep.cohort(seed, [name for name in names if name != left_out])
            newcomer = replace(sweep, classes=cohort.classes).cohort(seed, [left_out]).sites[left_out]
            for variant in sweep.variants:
                folder, _ = sweep.run(cohort, variant, seed, where=f"-without-{left_out}")
                found.setdefault((variant.text, left_out), []).append(_stages(folder, newcomer))
    return found


def _stages(folder: Path, newcomer: SiteData) -> Stages:
    """Fit a finished run to the hospital that it was trained without, once."""
    done = folder / "adaptation.json"
    if not done.exists():
        handover = read_handover(folder)
        fitted = adapt(handover.study, handover.tensors, newcomer.train, site=newcomer.name)
        answers = {name: stage.answer(newcomer.test).probabilities.numpy() for name, stage in fitted.stages.items()}
        labels = newcomer.test.labels.numpy()
        scores = {name: score(each, labels, newcomer.classes) for name, each in answers.items()}
        write_json(done, {"distance": fitted.distance, "stages": scores})
    stages: Stages = read_json(done)["stages"]
    return stages


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
