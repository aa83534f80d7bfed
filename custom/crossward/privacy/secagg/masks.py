"""Masks: a 32-byte key stretched to as many numbers as a vector has, added to it or taken away modulo 2^32.

AES-256 or ChaCha20 in counter mode through OpenSSL, which lets go of Python's lock: threads work on ranges of their
own, each positioned by the counter. A key makes one mask and is never used again, so the nonce is zero.
All keys' streams run side by side over a piece of the vector that stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from crossward.federation.errors import PrivacyRefusal

CipherName = Literal["aes-256-ctr", "chacha20"]
Words = NDArray[np.uint32]

WORD = 4
CHUNK_BYTES = 256 * 1024
_KEY_BYTES = 32
# A cipher may want room for a block beyond what it writes.
_SPARE = 64
_ZEROS = bytes(CHUNK_BYTES)


def _aes(key: bytes, offset: int) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR((offset // 16).to_bytes(16))).encryptor()


def _chacha(key: bytes, offset: int) -> CipherContext:
    # The first eight bytes are the block counter, the other eight the nonce.
    return Cipher(algorithms.ChaCha20(key, (offset // 64).to_bytes(16, "little")), mode=None).encryptor()


_CIPHERS: dict[str, Callable[[bytes, int], CipherContext]] = {"aes-256-ctr": _aes, "chacha20": _chacha}


@dataclass(frozen=True)
class Mask:
    """A key and whether its stream is added to the vector or taken away.

    Attributes:
        key: 32 bytes, for this one mask only.
        sign: +1 or -1.
    """

    key: bytes
    sign: int

    def __post_init__(self) -> None:
        if len(self.key) != _KEY_BYTES or self.sign not in (1, -1):
            raise PrivacyRefusal("a mask takes a key of 32 bytes and a sign of +1 or -1")

    def __repr__(self) -> str:
        return f"Mask(sign={self.sign})"


def apply_masks(words: Words, masks: Sequence[Mask], *, cipher: CipherName = "aes-256-ctr", threads: int = 1) -> None:
    """Add every mask to the vector, in place.

    Args:
        words: contiguous uint32.
        masks: keys with signs.
        cipher: the same at both ends of a pair.
        threads: how many ranges are worked on at once.
    """
    if words.dtype != np.uint32 or words.ndim != 1 or not words.flags.c_contiguous:
        raise PrivacyRefusal("masks go onto one contiguous vector of 32-bit words")
    chunk = CHUNK_BYTES // WORD
    pieces = -(-len(words) // chunk)
    ranges = [
        (start * chunk, min(end * chunk, len(words))) for start, end in _even(pieces, max(1, min(threads, pieces)))
    ]
    if len(ranges) == 1:
        _mask_range(words, 0, len(words), masks, cipher)
        return
    with ThreadPoolExecutor(len(ranges)) as pool:
        for done in [pool.submit(_mask_range, words, start, end, masks, cipher) for start, end in ranges]:
            done.result()


def _even(count: int, parts: int) -> list[tuple[int, int]]:
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _mask_range(words: Words, start: int, end: int, masks: Sequence[Mask], cipher: CipherName) -> None:
    streams = [(_CIPHERS[cipher](mask.key, start * WORD), _ADD[mask.sign]) for mask in masks]
    buffer = bytearray(CHUNK_BYTES + _SPARE)
    numbers = np.frombuffer(buffer, dtype="<u4", count=CHUNK_BYTES // WORD)
    zeros = memoryview(_ZEROS)
    for first in range(start, end, len(numbers)):
        piece = words[first : min(first + len(numbers), end)]
        stream = numbers[: len(piece)]
        for context, add in streams:
            context.update_into(zeros[: WORD * len(piece)], buffer)
            add(piece, stream, out=piece)


_ADD: dict[int, Callable[..., Any]] = {1: np.add, -1: np.subtract}


def remove_pads(words: Words, pads: Sequence[bytes], *, cipher: CipherName = "aes-256-ctr", threads: int = 1) -> None:
    """Make a site's own slot of an opened sum readable, in place."""
    apply_masks(words, [Mask(key, -1) for key in pads], cipher=cipher, threads=threads)


def fingerprint(words: Words, context: bytes) -> bytes:
    """What a site signs of its masked vector (GMAC under a public key of the attempt).

    It shows that the vector that arrived is the one that was signed, at the speed of memory. Whoever can change
    messages inside TLS could make another vector with the same fingerprint: that is the server, which adds them up.
    """
    cipher = Cipher(algorithms.AES(sha256(context).digest()), modes.GCM(bytes(12))).encryptor()
    cipher.authenticate_additional_data(words.data.cast("B"))
    cipher.finalize()
    return cipher.tag


def keystream(key: bytes, count: int, *, cipher: CipherName = "aes-256-ctr") -> Words:
    """The first numbers of a key's stream, where a few are needed by themselves."""
    words = np.zeros(count, dtype=np.uint32)
    apply_masks(words, [Mask(key, 1)], cipher=cipher)
    return words
