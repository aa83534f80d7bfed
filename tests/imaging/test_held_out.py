from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import load
from crossward.imaging.held_out import NO_CLASS, OWN_TEST, NamedScans, load_held_out
from crossward.imaging.phantom import write_hospitals
from crossward.imaging.pictures import pictures_of
from crossward.imaging.spoiled import KINDS

CLASSES = ("nodule", "normal")


@pytest.fixture
def hospitals(tmp_path: Path, write_hospital) -> Path:
    """Two hospitals, and a held-out set that is a copy of the first."""
    for name in ("east", "west"):
        write_hospital(tmp_path / name, {"normal": 12, "nodule": 12})
    shutil.copytree(tmp_path / "east", tmp_path / "held-out" / "copy-of-east")
    return tmp_path


def read(folder: Path, **changes) -> dict[str, NamedScans]:
    return load_held_out(folder, **{"classes": CLASSES, "size": 16, "channels": 1} | changes)


def test_images_and_labels_are_exactly_what_a_hospital_with_the_same_files_gets(hospitals: Path) -> None:
    cohort = load(hospitals, size=16, batch_size=4)
    assert cohort.classes == CLASSES
    site = cohort.sites["east"]
    expected = {
        scan: (image, label)
        for part in (site.train, site.val, site.test)
        for scan, image, label in zip(part.ids, part.images, part.labels.tolist(), strict=True)
    }
    (found,) = read(hospitals).values()
    assert len(found.split) == len(expected) == 32
    for scan, image, label, kind in zip(
        found.split.ids, found.split.images, found.split.labels.tolist(), found.kinds, strict=True
    ):
        assert torch.equal(image, expected[scan][0])
        assert label == expected[scan][1]
        assert kind == CLASSES[label]


def test_a_label_that_is_no_class_is_kept_as_text(hospitals: Path, write_dicom, write_labels) -> None:
    spoiled = hospitals / "held-out" / "all-spoiled"
    for name in ("a", "b", "c"):
        write_dicom(spoiled / f"{name}.dcm", np.full((8, 8), 51, np.uint8))
    write_labels(spoiled, [("a.dcm", "1", "empty"), ("b.dcm", "2", "normal"), ("c.dcm", "3", "blurred")])
    sets = read(hospitals)
    assert list(sets) == ["copy of east", "all spoiled"]  # sets of known classes first
    found = sets["all spoiled"]
    assert found.kinds == ("empty", "normal", "blurred")
    assert found.split.labels.tolist() == [NO_CLASS, 1, NO_CLASS]
    assert found.split.ids == ("a.dcm", "b.dcm", "c.dcm")
    assert found.split.patients == ("1", "2", "3")
    # 51 of 255 is 0.2, and (0.2 - 0.5) / 0.25 = -1.2.
    assert torch.allclose(found.split.images, torch.tensor(-1.2))
    assert (pictures_of(found.split.images) == 51).all()


def test_the_choice_is_spread_over_kinds_and_does_not_depend_on_the_order_of_the_lines(hospitals: Path) -> None:
    def chosen(**changes) -> tuple[str, ...]:
        (found,) = read(hospitals, **changes).values()
        assert len(set(found.split.ids)) == len(found.split.ids)
        return found.split.ids

    (some,) = read(hospitals, at_most=10).values()
    assert Counter(some.kinds) == {"normal": 5, "nodule": 5}
    assert chosen(at_most=10) == some.split.ids
    assert set(chosen(at_most=6)) < set(some.split.ids)
    assert chosen(at_most=10, seed=1) != some.split.ids

    labels = hospitals / "held-out" / "copy-of-east" / "labels.csv"
    head, *lines = labels.read_text().splitlines()
    labels.write_text("\n".join([head, *reversed(lines)]) + "\n")
    assert sorted(chosen(at_most=10)) == sorted(some.split.ids)


