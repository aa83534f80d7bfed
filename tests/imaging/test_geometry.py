from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from crossward.imaging import folder
from crossward.imaging.dicom.film import Film
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.transforms.geometry import body_box, fit_square, luminance, middle_square, resample


def everywhere(values: np.ndarray, axes: int = 2) -> np.ndarray:
    return np.ones(values.shape[:axes], dtype=bool)


def ramp(*shape: int) -> np.ndarray:
    """Every pixel's number along the last axis."""
    return np.broadcast_to(np.arange(shape[-1], dtype=np.float32), shape).copy()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((100, 77), 32),
        ((32, 32), 32),
        ((20, 11), 32),
        ((65, 64), 64),
        ((333, 500), 40),
        ((50, 41, 3), 16),
        ((1, 20), 32),
    ],
)
def test_the_fit_is_that_of_a_folder_without_rules(shape: tuple[int, ...], size: int) -> None:
    values = np.random.default_rng(0).random(shape, dtype=np.float32)
    wanted = folder.fit_square(size)(Film(values, "", "", None, 8, "")).numpy()
    fitted = np.atleast_3d(fit_square(values, size)).transpose(2, 0, 1)
    np.testing.assert_allclose(fitted, wanted, atol=1e-6)


def test_a_fitted_picture_by_hand() -> None:
    fitted = fit_square(np.array([[0.0, 0.2, 0.4, 1.0], [0.2, 0.0, 0.6, 0.0]], dtype=np.float32), 2)
    # 2 x 4 to 1 x 2, each of the mean of four; the spare row is dark and below.
    np.testing.assert_allclose(fitted, [[0.1, 0.5], [0, 0]], atol=1e-7)


def test_a_strip_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        fit_square(np.zeros((2, 65), dtype=np.float32), 32)
    assert refused.value.reason is Reason.TOO_NARROW
    assert fit_square(np.ones((2, 64), dtype=np.float32), 32).sum() == 32


def test_half_the_spacing_of_a_ramp() -> None:
    values, valid = resample(ramp(4, 8), np.ones((4, 8), bool), (1, 1), (1, 0.5))
    # Centres lie at -1/4, 1/4, 3/4, ...; beyond the border the border's value counts.
    wanted = np.clip((np.arange(16) + 0.5) / 2 - 0.5, 0, 7)
    np.testing.assert_array_equal(values, np.tile(wanted.astype(np.float32), (4, 1)))
    assert valid.shape == (4, 16)
    assert valid.all()


def test_twice_and_three_times_the_spacing_of_a_ramp() -> None:
    row = ramp(1, 8)
    assert resample(row, everywhere(row), (1, 1), (1, 2))[0].tolist() == [[0.5, 2.5, 4.5, 6.5]]
    # The last pixel reaches beyond the picture: only what is there counts.
    np.testing.assert_allclose(resample(row, everywhere(row), (1, 1), (1, 3))[0], [[1, 4, 6.5]], atol=1e-6)
    # A pixel and a half: (0 + 1/2 · 1) / 1.5, (1/2 · 1 + 2) / 1.5, ...
    np.testing.assert_allclose(
        resample(ramp(1, 6), np.ones((1, 6), bool), (1, 1), (1, 1.5))[0], [[1 / 3, 5 / 3, 10 / 3, 14 / 3]], atol=1e-6
    )


def test_without_anti_aliasing_a_pixel_is_read_at_its_centre() -> None:
    stripes = (ramp(1, 12) % 2).astype(np.float32)
    averaged = resample(stripes, everywhere(stripes), (1, 1), (1, 3))[0]
    plain = resample(stripes, everywhere(stripes), (1, 1), (1, 3), anti_alias=False)[0]
    np.testing.assert_allclose(averaged, [[1 / 3, 2 / 3, 1 / 3, 2 / 3]], atol=1e-6)
    assert plain.tolist() == [[1, 0, 1, 0]]


def test_a_volume_is_resampled_along_every_axis() -> None:
    volume = np.random.default_rng(1).random((5, 6, 7)).astype(np.float32)
    values, valid = resample(volume, everywhere(volume, 3), (2.0, 1.0, 1.5), (1.0, 0.5, 1.5))
    assert values.shape == valid.shape == (10, 12, 7)
    places = np.meshgrid((np.arange(10) + 0.5) / 2 - 0.5, (np.arange(12) + 0.5) / 2 - 0.5, np.arange(7), indexing="ij")
    np.testing.assert_allclose(values, map_coordinates(volume, places, order=1, mode="nearest"), atol=1e-6)


