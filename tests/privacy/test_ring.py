from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.masks import CHUNK_BYTES, keystream
from crossward.privacy.secagg.ring import Ring

BITS: Any = st.sampled_from([16, 24, 32])
KEY = bytes(range(32))


def _encoded(ring: Ring, values: Any, **options: Any) -> tuple[Any, int]:
    values = np.asarray(values, dtype=np.float32)
    words = np.zeros(len(values), np.uint32)
    return words, ring.encode_into(words, values, **options)


def _signed(word: int, bits: int) -> int:
    word %= 2**bits
    return word - 2**bits if word >= 2 ** (bits - 1) else word


@st.composite
def parts(draw: Any) -> tuple[int, list[float], list[float], float]:
    """Sites' values and weights that add up to at most 1, with all their weight on the ends of the range often."""
    parties = draw(st.integers(2, 64))
    limit = draw(st.floats(1e-6, 1e6))
    shares = draw(st.lists(st.integers(0, 10), min_size=parties, max_size=parties).filter(any))
    total = sum(shares)
    weights = [share / total for share in shares] if draw(st.booleans()) else [1 / parties] * parties
    wild = st.floats(allow_nan=False, allow_infinity=False, width=32)
    value = st.sampled_from([limit, -limit, 10 * limit]) if draw(st.booleans()) else wild
    values = draw(st.lists(value, min_size=parties, max_size=parties))
    if draw(st.booleans()):
        values = [draw(st.sampled_from([limit, -limit]))] * parties
    return parties, values, weights, limit


@given(parts(), BITS)
@settings(max_examples=300)
def test_the_sum_of_honest_parts_never_wraps_and_is_near_the_exact_one(drawn: Any, bits: Any) -> None:
    parties, values, weights, limit = drawn
    ring = Ring(bits, parties)
    summed = np.zeros(1, np.uint32)
    whole = 0
    exact = Fraction(0)
    for value, weight in zip(values, weights, strict=True):
        words, _ = _encoded(ring, [value], weight=weight, limit=limit)
        summed += words
        whole += int(words.view(np.int32)[0])
        held = min(max(Fraction(float(np.float32(value))), -Fraction(limit)), Fraction(limit))
        exact += Fraction(weight) * held
    assert -(2 ** (bits - 1)) <= whole < 2 ** (bits - 1)
    assert _signed(int(summed[0]), bits) == whole
    found = ring.decode(summed, limit=limit)[0]
    assert found == pytest.approx(whole * limit / ring.levels, rel=1e-12)
    # Half a step of every party, and float32's own rounding of range, factor and product.
    bound = Fraction(limit) * (Fraction(parties, 2 * ring.levels) + Fraction(4, 2**24))
    assert abs(Fraction(float(found)) - exact) <= bound


@pytest.mark.parametrize(("bits", "parties", "levels"), [(16, 3, 32762), (24, 10, 8388588), (32, 4, 2147482624)])
def test_how_many_levels_a_ring_has(bits: Any, parties: int, levels: int) -> None:
    assert Ring(bits, parties).levels == levels


def test_numbers_worked_out_by_hand() -> None:
    """A 16-bit ring of three has 32762 levels; 0.25 of 1 is 8190.5, and so is half of 0.5; halves go to the even."""
    ring = Ring(16, 3)
    words, outside = _encoded(ring, [1.0, -1.0, 0.0, 3.0], weight=0.25, limit=1.0)
    assert words.view(np.int32).tolist() == [8190, -8190, 0, 8190]
    assert outside == 1
    words, _ = _encoded(ring, [-0.5], weight=0.5, limit=1.0)
    assert words.tolist() == [2**32 - 8190]
    assert ring.decode(np.array([2**32 - 8190, 32762, 65535], np.uint32), limit=2.0).tolist() == pytest.approx(
        [-16380 / 32762, 2.0, -2 / 32762]
    )


@given(st.lists(st.floats(-3, 3, width=32), max_size=50), st.floats(0.5, 2))
def test_what_is_outside_the_range_is_counted_and_held_at_its_end(values: list[float], limit: float) -> None:
    ring = Ring(32, 2)
    words, outside = _encoded(ring, values, weight=0.5, limit=limit)
    end = float(np.float32(limit))
    assert outside == sum(abs(value) > end for value in values)
    held, none = _encoded(ring, np.clip(np.asarray(values, np.float32), -end, end), weight=0.5, limit=limit)
    assert none == 0
    np.testing.assert_array_equal(words, held)


