"""What a site trained is in one sum, also where another study trains the same.

Studies that differ in what the first training does not depend on (one round more, another weighting, another method
that begins in the same way) have records of their own in ``DurableMemory``, and yet the same first updates, bit by
bit. Two sums of them over other sites would differ by a site's update. This record is therefore of what was trained,
tensor by tensor, because methods send different parts of one training; and of no study.
"""

from __future__ import annotations

from collections.abc import Mapping

from crossward.federation.contract import Tensors
from crossward.federation.scopes import tensors_digest
from crossward.privacy.secagg.memory import AlreadyUsed, Memory, Use

EVERY_STUDY = ""
"""Where a study's digest stands otherwise."""

_TRAINED = "trained"
_DIGITS = 16
"""Of a digest: two tensors that are taken for one by chance, once in 1e19 times, cost a refusal and no secret."""


def tensor_digests(update: Tensors) -> dict[str, str]:
    """A digest of every tensor by itself, whatever it is called.

    A tensor that is one number throughout is nobody's: layers that do not learn give the same zeros in every round.
    """
    return {
        name: tensors_digest({"": tensor})[:_DIGITS]
        for name, tensor in update.items()
        if tensor.numel() and tensor.min() < tensor.max()
    }


def hold_to_one_sum(
    memory: Memory, *, owner: str, kind: str, round_number: int, sites: tuple[str, ...], ways: Mapping[str, str]
) -> None:
    """Write down what is about to be masked or opened, unless it was in another sum; on disk when this returns.

    Whatever the owner masked before is left to the owner's own record, which knows about attempts that failed. For
    everybody else a sum that was only begun counts like one that was opened.

    Args:
        memory: of the site.
        owner: digest of the study and the model that this is for.
        kind: of sum.
        round_number: of the sum.
        sites: whose parts are in it.
        ways: by digest of a tensor, how it goes into the sum.

    Raises:
        AlreadyUsed: some of it was masked for another study or another model, and not for the same sum.
    """
    if not ways:
        return
    parts = {tensor: way[:_DIGITS] for tensor, way in sorted(ways.items())}
    this = Use(owner, round_number, 0, sites, " ".join(parts), " ".join((kind, *parts.values())), "masked")
    kept = memory.uses(EVERY_STUDY, _TRAINED)
    if any(use.job != owner and _is_another_sum(use, this) for use in kept):
        raise AlreadyUsed(
            f"what was trained for round {round_number} was masked before, for another study or another model; it may "
            "be masked again only for the same sites, with the same weights and ranges"
        )
    if this not in kept:
        memory.keep(EVERY_STUDY, _TRAINED, this)


def _is_another_sum(earlier: Use, this: Use) -> bool:
    """Whether some tensor is in both, and the sums are not one: other sites, or other products of the same kind."""
    earlier_kind, before = _parts(earlier)
    kind, now = _parts(this)
    common = before.keys() & now.keys()
    if not common:
        return False
    differs = earlier_kind == kind and any(before[tensor] != now[tensor] for tensor in common)
    return differs or earlier.cohort != this.cohort


def _parts(use: Use) -> tuple[str, dict[str, str]]:
    kind, *ways = use.about.split(" ")
    return kind, dict(zip(use.update.split(" "), ways, strict=True))
