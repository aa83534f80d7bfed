"""What several commands show: a cohort before training, a result after it, and samples for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from crossward.evaluate.table import matrix_table, site_table
from crossward.imaging.data import Cohort, SiteData


def show_cohort(console: Console, cohort: Cohort) -> None:
    """Say what was found in the data folder, before a round is spent on it."""
    nature = "computer-drawn phantoms, " if cohort.phantom else ""
    console.print(
        f"Found {len(cohort.sites)} sites in {cohort.source} ({nature}{cohort.kind}), "
        f"{cohort.size} px, classes: {', '.join(cohort.classes)}",
        soft_wrap=True,
        highlight=False,
    )
    table = Table()
    for heading in ("site", "scanner"):
        table.add_column(heading)
    for heading in ("train", "validation", "test", "patients"):
        table.add_column(heading, justify="right")
    for name, site in cohort.sites.items():
        patients = len({*site.train.patients, *site.val.patients, *site.test.patients})
        table.add_row(name, site.scanner, str(len(site.train)), str(len(site.val)), str(len(site.test)), str(patients))
    console.print(table)
    for warning in cohort.warnings:
        console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True, highlight=False)


def show_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table per site and the train-site by test-site matrix."""
    console.print(site_table(result))
    console.print(f"Deployed: every hospital's model of round {result['best_round']}, chosen on validation images.")
    if (matrix := matrix_table(result)) is not None:
        console.print(matrix)


def show_comparison(console: Console, result: Mapping[str, Any]) -> None:
    """Say how the hospitals do together and alone, where both were measured."""
    alone, together = result.get("alone"), result["summary"]
    if not alone or alone["avg"] is None or together["avg"] is None:
        return
    gains = [
        f"{name} {100 * (site['accuracy'] - alone['accuracy'][name]):+.1f}"
        for name, site in result["sites"].items()
        if site["accuracy"] is not None and alone["accuracy"].get(name) is not None
    ]
    console.print(
        f"Together {100 * together['avg']:.1f} % on average, each hospital alone {100 * alone['avg']:.1f} % "
        f"(points: {', '.join(gains)})",
        soft_wrap=True,
        highlight=False,
    )


def sample_images(cohort: Cohort, *, per_site: int = 6) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Pick a few training images of every site for the report, classes in turn."""
    return {name: _samples(site, per_site) for name, site in cohort.sites.items()}


def _samples(site: SiteData, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    by_class = [
        [i for i, label in enumerate(site.train.labels.tolist()) if label == k] for k in range(len(site.classes))
    ]
    turns = [row[turn] for turn in range(count) for row in by_class if turn < len(row)][:count]
    images = site.train.images[turns].numpy()
    grey = np.clip((images * 0.25 + 0.5) * 255, 0, 255).astype(np.uint8)
    return grey[:, 0] if grey.shape[1] == 1 else np.ascontiguousarray(grey.transpose(0, 2, 3, 1))
