from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import load

THREE = [0, 1, 2] * 20


def write_manifest(folder: Path, rows: list[tuple[str, int, str]], *, column: str = "lesion_group") -> None:
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "row", column), *rows])


@pytest.fixture
def pack(tmp_path: Path, write_pack) -> Path:
    write_pack(tmp_path / "site_2017_64.npz", THREE)
    write_pack(tmp_path / "other_128.npz", THREE, colour=True)
    return tmp_path


def test_a_pack(pack: Path) -> None:
    cohort = load(pack, size=16, batch_size=8)
    assert (cohort.kind, cohort.channels, cohort.size, cohort.phantom) == ("pack", 3, 16, False)
    assert cohort.classes == ("nevus", "melanoma", "keratosis")
    assert list(cohort.sites) == ["other", "site_2017"]
    site = cohort.sites["site_2017"]
    assert [len(part) for part in (site.train, site.val, site.test)] == [42, 6, 12]
    assert site.test.ids[:2] == ("image-8", "image-9")
    assert site.test.patients == site.test.ids
    assert site.test.labels[:2].tolist() == [2, 0]


def test_values_and_order_are_the_packs_own(pack: Path) -> None:
    stored = dict(np.load(pack / "other_128.npz"))
    site = load(pack, size=16, batch_size=8).sites["other"]
    expected = stored["x"][stored["split"] == 2].transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(site.test.images.numpy(), (expected - 0.5) / 0.25, atol=1e-5)


def test_halving_takes_the_mean_of_four_pixels(pack: Path) -> None:
    stored = dict(np.load(pack / "site_2017_64.npz"))
    site = load(pack, size=8, batch_size=8, sites=["site_2017"]).sites["site_2017"]
    expected = stored["x"][stored["split"] == 1].reshape(-1, 8, 2, 8, 2).mean(axis=(2, 4)) / 255
    np.testing.assert_allclose(site.val.images[:, 0].numpy(), (expected - 0.5) / 0.25, atol=1e-5)


def test_enlarging_keeps_a_plain_image_plain(tmp_path: Path, write_pack) -> None:
    write_pack(tmp_path / "a.npz", THREE, x=np.full((60, 16, 16), 51, np.uint8))
    images = load(tmp_path, size=24, batch_size=8).sites["a"].train.images
    torch.testing.assert_close(images, torch.full((42, 1, 24, 24), (0.2 - 0.5) / 0.25))


def test_more_images_than_one_chunk(tmp_path: Path, write_pack) -> None:
    write_pack(tmp_path / "a.npz", [0, 1] * 600)
    calls: list[tuple[str, int, int]] = []
    site = load(tmp_path, size=16, progress=lambda *call: calls.append(call)).sites["a"]
    assert calls == [("a", 512, 1200), ("a", 1024, 1200), ("a", 1200, 1200)]
    stored = dict(np.load(tmp_path / "a.npz"))
    expected = stored["x"][stored["split"] == 0][-1] / 255
    np.testing.assert_allclose(site.train.images[-1, 0].numpy(), (expected - 0.5) / 0.25, atol=1e-5)


def test_classes_are_chosen_and_reindexed_in_the_order_given(pack: Path) -> None:
    cohort = load(pack, size=16, batch_size=8, classes=("keratosis", "nevus"))
    site = cohort.sites["other"]
    assert cohort.classes == site.classes == ("keratosis", "nevus")
    assert set(site.train.labels.tolist()) == {0, 1}
    for name, label in zip(site.train.ids, site.train.labels.tolist(), strict=True):
        assert int(name.removeprefix("image-")) % 3 == (2, 0)[label]


def test_a_class_without_images_is_left_out(tmp_path: Path, write_pack) -> None:
    write_pack(tmp_path / "a.npz", [0, 1] * 20)
    assert load(tmp_path, size=16, batch_size=8).classes == ("nevus", "melanoma")
    cohort = load(tmp_path, size=16, batch_size=8, classes=("nevus", "melanoma", "keratosis"))
    assert cohort.warnings == ("no image has the class 'keratosis'",)


