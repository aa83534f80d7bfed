from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.imaging.prepared_sites import SITE, SIZE, Hospital

from crossward.federation.errors import BadInput
from crossward.imaging.data import TooFewImages, labels_of, load, load_site, site_names
from crossward.imaging.prepare.cache import NotPrepared
from crossward.imaging.prepare.ready import StoredImages
from crossward.imaging.refusals import Reason
from crossward.imaging.splits import TRAIN
from crossward.imaging.transforms.style import STYLES

ASKED: dict[str, Any] = {"classes": ("x", "y"), "size": SIZE, "channels": 1, "seed": 9, "batch_size": 4}
PARTS = ("train", "val", "test")


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital(tmp_path / "hospital").films(20)


def test_the_counts_trained_on_are_the_counts_shown(hospital: Hospital) -> None:
    hospital.film("strip.dcm", "PLANTED-S", "x", pixels=np.full((2, 400), 7, np.uint8))
    manifest = hospital.prepare()
    site = load_site(hospital.folder, name="st-mary", **ASKED).sites["st-mary"]
    shown = manifest.summary()["parts"]
    for part in PARTS:
        split = getattr(site, part)
        labels = Counter(site.classes[label] for label in split.labels.tolist())
        assert labels == Counter(shown[part])
        assert len(split) == sum(shown[part].values()) == len(split.images)
    assert sum(len(getattr(site, part)) for part in PARTS) == len(manifest.pictures) == manifest.accepted
    assert not {name for part in PARTS for name in getattr(site, part).ids} & {row.file for row in manifest.rejected}
    people = [set(getattr(site, part).patients) for part in PARTS]
    assert not people[0] & people[1]
    assert not people[0] & people[2]
    assert not people[1] & people[2]


def test_it_gives_what_reading_the_folder_gives(hospital: Hospital, tmp_path: Path) -> None:
    """The other way from files to tensors: labels.csv without site.yaml, MONAI's resizing, the study's seed."""
    plain = tmp_path / "plain"
    shutil.copytree(hospital.folder, plain)
    (plain / "site.yaml").unlink()
    hospital.prepare()
    one = load(hospital.folder, size=SIZE, batch_size=4, seed=123).sites["hospital"]
    other = load(plain, size=SIZE, batch_size=4, seed=0).sites["plain"]
    for part in PARTS:
        found, expected = getattr(one, part), getattr(other, part)
        assert found.ids == expected.ids
        assert torch.equal(found.labels, expected.labels)
        # Half a step of 65535, four times over by the normalisation, and single precision.
        np.testing.assert_allclose(found.images.numpy(), expected.images.numpy(), atol=4 * 0.5 / 65535 + 2e-6)


def test_no_dicom_file_is_opened(hospital: Hospital) -> None:
    hospital.prepare()
    shutil.rmtree(hospital.folder / "images")
    cohort = load_site(hospital.folder, name="a", **ASKED)
    assert isinstance(cohort.sites["a"].train.images, StoredImages)
    assert cohort.sites["a"].scanner == "maker-model-1"


def test_site_yaml_decides_the_split_and_not_the_seed(hospital: Hospital) -> None:
    hospital.prepare()
    first, second = (load_site(hospital.folder, name="a", **{**ASKED, "seed": seed}).sites["a"] for seed in (1, 2))
    assert first.test.ids == second.test.ids
    hospital.rules(SITE + "splits: {train: 0.5, val: 0.2, test: 0.3, seed: 4}\n")
    manifest = hospital.prepare()
    third = load_site(hospital.folder, name="a", **ASKED).sites["a"]
    assert third.test.ids != first.test.ids
    # Ten patients a class: 5, 2 and 3 of each.
    patients = Counter(part for _, part in {(each.patient, each.part) for each in manifest.pictures})
    assert patients == {0: 10, 1: 4, 2: 6}


