"""How far groups of feature vectors are apart, in the space they live in: the number beside a map of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def squared_distances(rows: Floats) -> Floats:
    """Squared Euclidean distances [n,n] between rows [n,d]; exactly zero on the diagonal, never negative."""
    centred = rows - rows.mean(axis=0)  # the same distances, with less to cancel
    norms = (centred**2).sum(axis=1)
    distances: Floats = np.maximum(norms[:, None] + norms[None, :] - 2 * centred @ centred.T, 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def silhouette(features: npt.ArrayLike, groups: npt.ArrayLike) -> float | None:
    """Mean silhouette (Rousseeuw, 1987) of features [n,d] in groups [n]: 1 apart, 0 mixed, below 0 misplaced.

    For an image, a is its mean distance to the others of its group and b the smallest mean distance to another
    group; its silhouette is (b - a) / max(a, b), and 0 for the only one of its group.

    Returns:
        None where it says nothing: less than two groups, every image a group of its own, or no finite features.
    """
    rows = np.asarray(features, dtype=np.float64)
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    if not 2 <= len(names) < len(rows) or not np.isfinite(rows).all():
        return None
    belongs = np.eye(len(names))[member]
    sizes = belongs.sum(axis=0)
    sums = np.sqrt(squared_distances(rows)) @ belongs
    everyone = np.arange(len(rows))
    own = sums[everyone, member] / np.maximum(sizes[member] - 1, 1)
    means = sums / sizes
    means[everyone, member] = np.inf
    other = means.min(axis=1)
    larger = np.maximum(own, other)
    scores = np.divide(other - own, larger, out=np.zeros(len(rows)), where=(larger > 0) & (sizes[member] > 1))
    return float(scores.mean())
