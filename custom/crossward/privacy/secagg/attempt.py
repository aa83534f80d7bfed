"""What a site keeps in memory during one attempt at a sum, and how an attempt goes wrong at a site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.messages import Shares, commitment


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
    own_note: bytes = b""
    notes: dict[str, bytes] = field(default_factory=dict)
    held: dict[str, Shares] = field(default_factory=dict)
    pads: dict[str, bytes] = field(default_factory=dict)
    update: str = ""
    sharers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()

    def take(self, peer: str, body: Mapping[str, Any], content: bytes) -> None:
        """Keep a peer's shares and note.

        Raises:
            Blamed: it committed to something else.
        """
        shares, note = Shares.unpacked(content)
        if len(content) != len(self.own_shares.packed(self.own_note)):
            raise Blamed(peer, "sent shares of a wrong size")
        if body.get("shares") != shares.commitments(self.context):
            raise Blamed(peer, "committed to other shares than it sent")
        if body.get("pair") != commitment("pair", self.context, self.pair_seeds[peer]):
            raise Blamed(peer, "committed to another mask for the pair than this site")
        self.held[peer], self.notes[peer] = shares, note

    def __repr__(self) -> str:
        return f"SiteAttempt(round {self.binding.round_number}, attempt {self.binding.attempt})"
