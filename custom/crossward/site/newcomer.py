"""A hospital that joins without labels, tried on scans of a scanner that no site has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossward.evaluate.metrics import wilson_interval
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.imaging.data import Split
from crossward.imaging.held_out import NO_CLASS, NamedScans
from crossward.imaging.splits import TEST, TRAIN, split_patients
from crossward.site.adapt import adapt
from crossward.site.deployed import Deployed
from crossward.site.handover import Handover


def try_newcomer(
    handover: Handover, models: Mapping[str, Deployed], held_out: Mapping[str, NamedScans]
) -> dict[str, Any] | None:
    """Treat a held-out set of a scanner that no site has as a hospital that joins without labels.

    Half of the scans, without their labels, fit the newcomer's statistics, and what the method can adapt; it is tested
    on the other half, beside the models that the sites deployed.

    Returns:
        For ``result["newcomer"]``; None where no set has classes for labels, or too few scans, or the method shares no
        model.
    """
    study = handover.study
    known = {what: scans for what, scans in held_out.items() if bool((scans.split.labels != NO_CLASS).all())}
    if not known or not models or not names_in(layout_of(study.model()), Scope.SHARED):
        return None
    what, scans = next(iter(known.items()))
    fitting, test = halves(scans.split, seed=study.training.seed)
    # A single image has no statistics: the newcomer would answer with those of a partner.
    if len(fitting) < 2 or not len(test):
        return None
    new = adapt(study, handover.tensors, fitting, site=what)
    right = int((new.deployed.answer(test).probabilities.argmax(1) == test.labels).sum())
    return {
        "set": what,
        "n_fitting": len(fitting),
        "n_test": len(test),
        "accuracy": right / len(test),
        "accuracy_interval": wilson_interval(right, len(test)),
        "stages": {name: stage.accuracy(test) for name, stage in new.stages.items()},
        "partners": {site: model.accuracy(test) for site, model in models.items()},
    }


def halves(split: Split, *, seed: int) -> tuple[Split, Split]:
    """Half of the patients of every class, and the other half: no patient is in both."""
    parts = split_patients(split.patients, split.labels.tolist(), seed=seed, fractions=(0.5, 0.0, 0.5))
    return split.rows(parts == TRAIN), split.rows(parts == TEST)
