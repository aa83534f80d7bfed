"""FDSE's weights of sites, from the cosines between them alone: least conflict (Eq. 8) and likeness (Eq. 9)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.special import softmax

from crossward.federation.combine import normalise
from crossward.federation.contract import Vector

FLATTEST = 1e-10
"""Directions flatter than this count as this steep, so that sites with equal updates share their weight evenly."""


def consensus_weights(gram: npt.ArrayLike, cap: float | None = None) -> Vector:
    """Weights u of the unit updates whose combination has the smallest norm (Eq. 8), on the simplex.

    The combination has a non-negative inner product with every update. It is found exactly: the nonnegative least
    squares problem min |R u|^2 + (1'u - 1)^2 with R'R = G is solved by a multiple of the wanted u.

    Args:
        gram: [N,N] inner products of unit updates; a site that did not move is left out by the caller.
        cap: largest weight of a site. Where it binds, the combination may conflict with somebody.
    """
    inner = np.asarray(gram, dtype=np.float64)
    count = len(inner)
    if inner.shape != (count, count) or not count or not np.isfinite(inner).all():
        raise ValueError(f"a Gram matrix is square and finite, not of shape {inner.shape} or with other numbers")
    if not _enough(count, cap):
        raise ValueError(f"{count} weights of at most {cap} cannot sum to 1")
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    root = np.sqrt(np.maximum(values, FLATTEST))[:, None] * vectors.T
    target = np.append(np.zeros(count), 1.0)
    solution, _ = optimize.nnls(np.vstack([root, np.ones(count)]), target, maxiter=100 * count)
    weights: Vector = solution / solution.sum()
    return weights if cap is None or weights.max() <= cap else _capped(root, cap)


def _capped(root: Vector, cap: float) -> Vector:
    """The same under an upper bound, for which there is no shortcut: a small quadratic programme."""
    count, inner = len(root), root.T @ root
    found = optimize.minimize(
        lambda u: u @ inner @ u,
        np.full(count, 1 / count),
        jac=lambda u: 2 * inner @ u,
        bounds=[(0.0, cap)] * count,
        constraints={"type": "eq", "fun": lambda u: u.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    weights: Vector = np.clip(found.x, 0.0, cap)
    return weights


def _enough(count: int, cap: float | None) -> bool:
    """Whether so many weights under the cap can sum to 1; an even share may be rounded down."""
    return cap is None or cap * count >= 1 - 1e-12


def weights_of_moved(cosines: Vector, cap: float | None = None) -> Vector:
    """The same for all sites of a block: who did not move (a zero on the diagonal) has no weight.

    Where too few moved to stay under the cap, nobody has any: the sum would show one of them.
    """
    weights, moved = np.zeros(len(cosines)), np.flatnonzero(np.diagonal(cosines))
    if len(moved) and _enough(len(moved), cap):
        weights[moved] = consensus_weights(cosines[np.ix_(moved, moved)], cap)
    return weights


def attention(parameters: npt.ArrayLike, tau: float) -> Vector:
    """Mixture of every site, softmax of the cosines over tau (Eq. 9); [N,P] -> [N,N], rows sum to 1.

    All-zero parameters have no direction: their cosine with anything counts as 0.
    """
    rows = np.asarray(parameters, dtype=np.float64)
    mixture: Vector = softmax(normalise(rows @ rows.T) / tau, axis=1)
    return mixture


def spread_out(mixture: Vector, others: int) -> Vector:
    """Let every site receive from at least so many others: each is at most its even share of what they give together.

    What is over goes to the rest in proportion; rows keep their sum, and a site keeps its own part. Where there are
    not as many others, all of them count the same; [N,N] -> [N,N].
    """
    own = np.eye(len(mixture), dtype=bool)
    result, held = np.where(own, 0.0, mixture), np.zeros_like(own)
    total = result.sum(axis=1, keepdims=True)
    limit = total / max(1, min(others, len(mixture) - 1))
    while (over := result > limit * (1 + 1e-12)).any():
        held |= over
        rest = np.where(held, 0.0, result)
        # Who is too far away to have any part at all gets an even one.
        rest = np.where(rest.any(axis=1, keepdims=True), rest, ~held & ~own)
        whole = rest.sum(axis=1, keepdims=True)
        left = total - limit * held.sum(axis=1, keepdims=True)
        parts = np.divide(rest, whole, out=np.zeros_like(result), where=whole > 0) * left
        result = np.where(held, limit, np.where(held.any(axis=1, keepdims=True), parts, result))
    return np.where(own, mixture, result)