def test_a_fraction_of_the_training_patients(hospital: Hospital) -> None:
    hospital.prepare()
    whole, half = (load(hospital.folder, size=SIZE, batch_size=1, fraction=part).sites for part in (1.0, 0.5))
    assert set(half["hospital"].train.ids) < set(whole["hospital"].train.ids)
    assert half["hospital"].test.ids == whole["hospital"].test.ids


def test_prepared_and_plain_hospitals_side_by_side(hospital: Hospital, tmp_path: Path, write_hospital: Any) -> None:
    hospital.prepare()
    write_hospital(tmp_path / "other", {"x": 8, "y": 8})
    assert site_names(tmp_path) == ["hospital", "other"]
    cohort = load(tmp_path, size=SIZE, batch_size=4)
    assert list(cohort.sites) == ["hospital", "other"]
    assert isinstance(cohort.sites["hospital"].train.images, StoredImages)
    assert isinstance(cohort.sites["other"].train.images, torch.Tensor)


def test_labels_are_counted(hospital: Hospital) -> None:
    hospital.prepare()
    expected = Counter(label for _, _, label in hospital.rows)
    assert labels_of(hospital.folder, "anyone", size=SIZE, channels=1) == expected
    assert labels_of(hospital.folder, "anyone") == expected


def refused(hospital: Hospital, **changes: Any) -> str:
    with pytest.raises(NotPrepared) as refusal:
        load_site(hospital.folder, name="a", **{**ASKED, **changes})
    message = str(refusal.value)
    assert "\n" not in message
    assert "run: crossward data prepare" in message
    return message


def test_nothing_prepared(hospital: Hospital) -> None:
    assert "no images of 8 x 8 pixels, 1 channel(s) were prepared" in refused(hospital)
    with pytest.raises(NotPrepared, match="no images were prepared"):
        labels_of(hospital.folder, "a")


def test_prepared_for_something_else(hospital: Hospital) -> None:
    hospital.prepare(channels=3)
    assert "--size 16 --channels 1" in refused(hospital, size=16)
    assert "--size 8 --channels 1" in refused(hospital)
    assert load_site(hospital.folder, name="a", **{**ASKED, "channels": 3}).channels == 3


def test_grey_serves_a_study_in_colour_unless_colour_was_refused(hospital: Hospital) -> None:
    hospital.prepare()
    cohort = load_site(hospital.folder, name="a", **{**ASKED, "channels": 3})
    assert cohort.sites["a"].test.images.shape[1:] == (3, SIZE, SIZE)
    hospital.film("colour.dcm", "PLANTED-c", "x", pixels=np.full((9, 9, 3), 5, np.uint8))
    assert [row.reason for row in hospital.prepare().rejected] == [Reason.COLOUR]
    load_site(hospital.folder, name="a", **ASKED)
    assert "--size 8 --channels 3" in refused(hospital, channels=3)


def test_rules_or_labels_that_changed_since(hospital: Hospital) -> None:
    hospital.prepare()
    hospital.rules(SITE + "burned_in: take\n")
    assert "changed since the images were prepared: site.yaml" in refused(hospital)
    hospital.rules(SITE)
    load_site(hospital.folder, name="a", **ASKED)
    hospital.label("000-0.dcm", "PLANTED-000", "y")
    assert "changed since the images were prepared: labels" in refused(hospital)


