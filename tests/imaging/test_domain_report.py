from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from crossward.federation.errors import StorageFailure
from crossward.imaging.transforms.report import PAGE, SHEET, Domain, Sample, domain_report
from crossward.imaging.transforms.statistics import DomainStatistics, Tally, measure, measure_picture


def field(length: float, *, side: int = 256, seed: int = 0) -> np.ndarray:
    """A random picture whose autocorrelation is a Gaussian of this length."""
    white = np.random.default_rng(seed).standard_normal((side, side))
    return gaussian_filter(white, length / np.sqrt(2), mode="wrap").astype(np.float32)


@pytest.mark.parametrize("value", [0.0, 0.004, 0.5, 1.0, -1.0, 37.0, -1024.0, 65535.0, 4e9])
def test_a_quantile_is_within_a_hundredth(value: float) -> None:
    tally = Tally()
    tally.add(np.full(9, value))
    assert tally.quantile(0.5) == pytest.approx(value, rel=0.005, abs=1e-6)


def test_quantiles_of_known_numbers() -> None:
    tally = Tally()
    tally.add(np.arange(1, 1001, dtype=np.float64))
    for part in (0.05, 0.25, 0.5, 0.95):
        assert tally.quantile(part) == pytest.approx(1000 * part, rel=0.01)
    assert tally.quantile(0) == pytest.approx(1, rel=0.01)
    assert tally.quantile(1) == pytest.approx(1000, rel=0.01)
    assert Tally().quantile(0.5) is None


def test_figures_of_a_picture_by_hand() -> None:
    columns = np.tile(np.arange(64, dtype=np.float32), (64, 1))
    figures = measure(columns + 100, spacing=(0.5, 0.25)).figures
    deviation = np.sqrt((64**2 - 1) / 12)
    assert figures["mean"] == pytest.approx(131.5)
    assert figures["contrast"] == pytest.approx(deviation)
    # One grey from column to column, none from row to row.
    assert figures["sharpness"] == pytest.approx(1 / deviation)
    assert figures["noise"] == 0
    assert figures["shading"] == pytest.approx(deviation / 131.5)
    assert (figures["row_mm"], figures["column_mm"]) == (0.5, 0.25)


@pytest.mark.parametrize("length", [4.0, 8.0])
def test_sharpness_tells_the_length_of_a_pictures_structure(length: float) -> None:
    assert measure(field(length)).figures["sharpness"] == pytest.approx(np.sqrt(2) / length, rel=0.08)


def test_blur_changes_sharpness_as_the_augmentation_reckons() -> None:
    sharp = field(4.0)
    soft = gaussian_filter(sharp, 2.0, mode="wrap")
    before, after = (measure(picture).figures["sharpness"] for picture in (sharp, soft))
    assert np.sqrt(1 / after**2 - 1 / before**2) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_noise_is_found_on_a_smooth_picture(spread: float) -> None:
    grain = spread * np.random.default_rng(1).standard_normal((256, 256))
    picture = (200 * field(20.0) + grain).astype(np.float32)
    assert measure(picture).figures["noise"] == pytest.approx(spread, rel=0.05)


def test_saturated_parts_do_not_hide_noise() -> None:
    picture = (50 + np.random.default_rng(2).standard_normal((128, 128))).astype(np.float32)
    picture[:, :80] = 99
    assert measure(picture).figures["noise"] == pytest.approx(1, rel=0.1)


def test_padding_and_margins_do_not_count() -> None:
    picture, valid = field(4.0, side=64), np.ones((64, 64), bool)
    valid[:, :16] = False
    spoiled = picture.copy()
    spoiled[:, :16] = 1e6
    wanted = measure(picture, valid=valid)
    assert measure(spoiled, valid=valid) == wanted
    assert wanted.figures["mean"] == pytest.approx(picture[:, 16:].mean(), abs=1e-6)
    square = np.zeros((1, 8, 8), np.float32)
    square[0, 2:6] = 0.5
    assert measure_picture(square).figures["mean"] == 0.5
    assert measure_picture(np.zeros((3, 8, 8), np.float32)).figures["mean"] == 0


