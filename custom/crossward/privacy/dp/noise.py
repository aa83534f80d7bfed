"""Gaussian noise for privacy, from the operating system's randomness and from no seed.

A key from ``os.urandom`` is stretched by AES-256 in counter mode; it is never kept, shown or written down, so that
nobody can make the noise again. Two numbers of 64 bits make two values of noise (Box and Muller 1958) in double
precision. The radius goes out to 9.4 standard deviations and is never infinite.

Floating point is denser around zero, and a sum's last bits can give away what stood before the noise (Mironov 2012).
Therefore value and noise are both rounded to multiples of one step, a power of two near 2^-30 of the noise's scale,
and are added without any rounding. The sum holds no bits but those of two whole numbers; rounding it to the tensor's
own type afterwards tells nothing more. A sum of several Gaussians (Holohan and Braghin 2021), which other libraries
take, makes the last bits hard to read; here there are none.

What this leaves open:

- Rounding a value moves it by up to half a step. Over 5 million values that adds 2e-6 of the scale to the sensitivity.
- Noise is a rounded Gaussian up to the accuracy of double precision and of the libraries' logarithm, sine and cosine
  (an error in the last place). It is not an exact sampler of a discrete Gaussian (Canonne, Kamath and Steinke 2020).
- Nothing is done about what the time of a step, or another process on the same machine, could show.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from crossward.federation.contract import Vector
from crossward.federation.errors import PrivacyRefusal

GRID_BITS = 30
"""A step is between 2^-30 and 2^-31 of the noise's scale."""

FARTHEST = 10.0
"""Standard deviations that no noise goes beyond: the smallest of numbers of 64 bits makes 9.4."""

_KEY_BYTES, _WORD = 32, 8
# Pairs at a time: their buffers stay in the processor's cache.
_PAIRS = 8192
# A cipher may want room for a block beyond what it writes.
_SPARE = 64
_ZEROS = bytes(2 * _PAIRS * _WORD)
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


class NoiseSource:
    """Gaussian noise that no seed can reproduce: AES-256-CTR under a key from os.urandom, which is never kept or shown.

    Safe for threads. A process that was forked draws a key of its own: the same noise on two values would cancel in
    their difference.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._cipher = _new_cipher()

    def __reduce__(self) -> NoReturn:
        raise PrivacyRefusal("a source of noise cannot be copied or stored: its noise would come twice. Make a new one")

    def normal(self, shape: Sequence[int], *, scale: float, device: torch.device | str = "cpu") -> Tensor:
        """Give noise N(0, scale^2) of a shape, in float32."""
        noise = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
        self.add_to([noise], scale=scale)
        return noise

    def add_to(self, tensors: Sequence[Tensor], *, scale: float) -> None:
        """Add noise N(0, scale^2) to every value, in place, by pieces that stay in the processor's cache.

        Args:
            tensors: of floating point, on any device.
            scale: the standard deviation.

        Raises:
            PrivacyRefusal: the scale is not one to protect anything by, or values are not of floating point.
        """
        if not _SMALLEST <= scale <= _LARGEST:
            raise PrivacyRefusal(f"noise of scale {scale} protects nothing; the scale must be a finite number above 0")
        wrong = next((tensor.dtype for tensor in tensors if not tensor.is_floating_point()), None)
        if wrong is not None:
            raise PrivacyRefusal(f"noise cannot be added to values of {wrong}; they must be of floating point")
        finest = math.floor(math.log2(scale)) - GRID_BITS
        steps, step = math.ldexp(1.0, -finest), math.ldexp(1.0, finest)
        with self._lock, torch.no_grad():
            for tensor in tensors:
                values = tensor.detach().contiguous()
                flat, start = values.view(-1), 0
                for noise in self._gaussian(flat.numel(), scale * steps):
                    piece = flat[start : start + len(noise)]
                    start += len(noise)
                    # In double precision whole numbers up to 2^53 are exact, and so is the product with a power of two.
                    whole = piece.double().mul_(steps).round_()
                    piece.copy_(whole.add_(noise.to(whole.device)).mul_(step))
                if not tensor.is_contiguous():
                    tensor.copy_(values)

    def uniform(self, count: int) -> Vector:
        """Give numbers in [0,1), all multiples of 2^-53 alike."""
        found: Vector = np.empty(count)
        with self._lock:
            buffer, words = _buffer()
            for start in range(0, count, len(words)):
                size = min(len(words), count - start)
                self._fill(buffer, size)
                np.multiply(words[:size] >> np.uint64(11), 2.0**-53, out=found[start : start + size])
        return found

    def _gaussian(self, count: int, scale: float) -> Iterator[Tensor]:
        """Whole numbers that are rounded noise of a scale, in pieces; a piece is overwritten by the next."""
        pairs = min(_PAIRS, max(1, (count + 1) // 2))
        buffer, words = _buffer(pairs)
        radius, angle, values = np.empty(pairs), np.empty(pairs), np.empty(2 * pairs)
        turns, noise = torch.from_numpy(angle), torch.from_numpy(values)
        for start in range(0, count, 2 * pairs):
            self._fill(buffer, 2 * pairs)
            # Half a unit keeps the logarithm finite, and 64 bits the far tail filled.
            np.add(words[:pairs], 0.5, out=radius)
            np.log(np.multiply(radius, 2.0**-64, out=radius), out=radius)
            np.sqrt(np.multiply(radius, -2.0 * scale * scale, out=radius), out=radius)
            np.multiply(words[pairs:], 2.0**-63 * math.pi, out=angle)
            # PyTorch's sine and cosine of doubles are three times as fast as numpy's.
            torch.cos(turns, out=noise[:pairs])
            torch.sin(turns, out=noise[pairs:])
            values[:pairs] *= radius
            values[pairs:] *= radius
            np.rint(values, out=values)
            yield noise[: count - start]

    def _fill(self, buffer: bytearray, words: int) -> None:
        """Overwrite a buffer with the stream's next numbers of 64 bits."""
        if os.getpid() != self._process:
            self._process, self._cipher = os.getpid(), _new_cipher()
        self._cipher.update_into(memoryview(_ZEROS)[: _WORD * words], buffer)


def _new_cipher() -> CipherContext:
    # The key makes one stream only, so the counter may start at zero.
    return Cipher(algorithms.AES(os.urandom(_KEY_BYTES)), modes.CTR(bytes(16))).encryptor()


def _buffer(pairs: int = _PAIRS) -> tuple[bytearray, NDArray[Any]]:
    """Room for the stream's numbers, and a view of them."""
    buffer = bytearray(2 * pairs * _WORD + _SPARE)
    return buffer, np.frombuffer(buffer, dtype="<u8", count=2 * pairs)
