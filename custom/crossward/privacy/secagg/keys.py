"""The keys of a job: what a site signs with, what a pair of sites shares, and what is derived from it for one use."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crossward.privacy.secagg.canonical import Malformed, decode, digest, encode, field
from crossward.privacy.secagg.identity import Untrusted

KEY_BYTES = 32
_NONCE = bytes(12)


def fresh() -> bytes:
    """A secret of 32 bytes from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def derive(secret: bytes, purpose: str, *, context: bytes = b"", parts: Sequence[Any] = ()) -> bytes:
    """A key for one purpose in one context; keys of other purposes or contexts tell nothing about it (HKDF)."""
    info = encode(["SA-1", purpose, list(parts)])
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=context or None, info=info).derive(secret)


def lock(key: bytes, content: bytes, *, about: bytes) -> bytes:
    """Encrypt under a key that is used this once, and bind the box to what it is about."""
    return AESGCM(key).encrypt(_NONCE, content, about)


def unlock(key: bytes, box: bytes, *, about: bytes) -> bytes:
    """Open a box.

    Raises:
        Untrusted: another key, another context, or changed on the way.
    """
    try:
        return AESGCM(key).decrypt(_NONCE, box, about)
    except (InvalidTag, ValueError) as error:
        raise Untrusted("a sealed message does not open: it was changed, or is of another round or model") from error


class JobKeys:
    """A site's own keys for one job; in memory only."""

    def __init__(self) -> None:
        self._signing = Ed25519PrivateKey.generate()
        self._agreeing = X25519PrivateKey.generate()
        self.verify_key = self._signing.public_key().public_bytes_raw()
        self.agree_key = self._agreeing.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._signing.sign(message)

    def agree(self, other: bytes, *, parts: Sequence[Any]) -> bytes:
        """The secret that this site shares with another, bound to what both know."""
        try:
            shared = self._agreeing.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise Untrusted("another site's key is none") from error
        return derive(shared, "root", parts=parts)


class PairRoots:
    """This site's secret with every other one, moved on from round to round so that earlier ones cannot be had again.

    The generation is the round's number, which both ends know: there is no message that one of them could miss.
    """

    def __init__(self, roots: Mapping[str, bytes], *, last: int) -> None:
        self._roots = dict(roots)
        self._round = 0
        self._last = last

    def move_to(self, round_number: int) -> None:
        """Forget everything that would open earlier rounds.

        Raises:
            Malformed: the round is over, or there is no such round.
        """
        if not self._round <= round_number <= self._last:
            raise Malformed(f"round {round_number} of secure aggregation, after round {self._round} of {self._last}")
        while self._round < round_number:
            self._round += 1
            self._roots = {name: derive(root, "ratchet", parts=[self._round]) for name, root in self._roots.items()}

    def key(self, other: str, purpose: str, *, context: bytes, parts: Sequence[Any] = ()) -> bytes:
        """The key of a pair for one purpose in one context."""
        return derive(self._roots[other], purpose, context=context, parts=parts)

    def forget(self) -> None:
        self._roots = {}


def sign(kind: str, body: Mapping[str, Any], *, sender: str, context: bytes, keys: JobKeys) -> bytes:
    """A message as it travels: its kind, sender, context and body under one signature."""
    content = encode(dict(body))
    signature = keys.sign(digest("signed", kind, sender, context, content))
    return encode({"kind": kind, "sender": sender, "context": context, "body": content, "signature": signature})


def signed_by(message: bytes, kind: str, *, sender: str, context: bytes, verify_key: bytes) -> dict[str, Any]:
    """The body of a message, when it is of this kind, sender and context.

    Raises:
        Untrusted: it is not, or the signature is not the sender's.
        Malformed: it is no message.
    """
    outer = decode(message)
    content = field(outer, "body", bytes)
    if (field(outer, "kind", str), field(outer, "sender", str)) != (kind, sender):
        raise Untrusted(f"a message that is not {sender}'s, or not a {kind}")
    if field(outer, "context", bytes) != context:
        raise Untrusted(f"{sender}'s {kind} is of another job, round, attempt, cohort, model or plan")
    try:
        Ed25519PublicKey.from_public_bytes(verify_key).verify(
            field(outer, "signature", bytes), digest("signed", kind, sender, context, content)
        )
    except (InvalidSignature, ValueError) as error:
        raise Untrusted(f"{sender}'s {kind} is not signed by {sender}") from error
    body = decode(content)
    if type(body) is not dict:
        raise Malformed(f"{sender}'s {kind} has no fields")
    return body
