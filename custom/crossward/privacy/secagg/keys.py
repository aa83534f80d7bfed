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

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import Malformed, decode, digest, encode, field
from crossward.privacy.secagg.identity import Untrusted

KEY_BYTES = 32
GROUP = ""
"""Stands for all sites of a roster where a site's name stands for a pair; no site is called so."""
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
    """A site's own keys for one job; in memory only, and each no longer than it is needed."""

    def __init__(self) -> None:
        signing, agreeing = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.verify_key = signing.public_key().public_bytes_raw()
        self.agree_key = agreeing.public_key().public_bytes_raw()
        self._signing: Ed25519PrivateKey | None = signing
        self._agreeing: X25519PrivateKey | None = agreeing

    def sign(self, message: bytes) -> bytes:
        if self._signing is None:
            raise PrivacyRefusal("the site's keys of this job are gone")
        return self._signing.sign(message)

    def agree(self, other: bytes, *, parts: Sequence[Any]) -> bytes:
        """The secret that this site shares with another, bound to what both know."""
        if self._agreeing is None:
            raise PrivacyRefusal("the site has agreed on its secrets with the others already; the key for it is gone")
        try:
            shared = self._agreeing.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise Untrusted("another site's key is none") from error
        return derive(shared, "root", parts=parts)

    def roots(self, own: str, others: Mapping[str, bytes], *, parts: Sequence[Any]) -> dict[str, bytes]:
        """The first secret with every other site; the key they are agreed on with goes, as it would give them again."""
        found = {other: self.agree(key, parts=[*parts, *sorted([own, other])]) for other, key in others.items()}
        self._agreeing = None
        return found

    def forget(self) -> None:
        self._signing = self._agreeing = None


class PairRoots:
    """This site's secret with every other one, and the one of all sites, moved on from round to round.

    Whoever reads the site's memory after it has moved on cannot make the keys of earlier rounds: neither the seeds of
    masks, pads and sealed shares, nor what vectors were turned by and sketched under, which come from the secret of
    all sites. That takes that nothing else gives the first roots again: ``JobKeys`` drops its agreement key once they
    are made. Not covered are the round that the site is in; what it keeps on disk so that a result can arrive later
    (``Vault.keep_keys``, until that round's model was received); and copies of memory that Python made and did not
    wipe. Who had the site's memory at an earlier round can go on from there.

    The generation is the round's number, which all ends know: there is no message that one of them could miss.
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

    def add_group(self, secret: bytes) -> None:
        """Take the secret of all sites, before the first round."""
        if self._round:
            raise Malformed("the key that only sites know comes before the first round")
        self._roots[GROUP] = secret

    @property
    def grouped(self) -> bool:
        """Whether the secret of all sites is known."""
        return GROUP in self._roots

    def key(self, other: str, purpose: str, *, context: bytes = b"", parts: Sequence[Any] = ()) -> bytes:
        """The key of a pair, or of all sites, for one purpose in one context."""
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
