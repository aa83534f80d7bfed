from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from crossward.imaging.anatomy import CLASSES, draw_chest, draw_finding, draw_person
from crossward.imaging.scanner import take_film
from crossward.imaging.scanner_profiles import HOSPITAL_SCANNERS
from crossward.imaging.skew import GLOBAL_NUMBERS, global_numbers, linear_accuracy, match_histogram


def test_global_numbers_by_hand() -> None:
    # Three rows of 0, 1, 2: mean 1, variance 2/3, slope 1 across and 0 down; kurtosis 1.5 - 3.
    image = np.tile(np.array([0.0, 1.0, 2.0]), (3, 1))[None]
    numbers = dict(zip(GLOBAL_NUMBERS, global_numbers(image)[0], strict=True))
    assert numbers["mean"] == pytest.approx(1)
    assert numbers["standard deviation"] == pytest.approx(np.sqrt(2 / 3))
    assert (numbers["minimum"], numbers["median"], numbers["maximum"]) == (0, 1, 2)
    assert (numbers["25th percentile"], numbers["75th percentile"]) == (0, 2)
    assert numbers["skewness"] == pytest.approx(0)
    assert numbers["kurtosis"] == pytest.approx(-1.5)
    assert numbers["mean gradient"] == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:Precision loss")
def test_a_constant_image_has_finite_numbers() -> None:
    assert np.isfinite(global_numbers(np.full((2, 4, 4), 0.3))).all()


@given(seed=st.integers(0, 1000))
def test_global_numbers_know_nothing_of_place(seed: int) -> None:
    images = np.random.default_rng(seed).random((2, 6, 5))
    turned = images[:, ::-1, ::-1]
    np.testing.assert_allclose(global_numbers(turned), global_numbers(images), rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 1000), power=st.floats(0.3, 3.0))
def test_matching_undoes_any_rising_tone_curve(seed: int, power: float) -> None:
    rng = np.random.default_rng(seed)
    images, reference = rng.random((3, 8, 8)), rng.random((20, 8, 8))
    np.testing.assert_allclose(
        match_histogram(images**power, reference), match_histogram(images, reference), rtol=0, atol=1e-12
    )


def test_matching_gives_the_reference_histogram_and_keeps_the_order() -> None:
    rng = np.random.default_rng(0)
    images, reference = rng.random((2, 32, 32)) * 0.2, rng.normal(5, 2, (4, 32, 32))
    matched = match_histogram(images, reference)
    shares = np.linspace(0.05, 0.95, 19)
    for before, after in zip(images, matched, strict=True):
        np.testing.assert_allclose(np.quantile(after, shares), np.quantile(reference, shares), atol=0.05)
        assert (np.argsort(before, axis=None) == np.argsort(after, axis=None)).all()
    assert len(np.unique(match_histogram(np.full((1, 4, 4), 0.5), reference))) == 1


def test_linear_accuracy_on_what_a_line_can_and_cannot_tell_apart() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 3
    corners = np.array([[0.0, 8.0], [8.0, 0.0], [-8.0, -8.0]])
    points = corners[labels] + rng.normal(size=(300, 2))
    assert linear_accuracy(points[:150], labels[:150], points[150:], labels[150:], 3) == 1.0
    noise = rng.normal(size=(300, 2))
    assert linear_accuracy(noise[:150], labels[:150], noise[150:], labels[150:], 3) < 0.5
    # Exclusive or: no line does better than three of its four corners.
    square = rng.choice([-1.0, 1.0], size=(400, 2))
    either = (square[:, 0] * square[:, 1] > 0).astype(np.int64)
    assert linear_accuracy(square[:200], either[:200], square[200:], either[200:], 2) <= 0.85


@pytest.mark.parametrize("site", range(4))
def test_brightness_and_contrast_alone_do_not_tell_the_classes_apart(site: int) -> None:
    scanner, numbers = HOSPITAL_SCANNERS[site], []
    labels = np.arange(120) % len(CLASSES)
    for person, label in enumerate(labels):
        rng = np.random.default_rng([site, person])
        chest, finding = draw_person(rng), draw_finding(CLASSES[label], rng)
        film = take_film(scanner, lambda x, y, who=chest, what=finding: draw_chest(who, what, x, y), rng)
        small = interpolate(torch.from_numpy(film)[None, None], size=(32, 32), mode="bilinear", antialias=True)
        numbers.append(global_numbers(small[0].numpy())[0])
    table = np.stack(numbers)
    folds = np.arange(len(labels)) // len(CLASSES) % 5
    scores = [
        linear_accuracy(table[folds != k], labels[folds != k], table[folds == k], labels[folds == k], len(CLASSES))
        for k in range(5)
    ]
    assert 0.25 < np.mean(scores) < 0.6