def test_colours_are_resampled_one_by_one() -> None:
    picture = np.random.default_rng(2).random((6, 6, 3)).astype(np.float32)
    values, _ = resample(picture, everywhere(picture), (1, 1), (2, 2))
    for colour in range(3):
        alone, _ = resample(picture[..., colour], everywhere(picture), (1, 1), (2, 2))
        np.testing.assert_array_equal(values[..., colour], alone)


def test_a_new_pixel_is_valid_where_half_of_it_is() -> None:
    valid = np.array([[True, True, True, False, False, False, False, True]])
    _, kept = resample(ramp(1, 8), valid, (1, 1), (1, 2))
    assert kept.tolist() == [[True, True, False, True]]


@pytest.mark.parametrize(
    ("spacing", "wanted", "reason"),
    [
        (None, (1, 1), Reason.GEOMETRY),
        ((0.0, 1.0), (1, 1), Reason.GEOMETRY),
        ((float("nan"), 1.0), (1, 1), Reason.GEOMETRY),
        ((-1.0, 1.0), (1, 1), Reason.GEOMETRY),
        ((1e308, 1e308), (0.01, 0.01), Reason.TOO_LARGE),
        ((5000.0, 5000.0), (0.01, 0.01), Reason.TOO_LARGE),
        ((1e-300, 1.0), (1, 1), Reason.TRANSFORM),
    ],
)
def test_a_spacing_that_makes_no_sense_is_refused(spacing: object, wanted: tuple[float, float], reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        resample(ramp(4, 8), np.ones((4, 8), bool), spacing, wanted)
    assert refused.value.reason is reason


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0.2, 5),
    st.floats(0.2, 5),
    st.booleans(),
    st.integers(0, 99),
)
def test_resampling_stays_within_the_values(
    height: int, width: int, down: float, across: float, anti_alias: bool, seed: int
) -> None:
    values = np.random.default_rng(seed).random((height, width), dtype=np.float32)
    shape = (round(height / down), round(width / across))
    if 0 in shape:
        with pytest.raises(Refused, match="leaves no pixel"):
            resample(values, everywhere(values), (1, 1), (down, across), anti_alias=anti_alias)
        return
    result, valid = resample(values, everywhere(values), (1, 1), (down, across), anti_alias=anti_alias)
    assert result.shape == shape
    assert valid.all()
    assert values.min() - 1e-5 <= result.min()
    assert result.max() <= values.max() + 1e-5


def disc(shape: tuple[int, int], middle: tuple[int, int], radius: float) -> np.ndarray:
    rows, columns = np.indices(shape)
    return np.hypot(rows - middle[0], columns - middle[1]) <= radius


def test_the_crop_keeps_the_body_and_drops_a_marker() -> None:
    body = disc((100, 120), (50, 70), 20)
    picture = body * np.float32(5) + disc((100, 120), (8, 8), 3) * np.float32(9)
    box = body_box(picture, everywhere(picture), threshold=1, margin=0)
    assert box == (slice(30, 71), slice(50, 91))
    # A tenth of 41 pixels, on every side.
    assert body_box(picture, everywhere(picture), threshold=1, margin=0.1) == (slice(26, 75), slice(46, 95))
    assert body_box(picture, everywhere(picture), threshold=1, margin=1) == (slice(0, 100), slice(9, 120))


def test_two_legs_are_one_body() -> None:
    picture = (disc((60, 100), (30, 25), 15) | disc((60, 100), (30, 75), 12)).astype(np.float32)
    assert body_box(picture, everywhere(picture), threshold=0.5, margin=0) == (slice(15, 46), slice(10, 88))


def test_bright_padding_is_no_body() -> None:
    body = disc((80, 80), (40, 30), 10)
    picture = body.astype(np.float32)
    valid = everywhere(picture)
    picture[:, 60:], valid[:, 60:] = 7, False
    assert body_box(picture, valid, threshold=0.5, margin=0) == (slice(30, 51), slice(20, 41))


def test_nothing_and_next_to_nothing_is_no_body() -> None:
    dust = np.zeros((100, 100), dtype=np.float32)
    with pytest.raises(Refused, match="no body"):
        body_box(dust, everywhere(dust), threshold=0.5, margin=0)
    dust[3:6, 3:6] = 1
    with pytest.raises(Refused, match="no body"):
        body_box(dust, everywhere(dust), threshold=0.5, margin=0)


def test_the_middle_square() -> None:
    assert middle_square(np.ones((10, 7), bool)) == (slice(1, 8), slice(0, 7))
    assert middle_square(np.ones((4, 7, 5), bool)) == (slice(0, 4), slice(1, 5), slice(0, 4))


def test_luminance_of_the_three_colours() -> None:
    np.testing.assert_allclose(luminance(np.eye(3, dtype=np.float32)[None], 2), [[0.299, 0.587, 0.114]])
