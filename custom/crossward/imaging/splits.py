"""What a site has, and who is in training, validation and test: whole patients, whatever the order of the files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.federation.names import check_site_name

TRAIN, VAL, TEST = 0, 1, 2

Progress = Callable[[str, int, int], None]


class Reader(Protocol):
    """Reads the pictures of some rows of a listing."""

    def __call__(self, rows: NDArray[np.intp], *, size: int, progress: Progress | None) -> tuple[torch.Tensor, str]:
        """Gives float32 [n, 1 or 3, size, size] in [0, 1], and the scanner they come from."""


@dataclass(frozen=True)
class Listing:
    """What a site has, before any picture is read: one entry per image.

    Attributes:
        site: the site's name.
        classes: the labels that the site knows, in its own order.
        labels: the label of each image.
        patients: the patient, or the group of images that must stay together.
        ids: what names the image within the site.
        parts: 0 training, 1 validation, 2 test.
        read: reads the pictures.
    """

    site: str
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    patients: tuple[str, ...]
    ids: tuple[str, ...]
    parts: NDArray[np.uint8]
    read: Reader


def choose_sites(known: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """The sites asked for, or all of them, in alphabetical order."""
    names = sorted(known)
    unknown = [name for name in wanted or () if name not in names]
    if unknown:
        raise BadInput(f"there is no site named {', '.join(unknown)}; choose from {', '.join(names)}")
    if wanted is not None and not wanted:
        raise BadInput(f"no site was chosen; choose from {', '.join(names)}")
    chosen = names if wanted is None else sorted(set(wanted))
    for name in chosen:
        check_site_name(name)
    return chosen


def split_patients(
    patients: Sequence[str],
    labels: Sequence[int],
    *,
    seed: int,
    fractions: tuple[float, float, float] = (0.7, 0.1, 0.2),
) -> NDArray[np.uint8]:
    """Assigns every image to training (0), validation (1) or test (2), whole patients at a time.

    Patients are grouped by their most frequent label. In each group they are ordered by a hash of the seed and
    the patient's id and cut by `fractions`, so the result depends neither on the order of the files nor on the
    platform. A label with three patients or more has at least one in training and one in test.
    """
    part: dict[str, int] = {}
    for group in _strata(patients, labels, seed=seed):
        train, val, test = _sizes(len(group), fractions)
        part |= dict(zip(group, [TRAIN] * train + [VAL] * val + [TEST] * test, strict=True))
    return np.array([part[patient] for patient in patients], dtype=np.uint8)


def keep_patients(patients: Sequence[str], labels: Sequence[int], *, seed: int, fraction: float) -> NDArray[np.bool_]:
    """Marks the images of the given fraction of patients, rounded up for each label; a smaller fraction is a subset."""
    kept: set[str] = set()
    for group in _strata(patients, labels, seed=seed):
        kept.update(group[: ceil(round(fraction * len(group), 9))])
    return np.array([patient in kept for patient in patients], dtype=np.bool_)


def _strata(patients: Sequence[str], labels: Sequence[int], *, seed: int) -> list[list[str]]:
    """Patients grouped by their most frequent label (the smaller one of two), each group in the order of the hash."""
    seen: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for patient, label in zip(patients, labels, strict=True):
        seen[patient][int(label)] += 1
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for patient, counts in seen.items():
        groups[min(counts, key=lambda label: (-counts[label], label))].append(patient)

    def place(patient: str) -> bytes:
        return blake2b(f"{seed}/{patient}".encode()).digest()

    return [sorted(groups[label], key=place) for label in sorted(groups)]


def _sizes(count: int, fractions: tuple[float, float, float]) -> list[int]:
    """Splits `count` patients by largest remainder; of equal remainders test comes first, then validation."""
    ideal = [round(count * fraction, 9) for fraction in fractions]
    sizes = [int(share) for share in ideal]
    by_remainder = sorted((TEST, VAL, TRAIN), key=lambda part: round(sizes[part] - ideal[part], 9))
    for part in by_remainder[: count - sum(sizes)]:
        sizes[part] += 1
    for part in (TRAIN, TEST):
        if count >= 3 and sizes[part] == 0 and fractions[part] > 0:
            sizes[max((TRAIN, VAL, TEST), key=lambda donor: sizes[donor])] -= 1
            sizes[part] = 1
    return sizes
