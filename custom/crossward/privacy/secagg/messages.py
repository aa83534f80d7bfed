"""The messages of SA-1: their names, and what several of them have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from crossward.privacy.secagg.canonical import digest

JOINED = "joined"
SHARE = "share"
UPLOAD = "upload"
AGREED = "agreed"
REVEAL = "reveal"


@dataclass(frozen=True)
class Shares:
    """One holder's shares of a site's two secrets: of its own mask, and of what opens its masks with the others."""

    self_share: bytes
    wrap_share: bytes

    def __repr__(self) -> str:
        return "Shares(...)"

    def commitments(self, context: bytes) -> list[bytes]:
        """Ties the owner to what it gave a holder, and the holder to what it got: who changes a share is known."""
        return [
            commitment("self share", context, self.self_share),
            commitment("wrap share", context, self.wrap_share),
        ]


def commitment(what: str, context: bytes, secret: bytes) -> bytes:
    """Ties a site to a secret of 32 random bytes without telling it."""
    return digest("commitment", what, context, secret)


def set_digest(names: Iterable[str]) -> bytes:
    """Of a set of sites, whatever their order."""
    return digest("sites", sorted(names))


def names_of(messages: Iterable[str]) -> tuple[str, ...]:
    """Sites in the order of their names."""
    return tuple(sorted(messages))
