"""The metrics of a run: per site, across sites, and from every site's model to every site's images.

An undefined metric is None with a reason in plain words. It is left out of averages, and the averages say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.federation.errors import BadInput

Z_95 = 1.959963984540054  # two-sided 95 % point of the normal distribution
_ROUNDING = 1e-3  # how far a probability in half precision may stray outside [0, 1]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Averages(tuple[float | None, float | None]):
    """Two averages that unpack as a pair; `left_out` counts the undefined entries that are in neither."""

    left_out: int

    def __new__(cls, pair: tuple[float | None, float | None], left_out: int = 0) -> Averages:
        self = super().__new__(cls, pair)
        self.left_out = left_out
        return self


def score(probabilities: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[str]) -> dict[str, Any]:
    """Scores one site's predictions.

    Args:
        probabilities: [n, K], one row per image; the predicted class is the largest, the first one in a tie.
        labels: [n] indices into `classes`.
        classes: the K class names; for K = 2 the second one is the positive class.

    Returns:
        JSON-ready: n, accuracy, balanced_accuracy (mean recall over the classes present), auc (K > 2: mean of
        one-vs-rest over the classes where it is defined), their 95 % intervals as [low, high], per_class, and
        `undefined`: the reason for every metric that is None.
    """
    chances, truth = _checked(probabilities, labels, classes)
    n = len(truth)
    hits = chances.argmax(axis=1) == truth if n else np.zeros(0, dtype=bool)
    undefined: dict[str, str] = {}
    per_class: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(classes):
        held = truth == index
        per_class[name] = {"n": int(held.sum()), "recall": None, "auc": rank_auc(chances[:, index], held)}
        if held.any():
            per_class[name]["recall"] = float(hits[held].mean())
        else:
            undefined[f"recall[{name}]"] = f"no image of {name}, n={n}"
        if per_class[name]["auc"] is None:
            undefined[f"auc[{name}]"] = _why_no_auc(name, int(held.sum()), n)

    result: dict[str, Any] = {
        "n": n,
        "accuracy": float(hits.mean()) if n else None,
        "accuracy_interval": wilson_interval(int(hits.sum()), n),
        "balanced_accuracy": _mean([entry["recall"] for entry in per_class.values()]),
        "auc": None,
        "auc_interval": None,
        "per_class": per_class,
        "undefined": undefined,
    }
    if not n:
        undefined |= dict.fromkeys(("accuracy", "accuracy_interval", "balanced_accuracy"), "no images to score, n=0")
    if len(classes) == 2:
        positive = per_class[classes[1]]
        result["auc"] = positive["auc"]
        result["auc_interval"] = auc_interval(positive["auc"], positive["n"], n - positive["n"])
        if result["auc"] is None:
            undefined |= dict.fromkeys(("auc", "auc_interval"), undefined[f"auc[{classes[1]}]"])
    else:
        result["auc"] = _mean([entry["auc"] for entry in per_class.values()])
        undefined["auc_interval"] = f"a mean over {len(classes)} one-vs-rest curves has no simple interval, n={n}"
        if result["auc"] is None:
            undefined["auc"] = "no images to score, n=0" if not n else f"all images are of one class, n={n}"
    return result


def rank_auc(scores: npt.ArrayLike, positive: npt.ArrayLike) -> float | None:
    """Mann-Whitney AUC: the chance that a positive scores above a negative, a tie counting one half.

    None where there is no positive or no negative.
    """
    values, held = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    positives, negatives = int(held.sum()), int((~held).sum())
    if not positives or not negatives:
        return None
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle_rank = np.cumsum(counts) - (counts - 1) / 2
    wins = middle_rank[group][held].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def wilson_interval(hits: int, n: int) -> list[float] | None:
    """Wilson's 95 % interval for a share of `hits` in `n`; None for n = 0."""
    if not n:
        return None
    share, z2 = hits / n, Z_95**2
    centre = share + z2 / (2 * n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At the ends the exact limit is the share itself; rounding must not put it outside the interval.
    low = 0.0 if hits == 0 else (centre - half) / (1 + z2 / n)
    high = 1.0 if hits == n else (centre + half) / (1 + z2 / n)
    return [low, high]


def auc_interval(auc: float | None, positives: int, negatives: int) -> list[float] | None:
    """95 % interval of an AUC with the variance of Hanley and McNeil (1982), None where the AUC is None.

    The limits are the true AUCs whose own standard error puts them 1.96 errors from the observed one (Wilson's
    idea). Unlike `auc +- 1.96 SE` they stay inside [0, 1], and a perfect AUC of ten images does not look certain.
    """
    if auc is None:
        return None

    def outside(true_auc: float) -> bool:
        q1, q2 = true_auc / (2 - true_auc), 2 * true_auc**2 / (1 + true_auc)
        spread = true_auc * (1 - true_auc) + (positives - 1) * (q1 - true_auc**2) + (negatives - 1) * (q2 - true_auc**2)
        return (auc - true_auc) ** 2 > Z_95**2 * spread / (positives * negatives)

    return [_boundary(outside, auc, 0.0), _boundary(outside, auc, 1.0)]


def across_domains(acc: Sequence[float | None]) -> Averages:
    """Mean over domains and standard deviation (ddof 1; None for fewer than two); undefined entries left out."""
    known = _known(acc)
    spread = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return Averages((_mean(known), spread), left_out=len(acc) - len(known))


def across_sites(acc: Sequence[float | None], sizes: Sequence[int]) -> Averages:
    """Over all images (weighted by site size), and the plain mean over sites; undefined entries left out."""
    if len(acc) != len(sizes):
        raise BadInput(f"{len(acc)} accuracies but {len(sizes)} site sizes: give one size for every site")
    if any(size < 0 for size in sizes):
        raise BadInput("a site size is negative: give the number of test images of every site")
    known = _known(acc)
    weights = [size for value, size in zip(acc, sizes, strict=True) if value is not None]
    pooled = float(np.average(known, weights=weights)) if sum(weights) else None
    return Averages((pooled, _mean(known)), left_out=len(acc) - len(known))


def summarise(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the sites' scores together, naming the worst site.

    Args:
        sites: for every site what `score` gave, and `as_received`: the score of the model before its refresh.

    Returns:
        avg and std over sites, all (over images), worst_site with its accuracy, averages of the other metrics,
        left_out (sites with undefined accuracy) and auc_left_out (sites with undefined AUC).
    """

    def column(metric: str) -> list[float | None]:
        return [site.get(metric) for site in sites.values()]

    accuracy = column("accuracy")
    avg, std = across_domains(accuracy)
    pooled, _ = across_sites(accuracy, [site["n"] if "n" in site else site.get("n_test", 0) for site in sites.values()])
    ranked = {name: value for name, value in zip(sites, accuracy, strict=True) if value is not None}
    worst = min(ranked, key=ranked.__getitem__, default=None)
    return {
        "avg": avg,
        "std": std,
        "all": pooled,
        "worst_site": worst,
        "worst_accuracy": None if worst is None else ranked[worst],
        "avg_auc": _mean(column("auc")),
        "avg_balanced_accuracy": _mean(column("balanced_accuracy")),
        "as_received_avg": _mean([(site.get("as_received") or {}).get("accuracy") for site in sites.values()]),
        "left_out": [name for name in sites if name not in ranked],
        "auc_left_out": [name for name, site in sites.items() if site.get("auc") is None],
    }


def cross_site(accuracy_matrix: Sequence[Sequence[float | None]], domains: Sequence[str]) -> dict[str, Any]:
    """FedCode's metrics of transfer between domains.

    Args:
        accuracy_matrix: row i, column j: the model of site i on the test images of site j; None where undefined.
        domains: the domain of every site.

    Returns:
        LTA: mean of the diagonal. GASA: mean over sites of their mean accuracy inside their own domain. ATA: for
        every domain, how its sites do on the other domains. GATA: plain mean of ATA. CPRR: GATA / GASA. And
        `undefined`: the reason for every figure that is None, those of ATA as `ATA[domain]`.
    """
    n = len(domains)
    if len(accuracy_matrix) != n or any(len(row) != n for row in accuracy_matrix):
        raise BadInput(f"the accuracy matrix does not fit {n} sites: give one row and one column for every site")

    def reach(i: int, *, inside: bool) -> float | None:
        return _mean([accuracy_matrix[i][j] for j in range(n) if (domains[i] == domains[j]) == inside])

    transfer = {
        domain: _mean([reach(i, inside=False) for i in range(n) if domains[i] == domain])
        for domain in dict.fromkeys(domains)
    }
    gasa = _mean([reach(i, inside=True) for i in range(n)])
    gata = _mean(list(transfer.values()))
    figures = {
        "LTA": _mean([accuracy_matrix[i][i] for i in range(n)]),
        "ATA": transfer,
        "GATA": gata,
        "GASA": gasa,
        "CPRR": gata / gasa if gata is not None and gasa else None,
    }
    return {**figures, "undefined": _why_no_transfer(figures)}


def _checked(probabilities: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[str]) -> tuple[Floats, Integers]:
    chances, truth = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if len(classes) < 2 or len(set(classes)) != len(classes):
        raise BadInput(f"cannot score {len(classes)} class names: give two or more different ones")
    if truth.size == 0 and chances.size == 0:
        return np.zeros((0, len(classes))), np.zeros(0, dtype=np.int64)
    if truth.ndim != 1 or chances.shape != (len(truth), len(classes)):
        raise BadInput(
            f"probabilities of shape {list(chances.shape)} do not fit {len(classes)} classes and labels of shape "
            f"{list(truth.shape)}: give one row per image and one column per class"
        )
    if not np.isfinite(chances).all():
        rows = int((~np.isfinite(chances)).any(axis=1).sum())
        raise BadInput(
            f"the model gave NaN or infinite probabilities for {rows} of {len(truth)} images: its training diverged; "
            "lower the learning rate or clip the gradients"
        )
    if chances.min() < -_ROUNDING or chances.max() > 1 + _ROUNDING:
        raise BadInput("the scores are outside [0, 1]: give probabilities, not logits")
    if truth.dtype.kind not in "iub":
        raise BadInput(f"labels are of type {truth.dtype}: give whole numbers, indices into the classes")
    if truth.min() < 0 or truth.max() >= len(classes):
        raise BadInput(f"a label is outside 0..{len(classes) - 1}: give indices into the {len(classes)} classes")
    return chances, truth.astype(np.int64)


def _why_no_auc(name: str, held: int, n: int) -> str:
    if not n:
        return "no images to score, n=0"
    return (
        f"every image is {name}, so there is nothing to tell it from, n={n}" if held else f"no image of {name}, n={n}"
    )


def _why_no_transfer(figures: Mapping[str, Any]) -> dict[str, str]:
    """The reason for every figure of `cross_site` that is None."""
    at_home, elsewhere = "no model has a score on images of its own domain", "there is one domain only"
    if len(figures["ATA"]) > 1:
        elsewhere = "no model has a score on images of another domain"
    reasons = {"LTA": "no model has a score on images of its own site", "GATA": elsewhere, "GASA": at_home}
    if figures["GATA"] is None:
        reasons["CPRR"] = elsewhere
    else:
        reasons["CPRR"] = at_home if figures["GASA"] is None else "no model is ever right in its own domain"
    undefined = {name: reason for name, reason in reasons.items() if figures[name] is None}
    return undefined | {f"ATA[{domain}]": elsewhere for domain, value in figures["ATA"].items() if value is None}


def _known(values: Sequence[float | None]) -> list[float]:
    known = [float(value) for value in values if value is not None]
    if not all(math.isfinite(value) for value in known):
        raise BadInput("a metric is NaN or infinite: an undefined metric has to be None, with its reason")
    return known


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return float(np.mean(known)) if known else None


def _boundary(outside: Callable[[float], bool], inner: float, outer: float) -> float:
    """Bisects for where `outside` turns true between a point inside and one that may be outside."""
    if not outside(outer):
        return outer
    for _ in range(60):
        middle = (inner + outer) / 2
        inner, outer = (inner, middle) if outside(middle) else (middle, outer)
    return inner
