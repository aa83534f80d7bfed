from __future__ import annotations

from pathlib import Path

import numpy as np

from crossward.imaging.dicom.scans import Header
from crossward.imaging.labels.join import Labelled, Labels
from crossward.imaging.labels.report import balance, problems, split, warnings
from crossward.imaging.refusals import Reason
from crossward.imaging.rules.site import LabelRule, SiteRules


def labels_of(*pairs: tuple[str, str], **others: object) -> Labels:
    """Images with (label, patient)."""
    rows = tuple(
        Labelled(file=f"f{index}", header=Header(manufacturer="Maker", model="M"), label=label, patient=patient)
        for index, (label, patient) in enumerate(pairs)
    )
    return Labels(rows=rows, refused=(), **others)  # type: ignore[arg-type]


def rules(fractions: tuple[float, float, float]) -> SiteRules:
    here = Path("nowhere")
    return SiteRules(path=here, data=here, cache=here, labels=LabelRule(), fractions=fractions, split_seed=3)


def test_classes_in_every_part() -> None:
    labels = labels_of(("b", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("a", "5"))
    parts = np.array([0, 0, 1, 2, 0], np.uint8)
    assert balance(labels, parts) == {
        "training": {"a": 2, "b": 1},
        "validation": {"a": 1, "b": 0},
        "test": {"a": 0, "b": 1},
    }


def test_splitting_is_by_patient_and_by_the_rules_fractions() -> None:
    labels = labels_of(*((label, f"{label}{index // 2}") for label in "ab" for index in range(40)))
    parts = split(labels, rules((0.5, 0.25, 0.25)))
    assert np.bincount(parts).tolist() == [40, 20, 20]
    assert (parts[::2] == parts[1::2]).all(), "both images of a patient"
    assert (parts != split(labels, SiteRules(**{**vars(rules((0.5, 0.25, 0.25))), "split_seed": 4}))).any()


def test_problems_are_counts_with_remedies() -> None:
    assert problems({Reason.DAMAGED: 1, Reason.NO_LABEL: 2}) == [
        "2 files: has no label; add their labels, or do without them",
        "1 files: damaged: the file ends early or its header makes no sense; they are left out",
    ]


def test_a_site_in_order_has_no_warnings() -> None:
    labels = labels_of(*((label, f"{label}{index}") for label in "ab" for index in range(30)))
    assert warnings(labels, split(labels, rules((0.7, 0.1, 0.2)))) == []


def test_a_site_with_one_class_and_few_patients() -> None:
    labels = labels_of(*(("a", str(index)) for index in range(12)))
    told = " ".join(warnings(labels, split(labels, rules((0.7, 0.1, 0.2)))))
    assert "every image is 'a'" in told
    assert "12 patients are few" in told


def test_a_class_that_a_part_lacks_and_a_lopsided_site() -> None:
    labels = labels_of(*(("a", f"a{index}") for index in range(30)), ("b", "b1"))
    parts = np.array([0] * 20 + [1] * 5 + [2] * 5 + [0], np.uint8)
    assert warnings(labels, parts) == [
        "'a' has 30 images and 'b' 1: accuracy will look good without 'b' being found; look at the score of each class",
        "'b' has no validation images: the choice of the best round does not see it; add patients with it",
        "'b' has no test images: no score will say whether it is found; add patients with it",
    ]


def test_one_patient_no_image_and_classes_that_look_alike() -> None:
    nobody = labels_of()
    assert "the site cannot take part" in warnings(nobody, split(nobody, rules((0.7, 0.1, 0.2))))[0]
    labels = labels_of(("No finding", "1"), ("nofinding", "1"))
    told = " ".join(warnings(labels, np.array([0, 0], np.uint8)))
    assert "one patient" in told
    assert "'No finding' and 'nofinding' are trained on as different classes" in told


def test_a_study_of_two_patients() -> None:
    header = Header(study_uid="1.8")
    rows = [Labelled(file=name, header=header, label="a", patient=name) for name in "xy"]
    told = warnings(Labels(rows=tuple(rows), refused=()), np.array([0, 2], np.uint8))
    assert any("1 studies belong to two patients" in line for line in told)
