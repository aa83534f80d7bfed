"""What a site keeps in memory during one attempt at a sum, and how an attempt goes wrong at a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg import canonical
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import Malformed
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.keys import unlock
from crossward.privacy.secagg.messages import Shares, commitment


class OutOfTurn(PrivacyRefusal):
    """A message that the site does not wait for: a second answer could undo what the first one protected."""


class Blamed(PrivacyRefusal):
    """Another site broke the protocol.

    Args:
        site: which.
        what: it did.
        message: what this site says of it, signed, where it can show what the other one signed.
    """

    def __init__(self, site: str, what: str, *, message: bytes = b"") -> None:
        super().__init__(f"{site} {what}")
        self.site = site
        self.what = what
        self.message = message

    @classmethod
    def of(cls, faults: Sequence[Blamed], message: bytes) -> Blamed:
        """All that a site found at one time, in one."""
        first, *others = faults
        return cls(first.site, "; ".join([first.what, *map(str, others)]), message=message)


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

    def take_shares(
        self, me: str, bodies: Mapping[str, Mapping[str, Any]], key: Callable[[str], bytes]
    ) -> list[Blamed]:
        """Keep what peers shared with this site.

        Args:
            me: this site's name.
            bodies: by peer, what it signed.
            key: that a peer sealed its shares with.

        Returns:
            What is wrong with those that do not hold.
        """
        faults = []
        for peer, body in bodies.items():
            try:
                self._take(peer, body, _opened(me, peer, body, key(peer), self.context))
            except Blamed as fault:
                faults.append(fault)
        return faults

    def _take(self, peer: str, body: Mapping[str, Any], content: bytes) -> None:
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


def _opened(me: str, peer: str, body: Mapping[str, Any], key: bytes, context: bytes) -> bytes:
    """What a peer sealed to this site."""
    try:
        if body.get("to") != me:
            raise Malformed("shares for another site")
        return unlock(key, canonical.field(body, "box", bytes), about=context)
    except (Untrusted, Malformed) as error:
        raise Blamed(peer, f"signed shares that do not open ({error})") from error
