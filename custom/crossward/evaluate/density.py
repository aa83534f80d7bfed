"""Does the uncertainty rise where it should? Its density for clean and noised images (RFedDis, Fig. 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.evaluate.metrics import rank_auc

BINS = 20


def density(uncertainty: npt.ArrayLike) -> list[float]:
    """The share of values in each of 20 equal bins of [0,1]; what rounding put outside counts to the nearest bin."""
    values = np.clip(np.asarray(uncertainty, dtype=np.float64), 0.0, 1.0)
    counts, _ = np.histogram(values, bins=BINS, range=(0.0, 1.0))
    return (counts / max(1, len(values))).tolist()  # type: ignore[no-any-return]


def uncertainty_facts(clean: npt.ArrayLike, noised: npt.ArrayLike, right: npt.ArrayLike) -> dict[str, Any]:
    """What a report says about one site's uncertainties.

    Args:
        clean: [n], of the site's test images.
        noised: [n], of the same images with noise.
        right: [n], whether the answer for the clean image was right.

    Returns:
        JSON-ready: n, densities and means of both, `noise_auc` (noised above clean), `error_auc` (wrong above right,
        clean images only), and `undefined`: the reason for every one that is None.
    """
    before, after = np.asarray(clean, dtype=np.float64), np.asarray(noised, dtype=np.float64)
    wrong = ~np.asarray(right, dtype=bool)
    facts: dict[str, Any] = {"n": len(before)}
    keys = ("clean", "noised", "mean_clean", "mean_noised", "noise_auc", "error_auc")
    reason = None
    if not len(before):
        reason = "no test images, n=0"
    elif not (np.isfinite(before).all() and np.isfinite(after).all()):
        reason = "the model's uncertainties are not all finite numbers"
    if reason:
        return {**facts, **dict.fromkeys(keys), "undefined": dict.fromkeys(keys, reason)}
    facts |= {
        "clean": density(before),
        "noised": density(after),
        "mean_clean": float(before.mean()),
        "mean_noised": float(after.mean()),
        "noise_auc": rank_auc(np.concatenate([before, after]), np.repeat([False, True], len(before))),
        "error_auc": rank_auc(before, wrong),
        "undefined": {},
    }
    if facts["error_auc"] is None:
        facts["undefined"]["error_auc"] = f"every answer was {'wrong' if wrong.all() else 'right'}, n={len(before)}"
    return facts
