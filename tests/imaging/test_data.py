from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import Split, load
from crossward.imaging.loading import batches

TWO = [0, 1] * 30


@pytest.fixture
def pack(tmp_path: Path, write_pack) -> Path:
    write_pack(tmp_path / "a.npz", TWO)
    write_pack(tmp_path / "b.npz", TWO)
    return tmp_path


def numbered(count: int) -> Split:
    """Image k is filled with k and has the label k."""
    names = tuple(str(number) for number in range(count))
    values = torch.arange(count)
    return Split(values.float().reshape(-1, 1, 1, 1).repeat(1, 3, 8, 8), values, names, names)


@pytest.mark.parametrize(
    "where",
    [[3, 0], (3, 0), np.array([3, 0]), np.array([3, 0], np.uint8), np.array([-1, -4])],
    ids=["list", "tuple", "array", "bytes", "from the end"],
)
def test_rows_by_number_come_in_their_order(where) -> None:
    split = replace(numbered(4), patients=("a", "b", "c", "d"))
    some = split.rows(where)
    assert some.labels.tolist() == [3, 0]
    assert some.images[:, 0, 0, 0].tolist() == [3.0, 0.0]
    assert (some.patients, some.ids) == (("d", "a"), ("3", "0"))


def test_rows_by_marks_and_none_at_all() -> None:
    split = numbered(4)
    assert split.rows(np.array([True, False, True, False])).ids == ("0", "2")
    for nothing in ([], np.zeros(4, bool), np.array([], np.int64)):
        empty = split.rows(nothing)
        assert (len(empty), empty.images.shape, empty.labels.dtype) == (0, (0, 3, 8, 8), torch.int64)
    assert len(numbered(0).rows(np.zeros(0, bool))) == 0


def order(split: Split, *, batch_size: int, seed: int | None, drop_last: bool = False) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches(split, batch_size=batch_size, seed=seed, drop_last=drop_last)]


def test_batches_without_a_seed_keep_the_order() -> None:
    assert order(numbered(7), batch_size=3, seed=None) == [[0, 1, 2], [3, 4, 5], [6]]
    assert order(numbered(7), batch_size=3, seed=None, drop_last=True) == [[0, 1, 2], [3, 4, 5]]


def test_batches_with_a_seed_are_shuffled_by_it() -> None:
    split = numbered(50)
    first = order(split, batch_size=8, seed=1)
    assert first == order(split, batch_size=8, seed=1)
    assert first != order(split, batch_size=8, seed=2)
    assert order(split, batch_size=8, seed=0) != order(split, batch_size=8, seed=None)
    assert sorted(label for batch in first for label in batch) == list(range(50))


def test_each_pass_is_shuffled_anew_and_repeatably() -> None:
    def passes() -> list[list[int]]:
        loader = batches(numbered(50), batch_size=50, seed=3, drop_last=False)
        return [labels.tolist() for _ in range(2) for _, labels in loader]

    assert passes()[0] != passes()[1]
    assert passes() == passes()


def test_images_come_with_their_labels_and_a_length() -> None:
    loader = batches(numbered(20), batch_size=6, seed=5, drop_last=True)
    assert len(loader) == 3
    for images, labels in loader:
        assert images.shape == (6, 3, 8, 8)
        assert images.dtype == torch.float32
        assert torch.equal(images[:, 0, 0, 0].long(), labels)


@pytest.mark.parametrize("seed", [None, 4])
def test_the_global_random_state_is_left_alone(seed: int | None) -> None:
    before = torch.get_rng_state()
    order(numbered(20), batch_size=4, seed=seed)
    assert torch.equal(before, torch.get_rng_state())


def test_a_batch_is_a_copy() -> None:
    split = numbered(4)
    for images, _ in batches(split, batch_size=2, seed=None, drop_last=False):
        images.zero_()
    assert split.images[3].min() == 3


def test_fraction_thins_training_only(pack: Path) -> None:
    whole, half = load(pack, size=8, batch_size=4), load(pack, size=8, batch_size=4, fraction=0.5)
    for name, site in half.sites.items():
        # Of every ten images the seven first are for training: 24 with the one label, 18 with the other.
        assert torch.bincount(site.train.labels).tolist() == [12, 9]
        assert set(site.train.ids) < set(whole.sites[name].train.ids)
        assert site.test.ids == whole.sites[name].test.ids
        assert site.val.ids == whole.sites[name].val.ids
    again = load(pack, size=8, batch_size=4, fraction=0.5)
    assert again.sites["a"].train.ids == half.sites["a"].train.ids
    assert load(pack, size=8, batch_size=4, fraction=0.5, seed=1).sites["a"].train.ids != half.sites["a"].train.ids


