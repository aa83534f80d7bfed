from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from crossward.imaging.dicom.scans import Table, Window
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.transforms.standardise import (
    Histogram,
    Mean,
    air,
    between,
    bright,
    histogram,
    landmarks_of,
    nyul,
    otsu,
    percentile,
    shares_of,
    through_table,
    windowed,
    zscore,
)

SAMPLES = arrays.arrays(
    np.float32, st.integers(2, 60), elements=st.floats(-30000, 30000, width=32, allow_subnormal=False)
)


def row(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


def test_the_linear_window_of_the_standard() -> None:
    # PS3.3 C.11.2.1.2.1, example: c = 2048, w = 4096 maps x <= 0 to the bottom, x > 4095 to the top, else x / 4095.
    unit = windowed(row(-5, 0, 1, 819, 4095, 4096), Window(2048, 4096))
    np.testing.assert_allclose(unit, [0, 0, 1 / 4095, 0.2, 1, 1], atol=1e-7)
    # Another example there: c = 0, w = 100: ((x + 0.5) / 99 + 0.5).
    unit = windowed(row(-50, -20, 0, 49, 50), Window(0, 100))
    np.testing.assert_allclose(unit, [0, -19.5 / 99 + 0.5, 0.5 / 99 + 0.5, 1, 1], atol=1e-7)
    # Width 1 is a threshold: c = 2048 parts 2047 and 2048.
    assert windowed(row(2047, 2047.5, 2048), Window(2048, 1)).tolist() == [0, 0, 1]


def test_the_exact_and_the_sigmoid_window() -> None:
    assert windowed(row(-60, -50, -25, 0, 50, 51), Window(0, 100, "LINEAR_EXACT")).tolist() == [0, 0, 0.25, 0.5, 1, 1]
    unit = windowed(row(-1e30, 0, 25, 1e30), Window(0, 100, "SIGMOID"))
    np.testing.assert_allclose(unit, [0, 0.5, 1 / (1 + np.exp(-1)), 1], atol=1e-7)


@pytest.mark.parametrize(
    "window", [Window(0, 0.5), Window(0, 0), Window(0, -3, "SIGMOID"), Window(0, 0, "LINEAR_EXACT"), Window(np.nan, 9)]
)
def test_a_window_without_a_width_is_refused(window: Window) -> None:
    with pytest.raises(Refused) as refused:
        windowed(row(0, 1), window)
    assert refused.value.reason is Reason.RESCALE


def test_a_table_takes_its_nearest_end_outside() -> None:
    table = Table(10, row(0, 0.5, 0.25, 1))
    assert through_table(row(-99, 10, 11, 12, 13, 14, 1e6), table).tolist() == [0, 0, 0.5, 0.25, 1, 1, 1]


def test_percentiles_by_hand() -> None:
    sample = np.arange(101, dtype=np.float32)
    unit = percentile(row(5, 10, 50, 90, 95), sample, low=10, high=90)
    np.testing.assert_allclose(unit, [0, 0, 0.5, 1, 1], atol=1e-7)


def test_zscores_by_hand() -> None:
    # Mean 5, standard deviation 2; two of them to each side are 1 to 9.
    sample = row(2, 4, 4, 4, 5, 5, 7, 9)
    np.testing.assert_allclose(zscore(row(0, 1, 5, 7, 9, 10), sample, spread=2), [0, 0, 0.5, 0.75, 1, 1], atol=1e-7)


def test_otsu_lies_between_two_groups() -> None:
    rng = np.random.default_rng(0)
    sample = np.concatenate([rng.normal(10, 2, 4000), rng.normal(60, 5, 1000)]).astype(np.float32)
    assert 20 < otsu(sample) < 45
    # Only two greys: the middle of the gap.
    assert otsu(row(0, 0, 0, 1)) == pytest.approx(0.5)


def test_a_few_very_bright_pixels_do_not_make_the_body_air() -> None:
    rng = np.random.default_rng(1)
    background, body, metal = rng.exponential(4, 7000), rng.normal(200, 30, 2900), np.full(100, 6000.0)
    sample = np.concatenate([background, body, metal]).astype(np.float32)
    assert otsu(sample) > 1000
    assert np.percentile(background, 99) < air(sample) < 130
    assert len(bright(sample)) == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize("rule", [otsu, air, lambda sample: percentile(sample, sample, low=1, high=99)])
def test_pixels_that_are_all_alike_are_refused(rule) -> None:
    with pytest.raises(Refused) as refused:
        rule(row(7, 7, 7))
    assert refused.value.reason is Reason.TRANSFORM


def test_landmarks_and_their_scale_by_hand() -> None:
    marks = (0, 50, 100)
    # Images 0, 1, 4 and 0, 3, 4: their middles lie at 1/4 and 3/4, so the standard scale's is at 1/2.
    mean = Mean()
    for image in (row(0, 1, 4), row(0, 3, 4)):
        mean.take(landmarks_of(image, marks))
    assert mean.value() == (0, 0.5, 1)
    # In the first image 1 goes to 1/2, and 2 a third of the way from there to 1.
    unit = nyul(row(0, 0.5, 1, 2, 4, 9), row(0, 1, 4), percentiles=marks, scale=mean.value())
    np.testing.assert_allclose(unit, [0, 0.25, 0.5, 2 / 3, 1, 1], atol=1e-7)


def test_scanners_that_differ_by_gain_and_offset_become_the_same() -> None:
    rng = np.random.default_rng(2)
    percentiles = (1, 10, 25, 50, 75, 90, 99)
    first = [rng.gamma(2, 100, 500).astype(np.float32).round() for _ in range(5)]
    # A power of two and a whole number, so that the second scanner's values are exact.
    second = [4 * image - 1000 for image in first]
    scales = []
    for images in (first, second):
        mean = Mean()
        for image in images:
            mean.take(landmarks_of(image, percentiles))
        scales.append(mean.value())
    np.testing.assert_allclose(scales[0], scales[1], rtol=1e-12)
    for one, other in zip(first, second, strict=True):
        mapped = [
            nyul(image, image, percentiles=percentiles, scale=scale)
            for image, scale in zip((one, other), scales, strict=True)
        ]
        np.testing.assert_allclose(mapped[0], mapped[1], atol=1e-6)
        landmarks = np.percentile(one.astype(np.float64), percentiles)
        at_landmarks = nyul(landmarks, one, percentiles=percentiles, scale=scales[0])
        np.testing.assert_allclose(at_landmarks, scales[0], atol=1e-6)


def test_air_stays_dark_where_landmarks_fall_together() -> None:
    image = row(*[0] * 60, *range(1, 41))
    unit = nyul(image, image, percentiles=(1, 25, 50, 75, 99), scale=(0, 0.25, 0.5, 0.75, 1))
    assert (unit[:60] == 0).all()
    assert (np.diff(unit[60:]) >= 0).all()
    assert unit[-1] == 1


def test_a_mean_does_not_depend_on_the_order() -> None:
    vectors = [np.array([1e16]), np.array([1.0]), np.array([-1e16]), np.array([3.0])]
    results = set()
    for order in itertools.permutations(vectors):
        mean = Mean()
        for vector in order:
            mean.take(vector)
        results.add(mean.value())
    # Floating-point sums would lose the 1 in some orders.
    assert results == {(1.0,)}


def fitted_knots(images: list[np.ndarray], bins: int) -> tuple[float, ...]:
    gathered = Histogram()
    for image in images:
        gathered.take(shares_of(image))
    return gathered.knots(bins)


def test_a_domains_histogram_becomes_flat() -> None:
    images = [np.random.default_rng(seed).beta(2, 5, 20000).astype(np.float32) for seed in range(3)]
    knots = fitted_knots(images, 64)
    flat = np.concatenate([histogram(image, knots=knots) for image in images])
    counts = np.histogram(flat, 10, range=(0, 1))[0]
    assert counts.min() > 0.95 * len(flat) / 10
    assert counts.max() < 1.05 * len(flat) / 10


def test_scanners_that_differ_by_any_tone_curve_become_the_same() -> None:
    first = [np.random.default_rng(seed).random(5000).astype(np.float32) for seed in range(3)]
    second = [image**3 for image in first]
    for one, other in zip(first, second, strict=True):
        unit = [histogram(image, knots=fitted_knots(images, 512)) for image, images in ((one, first), (other, second))]
        # Cubed greys near 0 share one of the 65536 levels, so the darkest 3 % are coarser.
        seen = one > 0.03
        np.testing.assert_allclose(unit[0][seen], unit[1][seen], atol=0.01)


def test_a_large_image_counts_no_more_than_a_small_one() -> None:
    knots = fitted_knots([np.full(10, 0.25, np.float32), np.full(100_000, 0.75, np.float32)], 4)
    assert knots == pytest.approx((0.25, 0.25, 0.25, 0.75, 0.75), abs=1e-5)


@given(SAMPLES, SAMPLES)
def test_maps_are_monotone_finite_and_within_the_unit(sample: np.ndarray, values: np.ndarray) -> None:
    values = np.sort(values)
    unit = between(sample, -30000, 30000)
    marks = (0, 30, 60, 100)
    maps = {
        "percentile": lambda: percentile(values, sample, low=2, high=98),
        "zscore": lambda: zscore(values, sample, spread=3),
        "nyul": lambda: nyul(values, sample, percentiles=marks, scale=(0, 0.1, 0.6, 1)),
        "histogram": lambda: histogram(between(values, -30000, 30000), knots=fitted_knots([unit], 16)),
        "window": lambda: windowed(values, Window(20, 300)),
        "sigmoid": lambda: windowed(values, Window(20, 300, "SIGMOID")),
    }
    for name, apply in maps.items():
        try:
            mapped = apply()
        except Refused:
            assert name not in ("window", "sigmoid")
            continue
        assert np.isfinite(mapped).all(), name
        assert mapped.dtype == np.float32, name
        assert mapped.min() >= 0, name
        assert mapped.max() <= 1, name
        assert (np.diff(mapped) >= 0).all(), name
