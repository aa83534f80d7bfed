"""Whether a site's uncertainty tells what its model should not be trusted on: finished runs, and training by round."""

from __future__ import annotations

import json
import statistics
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from crossward.evaluate.facts import read_result
from crossward.evaluate.metrics import across_domains, rank_auc
from crossward.federation.errors import BadInput
from crossward.federation.seeds import derive
from crossward.federation.storage import read_json
from crossward.imaging.data import Cohort, Split, load
from crossward.imaging.held_out import NO_CLASS
from crossward.imaging.pack import sized
from crossward.imaging.pictures import normalised
from crossward.methods.base import Prediction
from crossward.site.deployed import Deployed, deployed_models
from crossward.site.diagnostics import noised
from crossward.site.runfolder import DESCRIPTION
from crossward.site.study import Study

NOISE = "noise"
WRONG = "wrong answers"
AVERAGE = "average"

Signals = Mapping[str, npt.NDArray[np.float64]]
"""Per image one number by each name: the answer's uncertainty, that of every head, and the heads' conflict."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class StoredRun:
    """A finished run in one process."""

    folder: Path
    study: Study
    sites: Mapping[str, Any]
    data: Path

    @classmethod
    def read(cls, folder: Path) -> StoredRun:
        """Read what was run and how it ended.

        Raises:
            BadInput: the folder holds no finished run.
        """
        if not (folder / DESCRIPTION).exists():
            raise BadInput(f"{folder} holds no run; give the folder of crossward simulate, or of a cell of bench table")
        result = read_result(folder / "result.json")
        study = Study.from_options(read_json(folder / DESCRIPTION)["options"])
        return cls(folder, study, result["sites"], Path(result["data"]["path"]))

    def cohort(self, data: Path | None, sites: Sequence[str] | None) -> Cohort:
        """Read the images that the run was tested on; test images do not depend on the part used for training."""
        task = self.study.task
        for name in sites or ():
            if name not in self.sites:
                raise BadInput(f"{self.folder} has no site '{name}'; it has: {', '.join(self.sites)}")
        cohort = load(
            data or self.data,
            size=task.size,
            classes=task.classes,
            sites=list(self.sites) if sites is None else sites,
            seed=self.study.training.seed,
            channels=task.channels,
            lenient=True,
        )
        for name, site in cohort.sites.items():
            found = {label: int((site.test.labels == code).sum()) for code, label in enumerate(task.classes)}
            tested = {label: each["n"] for label, each in self.sites[name]["per_class"].items()}
            if found != tested:
                raise BadInput(f"{name}: {self.folder} was tested on {tested} and not on {found}; give its data")
        return cohort


def measure(
    folders: Sequence[Path], *, data: Path | None, sites: Sequence[str] | None, ood: Sequence[Path], noise: float
) -> Figures:
    """Compare what every site's deployed model says about usual and about odd images, in every run.

    Returns:
        ``method``, and ``runs``: for each its folder, seed, and figures by site and kind of odd images.
    """
    runs = [StoredRun.read(folder) for folder in folders]
    for run in runs[1:]:
        if _but_seed(run.study) != _but_seed(runs[0].study):
            raise BadInput(f"{run.folder} and {runs[0].folder} differ in more than the seed; give runs of one study")
        if set(run.sites) != set(runs[0].sites):
            raise BadInput(
                f"{run.folder} has the sites {', '.join(run.sites)} and {runs[0].folder} has "
                f"{', '.join(runs[0].sites)}; give runs of the same sites"
            )
    task = runs[0].study.task
    others = {path.stem: read_images(path, size=task.size, channels=task.channels) for path in ood}
    measured = []
    for run in runs:
        cohort = run.cohort(data, sites)
        folder_of = {name: run.folder / "sites" / name for name in cohort.sites}
        models = deployed_models(run.study, folder_of)
        if lacking := sorted(set(cohort.sites) - set(models)):
            raise BadInput(f"{run.folder} has no deployed model of {', '.join(lacking)}; finish the run")
        seed = run.study.training.seed
        figures = {
            name: site_figures(model, cohort.sites[name].test, others, noise=noise, seed=seed)
            for name, model in models.items()
        }
        measured.append({"run": str(run.folder), "seed": seed, "sites": figures})
    return {"method": runs[0].study.method.name, "runs": measured}


def site_figures(
    model: Deployed, test: Split, others: Mapping[str, Split], *, noise: float, seed: int
) -> dict[str, Figures]:
    """Compare a site's test images with their noised copies and with others, and its right with its wrong answers."""
    answer = model.answer(test)
    usual = signals(answer)
    odd = {NOISE: noised(test, noise, seed=derive(seed, model.site, NOISE)), **others}
    right = (answer.probabilities.argmax(1) == test.labels).numpy()
    return {
        **{name: compare(usual, signals(model.answer(split))) for name, split in odd.items()},
        WRONG: compare(
            {name: values[right] for name, values in usual.items()},
            {name: values[~right] for name, values in usual.items()},
        ),
    }