def test_the_seed_changes_a_hospitals_split_and_nothing_else_does(tmp_path: Path, write_hospital) -> None:
    write_hospital(tmp_path / "h", {"x": 12, "y": 12, "z": 12})
    first = load(tmp_path, size=8, batch_size=4).sites["h"]
    assert load(tmp_path, size=8, batch_size=4, seed=1).sites["h"].test.ids != first.test.ids
    two = load(tmp_path, size=8, batch_size=4, classes=("y", "x")).sites["h"]
    assert set(two.test.ids) == {name for name in first.test.ids if "z-" not in name}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 7}, "images of 7 pixels"),
        ({"fraction": 0.0}, "a fraction of 0.0"),
        ({"fraction": 1.5}, "a fraction of 1.5"),
        ({"fraction": float("nan")}, "a fraction of nan"),
        ({"batch_size": 0}, "a batch of 0 images"),
        ({"sites": ["a", "x"]}, "no site named x; choose from a, b"),
        ({"classes": ["nevus", "mole"]}, "no site has a class named mole; choose from nevus, melanoma, keratosis"),
        ({"classes": ["nevus", "melanoma", "nevus"]}, "named twice"),
        ({"classes": ["nevus"]}, "only one class"),
        ({"classes": []}, "only one class"),
        ({"batch_size": 43}, "a: 42 training images are fewer than a batch of 43; .*--batch-size.*--sites.*--lenient"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, object], message: str, pack: Path) -> None:
    with pytest.raises(BadInput, match=message) as refusal:
        load(pack, **options)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_a_missing_path_a_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        load(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"neither a folder of hospitals .* nor a pack"):
        load(tmp_path / "empty")
    (tmp_path / "file").write_text("hello")
    with pytest.raises(BadInput, match="a file, not a folder"):
        load(tmp_path / "file")


def test_hospitals_beside_packs_are_refused(pack: Path, write_hospital) -> None:
    (pack / "plots").mkdir()
    assert load(pack, size=8, batch_size=4).kind == "pack"
    write_hospital(pack / "h", {"x": 3, "y": 3})
    with pytest.raises(BadInput, match=r"both hospitals and \.npz files"):
        load(pack, size=8, batch_size=4)


def test_one_class_in_training(pack: Path, write_pack) -> None:
    split = np.array([(0, 2)[label] for label in TWO], np.uint8)
    write_pack(pack / "b.npz", TWO, split=split)
    with pytest.raises(BadInput, match=r"b: all training images have the one label 'nevus'; .*--sites.*--lenient"):
        load(pack, size=8, batch_size=4)
    cohort = load(pack, size=8, batch_size=4, lenient=True)
    assert cohort.warnings == (
        "b: all training images have the one label 'nevus'",
        "b: no validation images, so the best round cannot be chosen on this site",
    )
    assert len(cohort.sites["b"].val) == 0
    assert cohort.sites["b"].val.images.shape == (0, 1, 8, 8)


def test_a_site_smaller_than_a_batch_is_a_warning_when_lenient(pack: Path) -> None:
    cohort = load(pack, size=8, batch_size=64, lenient=True)
    assert cohort.warnings == tuple(f"{site}: 42 training images are fewer than a batch of 64" for site in "ab")


@pytest.mark.parametrize(("part", "name"), [(0, "training"), (2, "test")])
def test_a_part_without_images_is_always_refused(part: int, name: str, pack: Path, write_pack) -> None:
    split = np.array([1 if row % 2 else 2 - part for row in range(60)], np.uint8)
    write_pack(pack / "b.npz", [row // 2 % 2 for row in range(60)], split=split)
    with pytest.raises(BadInput, match=f"^b: no {name} images"):
        load(pack, size=8, batch_size=4, lenient=True)


def test_a_label_at_one_site_only(pack: Path, write_pack) -> None:
    write_pack(pack / "b.npz", [0, 1, 2] * 20)
    with pytest.raises(BadInput, match=r"^b: 20 image\(s\) have the label 'keratosis', which no other site has"):
        load(pack, size=8, batch_size=4)
    assert load(pack, size=8, batch_size=4, sites=["b"]).classes == ("nevus", "melanoma", "keratosis")
    assert load(pack, size=8, batch_size=4, classes=("nevus", "melanoma")).classes == ("nevus", "melanoma")
