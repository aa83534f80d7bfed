"""Shamir's secret sharing of 32-byte secrets: any ``threshold`` shares give the secret, fewer give nothing.

Over the prime field of 2^256 + 297, so that every 32-byte string is an element. A share is 33 bytes. The polynomial is
read at 0; a share's place is its holder's public number, from 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from crossward.federation.errors import PrivacyRefusal

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


class BadShares(PrivacyRefusal):
    """Shares that cannot be of one secret, or too few of them."""


def split(secret: bytes, *, places: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Share a secret among holders.

    Args:
        secret: 32 bytes.
        places: the holders' public numbers: different, from 1.
        threshold: how many shares it takes to know anything about the secret.
    """
    if len(secret) != SECRET_BYTES:
        raise BadShares(f"a secret of {len(secret)} bytes; it takes {SECRET_BYTES}")
    if len(set(places)) != len(places) or not all(0 < place < PRIME for place in places):
        raise BadShares("holders need different numbers, from 1")
    if not 1 <= threshold <= len(places):
        raise BadShares(f"a threshold of {threshold} among {len(places)} holders")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value_at(coefficients, place).to_bytes(SHARE_BYTES) for place in places}


def _value_at(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret, from the first ``threshold`` shares by place.

    Raises:
        BadShares: too few, or not shares of any 32-byte secret. Wrong shares may also give a wrong secret, without
            an error: compare it with what its owner committed to.
    """
    if len(shares) < threshold:
        raise BadShares(f"{len(shares)} shares of the {threshold} that it takes")
    places = tuple(sorted(shares))[:threshold]
    total = 0
    for place, weight in zip(places, _weights(places), strict=True):
        share = int.from_bytes(shares[place])
        if len(shares[place]) != SHARE_BYTES or share >= PRIME:
            raise BadShares("a share that is no element of the field")
        total = (total + weight * share) % PRIME
    if total >= 2 ** (8 * SECRET_BYTES):
        raise BadShares("the shares are not of one secret")
    return total.to_bytes(SECRET_BYTES)


@lru_cache(maxsize=64)
def _weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights for reading a polynomial at 0; the same survivors need them for every secret of a round."""
    weights = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