def signals(answer: Prediction) -> dict[str, npt.NDArray[np.float64]]:
    """What may tell odd images from usual ones, for every image."""
    tensors = {"uncertainty": answer.uncertainty}
    tensors |= {name: opinion.uncertainty for name, opinion in answer.opinions.items() if name != "fused"}
    if answer.conflict is not None:
        tensors["conflict"] = answer.conflict
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def compare(usual: Signals, odd: Signals) -> Figures:
    """Numbers of images, mean uncertainties, and for every signal how well it tells odd images from usual ones."""
    both = {name: np.concatenate([usual[name], odd[name]]) for name in usual}
    count = len(usual["uncertainty"])
    is_odd = np.arange(len(both["uncertainty"])) >= count
    return {
        "n": [count, len(is_odd) - count],
        "uncertainty": [
            float(values.mean()) if len(values) else None for values in (usual["uncertainty"], odd["uncertainty"])
        ],
        "auroc": {name: rank_auc(values, is_odd) for name, values in both.items()},
    }


def read_images(path: Path, *, size: int, channels: int) -> Split:
    """Read the images ``x`` of one file, sized and normalised as those of a pack; their labels are none of ours.

    Raises:
        BadInput: the file cannot be read, or holds no square uint8 images that fit.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            stored = arrays["x"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read ({type(error).__name__}); give an .npz file with images x") from None
    colour = stored.ndim == 4 and stored.shape[3] == 3
    if stored.dtype != np.uint8 or not (stored.ndim == 3 or colour) or stored.shape[1] != stored.shape[2]:
        raise BadInput(f"{path}: x has to hold square uint8 images, grey (N,H,H) or RGB (N,H,H,3)")
    if colour and channels == 1:
        raise BadInput(f"{path}: the images are in colour, and the run's are grey; leave the file out")
    names = tuple(str(row) for row in range(len(stored)))
    images = normalised(sized(stored, size), channels)
    return Split(images, torch.full((len(stored),), NO_CLASS), names, names)


def table(facts: Figures) -> list[Figures]:
    """A row per kind of odd images and site, mean ± spread over runs; then the average over sites."""
    runs = [run["sites"] for run in facts["runs"]]
    sites, kinds = list(runs[0]), list(next(iter(runs[0].values())))
    rows = []
    for kind in kinds:
        rows += [_row(kind, site, [[run[site][kind]] for run in runs]) for site in sites]
        rows.append(_row(kind, AVERAGE, [[run[site][kind] for site in sites] for run in runs]))
    return rows


def _row(kind: str, site: str, runs: Sequence[Sequence[Figures]]) -> Figures:
    """One row from the figures of one or more sites in every run."""

    def over_runs(group: str, key: str | int) -> str:
        return spread([across_domains([figures[group][key] for figures in run])[0] for run in runs])

    return {
        "odd": kind,
        "site": site,
        "n usual": _range([sum(figures["n"][0] for figures in run) for run in runs]),
        "n odd": _range([sum(figures["n"][1] for figures in run) for run in runs]),
        "u usual": over_runs("uncertainty", 0),
        "u odd": over_runs("uncertainty", 1),
        **{f"AUROC {name}": over_runs("auroc", name) for name in runs[0][0]["auroc"]},
    }


def spread(values: Sequence[float | None]) -> str:
    """Mean ± standard deviation of what is defined, with three digits."""
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    more = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.3f}{more}"


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}–{max(counts)}"


def _but_seed(study: Study) -> str:
    same = replace(study, task=replace(study.task, seed=0), training=replace(study.training, seed=0))
    return json.dumps(same.options(), sort_keys=True)
