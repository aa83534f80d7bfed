"""By how much the sums of a run under masks differ from the plain method's, over all its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def over_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up what the records of rounds say.

    Returns:
        ``cut_off``: values at the end of their range. ``capped``: the largest part of a block's weight that caps took
        in a round, none where there are no caps. ``bounds``: the rules' own counts, added up. ``sketch_error``: the
        root of the mean square, over the rounds.
    """
    found = [entry["secagg"] for entry in rounds if "secagg" in entry]
    return {
        "cut_off": float(sum(entry["cut_off"] for entry in found)),
        "capped": max((entry["capped"] for entry in found if entry.get("capped") is not None), default=None),
        "bounds": _joined([entry.get("bounds", {}) for entry in found], sum),
        "sketch_error": _joined([entry.get("sketch_error", {}) for entry in found], _root_mean_square),
    }


def _joined(parts: Sequence[Mapping[str, float]], join: Callable[[Sequence[float]], float]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: join([part[name] for part in parts if name in part]) for name in names}


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
