"""What a run's models learned, looked into: the figures of the F2DC and RFedDis papers, for any method.

For whoever may look into every site's folder, as a simulation or a POC can; nothing here is part of a round. What
cannot be worked out is None with a reason, never an error: a result is worth more than its diagnostics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossward.evaluate.collapse import collapse_facts
from crossward.evaluate.density import BINS, uncertainty_facts
from crossward.evaluate.silhouette import silhouette
from crossward.evaluate.tsne import tsne, why_no_map
from crossward.federation.seeds import derive
from crossward.imaging.data import Cohort, Split
from crossward.imaging.loading import batches
from crossward.imaging.pictures import pictures_of
from crossward.methods.base import Prediction
from crossward.methods.f2dc import DecouplingBlock
from crossward.site.deployed import Deployed
from crossward.site.gradcam import grad_cam, overlay
from crossward.site.study import Study
from crossward.site.trainer import EVALUATION_BATCH

NOISE = 1.5
"""Standard deviation of the Gaussian noise, in the normalised units that a model sees (RFedDis, Fig. 3)."""

LARGEST_MAP = 400
LARGEST_COVARIANCE = 2000
SCANS_PER_SITE = 2

_SPACES = {"encoder": "pooled", "global head": "hidden/global", "local head": "hidden/local"}
_PARTS = ("robust", "related", "corrected")

Pictures = dict[str, npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class _View:
    """One site's own test images through its own model."""

    deployed: Deployed
    split: Split
    trace: Mapping[str, Tensor]
    answer: Prediction

    @classmethod
    def of(cls, deployed: Deployed, split: Split) -> _View:
        return cls(deployed, split, *_look(deployed, split))

    @property
    def right(self) -> Tensor:
        return self.answer.probabilities.argmax(1) == self.split.labels

    @property
    def finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in (*self.trace.values(), self.answer.probabilities))


def diagnose(
    cohort: Cohort, study: Study, models: Mapping[str, Deployed], *, seed: int
) -> tuple[dict[str, Any], Pictures]:
    """Work out the diagnostics of a run.

    Args:
        cohort: the sites' images; only those for testing are looked at.
        study: what was run.
        models: of every site, from ``deployed_models``; a site without one is left out.
        seed: of the map, the noise, and the choice of images where there are very many.

    Returns:
        What goes into a result as ``diagnostics``, JSON-ready, and the pictures that it names.
    """
    began = time.monotonic()
    seen = {
        name: _View.of(models[name], site.test)
        for name, site in cohort.sites.items()
        if name in models and len(site.test)
    }
    views = {name: view for name, view in seen.items() if view.finite}
    left_out: dict[str, str] = {}
    for name, site in cohort.sites.items():
        if name not in models:
            left_out[name] = "no deployed model"
        elif not len(site.test):
            left_out[name] = "no test images"
        elif name not in views:
            left_out[name] = "its model gives values that are not finite numbers"
    attention, pictures = _attention(views, study.task.classes)
    facts = {
        "collapse": _collapse(cohort, models, seen, seed),
        "map": _map(views, study.task.classes, seed),
        "masks": _masks(views),
        "noise": _noise(views, seed),
        "gradcam": attention,
        "left_out": left_out,
    }
    return {**facts, "seconds": time.monotonic() - began}, pictures


def noised(split: Split, sigma: float = NOISE, *, seed: int) -> Split:
    """The same images with Gaussian noise of this standard deviation, in normalised units."""
    noise = torch.randn(split.images.shape, generator=torch.Generator().manual_seed(seed))
    return replace(split, images=split.images[:] + sigma * noise)


def _look(deployed: Deployed, split: Split) -> tuple[dict[str, Tensor], Prediction]:
    """One pass: pooled features, logits and all notes with one row per image, in float32 on the CPU; and the answer."""
    deployed.model.eval()
    found: dict[str, list[Tensor]] = {}
    answers = []
    with torch.inference_mode(), deployed.device.autocast():
        for images, _ in batches(split, batch_size=EVALUATION_BATCH, seed=None, drop_last=False):
            trace = deployed.model(deployed.device.images(images))
            answers.append(deployed.model.head.predict(trace))
            rows = {"pooled": trace.pooled, "logits": trace.logits, **trace.notes}
            for name, tensor in rows.items():
                if tensor.ndim == 2 and len(tensor) == len(images):
                    found.setdefault(name, []).append(tensor.float().cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}, Prediction.joined(answers)


