"""FINCH's first partition (Sarfraz et al., CVPR 2019): groups of sites by who is whose nearest, however many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from crossward.federation.combine import normalise
from crossward.federation.contract import Vector


def first_neighbour_groups(vectors: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """First partition of FINCH with cosine distance: one group number per vector, [N,d] -> [N].

    Vectors belong together where one is the other's nearest, or both have the same nearest (ties: the lowest index).
    Every group has two members or more, so a style that a single site has is never alone.
    """
    rows = np.asarray(vectors, dtype=np.float64)
    return groups_by_cosine(normalise(rows @ rows.T))


def groups_by_cosine(cosines: Vector) -> npt.NDArray[np.int64]:
    """The same from the matrix of cosines, which is all that it takes; numbers in the order of appearance."""
    count = len(cosines)
    if count < 2:
        return np.zeros(count, dtype=np.int64)
    # Equal styles must not be told apart by the rounding of their cosines.
    apart = np.round(cosines, 12)
    np.fill_diagonal(apart, -np.inf)
    nearest = apart.argmax(axis=1)
    # Two with the same nearest are linked through it, so the links to the nearest are enough.
    links = coo_array((np.ones(count), (np.arange(count), nearest)), shape=(count, count))
    _, labels = connected_components(links, directed=False)
    order = {label: number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    return np.array([order[label] for label in labels.tolist()], dtype=np.int64)


def join_small(groups: npt.NDArray[np.int64], cosines: Vector, members: int) -> npt.NDArray[np.int64]:
    """Let groups with fewer members join another, until none has fewer or one is left; the smallest goes first.

    It joins the one whose members' cosines with its own are highest on average (ties: the lowest index), as often as
    it takes. Numbers are in the order of appearance, before and after.
    """
    joined = groups.copy()
    while True:
        labels, sizes = np.unique(joined, return_counts=True)
        if len(labels) < 2 or sizes.min() >= members:
            return np.unique(joined, return_inverse=True)[1].astype(np.int64)
        small = labels[sizes.argmin()]
        others = labels[labels != small]
        alike = [cosines[np.ix_(joined == small, joined == other)].mean() for other in others]
        nearest = others[np.round(alike, 12).argmax()]
        joined[joined == max(small, nearest)] = min(small, nearest)
