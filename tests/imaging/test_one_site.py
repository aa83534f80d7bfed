from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import TooFewImages, labels_of, load, load_site
from crossward.imaging.phantom import write_hospitals

CLASSES = ("effusion", "nodule", "normal", "pneumothorax")
ASKED: dict[str, Any] = {"classes": CLASSES, "size": 16, "channels": 1, "seed": 5, "batch_size": 4}
PACKED: dict[str, Any] = {**ASKED, "classes": ("nevus", "melanoma", "keratosis")}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-site") / "hospitals"
    write_hospitals(folder, sites=2, patients=16, seed=3)
    return folder


@pytest.fixture
def pack(tmp_path: Path, write_pack: Any) -> Path:
    write_pack(tmp_path / "pack" / "a.npz", [0, 1, 2] * 20)
    write_pack(tmp_path / "pack" / "b.npz", [0, 1] * 20)
    return tmp_path / "pack"


def same(one: Any, other: Any) -> bool:
    """Every split of two sites with the same images in the same order."""
    return all(
        torch.equal(getattr(one, part).images, getattr(other, part).images)
        and torch.equal(getattr(one, part).labels, getattr(other, part).labels)
        and getattr(one, part).ids == getattr(other, part).ids
        for part in ("train", "val", "test")
    )


def test_a_site_alone_has_what_it_has_among_all(hospitals: Path) -> None:
    together = load(hospitals, size=16, classes=CLASSES, seed=5, batch_size=4)
    for name in ("hospital-a", "hospital-b"):
        # In a folder of all hospitals, and in its own folder, as a real hospital has it.
        for root in (hospitals, hospitals / name):
            cohort = load_site(root, name=name, **ASKED)
            assert list(cohort.sites) == [name]
            assert cohort.classes == CLASSES
            assert same(cohort.sites[name], together.sites[name])
            assert cohort.sites[name].scanner == together.sites[name].scanner


def test_the_only_site_of_a_folder_goes_by_the_name_of_the_study(hospitals: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(hospitals / "hospital-a", tmp_path / "radiology"))
    cohort = load_site(root, name="st-mary", **ASKED)
    assert list(cohort.sites) == ["st-mary"]
    assert cohort.sites["st-mary"].name == "st-mary"
    expected = load_site(hospitals, name="hospital-a", **ASKED).sites["hospital-a"]
    assert torch.equal(cohort.sites["st-mary"].train.images.sort(0)[0], expected.train.images.sort(0)[0])
    assert labels_of(root, "st-mary") == labels_of(hospitals, "hospital-a")


def test_among_several_the_name_has_to_be_there(hospitals: Path) -> None:
    with pytest.raises(BadInput, match="st-mary"):
        load_site(hospitals, name="st-mary", **ASKED)
    with pytest.raises(BadInput, match="st-mary"):
        labels_of(hospitals, "st-mary")


def test_labels_are_counted_without_opening_an_image(hospitals: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(hospitals / "hospital-b", tmp_path / "own"))
    for film in root.rglob("*.dcm"):
        film.write_bytes(b"not an image")
    lines = (root / "labels.csv").read_text().splitlines()
    column = lines[0].split(",").index("label")
    assert labels_of(root, "hospital-b") == Counter(line.split(",")[column] for line in lines[1:])
    with pytest.raises(BadInput):
        load_site(root, name="hospital-b", **ASKED)


def test_a_pack_is_counted_and_read_by_name(pack: Path) -> None:
    assert labels_of(pack, "a") == Counter(nevus=20, melanoma=20, keratosis=20)
    assert labels_of(pack, "b") == Counter(nevus=20, melanoma=20)
    cohort = load_site(pack, name="b", **PACKED)
    assert same(cohort.sites["b"], load(pack, size=16, classes=PACKED["classes"], batch_size=4).sites["b"])


def test_the_order_of_the_classes_is_the_studys(pack: Path) -> None:
    straight = load_site(pack, name="a", **PACKED).sites["a"].train.labels
    turned = load_site(pack, name="a", **{**PACKED, "classes": PACKED["classes"][::-1]}).sites["a"].train.labels
    assert torch.equal(turned, 2 - straight)


def test_a_class_that_this_hospital_lacks_is_still_one_of_the_study(hospitals: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(hospitals / "hospital-a", tmp_path / "own"))
    lines = (root / "labels.csv").read_text().splitlines()
    (root / "labels.csv").write_text("\n".join(line for line in lines if ",effusion" not in line) + "\n")
    cohort = load_site(root, name="hospital-a", **ASKED)
    assert cohort.classes == CLASSES
    assert 0 not in cohort.sites["hospital-a"].train.labels
    assert any("effusion" in warning for warning in cohort.warnings)


def test_channels_are_those_of_the_study(pack: Path, write_pack: Any, tmp_path: Path) -> None:
    grey = load_site(pack, name="a", **PACKED)
    colour = load_site(pack, name="a", **{**PACKED, "channels": 3})
    assert (grey.channels, colour.channels) == (1, 3)
    one, three = grey.sites["a"].train.images, colour.sites["a"].train.images
    assert torch.equal(three, one.repeat(1, 3, 1, 1))
    write_pack(tmp_path / "colours" / "c.npz", [0, 1, 2] * 20, colour=True)
    assert load_site(tmp_path / "colours", name="c", **{**PACKED, "channels": 3}).sites["c"].train.images.shape[1] == 3
    with pytest.raises(BadInput, match="in colour, and the study's are grey"):
        load_site(tmp_path / "colours", name="c", **PACKED)


def test_without_a_word_on_channels_the_site_with_the_most_decides(pack: Path, write_pack: Any) -> None:
    asked: dict[str, Any] = {"size": 16, "batch_size": 4, "classes": PACKED["classes"]}
    assert load(pack, **asked).channels == 1
    write_pack(pack / "c.npz", [0, 1, 2] * 20, colour=True)
    assert load(pack, **asked).channels == 3
    assert load(pack, sites=["a", "b"], channels=3, **asked).channels == 3


def test_a_site_with_too_few_images_is_told_apart_from_one_that_cannot_be_read(tmp_path: Path, write_pack: Any) -> None:
    write_pack(tmp_path / "few" / "a.npz", [0, 1, 2])
    write_pack(tmp_path / "one-class" / "a.npz", [1] * 60)
    for folder in ("few", "one-class"):
        with pytest.raises(TooFewImages):
            load_site(tmp_path / folder, name="a", **PACKED)
    write_pack(tmp_path / "large-batch" / "a.npz", [0, 1, 2] * 10)
    with pytest.raises(TooFewImages, match="fewer than a batch of 32"):
        load_site(tmp_path / "large-batch", name="a", **{**PACKED, "batch_size": 32})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.npz").write_bytes(b"PK")
    with pytest.raises(BadInput) as caught:
        load_site(tmp_path / "damaged", name="a", **PACKED)
    assert not isinstance(caught.value, TooFewImages)