@pytest.mark.parametrize("column", ["group", "lesion_group", "patient"])
def test_patients_come_from_the_manifest(pack: Path, column: str) -> None:
    files = ("site_2017_64.npz", "other_128.npz")
    rows = [
        (file, row, f"{file[0]}{row // 10}-{(0, 0, 0, 0, 0, 0, 0, 1, 2, 2)[row % 10]}")
        for file in files
        for row in range(60)
    ]
    write_manifest(pack, rows, column=column)
    assert load(pack, size=16, batch_size=8).sites["other"].test.patients[:3] == ("o0-2", "o0-2", "o1-2")


def test_a_manifest_without_groups_is_ignored(pack: Path) -> None:
    write_manifest(pack, [], column="source_path")
    assert load(pack, size=16, batch_size=8).sites["other"].test.patients[0] == "image-8"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("other_128.npz", 0, "p")], r"other: manifest\.csv does not list every image"),
        ([("other_128.npz", row, "p") for row in range(60)], "other: .*one patient in two splits"),
        ([("other_128.npz", "x", "p")], r"manifest\.csv: cannot be read \(ValueError\)"),
    ],
)
def test_a_wrong_manifest_is_refused(rows: list[tuple[str, int, str]], message: str, pack: Path) -> None:
    write_manifest(pack, rows)
    with pytest.raises(BadInput, match=message):
        load(pack, size=16, batch_size=8)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"split": None}, "lacks split"),
    ({"x": np.zeros((60, 16, 16), np.float32)}, "square uint8"),
    ({"x": np.zeros((60, 16, 12), np.uint8)}, "square uint8"),
    ({"x": np.zeros((60, 16, 16, 4), np.uint8)}, "square uint8"),
    ({"x": np.zeros((59, 16, 16), np.uint8)}, "do not fit its number"),
    ({"y": np.full(60, 3, np.uint8)}, "none of its classes"),
    ({"split": np.full(60, 3, np.uint8)}, "other than 0, 1 and 2"),
    ({"ids": np.array([{}] * 60, dtype=object)}, "damaged or no pack file"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG)
def test_wrong_contents_are_refused(arrays: dict[str, Any], message: str, tmp_path: Path, write_pack) -> None:
    write_pack(tmp_path / "a_64.npz", THREE, **arrays)
    with pytest.raises(BadInput, match=rf"^a: a_64\.npz .*{message}"):
        load(tmp_path, size=16, batch_size=8)


@pytest.mark.parametrize("damage", ["cut", "text", "flipped", "single array"])
def test_a_corrupt_file_is_refused(damage: str, pack: Path) -> None:
    file = pack / "other_128.npz"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "text":
        file.write_text("hello")
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    else:
        with file.open("wb") as out:
            np.save(out, np.zeros(3))
    with pytest.raises(BadInput, match=r"^other: other_128\.npz is damaged or no pack file"):
        load(pack, size=16, batch_size=8)
    assert load(pack, size=16, batch_size=8, sites=["site_2017"]).sites


def test_two_files_of_one_site_are_refused(pack: Path, write_pack) -> None:
    write_pack(pack / "other_64.npz", THREE)
    with pytest.raises(BadInput, match=r"other: both other_128\.npz and other_64\.npz"):
        load(pack, size=16, batch_size=8)


@pytest.mark.shared
def test_the_skin_pack(shared_data: Path) -> None:
    cohort = load(shared_data / "skin", classes=("nevus", "melanoma"))
    assert (cohort.kind, cohort.channels, cohort.classes) == ("pack", 3, ("nevus", "melanoma"))
    assert len(cohort.sites) == 6
    # Test melanomas as counted in the pack's own description.
    melanomas = {name: int((site.test.labels == 1).sum()) for name, site in cohort.sites.items()}
    assert [
        melanomas[name] for name in ("rosendahl", "vidir_modern", "isic_2016_2017", "vienna_dias", "ph2_porto")
    ] == [
        46,
        78,
        30,
        12,
        8,
    ]
    for site in cohort.sites.values():
        assert not set(site.train.patients) & set(site.test.patients)
        assert site.train.images.shape[1:] == (3, 32, 32)


@pytest.mark.shared
def test_the_pacs_pack(shared_data: Path) -> None:
    cohort = load(shared_data / "pacs", fraction=0.5)
    sizes = {name: (len(site.train), len(site.val), len(site.test)) for name, site in cohort.sites.items()}
    assert sum(test for _, _, test in sizes.values()) == 410 + 469 + 333 + 786
    assert 0.5 * 1433 <= sizes["art_painting"][0] < 0.5 * 1433 + 7
    assert len(cohort.classes) == 7
