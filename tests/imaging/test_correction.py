from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.transforms.correction import bias_field, denoise

SIDE = 192


def grid() -> tuple[np.ndarray, np.ndarray]:
    middles = (2 * np.arange(SIDE) + 1) / SIDE - 1
    down, across = np.meshgrid(middles, middles, indexing="ij")
    return down, across


def head() -> np.ndarray:
    """Two tissues, a dark ventricle off the middle, and air."""
    down, across = grid()
    radius = np.hypot(down, across)
    return (
        np.where(radius < 0.85, 400.0, 0)
        + np.where(radius < 0.5, 300.0, 0)
        - 300.0 * (np.hypot(down, across - 0.3) < 0.12)
    )


def shading() -> np.ndarray:
    down, across = grid()
    return np.exp(0.5 * across - 0.3 * down + 0.35 * (across**2 - 0.3) + 0.2 * down * across)


def unevenness(picture: np.ndarray) -> list[float]:
    """Standard deviation over mean within each tissue."""
    down, across = grid()
    radius = np.hypot(down, across)
    outer = (radius > 0.55) & (radius < 0.8)
    inner = (radius < 0.45) & (np.hypot(down, across - 0.3) > 0.17)
    return [float(picture[tissue].std() / picture[tissue].mean()) for tissue in (outer, inner)]


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_known_field_is_flattened(noise: float) -> None:
    seen = head() * shading() + noise * np.random.default_rng(0).standard_normal((SIDE, SIDE))
    seen = np.abs(seen).astype(np.float32)
    field = bias_field(seen, np.ones(seen.shape, bool), order=3)
    before, after = unevenness(seen), unevenness(seen / field)
    assert before[0] > 0.25
    assert before[1] > 0.1
    for tissue in (0, 1):
        assert after[tissue] < before[tissue] / (7 if noise else 15)
    # Tissues keep their ratio, 700 to 400.
    down, across = grid()
    flat, radius = seen / field, np.hypot(down, across)
    ratio = np.median(flat[(radius < 0.45) & (across < 0)]) / np.median(flat[(radius > 0.55) & (radius < 0.8)])
    assert ratio == pytest.approx(7 / 4, rel=0.03)


def test_a_picture_without_a_field_stays_as_it_is() -> None:
    seen = gaussian_filter(head(), 1.0)
    seen = np.abs(seen + 5 * np.random.default_rng(1).standard_normal(seen.shape)).astype(np.float32)
    field = bias_field(seen, np.ones(seen.shape, bool), order=3)
    body = seen > 100
    assert field[body].min() > 0.97
    assert field[body].max() < 1.03


def test_the_soft_border_of_a_small_body_is_no_field() -> None:
    rows, columns = np.indices((64, 64)) - 31.5
    seen = gaussian_filter(np.where(np.hypot(rows, columns) < 12, 500.0, 0), 1.5)
    seen = np.abs(seen + 5 * np.random.default_rng(0).standard_normal(seen.shape)).astype(np.float32)
    field = bias_field(seen, np.ones(seen.shape, bool), order=3)
    assert np.ptp(field[np.hypot(rows, columns) < 10]) < 0.25


def test_the_field_does_not_depend_on_the_units_or_on_padding() -> None:
    seen = (head() * shading()).astype(np.float32)
    valid = np.ones(seen.shape, bool)
    field = bias_field(seen, valid, order=2)
    np.testing.assert_allclose(bias_field(seen * 8, valid, order=2), field, rtol=1e-5)
    valid[:, :8] = False
    padded = seen.copy()
    padded[:, :8] = 0
    spoiled = seen.copy()
    spoiled[:, :8] = 30000
    np.testing.assert_allclose(bias_field(spoiled, valid, order=2), bias_field(padded, valid, order=2), rtol=0.02)


def test_negative_values_are_no_magnitude() -> None:
    with pytest.raises(Refused) as refused:
        bias_field((head() - 100).astype(np.float32), np.ones((SIDE, SIDE), bool), order=3)
    assert refused.value.reason is Reason.TRANSFORM


def test_a_few_pixels_of_body_are_too_little() -> None:
    picture = np.zeros((64, 64), np.float32)
    picture[30:34, 30:34] = 100
    with pytest.raises(Refused, match="too little body"):
        bias_field(picture, np.ones(picture.shape, bool), order=3)


def test_a_median_takes_out_a_single_pixel_and_keeps_an_edge() -> None:
    edge = np.zeros((9, 9), np.float32)
    edge[:, 5:] = 10
    spoiled = edge.copy()
    spoiled[4, 2] = 99
    np.testing.assert_array_equal(denoise(spoiled, by="median", pixels=1.0), edge)


def test_a_gaussian_keeps_the_sum_and_treats_colours_one_by_one() -> None:
    dot = np.zeros((21, 21, 3), np.float32)
    dot[10, 10, 1] = 1
    smooth = denoise(dot, by="gaussian", pixels=1.0)
    assert smooth[..., 1].sum() == pytest.approx(1, abs=1e-5)
    assert smooth[10, 10, 1] == pytest.approx(1 / (2 * np.pi), rel=0.01)
    assert not smooth[..., [0, 2]].any()
