"""What a site keeps in memory during one attempt at a sum, and how an attempt goes wrong at a site."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.messages import Shares


class OutOfTurn(PrivacyRefusal):
    """A message that the site does not wait for: a second answer could undo what the first one protected."""


class Blamed(PrivacyRefusal):
    """Another site broke the protocol.

    Args:
        site: which.
        what: it did.
    """

    def __init__(self, site: str, what: str) -> None:
        super().__init__(f"{site} {what}")
        self.site = site


@dataclass(repr=False)
class SiteAttempt:
    """What a site keeps in memory during an attempt, and forgets with it."""

    binding: Binding
    context: bytes
    threshold: int
    pair_seeds: dict[str, bytes]
    self_seed: bytes
    own_shares: Shares
    held: dict[str, Shares] = field(default_factory=dict)
    pads: dict[str, bytes] = field(default_factory=dict)
    update: str = ""
    sharers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"SiteAttempt(round {self.binding.round_number}, attempt {self.binding.attempt})"
