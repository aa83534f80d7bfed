"""The whole picture of a run on one machine, whose owner may look into every site's folder.

Between hospitals nobody could: there the server knows what sites publish, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossward.evaluate.metrics import summarise
from crossward.federation.storage import read_json
from crossward.imaging.data import Cohort
from crossward.methods.registry import create
from crossward.site.deployed import deployed_models
from crossward.site.figures import cross_site_of, facts_of
from crossward.site.inprocess import simulate
from crossward.site.study import Study

_NOT_OF_A_SITE = ("site", "run", "method", "best_round")


def gathered(result: Mapping[str, Any], cohort: Cohort, study: Study, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Complete the server's result with the sites' own files.

    Args:
        result: as the server wrote it.
        cohort: all sites' images.
        study: what was run.
        folders: of the run at every site; one that did not finish has no result there.
    """
    sites = dict(result["sites"])
    for name, folder in folders.items():
        if (folder / "result.json").exists():
            own = read_json(folder / "result.json")
            sites[name] = {key: value for key, value in own.items() if key not in _NOT_OF_A_SITE}
    epsilon = {name: facts.get("epsilon") for name, facts in sites.items()}
    return {
        **result,
        "privacy": {**result["privacy"], "epsilon": epsilon},
        "data": facts_of(cohort),
        "sites": sites,
        "summary": summarise(sites),
        "cross_site": _cross_site(cohort, study, folders),
        "warnings": list(cohort.warnings),
    }


def alone(cohort: Cohort, study: Study, folder: Path) -> dict[str, Any]:
    """Train every site by itself, with the same settings, and give each site's accuracy and their average."""
    by_itself = replace(study, method=create("local"), quorum=None, participation=1.0, masking=None, privacy=None)
    result = simulate(cohort, by_itself, folder)
    accuracy = {name: site["accuracy"] for name, site in result["sites"].items()}
    return {"accuracy": accuracy, "avg": result["summary"]["avg"], "worst_site": result["summary"]["worst_site"]}


def _cross_site(cohort: Cohort, study: Study, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Every site's deployed model on every site's test images."""
    models, names = deployed_models(study, folders), list(folders)

    def row(name: str) -> list[float | None]:
        return [models[name].accuracy(cohort.sites[other].test) if name in models else None for other in names]

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return cross_site_of(cohort, names, list(pool.map(row, names)))