@pytest.mark.parametrize("where", [0, 5, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 3])
def test_a_value_that_is_no_number_is_refused_wherever_it_is(where: int) -> None:
    values = np.zeros(CHUNK_BYTES // 4 + 4, np.float32)
    values[where] = np.nan
    for key in (None, KEY):
        with pytest.raises(PrivacyRefusal):
            _encoded(Ring(32, 3), values, weight=1 / 3, limit=1.0, rounding_key=key)


@pytest.mark.parametrize(
    ("weight", "limit"),
    [(-0.1, 1.0), (1.1, 1.0), (np.nan, 1.0), (0.5, 0.0), (0.5, -1.0), (0.5, np.inf), (0.5, np.nan)],
)
def test_a_weight_or_a_range_that_makes_no_sense_is_refused(weight: float, limit: float) -> None:
    with pytest.raises(PrivacyRefusal):
        _encoded(Ring(32, 3), [0.0], weight=weight, limit=limit)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), BITS)
def test_what_travels_are_the_lower_bits(values: list[int], bits: Any) -> None:
    ring = Ring(bits, 3)
    packed = ring.pack(np.array(values, dtype=np.uint32))
    assert packed.tobytes() == b"".join((value % 2**bits).to_bytes(bits // 8, "little") for value in values)
    assert ring.unpack(packed).tolist() == [value % 2**bits for value in values]


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), min_size=1, max_size=8), BITS)
def test_lower_bits_are_all_that_a_sum_needs(vectors: list[list[int]], bits: Any) -> None:
    ring = Ring(bits, 8)
    travelled = sum((ring.unpack(ring.pack(np.array(each, np.uint32))) for each in vectors), np.zeros(3, np.uint32))
    expected = [_signed(sum(column), bits) / ring.levels for column in zip(*vectors, strict=True)]
    assert ring.decode(travelled, limit=1.0).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("bits", "octets"), [(16, 3), (24, 4), (32, 6)])
def test_bytes_that_are_no_vector_are_refused(bits: Any, octets: int) -> None:
    with pytest.raises(PrivacyRefusal):
        Ring(bits, 3).unpack(np.zeros(octets, np.uint8))
    with pytest.raises(PrivacyRefusal):
        Ring(bits, 3).unpack(np.zeros(12, np.int8))  # type: ignore[arg-type]


def test_rounding_by_chance_is_right_on_average() -> None:
    """A value of 1000.3 steps, 200,000 times: the average is off by less than six standard errors (p < 1e-8)."""
    ring = Ring(16, 4)
    count = 200_000
    step = 1.0 / ring.levels
    values = np.full(count, 1000.3 * step, np.float32)
    words, _ = _encoded(ring, values, weight=1.0, limit=1.0, rounding_key=KEY)
    steps = words.view(np.int32)
    assert set(steps.tolist()) == {1000, 1001}
    assert steps.mean() == pytest.approx(1000.3, abs=6 * np.sqrt(0.3 * 0.7 / count) + 1e-4)
    negative, _ = _encoded(ring, -values, weight=1.0, limit=1.0, rounding_key=KEY)
    assert negative.view(np.int32).mean() == pytest.approx(-1000.3, abs=6 * np.sqrt(0.3 * 0.7 / count) + 1e-4)


def test_chances_come_from_the_keyed_stream() -> None:
    """0.5 steps are rounded up exactly where the stream's number is a half or more."""
    ring = Ring(16, 4)
    values = np.full(1000, 0.5 / ring.levels, np.float32)
    words, _ = _encoded(ring, values, weight=1.0, limit=1.0, rounding_key=KEY)
    np.testing.assert_array_equal(words, (keystream(KEY, 1000) >= 2**31).astype(np.uint32))
    again, _ = _encoded(ring, values, weight=1.0, limit=1.0, rounding_key=KEY)
    other, _ = _encoded(ring, values, weight=1.0, limit=1.0, rounding_key=bytes(32))
    np.testing.assert_array_equal(words, again)
    assert (words != other).any()


def test_chances_go_on_from_piece_to_piece() -> None:
    count = CHUNK_BYTES // 4 + 1000
    ring = Ring(16, 4)
    values = np.full(count, 0.5 / ring.levels, np.float32)
    words, _ = _encoded(ring, values, weight=1.0, limit=1.0, rounding_key=KEY, cipher="chacha20")
    expected = (keystream(KEY, count, cipher="chacha20") >= 2**31).astype(np.uint32)
    np.testing.assert_array_equal(words, expected)
