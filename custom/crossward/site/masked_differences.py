"""By how much a round under masks differs from the plain method's, from what the server has in any case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from crossward.federation.contract import Plan, Tally, Vector
from crossward.privacy.secagg.sketch import gram, halves
from crossward.privacy.sums import MaskedAlgebra


def of_round(
    masked: MaskedAlgebra, plan: Plan, totals: Tally, cosines: Mapping[str, Mapping[str, Vector]]
) -> dict[str, dict[str, float]]:
    """What the rules' bounds kept back, and the standard errors that sketches bring.

    Two halves of a sketch measure the same cosine and know nothing of each other: half of what they are apart is the
    error of both together, and half of what the plans made from either are apart that of the plan. The count sketch
    before them, which adds about 0.011 to a cosine's error of 0.044, is common to both and is not seen.

    Args:
        masked: of the run.
        plan: of the round.
        totals: of the round, as summed.
        cosines: by site, what it is compared with others by.

    Returns:
        ``bounds``: the rules' counts, as ``group/key``. ``sketch_error``: by group, of its cosines and of what the
        rule plans from them; nothing where nothing is sketched.
    """
    compared = {block: [cosines[site][block] for site in plan.cohort] for block in masked.algebra.blocks()}
    whole = {block: gram(each) for block, each in compared.items()}
    return {
        "bounds": masked.algebra.bounded(plan, totals, whole),
        "sketch_error": _sketch_error(masked, plan, totals, whole, {each: compared[each] for each in masked.sketched}),
    }


def _sketch_error(
    masked: MaskedAlgebra,
    plan: Plan,
    totals: Tally,
    whole: Mapping[str, Vector],
    sketches: Mapping[str, Sequence[Vector]],
) -> dict[str, float]:
    if not sketches:
        return {}
    pairs = {block: halves(each) for block, each in sketches.items()}
    one, other = (
        masked.algebra.plan(plan.round_number, plan.cohort, totals, {**whole, **dict(zip(pairs, half, strict=True))})
        for half in zip(*pairs.values(), strict=True)
    )
    found = {}
    for group, rule in masked.algebra.rules().items():
        apart = [_between_moved(*pair) for block, pair in pairs.items() if block.startswith(f"{group}/")]
        if apart:
            found[f"{group}/cosines"] = _half(np.concatenate(apart))
        if apart and rule.weighs:
            found[f"{group}/{rule.weighs}"] = _half(one.values[group][rule.weighs] - other.values[group][rule.weighs])
    return found


def _between_moved(one: Vector, other: Vector) -> Vector:
    """How far the cosines of any two sites that moved are apart."""
    moved = np.flatnonzero(np.diagonal(one))
    first, second = np.triu_indices(len(moved), 1)
    apart: Vector = (one - other)[moved[first], moved[second]]
    return apart


def _half(apart: Vector) -> float:
    """Half of the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(apart)))) / 2 if apart.size else 0.0
