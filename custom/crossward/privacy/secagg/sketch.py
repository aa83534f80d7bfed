"""What the server may see of vectors whose inner products it needs: sketches and rotations under a key of the sites.

With a secret Gaussian map the columns of all sites' sketches are draws from a normal distribution whose covariance is
the sites' Gram matrix: the server's view depends on the Gram matrix and on nothing else. A secret rotation keeps
inner products exactly. Either way a site that colludes with the server gives the key away; keys are fresh every round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from crossward.federation.blocks import SKETCH_WIDTH
from crossward.federation.combine import normalise
from crossward.federation.contract import Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.keys import derive
from crossward.privacy.secagg.masks import keystream

WIDTH = SKETCH_WIDTH
"""Numbers in a sketch: cosines are off by about one over the square root of it."""

_BUCKETS = 8192


def sketch(pieces: Iterable[NDArray[np.float32]], key: bytes) -> Vector:
    """A block's direction in a few hundred numbers, of length 1; zeros where the block is all zero.

    Args:
        pieces: the block's tensors, flat, in an order that is the same at every site.
        key: of the sites, for this block and round only.

    Raises:
        PrivacyRefusal: a value is not finite.
    """
    values = np.concatenate([np.asarray(piece, dtype=np.float64).reshape(-1) for piece in pieces])
    if not np.isfinite(values).all():
        raise PrivacyRefusal("an update with values that are not finite cannot be compared with others")
    length = np.linalg.norm(values)
    if length == 0:
        return np.zeros(WIDTH)
    values /= length
    if len(values) > _BUCKETS:
        values = _gathered(values, derive(key, "buckets"))
    flat = gaussian(derive(key, "gaussian"), WIDTH * len(values)).reshape(WIDTH, len(values)) @ values
    found: Vector = flat / np.linalg.norm(flat)
    return found


def _gathered(values: Vector, key: bytes) -> Vector:
    """Count sketch: every value goes with a secret sign into a secret bucket; inner products are kept on average."""
    words = keystream(key, len(values))
    signs = 1.0 - 2.0 * (words >> np.uint32(31))
    sums = np.bincount(words % np.uint32(_BUCKETS), weights=values * signs, minlength=_BUCKETS)
    return sums.astype(np.float64, copy=False)


def gaussian(key: bytes, count: int) -> Vector:
    """Standard normal numbers from a key's stream."""
    words = keystream(key, count)
    found: Vector = ndtri((words + 0.5) * 2.0**-32)
    return found


def rotation(size: int, key: bytes) -> Vector:
    """A random rotation or reflection, every one as likely as every other (QR of a Gaussian matrix)."""
    q, r = np.linalg.qr(gaussian(key, size * size).reshape(size, size))
    # Without this the decomposition's own choice of signs would show.
    found: Vector = q * np.sign(np.diagonal(r))
    return found


def gram(sketches: Sequence[Vector]) -> Vector:
    """Cosines between sites from their sketches; a zero block has a zero row, diagonal included."""
    rows = np.stack(sketches)
    found: Vector = rows @ rows.T
    return found


def halves(sketches: Sequence[Vector]) -> tuple[Vector, Vector]:
    """The same from the first half of every sketch alone, and from the second: two measurements of one thing."""
    one, other = np.split(np.stack(sketches), 2, axis=1)
    return normalise(one @ one.T), normalise(other @ other.T)
