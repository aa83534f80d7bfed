from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage
from tests.imaging.planted import save, small

from crossward.imaging.deidentify.burned_in import suspicion, text_letters
from crossward.imaging.dicom.film import read_image
from crossward.imaging.phantom import write_hospitals


def tissue(seed: int, shape: tuple[int, int] = (240, 220)) -> np.ndarray:
    """Smooth blobs with noise on top: no edges, no letters."""
    rng = np.random.default_rng(seed)
    blobs = ndimage.gaussian_filter(rng.normal(size=shape), 14)
    blobs = (blobs - blobs.min()) / np.ptp(blobs)
    return (700 * blobs + rng.normal(0, 12, shape) + 60).astype(np.float32)


def drawn(picture: np.ndarray, text: str, *, size: int, corner: str, smooth: bool, grey: float) -> np.ndarray:
    """Text in a corner, dark where the picture is bright there."""
    height, width = picture.shape
    mask = Image.new("L" if smooth else "1", (width, height), 0)
    pen = ImageDraw.Draw(mask)
    font = ImageFont.load_default(size)
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    x = 4 if "left" in corner else width - 4 - (right - left)
    y = 4 if "top" in corner else height - 6 - (bottom - top)
    pen.text((x - left, y - top), text, fill=255 if smooth else 1, font=font)
    ink = np.asarray(mask, dtype=np.float32)
    ink /= ink.max()
    low, high = float(picture.min()), float(picture.max())
    dark = picture[ink > 0].mean() > (low + high) / 2
    return picture * (1 - ink) + ink * (low if dark else low + grey * (high - low))


@pytest.mark.parametrize("size", [12, 16, 24, 36])
def test_text_in_a_corner_is_found_on_nearly_every_picture(size: int) -> None:
    cases = [
        (seed, corner, smooth, grey)
        for seed, corner in enumerate(("top left", "top right", "bottom left", "bottom right"))
        for smooth in (False, True)
        for grey in (1.0, 1.3)
    ]
    found = [
        text_letters(drawn(tissue(seed), "DOE JANE 57", size=size, corner=corner, smooth=smooth, grey=grey)) > 0
        for seed, corner, smooth, grey in cases
    ]
    assert sum(found) >= 15, found


def test_pictures_without_text_pass() -> None:
    assert [text_letters(tissue(seed)) for seed in range(20)] == [0] * 20


def test_phantoms_pass_and_phantoms_with_text_do_not(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "made", sites=2, patients=8, seed=5)
    films = [read_image(path).pixels for path in sorted((tmp_path / "made").rglob("*.dcm"))]
    assert sum(text_letters(film) > 0 for film in films) == 0
    marked = [drawn(film, "DOE JANE", size=16, corner="top left", smooth=True, grey=1.0) for film in films]
    assert sum(text_letters(film) > 0 for film in marked) >= 0.9 * len(films)


@pytest.mark.parametrize("text", ["L", "R", "PA"])
def test_a_marker_of_the_side_is_no_text(text: str) -> None:
    assert text_letters(drawn(tissue(1), text, size=24, corner="top left", smooth=True, grey=1.3)) == 0


@pytest.mark.parametrize("picture", [np.zeros((40, 40)), np.full((9, 9), 5.0), np.full((30, 30), np.nan)])
def test_pictures_without_content_are_no_trouble(picture: np.ndarray) -> None:
    assert text_letters(picture.astype(np.float32)) == 0


@pytest.mark.parametrize(
    ("tags", "said", "kind"),
    [
        ({"BurnedInAnnotation": "NO"}, False, False),
        ({"BurnedInAnnotation": "YES"}, True, False),
        ({"BurnedInAnnotation": "NO", "Modality": "US"}, False, False),
        ({"BurnedInAnnotation": "", "Modality": "US"}, False, True),
        ({"BurnedInAnnotation": "", "Modality": "CT"}, False, False),
        ({"BurnedInAnnotation": "MAYBE", "Modality": "OT"}, False, True),
        ({"BurnedInAnnotation": "", "ConversionType": "WSD"}, False, True),
        ({"BurnedInAnnotation": "", "ImageType": ["DERIVED", "SECONDARY", "SCREEN SAVE"]}, False, True),
        ({"BurnedInAnnotation": "", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"}, False, True),
        ({"BurnedInAnnotation": "", "ImageType": "PRIMARY"}, False, False),
    ],
)
def test_what_the_header_says(tmp_path: Path, tags: dict[str, object], said: bool, kind: bool) -> None:
    dataset = small(1, **tags)
    found = suspicion(save(dataset, tmp_path / "x.dcm"), dataset)
    assert (found.said, found.kind, found.letters) == (said, kind, 0)
    assert bool(found) is (said or kind)


def test_text_in_a_later_frame_is_seen(tmp_path: Path) -> None:
    frames = np.stack([tissue(0), tissue(1), drawn(tissue(2), "DOE JANE", size=16, corner="top left", smooth=True,
                                                    grey=1.0)])  # fmt: skip
    scaled = (frames / frames.max() * 255).astype(np.uint8)
    dataset = small(1, pixels=scaled[0], NumberOfFrames=3, PixelData=scaled.tobytes())
    found = suspicion(save(dataset, tmp_path / "x.dcm"), dataset)
    assert found.letters >= 4
    assert "letter-like shapes" in found.words
