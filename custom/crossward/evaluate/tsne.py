"""t-SNE (van der Maaten and Hinton, 2008): feature vectors on a plane, neighbours beside each other.

Exact, with all pairs: for some hundred points that is fast, and the same seed gives the same map. The map starts
from the two main axes of the features, which keeps its large-scale order meaningful.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from crossward.evaluate.silhouette import Floats, squared_distances
from crossward.federation.errors import BadInput

FEWEST = 5
PERPLEXITY = 30.0
ITERATIONS = 500
_EXAGGERATED = 125  # iterations with exaggerated affinities, in which clusters form
_EXAGGERATION = 12.0
_MOMENTUM, _LATER_MOMENTUM = 0.5, 0.8
_START, _JITTER = 1e-4, 1e-6  # spread of the first map, and of the noise that parts what coincides in it
_HALVINGS = 100
_SMALLEST = 1e-12


def why_no_map(features: npt.ArrayLike) -> str | None:
    """The reason why features [n,d] have no map; None where they have one."""
    rows = np.asarray(features, dtype=np.float64)
    if len(rows) < FEWEST:
        return f"{len(rows)} images are too few for a map; it needs {FEWEST}"
    if not np.isfinite(rows).all():
        return "the model's features are not all finite numbers"
    if (rows == rows[0]).all():
        return f"all {len(rows)} images have the same features"
    return None


def tsne(features: npt.ArrayLike, *, seed: int, perplexity: float = PERPLEXITY, iterations: int = ITERATIONS) -> Floats:
    """Map features [n,d] to a plane, [n,2], centred.

    Args:
        features: at least five rows, not all the same; single rows may coincide.
        seed: of the jitter; the same seed gives the same map.
        perplexity: how many neighbours a point has in effect; at most a third of the others are taken.
        iterations: of gradient descent.

    Raises:
        BadInput: the features have no map; `why_no_map` says why.
    """
    rows = np.asarray(features, dtype=np.float64)
    if reason := why_no_map(rows):
        raise BadInput(f"no t-SNE map: {reason}")
    neighbours = min(perplexity, (len(rows) - 1) / 3)
    conditional = calibrated(squared_distances(rows), neighbours)
    affinities = np.maximum((conditional + conditional.T) / (2 * len(rows)), _SMALLEST)
    np.fill_diagonal(affinities, 0.0)
    return _descend(affinities, _main_axes(rows, np.random.default_rng(seed)), iterations)


def calibrated(distances: Floats, perplexity: float) -> Floats:
    """Affinities p(j|i) ~ exp(-beta_i distance_ij), each row's beta bisected until its entropy is log(perplexity).

    Where more points coincide than the perplexity counts, the entropy cannot come down to it; they share the row.
    """
    others = ~np.eye(len(distances), dtype=bool)
    nearest = np.where(others, distances, np.inf).min(axis=1, keepdims=True)
    # Measured from the nearest neighbour, no row can underflow; in units of the mean, beta is near one.
    apart = np.where(others, (distances - nearest) / distances[others].mean(), 0.0)
    target = math.log(perplexity)
    low, high, beta = np.zeros(len(apart)), np.full(len(apart), np.inf), np.ones(len(apart))
    for _ in range(_HALVINGS):
        weights = np.exp(-beta[:, None] * apart) * others
        totals = weights.sum(axis=1)
        entropy = np.log(totals) + beta * (weights * apart).sum(axis=1) / totals
        broad = entropy > target
        low, high = np.where(broad, beta, low), np.where(broad, high, beta)
        beta = np.where(np.isinf(high), 2 * beta, (low + high) / 2)
    shares: Floats = weights / totals[:, None]
    return shares


def gradient(affinities: Floats, points: Floats) -> Floats:
    """Gradient [n,2] of KL(P|Q), Q the Student-t affinities of the points: 4 sum_j (p_ij - q_ij) t_ij (y_i - y_j)."""
    kernel = 1 / (1 + squared_distances(points))
    np.fill_diagonal(kernel, 0.0)
    forces = (affinities - kernel / kernel.sum()) * kernel
    result: Floats = 4 * (forces.sum(axis=1)[:, None] * points - forces @ points)
    return result


def _main_axes(rows: Floats, random: np.random.Generator) -> Floats:
    left, scales, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    points = np.zeros((len(rows), 2))
    points[:, : min(2, left.shape[1])] = (left * scales)[:, :2]
    # An axis may point either way; its largest entry decides, so that the map does not depend on the library.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    start: Floats = points * (_START / points[:, 0].std()) + random.normal(scale=_JITTER, size=points.shape)
    return start


def _descend(affinities: Floats, points: Floats, iterations: int) -> Floats:
    """Gradient descent with momentum, a gain for every coordinate, and early exaggeration."""
    rate = max(len(points) / _EXAGGERATION / 4, 50.0)
    speed, gains = np.zeros_like(points), np.ones_like(points)
    for step in range(iterations):
        early = step < _EXAGGERATED
        slope = gradient(affinities * _EXAGGERATION if early else affinities, points)
        gains = np.maximum(np.where(np.sign(slope) == np.sign(speed), gains * 0.8, gains + 0.2), 0.01)
        speed = (_MOMENTUM if early else _LATER_MOMENTUM) * speed - rate * gains * slope
        points = points + speed
        points -= points.mean(axis=0)
    return points
