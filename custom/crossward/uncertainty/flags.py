"""When a scan is flagged: its uncertainty lies above a percentile of the site's own validation scans.

A flag sends a scan to a person; it says nothing about what is on it. The percentile is a plain one, without a promise
about the share of future scans. Whatever cannot be decided is flagged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from crossward.federation.errors import BadInput

USUAL_PERCENTILE = 95.0


@dataclass(frozen=True)
class Threshold:
    """Where a site draws the line, and what it rests on.

    Attributes:
        value: uncertainties above it are flagged; None where no line can be drawn, and then everything is.
        n: validation scans behind it.
        percentile: of them.
        note: why there is no value, or why it is a rough one; empty where neither is so.
    """

    value: float | None
    n: int
    percentile: float
    note: str = ""

    def reason(self, uncertainty: float) -> str | None:
        """Why a scan of this uncertainty is flagged; None where it is not."""
        if not math.isfinite(uncertainty):
            return "its uncertainty is not a number"
        if self.value is None:
            return f"no threshold: {self.note}"
        return "more uncertain than the threshold" if uncertainty > self.value else None


def threshold_of(uncertainty: npt.ArrayLike, *, percentile: float = USUAL_PERCENTILE) -> Threshold:
    """Draw the line at a percentile of the validation scans' uncertainty.

    The percentile is the smallest of the values that at least ``percentile`` per cent of them do not exceed (nearest
    rank), so it was measured and is not interpolated. For the 95th, fewer than 20 scans give the largest value, with
    a note. No value comes of no scans, of one that is not finite, or of two or more that are all the same: an
    uncertainty that never varies tells nothing.

    Args:
        uncertainty: [n], one for each validation scan.
        percentile: above 0, below 100.
    """
    if not 0 < percentile < 100:
        raise BadInput(f"the percentile {percentile:g} is not between 0 and 100")
    values = np.sort(np.asarray(uncertainty, dtype=np.float64).ravel())
    n = len(values)
    if not n:
        return Threshold(None, n, percentile, "no validation scans")
    if not np.isfinite(values).all():
        return Threshold(None, n, percentile, "the uncertainty of a validation scan is not a number")
    if n > 1 and values[0] == values[-1]:
        return Threshold(None, n, percentile, "every validation scan has the same uncertainty")
    # Exact for the decimals that people write: 64.4 % of 250 are 161, and not a little more.
    rank = math.ceil(Fraction(str(percentile)) * n / 100)
    few = f"rough: {n} validation scans are too few for this percentile, the largest value is taken"
    return Threshold(float(values[rank - 1]), n, percentile, few if rank == n else "")
