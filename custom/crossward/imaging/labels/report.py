"""What would be trained on, in figures, and what to think of it, in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.labels.join import Labels
from crossward.imaging.refusals import Reason
from crossward.imaging.rules.site import SiteRules
from crossward.imaging.splits import TEST, TRAIN, VAL, split_patients

PARTS: Mapping[int, str] = {TRAIN: "training", VAL: "validation", TEST: "test"}
FEW_PATIENTS = 20
LOPSIDED = 10

_LEAVE_OUT = "they are left out"
_REMEDIES: Mapping[Reason, str] = {
    Reason.NO_LABEL: "add their labels, or do without them",
    Reason.UNKNOWN_LABEL: "name these labels in labels.map",
    Reason.CONFLICTING_LABELS: "decide which label is right, and correct the source",
    Reason.NO_PATIENT: "name the patients in a column of the table (labels.patient_column)",
    Reason.NO_DOMAIN: "add a match under domain.names that fits them",
    Reason.TOO_MANY_FRAMES: "choose frames: each, first or middle",
    Reason.BURNED_IN: "look at them; burned_in: take trains on them",
    Reason.PATIENT_CLASH: "correct the ids in the archive, or name the patients in labels.patient_column",
}


def split(labels: Labels, rules: SiteRules) -> NDArray[np.uint8]:
    """Who is in training, validation and test: whole patients, by the rules' fractions and seed."""
    classes = {name: index for index, name in enumerate(labels.classes)}
    codes = [classes[label] for label in labels.labels]
    return split_patients(labels.patients, codes, seed=rules.split_seed, fractions=rules.fractions)


def balance(labels: Labels, parts: NDArray[np.uint8]) -> dict[str, dict[str, int]]:
    """Images of every class in every part."""
    counts = Counter(zip(parts.tolist(), labels.labels, strict=True))
    return {name: {label: counts[part, label] for label in labels.classes} for part, name in PARTS.items()}


def problems(reasons: Mapping[Reason, int]) -> list[str]:
    """What is not used and what to do about it, a line for each reason; most files first."""
    counts = sorted(reasons.items(), key=lambda pair: -pair[1])
    return [f"{count} files: {reason.value}; {_REMEDIES.get(reason, _LEAVE_OUT)}" for reason, count in counts]


def warnings(labels: Labels, parts: NDArray[np.uint8]) -> list[str]:
    """What training would suffer from, a line each."""
    if not labels.rows:
        return ["no image can be trained on: the site cannot take part; the problems say why"]
    return [*_on_size(labels), *_on_classes(labels), *_on_parts(labels, parts), *_on_patients(labels)]


def _on_size(labels: Labels) -> list[str]:
    patients = len(set(labels.patients))
    if patients == 1:
        return ["all images are of one patient: nothing is left to test with; check that patient ids are real"]
    if patients < FEW_PATIENTS:
        return [f"{patients} patients are few: scores will be rough, and single patients weigh much in the model"]
    return []


def _on_classes(labels: Labels) -> list[str]:
    counts = Counter(labels.labels)
    lines = []
    if len(counts) == 1:
        lines.append(
            f"every image is '{next(iter(counts))}': a site with one class pulls the model towards it and cannot "
            "be scored; a run takes it only with --lenient"
        )
    most, least = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    if counts[most] >= LOPSIDED * counts[least]:
        lines.append(
            f"'{most}' has {counts[most]} images and '{least}' {counts[least]}: accuracy will look good without "
            f"'{least}' being found; look at the score of each class"
        )
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in counts:
        alike["".join(name.casefold().split())].append(name)
    lines += [
        f"{' and '.join(repr(name) for name in sorted(names))} are trained on as different classes; are they one? "
        "labels.map can join them"
        for names in alike.values()
        if len(names) > 1
    ]
    return lines


def _on_parts(labels: Labels, parts: NDArray[np.uint8]) -> list[str]:
    meaning = {
        "training": "the site cannot teach it",
        "validation": "the choice of the best round does not see it",
        "test": "no score will say whether it is found",
    }
    return [
        f"'{label}' has no {part} images: {meaning[part]}; add patients with it"
        for part, counts in balance(labels, parts).items()
        for label, count in counts.items()
        if count == 0
    ]


def _on_patients(labels: Labels) -> list[str]:
    owners: defaultdict[str, set[str | None]] = defaultdict(set)
    for row in labels.rows:
        if row.header.study_uid:
            owners[row.header.study_uid].add(row.patient)
    torn = sum(len(patients) > 1 for patients in owners.values())
    if not torn:
        return []
    return [f"{torn} studies belong to two patients each: one person may be trained on and tested with; check the ids"]
