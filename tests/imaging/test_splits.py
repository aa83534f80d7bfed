from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.imaging.splits import TEST, TRAIN, choose_sites, keep_patients, split_patients

images = st.lists(st.tuples(st.integers(0, 60).map(str), st.integers(0, 3)), min_size=1, max_size=150)
seeds = st.integers(-(2**70), 2**70)


def main_label(listed: list[tuple[str, int]]) -> dict[str, int]:
    labels: dict[str, Counter[int]] = {}
    for patient, label in sorted(listed, key=lambda image: image[1]):
        labels.setdefault(patient, Counter())[label] += 1
    return {patient: counts.most_common(1)[0][0] for patient, counts in labels.items()}


def split(listed: list[tuple[str, int]], seed: int) -> list[int]:
    return split_patients([patient for patient, _ in listed], [label for _, label in listed], seed=seed).tolist()


@given(images, seeds)
def test_every_patient_is_in_one_part(listed: list[tuple[str, int]], seed: int) -> None:
    parts = split(listed, seed)
    assert len(parts) == len(listed)
    assert set(parts) <= {0, 1, 2}
    of_patient: dict[str, set[int]] = {}
    for (patient, _), part in zip(listed, parts, strict=True):
        of_patient.setdefault(patient, set()).add(part)
    assert all(len(seen) == 1 for seen in of_patient.values())


@given(images, seeds, st.randoms(use_true_random=False))
def test_the_order_of_the_files_does_not_matter(listed: list[tuple[str, int]], seed: int, random) -> None:
    order = list(range(len(listed)))
    random.shuffle(order)
    shuffled = split([listed[row] for row in order], seed)
    assert [shuffled[order.index(row)] for row in range(len(listed))] == split(listed, seed)


@given(images, seeds)
def test_parts_of_every_class_are_within_a_patient_of_their_fraction(listed: list[tuple[str, int]], seed: int) -> None:
    part_of = dict(zip((patient for patient, _ in listed), split(listed, seed), strict=True))
    labels = main_label(listed)
    for label in set(labels.values()):
        parts = Counter(part_of[patient] for patient in labels if labels[patient] == label)
        for part, fraction in enumerate((0.7, 0.1, 0.2)):
            assert abs(parts[part] - fraction * parts.total()) <= 1 + 1e-9
        if parts.total() >= 3:
            assert parts[TRAIN] >= 1
            assert parts[TEST] >= 1


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (2, 0, 1)), (5, (3, 1, 1)), (10, (7, 1, 2))]
)
def test_sizes_by_hand(count: int, expected: tuple[int, int, int]) -> None:
    parts = split_patients([str(patient) for patient in range(count)], [0] * count, seed=0)
    assert tuple(np.bincount(parts, minlength=3)) == expected


def test_the_order_is_that_of_the_hash() -> None:
    patients = [f"p{number}" for number in range(10)]
    by_hash = sorted(patients, key=lambda patient: blake2b(f"7/{patient}".encode()).digest())
    expected = {patient: 0 if place < 7 else 1 if place < 8 else 2 for place, patient in enumerate(by_hash)}
    assert split_patients(patients, [0] * 10, seed=7).tolist() == [expected[patient] for patient in patients]


def test_another_seed_is_another_split() -> None:
    patients = [str(number) for number in range(100)]
    assert split(list(zip(patients, [0] * 100, strict=True)), 0) != split(
        list(zip(patients, [0] * 100, strict=True)), 1
    )


def test_lopsided_fractions_still_leave_a_test_patient() -> None:
    parts = split_patients(["a", "b", "c"], [0, 0, 0], seed=0, fractions=(0.98, 0.01, 0.01))
    assert np.bincount(parts, minlength=3).tolist() == [2, 0, 1]
    parts = split_patients(["a", "b", "c"], [0, 0, 0], seed=0, fractions=(1.0, 0.0, 0.0))
    assert parts.tolist() == [0, 0, 0]


@given(images, seeds, st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_smaller_fraction_is_a_subset(listed: list[tuple[str, int]], seed: int, one: float, other: float) -> None:
    patients, labels = [patient for patient, _ in listed], [label for _, label in listed]
    fewer = keep_patients(patients, labels, seed=seed, fraction=min(one, other))
    more = keep_patients(patients, labels, seed=seed, fraction=max(one, other))
    assert not (fewer & ~more).any()
    assert keep_patients(patients, labels, seed=seed, fraction=1.0).all()
    kept = {patient for patient, keep in zip(patients, fewer, strict=True) if keep}
    of = main_label(listed)
    for label in set(of.values()):
        group = [patient for patient in of if of[patient] == label]
        share = min(one, other) * len(group)
        assert share - 1e-6 <= sum(patient in kept for patient in group) < share + 1


def test_choosing_sites() -> None:
    assert choose_sites(["b", "a"], None) == ["a", "b"]
    assert choose_sites(["b", "a", "c"], ["c", "a", "c"]) == ["a", "c"]
    with pytest.raises(BadInput, match=r"no site named x; choose from a, b$"):
        choose_sites(["b", "a"], ["a", "x"])
    with pytest.raises(BadInput, match="no site was chosen"):
        choose_sites(["b", "a"], [])
