"""Seeds for training, derived so that the same site, round and step draw the same numbers in every environment.

Never used for privacy noise: that must not be reproducible by anyone.
"""

from __future__ import annotations

import hashlib


def derive(seed: int, *parts: str | int) -> int:
    """Derive a 63-bit seed from a base seed and the place it is used at, such as (site, round, step)."""
    if any("\0" in part for part in parts if isinstance(part, str)):
        raise ValueError("a name in a seed cannot contain a null character")
    text = "\0".join(f"{type(part).__name__}:{part}" for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1
