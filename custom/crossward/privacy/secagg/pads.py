"""What hides a slot that one site alone may read: every other site adds a pad that the owner can take off."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from crossward.privacy.secagg.keys import PairRoots
from crossward.privacy.secagg.masks import Mask


@dataclass(frozen=True, repr=False)
class Pads:
    """A site's pads in one attempt; the server knows none, whoever is said to have dropped out.

    Attributes:
        site: whose they are.
        pairs: its secrets with the others, at the attempt's round.
        context: of the attempt.
    """

    site: str
    pairs: PairRoots
    context: bytes

    def put_on(self, owner: str) -> Mask:
        """What this site adds to another's slot."""
        return Mask(self.pairs.key(owner, "pad", context=self.context, parts=[self.site, owner]), 1)

    def of_others(self, sharers: Collection[str]) -> dict[str, bytes]:
        """The keys of what the others add to this site's own slot, to which it adds nothing itself."""
        return {
            peer: self.pairs.key(peer, "pad", context=self.context, parts=[peer, self.site])
            for peer in sharers
            if peer != self.site
        }
