"""How far the scanners are apart, and whether brightness alone explains it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from crossward.federation.storage import read_tensors
from crossward.imaging.data import Cohort, Split, load
from crossward.imaging.skew import linear_accuracy, match_histogram, plain_numbers
from crossward.methods import create
from crossward.site.devices import Device
from crossward.site.inprocess import simulate
from crossward.site.study import Study
from crossward.site.trainer import correct_count


def measure(data: Path, *, rounds: int, seed: int) -> dict[str, Any]:
    """Train every site alone and try its model everywhere, as it is and on histogram-matched images."""
    cohort = load(data, size=32, seed=seed)
    study = Study.usual(create("local"), cohort, rounds=rounds, seed=seed)
    with tempfile.TemporaryDirectory() as temporary:
        result = simulate(cohort, study, Path(temporary))
        matched = _matched_matrix(cohort, study, Path(temporary))
    matrix = result["cross_site"]["accuracy"]
    at_home, elsewhere = _means(matrix)
    _, elsewhere_matched = _means(matched)
    gap = at_home - elsewhere
    return {
        "sites": list(cohort.sites),
        "matrix": matrix,
        "histogram_matched": matched,
        "at_home": at_home,
        "elsewhere": elsewhere,
        "gap": gap,
        "gap_closed_by_histograms": (elsewhere_matched - elsewhere) / gap if gap else None,
        "linear_on_twelve_numbers": {name: _linear(cohort, name) for name in cohort.sites},
    }


def _matched_matrix(cohort: Cohort, study: Study, folder: Path) -> list[list[float]]:
    device = Device.best()
    rows = []
    for name, site in cohort.sites.items():
        model = study.method.build(study.task)
        tensors, _ = read_tensors(folder / "sites" / name / "vault" / "deployed.safetensors")
        model.load_state_dict(tensors)
        placed = device.take(model)
        reference = site.train.images.numpy()
        tests = [_match(other.test, reference) for other in cohort.sites.values()]
        rows.append([correct_count(model, study.method, test, device=placed) / len(test) for test in tests])
    return rows


def _match(split: Split, reference: np.ndarray[Any, np.dtype[np.float32]]) -> Split:
    """Give a split's images the reference's histogram, channel by channel."""
    images = split.images.numpy()
    channels = [match_histogram(images[:, c], reference[:, c]) for c in range(images.shape[1])]
    return replace(split, images=torch.from_numpy(np.stack(channels, axis=1)).float())


def _linear(cohort: Cohort, name: str) -> float:
    train, test = cohort.sites[name].train, cohort.sites[name].test
    return linear_accuracy(
        plain_numbers(train.images.numpy()),
        train.labels.numpy(),
        plain_numbers(test.images.numpy()),
        test.labels.numpy(),
        len(cohort.classes),
    )


def _means(matrix: list[list[float]]) -> tuple[float, float]:
    values = np.array(matrix)
    home = np.eye(len(values), dtype=bool)
    return float(values[home].mean()), float(values[~home].mean())


def show(console: Console, facts: dict[str, Any]) -> None:
    """Print the matrix and what explains it."""
    table = Table(title="Trained at (row), tested at (column): accuracy, % (histogram-matched)", title_justify="left")
    table.add_column("")
    for site in facts["sites"]:
        table.add_column(site, justify="right")
    for site, row, matched in zip(facts["sites"], facts["matrix"], facts["histogram_matched"], strict=True):
        table.add_row(site, *(f"{100 * a:.1f} ({100 * b:.1f})" for a, b in zip(row, matched, strict=True)))
    console.print(table)
    closed = facts["gap_closed_by_histograms"]
    linear = ", ".join(f"{site} {100 * value:.1f} %" for site, value in facts["linear_on_twelve_numbers"].items())
    console.print(
        f"At home {100 * facts['at_home']:.1f} %, elsewhere {100 * facts['elsewhere']:.1f} %: "
        f"a gap of {100 * facts['gap']:.1f} points, of which histogram matching closes "
        f"{'n/a' if closed is None else f'{100 * closed:.0f} %'}.\n"
        f"Linear model on twelve global numbers: {linear}.",
        soft_wrap=True,
        highlight=False,
    )
