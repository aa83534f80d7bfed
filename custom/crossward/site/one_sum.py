"""What a site trained is in one sum, also where another study trains the same.

Studies that differ in what the first training does not depend on (one round more, another weighting, another method
that begins in the same way) have records of their own in ``DurableMemory``, and yet the same first updates, bit by
bit. Two sums of them over other sites would differ by a site's update. This record is therefore of what was trained,
tensor by tensor, because methods send different parts of one training; and of no study.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Sum:
    """A sum that something trained is in.

    Attributes:
        owner: digest of the study and the model that it is for.
        round_number: of it.
        kind: of it.
        sites: whose parts are in it.
        ways: by digest of a tensor, how it goes into the sum.
    """

    owner: str
    round_number: int
    kind: str
    sites: tuple[str, ...]
    ways: Mapping[str, str]

    def forbids(self, other: _Sum) -> bool:
        """Whether a tensor of this is in another sum: with other sites, or another product of the same kind."""
        common = self.ways.keys() & other.ways.keys()
        differs = self.kind == other.kind and any(self.ways[tensor] != other.ways[tensor] for tensor in common)
        return bool(common) and (differs or self.sites != other.sites)

    # A site's record has lines of one form: here the owner stands where a job's name does, and there are no attempts.

    def use(self) -> Use:
        about = " ".join((self.kind, *self.ways.values()))
        return Use(self.owner, self.round_number, 0, self.sites, " ".join(self.ways), about, "masked")

    @classmethod
    def of(cls, use: Use) -> _Sum:
        kind, *ways = use.about.split(" ")
        return cls(use.job, use.round_number, kind, use.cohort, dict(zip(use.update.split(" "), ways, strict=True)))


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
    this = _Sum(owner, round_number, kind, sites, {tensor: way[:_DIGITS] for tensor, way in sorted(ways.items())})
    kept = [_Sum.of(use) for use in memory.uses(EVERY_STUDY, _TRAINED)]
    if any(earlier.owner != owner and earlier.forbids(this) for earlier in kept):
        raise AlreadyUsed(
            f"what was trained for round {round_number} was masked before, for another study or another model; it may "
            "be masked again only for the same sites, with the same weights and ranges"
        )
    if this not in kept:
        memory.keep(EVERY_STUDY, _TRAINED, this.use())