def test_statistics_add_up_in_any_order_and_travel_as_json() -> None:
    pictures = [field(4.0, side=32, seed=seed) for seed in range(4)]
    whole, parts, backwards = DomainStatistics(), [DomainStatistics(), DomainStatistics()], DomainStatistics()
    for place, picture in enumerate(pictures):
        whole.add(picture, spacing=(1.0, 1.0))
        parts[place % 2].add(picture, spacing=(1.0, 1.0))
    for picture in reversed(pictures):
        backwards.add(picture, spacing=(1.0, 1.0))
    parts[0].merge(parts[1])
    assert whole.images == 4
    assert whole.pixels.total == 4 * 32 * 32
    assert whole.as_json() == parts[0].as_json() == backwards.as_json()
    again = DomainStatistics.from_json(json.loads(json.dumps(whole.as_json())))
    assert again.as_json() == whole.as_json()


def domain(seed: int, *, images: int = 3, colour: bool = False) -> Domain:
    before, after, samples = DomainStatistics(), DomainStatistics(), []
    for number in range(images):
        values = 1000 + 400 * field(4.0, side=40, seed=10 * seed + number)
        picture = np.clip((values - values.min()) / np.ptp(values), 0, 1)[None]
        if colour:
            values, picture = np.stack([picture[0]] * 3, axis=-1), np.repeat(picture, 3, axis=0)
        before.add(values.astype(np.float32), spacing=(0.2, 0.2))
        after.take(measure_picture(picture))
        samples.append(Sample(values.astype(np.float32), picture))
    return Domain(before, after, samples)


def test_the_report_is_one_private_file_without_anything_from_elsewhere(tmp_path: Path) -> None:
    odd = 'Maker <script>alert(1)</script> & "$x_$" _1'
    page = domain_report(tmp_path / "report", {"Other": domain(1), odd: domain(2, colour=True)})
    text = page.read_text(encoding="utf-8")
    assert page == tmp_path / "report" / PAGE
    assert sorted(path.name for path in page.parent.iterdir()) == [PAGE, SHEET]
    assert {path.stat().st_mode & 0o777 for path in page.parent.iterdir()} == {0o600}
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert set(re.findall(r'(?:src|href)="([^",]*)', text)) == {"data:image/png;base64"}
    assert len(re.findall("<img ", text)) == len(re.findall('alt="[^"]', text)) == 3
    assert "http" not in text.replace("http-equiv", "")
    # A row per figure and domain: seven before and after, the last two of them empty after.
    assert len(re.findall("<tr><td>", text)) == 14
    assert "3 training images" in text
    # The other domain's images have a mean of about 1000.
    assert re.search(r"<td>mean</td><td>(9\d\d|10\d\d)</td>", text)
    assert "e+03" not in re.sub('base64,[^"]*', "", text)
    with Image.open(page.parent / SHEET) as sheet:
        assert sheet.width == 1100
        assert np.asarray(sheet.convert("L")).std() > 10


def test_domains_with_one_image_or_none_are_shown_too(tmp_path: Path) -> None:
    flat = DomainStatistics()
    flat.add(np.ones((8, 8), np.float32))
    sample = Sample(np.ones((8, 8), np.float32), np.zeros((1, 4, 4), np.float32))
    text = domain_report(
        tmp_path, {"empty": Domain(DomainStatistics(), DomainStatistics()), "flat": Domain(flat, flat, [sample])}
    ).read_text(encoding="utf-8")
    assert "<h2>empty</h2><p>0 training images" in text
    assert "<h2>flat</h2><p>1 training images" in text
    assert "nan" not in text.split("base64")[0]
    assert domain_report(tmp_path / "none", {}).is_file()


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageFailure):
        domain_report(tmp_path / "file", {"one": domain(3)})