def test_another_version(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hospital.prepare()
    monkeypatch.setattr("crossward.__version__", "9.9")
    assert "prepared: version" in refused(hospital)
    second = hospital.prepare()
    assert second.transforms != first.transforms
    load_site(hospital.folder, name="a", **ASKED)


@pytest.mark.parametrize("what", ["label", "part", "cut", "gone"])
def test_a_manifest_that_was_changed_by_hand(hospital: Hospital, what: str) -> None:
    hospital.prepare()
    path = hospital.cache / "manifest.json"
    content = json.loads(path.read_text())
    row = content["pictures"][0]
    changed = {
        "label": {**row, "label": "y" if row["label"] == "x" else "x"},
        "part": {**row, "part": 2 - row["part"]},
    }
    content["pictures"][0] = changed.get(what, row)
    text = json.dumps(content)
    path.write_text(text if what in changed else text[: len(text) // 2])
    if what == "gone":
        path.unlink()
    refused(hospital)
    hospital.prepare()
    load_site(hospital.folder, name="a", **ASKED)


def test_pictures_that_are_missing_or_damaged(hospital: Hospital) -> None:
    manifest = hospital.prepare()
    path = hospital.cache / manifest.pixels
    content = path.read_bytes()
    path.write_bytes(content[: 5 * SIZE * SIZE * 2])
    site = load_site(hospital.folder, name="a", **ASKED).sites["a"]
    with pytest.raises(NotPrepared, match="missing"):
        site.train.images[:]
    path.unlink()
    with pytest.raises(NotPrepared, match="cannot be read"):
        load_site(hospital.folder, name="a", **ASKED)


def test_too_few_images_and_labels_as_for_any_site(hospital: Hospital) -> None:
    hospital.prepare()
    with pytest.raises(TooFewImages):
        load_site(hospital.folder, name="a", **{**ASKED, "batch_size": 1000})
    with pytest.raises(BadInput, match="only one class"):
        load_site(hospital.folder, name="a", **{**ASKED, "classes": ("x",)})


def styled(hospital: Hospital, *, steps: str = "noise: {most: 0.1, probability: 1}") -> Any:
    hospital.rules(SITE + f"augment:\n  maker-model-1:\n    - {steps}\n")
    hospital.prepare()
    return load_site(hospital.folder, name="a", **ASKED).sites["a"]


def test_augmentation_is_for_training_only_and_by_domain(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(20)
    for number in range(20):
        hospital.film(f"b{number}.dcm", f"PLANTED-b{number}", "xy"[number % 2], ManufacturerModelName="Model 2")
    site = styled(hospital)
    assert (site.val.style, site.test.style) == (None, None)
    style, rows = site.train.style, torch.arange(len(site.train))
    images = site.train.images[:]
    changed = style(images, rows, torch.Generator().manual_seed(3))
    own = torch.tensor([not name.startswith("b") for name in site.train.ids])
    assert torch.equal(changed[~own], images[~own])
    assert all(not torch.equal(one, other) for one, other in zip(changed[own], images[own], strict=True))
    # Noise of up to a tenth of the range, four times over by the normalisation, and clipped to the range.
    assert 0.02 < (changed - images)[own].std() < 0.4
    assert changed.min() >= -2
    assert changed.max() <= 2
    assert torch.equal(changed, style(images, rows, torch.Generator().manual_seed(3)))
    assert not torch.equal(changed, style(images, rows, torch.Generator().manual_seed(4)))
    some = style(images[5:9], rows[5:9], torch.Generator().manual_seed(3))
    assert some.shape == images[5:9].shape


@pytest.mark.parametrize("name", sorted(STYLES))
def test_every_augmentation_can_be_asked_for(hospital: Hospital, name: str) -> None:
    site = styled(hospital, steps=name)
    images = site.train.images[:4]
    changed = site.train.style(images, torch.arange(4), torch.Generator().manual_seed(0))
    assert changed.shape == images.shape
    assert torch.isfinite(changed).all()


def test_without_augmentation_there_is_no_style(hospital: Hospital) -> None:
    manifest = hospital.prepare()
    assert manifest.styles == {}
    assert load_site(hospital.folder, name="a", **ASKED).sites["a"].train.style is None
    assert {each.part for each in manifest.pictures} == {TRAIN, 1, 2}


def test_made_up_images_are_called_so_wherever_site_yaml_lies(hospital: Hospital) -> None:
    hospital.prepare()
    assert not load(hospital.folder, size=SIZE, batch_size=4).phantom
    (hospital.folder / "images" / "PHANTOMS.txt").write_text("made up")
    hospital.prepare()
    assert load(hospital.folder, size=SIZE, batch_size=4).phantom