def test_a_rare_kind_is_taken_whole_and_the_others_fill_up(hospitals: Path) -> None:
    labels = hospitals / "held-out" / "copy-of-east" / "labels.csv"
    with labels.open(newline="") as file:
        rows = list(csv.reader(file))
    rows[1][2] = rows[2][2] = "rare"
    with labels.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (found,) = read(hospitals, at_most=12).values()
    assert Counter(found.kinds) == {"rare": 2, "normal": 5, "nodule": 5}


def test_grey_scans_get_the_channels_of_a_study_in_colour_and_not_the_other_way_round(
    hospitals: Path, write_dicom, write_labels
) -> None:
    (grey,), (colour,) = read(hospitals).values(), read(hospitals, channels=3).values()
    assert colour.split.images.shape[1] == 3
    for channel in range(3):
        assert torch.equal(colour.split.images[:, channel], grey.split.images[:, 0])

    write_dicom(hospitals / "held-out" / "skin" / "a.dcm", np.zeros((8, 8, 3), np.uint8))
    write_labels(hospitals / "held-out" / "skin", [("a.dcm", "1", "normal")])
    assert "skin" in read(hospitals, channels=3)
    with pytest.raises(BadInput, match=r"held-out/skin: .*colour.*grey"):
        read(hospitals)


def test_colour_pictures_keep_their_colours() -> None:
    images = (torch.tensor([[0.0, 0.2, 1.0]]).view(1, 3, 1, 1).expand(1, 3, 2, 2) - 0.5) / 0.25
    shown = pictures_of(images)
    assert shown.shape == (1, 2, 2, 3)
    assert shown.dtype == np.uint8
    assert shown[0, 0, 0].tolist() == [0, 51, 255]


def test_no_sets_where_there_is_no_folder_of_them(hospitals: Path) -> None:
    shutil.rmtree(hospitals / "held-out" / "copy-of-east")
    assert read(hospitals) == {}
    (hospitals / "held-out").rmdir()
    assert read(hospitals) == {}


def test_a_set_without_labels_is_named(hospitals: Path) -> None:
    (hospitals / "held-out" / "copy-of-east" / "labels.csv").unlink()
    with pytest.raises(
        BadInput, match=r"held-out/copy-of-east: has no labels\.csv; .* or take the set out of held-out$"
    ):
        read(hospitals)


def test_a_set_that_lists_nothing_is_named(hospitals: Path, write_labels) -> None:
    write_labels(hospitals / "held-out" / "copy-of-east", [])
    with pytest.raises(
        BadInput, match=r"held-out/copy-of-east: .* lists no images; .* or take the set out of held-out$"
    ):
        read(hospitals)


def test_a_set_cannot_take_the_place_of_a_hospitals_own_test_scans(hospitals: Path) -> None:
    sets = hospitals / "held-out"
    (sets / "copy-of-east").rename(sets / OWN_TEST.replace(" ", "-"))
    with pytest.raises(BadInput, match=r"held-out/own-test: .*another name"):
        read(hospitals)
    (sets / "own-test").rename(sets / "own-tests")
    assert list(read(hospitals)) == ["own tests"]


def test_phantoms_come_with_both_sets_and_neither_is_a_hospital(tmp_path: Path) -> None:
    folder = tmp_path / "phantoms"
    write_hospitals(folder, sites=1, patients=24, seed=2, unseen=True, spoiled=True)
    cohort = load(folder, size=16, batch_size=8)
    assert list(cohort.sites) == ["hospital-a"]
    sets = read(folder, classes=cohort.classes, at_most=8)
    assert list(sets) == ["unseen scanner", "spoiled"]
    assert Counter(sets["unseen scanner"].kinds) == dict.fromkeys(cohort.classes, 2)
    assert Counter(sets["spoiled"].kinds) == dict.fromkeys(KINDS, 2)
    assert NO_CLASS not in sets["unseen scanner"].split.labels
    assert (sets["spoiled"].split.labels == NO_CLASS).all()
