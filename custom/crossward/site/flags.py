"""Scans that a site's deployed model should not be trusted on: for whoever may look into every site's folder.

Every site's model reads the site's own test scans and the held-out sets, and flags those that are more uncertain than
its validation scans. Nothing of this leaves a site by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from crossward.evaluate.metrics import rank_auc
from crossward.federation.turns import in_turn
from crossward.imaging.data import Cohort
from crossward.imaging.folder import phantom_name
from crossward.imaging.held_out import NO_CLASS, OWN_TEST, NamedScans
from crossward.imaging.pictures import pictures_of
from crossward.methods.base import Prediction
from crossward.site.deployed import Deployed
from crossward.uncertainty.evidence import Opinion
from crossward.uncertainty.flags import USUAL_PERCENTILE, Threshold, threshold_of

_PICTURES = 6  # of a site and set
_HEADS = ("global", "local")

Pictures = dict[str, npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class Verdict:
    """What a site's model says about one scan, in plain values.

    Attributes:
        row: of the scan in its set.
        kind: the class, or what is wrong with the scan.
        predicted: the class that the model names; None where its answer is not a number.
        right: whether it is the scan's class; None where the scan has none.
        uncertainty: of the answer; NaN where it is not a number.
        heads: the opinion of each head, by its name; None where there is no such head.
        conflict: between the heads; None where there are not two.
        reason: why the scan is flagged; None where it is not.
    """

    row: int
    kind: str
    predicted: str | None
    right: bool | None
    uncertainty: float
    heads: Mapping[str, Mapping[str, Any] | None]
    conflict: float | None
    reason: str | None

    @property
    def suspicion(self) -> float:
        """The uncertainty, for ranking: an answer that is not a number is the most suspicious one."""
        return self.uncertainty if math.isfinite(self.uncertainty) else math.inf


def find_flags(
    cohort: Cohort,
    models: Mapping[str, Deployed],
    held_out: Mapping[str, NamedScans],
    *,
    percentile: float = USUAL_PERCENTILE,
) -> tuple[dict[str, Any], Pictures]:
    """Flag test scans and held-out scans at every site.

    Args:
        cohort: all sites' images.
        models: what every site deployed.
        held_out: sets of scans that belong to no site; each site's model reads all of them.
        percentile: of the site's validation uncertainty, above which a scan is flagged.

    Returns:
        For ``result["flags"]``: per site the threshold, counts and AUROC, and all flagged scans, the most uncertain
        first; and pictures of some of them by the names that the scans carry.
    """

    def at(name: str) -> tuple[dict[str, Any], list[dict[str, Any]], Pictures]:
        return _at_site(models[name], cohort, held_out, percentile=percentile)

    sites: dict[str, Any] = {}
    scans: list[dict[str, Any]] = []
    pictures: Pictures = {}
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, (facts, flagged, shown) in zip(models, pool.map(at, models), strict=True):
            sites[name] = facts
            scans += flagged
            pictures |= shown
    return {"percentile": percentile, "sites": sites, "scans": scans}, pictures


def _at_site(
    model: Deployed, cohort: Cohort, held_out: Mapping[str, NamedScans], *, percentile: float
) -> tuple[dict[str, Any], list[dict[str, Any]], Pictures]:
    """One site's counts, its flagged scans, and pictures of some."""
    data = cohort.sites[model.site]
    threshold = threshold_of(model.answer(data.val).uncertainty.numpy(), percentile=percentile)
    sets = {OWN_TEST: NamedScans.of_classes(data.test, cohort.classes), **held_out}
    verdicts = {
        what: verdicts_on(each, model.answer(each.split), threshold, classes=cohort.classes)
        for what, each in sets.items()
    }
    scans: list[dict[str, Any]] = []
    pictures: Pictures = {}
    for what, each in sets.items():
        flagged = sorted((v for v in verdicts[what] if v.reason), key=lambda v: -v.suspicion)
        shown = {
            v.row: f"flag/{model.site}/{what}/{v.row + 1}" for v in in_turn(_by_kind(flagged).values())[:_PICTURES]
        }
        pictures |= dict(zip(shown.values(), pictures_of(each.split.images[list(shown)]), strict=True))
        scans += [
            {
                "site": model.site,
                "set": what,
                "number": v.row + 1,
                # Ids of real scans may say whose they are; a running number does not.
                "id": phantom_name(each.split.ids[v.row]) if cohort.phantom else None,
                **_scan(v, threshold),
                "picture": shown.get(v.row),
            }
            for v in flagged
        ]
    return _site(verdicts, threshold), scans, pictures