def _part(split: Split, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Rows of a split, in order: all of them, or at most so many, drawn by the seed."""
    rows = np.arange(len(split))
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, size=most, replace=False))


def _collapse(cohort: Cohort, models: Mapping[str, Deployed], views: Mapping[str, _View], seed: int) -> dict[str, Any]:
    """Every site's model on all sites' test images: F2DC, Fig. 1."""
    tests = {name: site.test for name, site in cohort.sites.items() if len(site.test)}
    most = LARGEST_COVARIANCE // max(1, len(tests))
    chosen = {name: _part(test, most, derive(seed, "collapse", k)) for k, (name, test) in enumerate(tests.items())}

    def pooled(model: str, place: str) -> Tensor:
        if model == place:
            return views[place].trace["pooled"][chosen[place]]
        return _look(models[model], tests[place].rows(chosen[place]))[0]["pooled"]

    sites = {}
    for name in (name for name in cohort.sites if name in models):
        features = [pooled(name, place).numpy() for place in tests]
        sites[name] = collapse_facts(np.concatenate(features) if features else np.zeros((0, 0)))
    return {"images": sum(map(len, chosen.values())), "sites": sites}


def _map(views: Mapping[str, _View], classes: Sequence[str], seed: int) -> dict[str, Any]:
    """Every site's images through its own model on one plane: F2DC, Fig. 4; RFedDis, Fig. 2."""
    most = LARGEST_MAP // max(1, len(views))
    chosen = {name: _part(view.split, most, derive(seed, "map", name)) for name, view in views.items()}
    labels = [int(views[name].split.labels[row]) for name, rows in chosen.items() for row in rows]
    places = [place for place, rows in enumerate(chosen.values()) for _ in rows]
    spaces = {}
    for title, note in _SPACES.items():
        if views and all(note in view.trace for view in views.values()):
            features = np.concatenate([views[name].trace[note].numpy()[rows] for name, rows in chosen.items()])
            spaces[title] = _space(features, labels, places, derive(seed, "map", title))
    return {"classes": list(classes), "sites": list(chosen), "labels": labels, "site_of": places, "spaces": spaces}


def _space(
    features: npt.NDArray[np.float32], labels: Sequence[int], places: Sequence[int], seed: int
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "points": None,
        "silhouette_class": silhouette(features, labels),
        "silhouette_site": silhouette(features, places),
    }
    undefined = {}
    if reason := why_no_map(features):
        undefined["points"] = reason
    else:
        facts["points"] = tsne(features, seed=seed).round(3).tolist()
    for kind, groups in (("class", labels), ("site", places)):
        if facts[f"silhouette_{kind}"] is None:
            undefined[f"silhouette_{kind}"] = f"{len(set(groups))} of two or more groups, n={len(groups)}"
    return {**facts, "undefined": undefined}


def _masks(views: Mapping[str, _View]) -> dict[str, Any] | None:
    """Accuracy of f+, f-, f* and f~ on each site's own test images (F2DC, Table 7); None without F2DC's block.

    Each goes through the main head h and through the auxiliary classifier m of the last decoupled stage. h reads what
    the last stage of the backbone gives, so it says nothing about parts of an earlier one; m is not made for f~.
    """
    sites = {}
    for name, view in views.items():
        block = view.deployed.model.block
        if not isinstance(block, DecouplingBlock):
            continue
        stage = max(block.classifiers, key=int)
        if f"robust/{stage}" not in view.trace:
            continue
        last = int(stage) == len(view.deployed.model.backbone.stages) - 1
        pooled = {part: view.trace[f"{part}/{stage}"] for part in _PARTS}
        device, head, auxiliary = view.deployed.device.kind, view.deployed.model.head, block.classifiers[stage]
        with torch.inference_mode():
            by_head = {part: head(rows.to(device), {}) if last else None for part, rows in pooled.items()}
            by_auxiliary = {part: auxiliary(rows.to(device)) for part, rows in pooled.items()}
        labels = view.split.labels
        active = float((pooled["robust"] + pooled["related"]).sum())
        sites[name] = {
            "n": len(labels),
            "stage": int(stage) + 1,
            "kept": float(pooled["robust"].sum()) / active if active > 0 else None,
            "head": {part: _accuracy(logits, labels) for part, logits in by_head.items()}
            | {"fused": _accuracy(view.trace["logits"], labels)},
            "auxiliary": {part: _accuracy(logits, labels) for part, logits in by_auxiliary.items()} | {"fused": None},
        }
    return {"sites": sites} if sites else None


def _accuracy(logits: Tensor | None, labels: Tensor) -> float | None:
    return None if logits is None else float((logits.argmax(1).cpu() == labels).double().mean())


def _noise(views: Mapping[str, _View], seed: int) -> dict[str, Any]:
    """Uncertainty of each site's model on its own test images, clean and with noise: RFedDis, Fig. 3."""
    sites = {}
    for name, view in views.items():
        odd = view.deployed.answer(noised(view.split, seed=derive(seed, "noise", name)))
        sites[name] = uncertainty_facts(view.answer.uncertainty.numpy(), odd.uncertainty.numpy(), view.right.numpy())
    return {"sigma": NOISE, "bins": BINS, "sites": sites}


def _attention(views: Mapping[str, _View], classes: Sequence[str]) -> tuple[list[dict[str, Any]], Pictures]:
    """Grad-CAM on a few scans of every site, each the first of its class; captions name no patient."""
    entries, pictures = [], Pictures()
    for place, (name, view) in enumerate(views.items()):
        rows = list(_first_of_classes(view.split))[:SCANS_PER_SITE]
        predicted = view.answer.probabilities[rows].argmax(1)
        device = view.deployed.device
        heat = grad_cam(view.deployed.model, device.images(view.split.images[rows]), predicted.to(device.kind))
        shown = pictures_of(view.split.images[rows])
        for index, (row, image, warmth) in enumerate(zip(rows, shown, heat.cpu().numpy(), strict=True)):
            key = f"gradcam/{place}/{index}"
            pictures |= {key: image, f"{key}/heat": overlay(image, warmth)}
            entries.append(
                {
                    "site": name,
                    "truth": classes[int(view.split.labels[row])],
                    "predicted": classes[int(predicted[index])],
                    "uncertainty": float(view.answer.uncertainty[row]),
                    "warm": bool(warmth.any()),
                    "picture": key,
                    "overlay": f"{key}/heat",
                }
            )
    return entries, pictures


def _first_of_classes(split: Split) -> Iterator[int]:
    seen = set()
    for row, label in enumerate(split.labels.tolist()):
        if label not in seen:
            seen.add(label)
            yield row
