from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging import sheet
from crossward.imaging.anatomy import CLASSES
from crossward.imaging.dicom.film import Film, read_image
from crossward.imaging.phantom import write_hospitals
from crossward.imaging.sheet import contact_sheet
from crossward.imaging.spoiled import KINDS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sheet") / "all"
    write_hospitals(out, sites=2, patients=4, unseen=True, spoiled=True)
    return out


def test_a_sheet_is_a_png_that_says_it_is_drawn(made: Path, tmp_path: Path) -> None:
    out = contact_sheet(made, tmp_path / "sheet.png", per_class=2)
    picture = Image.open(out)
    assert picture.format == "PNG"
    assert "Computer-drawn phantoms" in picture.info["Description"]
    # Four sets below each other, eight films across.
    assert picture.height > 4 * sheet.TILE
    assert picture.width > 8 * sheet.TILE


def test_every_set_has_its_classes_and_names_its_scanner(made: Path) -> None:
    rng = np.random.default_rng(0)
    picture, title, classes = sheet._strip(made / "hospital-b" / "labels.csv", 3, rng)
    assert title == "hospital-b: Phantomworks Bedside 7 (computer-drawn phantoms)"
    assert classes == sorted(CLASSES)
    assert picture.shape == (sheet.TILE, 12 * (sheet.TILE + 2 * sheet.GAP))
    assert sheet._strip(made / "held-out" / "spoiled" / "labels.csv", 1, rng)[2] == sorted(KINDS)


def test_a_film_keeps_its_shape_on_its_tile() -> None:
    wide = Film(np.zeros((50, 100), dtype=np.float32), "", "", None, 8, "MONOCHROME2")
    dark = sheet._tile(wide) < 0.5
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    assert (len(rows), len(columns)) == (sheet.TILE // 2, sheet.TILE)
    assert not (sheet._tile(None) < 1).any()


def test_spoiled_films_are_spoiled(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "out", sites=1, patients=24, seed=2, spoiled=True)
    spoiled = tmp_path / "out" / "held-out" / "spoiled"
    lines = (spoiled / "labels.csv").read_text(encoding="utf-8").splitlines()[1:]
    films: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    for file, _, kind in (line.split(",") for line in lines):
        films[kind].append(read_image(spoiled / file).pixels)
    usual = tmp_path / "out" / "hospital-a"
    names = [line.split(",")[0] for line in (usual / "labels.csv").read_text(encoding="utf-8").splitlines()[1:]]
    mean = np.mean([read_image(usual / name).pixels for name in names], axis=0)

    def likeness(film: np.ndarray) -> float:
        return float(np.corrcoef(film.ravel(), mean.ravel())[0, 1])

    def sharpness(film: np.ndarray) -> float:
        return float(np.abs(np.diff(film, axis=0)).max())

    assert all(likeness(film) < -0.7 for film in films["inverted"])
    assert all(abs(likeness(film)) < 0.6 for film in films["wrong-anatomy"] + films["empty"])
    assert all(sharpness(film) < 0.05 for film in films["blurred"])
    assert all(sharpness(read_image(usual / name).pixels) > 0.1 for name in names)
    assert all(film[10:-10, 10:-40].std() < 0.1 for film in films["empty"])


def test_what_cannot_be_shown_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no made-up hospitals"):
        contact_sheet(tmp_path, tmp_path / "sheet.png")
    with pytest.raises(BadInput, match="choose 1 or more"):
        contact_sheet(made, tmp_path / "sheet.png", per_class=0)
    with pytest.raises(StorageFailure, match="cannot be written"):
        contact_sheet(made, tmp_path / "no such folder" / "sheet.png", per_class=1)
