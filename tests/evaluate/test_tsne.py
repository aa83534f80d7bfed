from __future__ import annotations

import time

import numpy as np
import pytest

from crossward.evaluate.silhouette import silhouette, squared_distances
from crossward.evaluate.tsne import calibrated, gradient, tsne, why_no_map
from crossward.federation.errors import BadInput


def clusters(*, each=30, features=16, seed=0, apart=20.0):
    random = np.random.default_rng(seed)
    rows = random.normal(size=(2 * each, features))
    rows[each:, 0] += apart
    return rows, np.repeat([0, 1], each)


def divergence(affinities, points):
    """KL(P|Q), pair by pair."""
    pairs = [(i, j) for i in range(len(points)) for j in range(len(points)) if i != j]
    kernel = {(i, j): 1 / (1 + ((points[i] - points[j]) ** 2).sum()) for i, j in pairs}
    total = sum(kernel.values())
    return sum(affinities[pair] * np.log(affinities[pair] * total / kernel[pair]) for pair in pairs)


def made_up_affinities(count, random):
    weights = random.uniform(0.1, 1, size=(count, count))
    weights = weights + weights.T
    np.fill_diagonal(weights, 0)
    return weights / weights.sum()


def test_two_far_clusters_stay_apart():
    rows, groups = clusters()
    points = tsne(rows, seed=0)
    assert points.shape == (60, 2)
    assert np.abs(points.mean(axis=0)).max() < 1e-9
    assert silhouette(points, groups) > 0.8


def test_neighbours_on_a_ring_stay_neighbours():
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    ring = np.stack([np.cos(angles), np.sin(angles), np.zeros(40)], axis=1)
    distances = squared_distances(tsne(ring, seed=0, perplexity=6))
    np.fill_diagonal(distances, np.inf)
    beside = [(distances[i].argmin() - i) % 40 in (1, 39) for i in range(40)]
    assert np.mean(beside) > 0.9


def test_the_same_seed_gives_the_same_map_and_the_global_state_is_untouched():
    rows, _ = clusters(each=10)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one, other = tsne(rows, seed=3), tsne(rows, seed=3)
    assert (one == other).all()
    assert not (one == tsne(rows, seed=4)).all()
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


@pytest.mark.parametrize("perplexity", [2.0, 5.0, 12.5])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_calibration_hits_the_entropy(perplexity, scale):
    rows = scale * np.random.default_rng(1).normal(size=(40, 5))
    shares = calibrated(squared_distances(rows), perplexity)
    assert shares.sum(axis=1) == pytest.approx(np.ones(40))
    assert (np.diag(shares) == 0).all()
    entropy = [-sum(p * np.log(p) for p in row if p > 0) for row in shares]
    assert entropy == pytest.approx(np.full(40, np.log(perplexity)), abs=1e-9)


def test_calibration_reaches_far_outliers():
    rows = np.random.default_rng(2).normal(size=(20, 2))
    rows[0] += 1e5
    shares = calibrated(squared_distances(rows), 4.0)
    assert -(shares[0] * np.log(np.maximum(shares[0], 1e-300))).sum() == pytest.approx(np.log(4.0), abs=1e-6)


def test_the_gradient_is_that_of_the_divergence():
    random = np.random.default_rng(5)
    affinities, points = made_up_affinities(7, random), random.normal(size=(7, 2))
    found, step = gradient(affinities, points), 1e-5
    for row in range(7):
        for axis in range(2):
            moved = np.zeros_like(points)
            moved[row, axis] = step
            slope = (divergence(affinities, points + moved) - divergence(affinities, points - moved)) / (2 * step)
            assert found[row, axis] == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "rows",
    [
        np.repeat(np.eye(4), 10, axis=0),
        np.concatenate([np.zeros((30, 3)), np.ones((1, 3))]),
        np.arange(5.0).reshape(5, 1),
        np.concatenate([np.random.default_rng(0).normal(size=(20, 6)), 1e9 * np.ones((1, 6))]),
        1e-30 * np.random.default_rng(0).normal(size=(20, 6)),
    ],
    ids=["duplicates", "all but one coincide", "five on a line", "far outlier", "tiny"],
)
def test_odd_features_still_give_finite_points(rows):
    points = tsne(rows, seed=0)
    assert points.shape == (len(rows), 2)
    assert np.isfinite(points).all()
    assert np.ptp(points, axis=0).max() > 0


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (np.zeros((0, 3)), "too few"),
        (np.eye(4), "too few"),
        (np.full((9, 3), 0.1), "same features"),
        (np.array([[np.nan, 0.0]] * 9), "finite"),
    ],
)
def test_what_has_no_map_is_refused_with_the_reason(rows, reason):
    assert reason in why_no_map(rows)
    with pytest.raises(BadInput, match=reason):
        tsne(rows, seed=0)


def test_four_hundred_points_take_seconds_of_one_core():
    rows = np.random.default_rng(0).normal(size=(400, 128))
    began = time.process_time()
    tsne(rows, seed=0)
    assert time.process_time() - began < 10
