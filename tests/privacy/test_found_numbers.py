"""Faults of the fixed point that were found by reading, each with a test that failed before it was mended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg import ring
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.vector import VectorLayout


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_value_is_refused_and_not_held_at_the_end_of_the_range(value: float) -> None:
    with pytest.raises(PrivacyRefusal):
        Ring(32, 3).encode_into(np.zeros(1, np.uint32), np.array([value], np.float32), weight=1 / 3, limit=1.0)


@pytest.mark.parametrize(("bits", "parties"), [(16, 2), (16, 4), (24, 2), (24, 4), (24, 8)])
def test_rounding_by_chance_does_not_wrap_either(monkeypatch: pytest.MonkeyPatch, bits: Any, parties: int) -> None:
    """The largest chance that the stream can give, at every site, for a value at the end of the range."""
    monkeypatch.setattr(ring, "keystream", lambda key, count, cipher: np.full(count, 2**32 - 1, np.uint32))
    summed = np.zeros(1, np.uint32)
    for _ in range(parties):
        words = np.zeros(1, np.uint32)
        Ring(bits, parties).encode_into(
            words, np.ones(1, np.float32), weight=1 / parties, limit=1.0, rounding_key=bytes(32)
        )
        summed += words
    assert Ring(bits, parties).decode(summed, limit=1.0)[0] == pytest.approx(1.0, rel=1e-2)


def test_rounding_by_chance_leaves_whole_numbers_alone_near_the_end_of_the_range() -> None:
    """2^22 steps exactly: float32 has no room for the chance beside them, and rounds some of them up."""
    narrow = Ring(24, 4)
    words = np.zeros(10_000, np.uint32)
    values = np.full(10_000, 2**22, np.float32)
    narrow.encode_into(words, values, weight=1.0, limit=float(narrow.levels), rounding_key=bytes(32))
    assert set(words.tolist()) == {2**22}


def test_a_tiny_range_gives_no_wild_numbers() -> None:
    words = np.zeros(2, np.uint32)
    try:
        Ring(32, 3).encode_into(words, np.zeros(2, np.float32), weight=1 / 3, limit=1e-30)
    except PrivacyRefusal:
        return
    np.testing.assert_array_equal(words, 0)


@pytest.mark.parametrize(("bits", "parties"), [(16, 3), (24, 20), (32, 20)])
def test_exact_numbers_survive_a_narrow_ring(bits: Any, parties: int) -> None:
    """They are written as words of 20 bits, and a 16-bit ring carries 16 of them; a 24-bit one 16 sites' sums."""
    layout = VectorLayout({}, {"count": ()}, parties=parties, bits=bits)
    summed = np.zeros(layout.words, np.uint32)
    for _ in range(parties):
        words = layout.encode({}, {"count": np.array(1e6 - 2.0**-24)}, {})
        layout.ring.narrow(words)
        summed += words
    layout.ring.narrow(summed)
    assert layout.numbers(summed)["tally", "count"] == pytest.approx(1e6 * parties, abs=1e-3)
