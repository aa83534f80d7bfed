"""Dimensional collapse: how many independent directions a model's features really use (F2DC, Fig. 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UNUSED_BELOW = 0.01
"""A direction counts as unused when its singular value is below this part of the largest one."""

_ROUNDING = 1e-12  # a variance this small beside the features' mean square is a rounding error of a constant


def singular_values(features: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The singular values of the covariance (over n - 1) of features [n,d], the largest first; [d].

    They are taken from the centred features themselves: the covariance would square their range of magnitudes and
    lose the small ones, which are what collapse is about. Of n images at most n - 1 are above zero.
    """
    rows = np.asarray(features, dtype=np.float64)
    centred = rows - rows.mean(axis=0)
    values = np.zeros(rows.shape[1])
    spread = np.linalg.svd(centred, compute_uv=False) ** 2 / (len(rows) - 1)
    values[: len(spread)] = spread
    return values


def effective_rank(values: npt.ArrayLike) -> float:
    """The exponential of the entropy of the normalised singular values: d for d equal ones, 1 where one is left."""
    given = np.asarray(values, dtype=np.float64)
    shares = given[given > 0] / given.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def collapse_facts(features: npt.ArrayLike) -> dict[str, Any]:
    """What a report says about one model's features [n,d].

    Returns:
        JSON-ready: `features`: d; `singular_values` relative to the largest, which is `largest`, without those that
        are zero only because there are too few images; `effective_rank`; `unused`: the share of these values below
        1 % of the largest; `undefined`: why, where they are None.
    """
    rows = np.asarray(features, dtype=np.float64)
    facts: dict[str, Any] = dict.fromkeys(("singular_values", "largest", "effective_rank", "unused"))
    reason = _why_not(rows)
    if reason:
        return {"features": rows.shape[1], **facts, "undefined": dict.fromkeys(facts, reason)}
    values = singular_values(rows)[: len(rows) - 1]
    return {
        "features": rows.shape[1],
        "singular_values": (values / values[0]).tolist(),
        "largest": float(values[0]),
        "effective_rank": effective_rank(values),
        "unused": float((values < UNUSED_BELOW * values[0]).mean()),
        "undefined": {},
    }


def _why_not(rows: npt.NDArray[np.float64]) -> str | None:
    if len(rows) < 2:
        return f"a covariance needs two images, n={len(rows)}"
    if not np.isfinite(rows).all():
        return "the model's features are not all finite numbers"
    if rows.var(axis=0).max(initial=0.0) <= _ROUNDING * max(float((rows**2).mean()), np.finfo(float).tiny):
        return f"every image has the same features, n={len(rows)}"
    return None
