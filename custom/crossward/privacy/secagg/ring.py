"""Fixed point: weighted tensors as whole numbers modulo a power of two, so that masks cancel exactly in their sum.

A site's part of a sum is ``weight * value`` with weights that add up to at most 1 over the sites. Values are held
within a public range, and all whole numbers together stay below half the ring: the sum of honest parts cannot wrap
round, however many sites there are, and no bit is spent on headroom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.masks import CHUNK_BYTES, WORD, CipherName, Words, keystream

Bits = Literal[16, 24, 32]
_CHUNK = CHUNK_BYTES // WORD
# float32 holds 24 bits: of a 32-bit ring's largest numbers it rounds the last eight.
_FLOAT_BITS = 24
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Ring:
    """The whole numbers that vectors are made of.

    Attributes:
        bits: of a number on the wire; arithmetic is on 32 bits, whose lower ones are all that travels.
        parties: how many sites add a part.
    """

    bits: Bits
    parties: int

    @property
    def levels(self) -> int:
        """The whole number that stands for the end of a range: half the ring, less what rounding may add."""
        return (1 << (self.bits - 1)) - (self.parties << max(1, self.bits - _FLOAT_BITS))

    def encode_into(
        self,
        out: Words,
        values: NDArray[np.float32],
        *,
        weight: float,
        limit: float,
        coefficient: float = 1.0,
        rounding_key: bytes | None = None,
        cipher: CipherName = "aes-256-ctr",
    ) -> int:
        """Write ``weight * coefficient * values`` as whole numbers; gives how many products were held at a limit.

        Args:
            out: as many words as there are values.
            values: flat float32.
            weight: this site's, from 0 to 1.
            limit: the end of the public range of the products, on both sides of 0.
            coefficient: makes products of values.
            rounding_key: where given, values are rounded up or down by chance, right on average; else to the nearest.
            cipher: that makes the chances from the key.

        Raises:
            PrivacyRefusal: a value is not finite, or weight or range make no sense. Nothing may be sent then.
        """
        if not (0 <= weight <= 1 and 0 < limit < np.inf and np.isfinite(coefficient)):
            raise PrivacyRefusal("a weight outside 0 to 1, a range without an end, or a coefficient that is none")
        ratio = weight * coefficient * self.levels / limit
        if not (limit > _SMALLEST and abs(ratio) < _LARGEST):
            raise PrivacyRefusal("a range that is too small to be worked with; nothing was sent")
        # Beside a chance float32 has no room for the larger whole numbers.
        kind: type[np.floating[Any]] = np.float32 if rounding_key is None else np.float64
        factor, end = kind(ratio), kind(min(limit / abs(coefficient), _LARGEST) if coefficient else _LARGEST)
        outside = 0
        scaled: NDArray[Any] = np.empty(min(_CHUNK, max(1, len(values))), dtype=kind)
        chances = None if rounding_key is None else _Chances(rounding_key, len(values), cipher)
        for first in range(0, len(values), _CHUNK):
            piece = values[first : first + _CHUNK]
            own = scaled[: len(piece)]
            # Two quick looks tell that nothing has to be cut off; they fail for what is not a number.
            if -end <= piece.min() and piece.max() <= end:
                np.multiply(piece, factor, out=own)
            else:
                outside += _held(piece, end, own)
                own *= factor
            if chances is None:
                np.rint(own, out=own)
            else:
                np.floor(np.add(own, chances.at(first, len(piece)), out=own), out=own)
            out[first : first + len(piece)].view(np.int32)[:] = own
        return outside

    def decode(self, words: Words, *, limit: float) -> NDArray[np.float64]:
        """The sum of weighted values, from the sum of what sites wrote."""
        shift = 32 - self.bits
        signed = words.view(np.int32) if not shift else (words << np.uint32(shift)).view(np.int32) >> np.int32(shift)
        values: NDArray[np.float64] = np.multiply(signed, limit / self.levels, dtype=np.float64)
        return values

    def narrow(self, words: Words) -> None:
        """Leave only the bits that travel, in place."""
        if self.bits < 32:
            np.bitwise_and(words, np.uint32((1 << self.bits) - 1), out=words)

    def pack(self, words: Words) -> NDArray[np.uint8]:
        """The lower bits of every word, as they travel."""
        octets = words.astype("<u4", copy=False).view(np.uint8)
        if self.bits == 32:
            return octets
        return np.ascontiguousarray(octets.reshape(-1, WORD)[:, : self.bits // 8]).reshape(-1)

    def unpack(self, octets: NDArray[np.uint8]) -> Words:
        """Words whose lower bits are those that travelled."""
        width = self.bits // 8
        if octets.dtype != np.uint8 or octets.ndim != 1 or len(octets) % width:
            raise PrivacyRefusal(f"a vector of {len(octets)} bytes is none of {self.bits}-bit numbers")
        if self.bits == 32:
            return octets.view("<u4")
        words = np.zeros((len(octets) // width, WORD), dtype=np.uint8)
        words[:, :width] = octets.reshape(-1, width)
        return words.reshape(-1).view("<u4")


def _held(values: NDArray[np.float32], end: np.floating[Any], out: NDArray[Any]) -> int:
    """Hold values within a range; gives how many were outside."""
    if not np.isfinite(values).all():
        raise PrivacyRefusal("a value is not a finite number; nothing was sent")
    np.clip(values, -end, end, out=out)
    return int(np.count_nonzero(out != values))


class _Chances:
    """Numbers from 0 to 1 for rounding, from a cryptographic stream: they decide what leaves the site."""

    def __init__(self, key: bytes, count: int, cipher: CipherName) -> None:
        self._words = keystream(key, count, cipher=cipher)

    def at(self, first: int, count: int) -> NDArray[np.float64]:
        chances: NDArray[np.float64] = self._words[first : first + count].astype(np.float64) * 2.0**-32
        return chances
