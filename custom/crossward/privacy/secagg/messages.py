"""The messages of SA-1: their names, and what several of them have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from crossward.privacy.secagg.canonical import digest
from crossward.privacy.secagg.shamir import SHARE_BYTES

JOINED = "joined"
SHARE = "share"
UPLOAD = "upload"
AGREED = "agreed"
REVEAL = "reveal"
BLAME = "blame"


@dataclass(frozen=True)
class Shares:
    """One holder's shares of a site's two secrets: of its own mask, and of what opens its masks with the others."""

    self_share: bytes
    wrap_share: bytes

    def __repr__(self) -> str:
        return "Shares(...)"

    def packed(self, note: bytes) -> bytes:
        """As they are sealed for their holder, with a note for it."""
        return self.self_share + self.wrap_share + note

    @classmethod
    def unpacked(cls, content: bytes) -> tuple[Shares, bytes]:
        """The shares and the note that ``packed`` joined."""
        end = 2 * SHARE_BYTES
        return cls(content[:SHARE_BYTES], content[SHARE_BYTES:end]), content[end:]

    def commitments(self, context: bytes) -> list[bytes]:
        """Ties the owner to what it gave a holder, and the holder to what it got: who changes a share is known."""
        return [
            commitment("self share", context, self.self_share),
            commitment("wrap share", context, self.wrap_share),
        ]


def share_body(
    context: bytes, to: str, box: bytes, given: Shares, own: Shares, hidden: Mapping[str, bytes], wrapped: bytes
) -> dict[str, Any]:
    """What a site tells another one when it shares its secrets.

    Args:
        context: of the attempt.
        to: the holder.
        box: the holder's shares, sealed to it.
        given: the same shares.
        own: those that the site keeps of its own secrets.
        hidden: secrets that it commits to, by name.
        wrapped: the sealed list of its masks with others.
    """
    return {
        "to": to,
        "box": box,
        "shares": given.commitments(context),
        "own": own.commitments(context),
        **{what: commitment(what, context, secret) for what, secret in hidden.items()},
        "wrapped": digest("wrapped seeds", wrapped),
    }


def commitment(what: str, context: bytes, secret: bytes) -> bytes:
    """Ties a site to a secret of 32 random bytes without telling it."""
    return digest("commitment", what, context, secret)


def set_digest(names: Iterable[str]) -> bytes:
    """Of a set of sites, whatever their order."""
    return digest("sites", sorted(names))


def names_of(messages: Iterable[str]) -> tuple[str, ...]:
    """Sites in the order of their names."""
    return tuple(sorted(messages))