def verdicts_on(
    scans: NamedScans, answer: Prediction, threshold: Threshold, *, classes: Sequence[str]
) -> list[Verdict]:
    """What a model's answers say about each scan of a set."""
    verdicts = []
    for row, (kind, label) in enumerate(zip(scans.kinds, scans.split.labels.tolist(), strict=True)):
        probabilities = answer.probabilities[row]
        best = int(probabilities.argmax()) if bool(probabilities.isfinite().all()) else None
        uncertainty = float(answer.uncertainty[row])
        verdicts.append(
            Verdict(
                row=row,
                kind=kind,
                predicted=None if best is None else classes[best],
                right=None if label == NO_CLASS else best == label,
                uncertainty=uncertainty,
                heads={head: _opinion(answer.opinions.get(head), row, classes) for head in _HEADS},
                conflict=None if answer.conflict is None else _number(float(answer.conflict[row])),
                reason=threshold.reason(uncertainty if best is not None else math.nan),
            )
        )
    return verdicts


def _opinion(opinion: Opinion | None, row: int, classes: Sequence[str]) -> dict[str, Any] | None:
    """The class that a head believes in most, how much, and its uncertainty."""
    if opinion is None or not bool(opinion.belief[row].isfinite().all()):
        return None
    belief, best = opinion.belief[row].max(dim=0)
    return {
        "class": classes[int(best)],
        "belief": float(belief),
        "uncertainty": _number(float(opinion.uncertainty[row])),
    }


def _site(verdicts: Mapping[str, Sequence[Verdict]], threshold: Threshold) -> dict[str, Any]:
    own = verdicts[OWN_TEST]
    return {
        "threshold": threshold.value,
        "n_validation": threshold.n,
        "note": threshold.note,
        "sets": {what: _counts(each, () if what == OWN_TEST else own) for what, each in verdicts.items()},
        "auroc": {what: _auroc(own, each) for what, each in verdicts.items() if what != OWN_TEST},
    }


def _counts(verdicts: Sequence[Verdict], own: Sequence[Verdict]) -> dict[str, Any]:
    by_kind = _by_kind(verdicts)
    return {
        "n": len(verdicts),
        "flagged": _flagged(verdicts),
        "accuracy_flagged": _accuracy([v for v in verdicts if v.reason]),
        "accuracy_rest": _accuracy([v for v in verdicts if not v.reason]),
        "kinds": {
            kind: {"n": len(each), "flagged": _flagged(each), "auroc": _auroc(own, each)}
            for kind, each in sorted(by_kind.items())
        },
    }


def _scan(verdict: Verdict, threshold: Threshold) -> dict[str, Any]:
    return {
        "what": verdict.kind,
        "predicted": verdict.predicted,
        "uncertainty": _number(verdict.uncertainty),
        "threshold": threshold.value,
        **verdict.heads,
        "conflict": verdict.conflict,
        "reason": verdict.reason,
    }


def _flagged(verdicts: Sequence[Verdict]) -> int:
    return sum(v.reason is not None for v in verdicts)


def _accuracy(verdicts: Sequence[Verdict]) -> float | None:
    known = [v.right for v in verdicts if v.right is not None]
    return sum(known) / len(known) if known else None


def _auroc(own: Sequence[Verdict], others: Sequence[Verdict]) -> float | None:
    """The chance that one of the others is more uncertain than an own test scan; None without either."""
    scores = [v.suspicion for v in (*own, *others)]
    return rank_auc(scores, [False] * len(own) + [True] * len(others))


def _by_kind(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    kinds: defaultdict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        kinds[verdict.kind].append(verdict)
    return kinds


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
