from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossward.federation.blocks import merge_blocks, smallest_block
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.sketch import (
    WIDTH,
    gaussian,
    gram,
    rotation,
    sketch,
)

KEY = bytes(range(32))


def unit(rng: np.random.Generator, size: int) -> np.ndarray:
    vector = rng.normal(size=size)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@pytest.mark.parametrize("size", [5000, 200_000])
def test_cosines_are_kept_to_the_width_of_a_sketch(size: int) -> None:
    rng = np.random.default_rng(size)
    base, one, two = (unit(rng, size) for _ in range(3))
    vectors = [base, 0.8 * base + 0.6 * one, -base + 0.1 * two, two]
    wanted = np.array([[float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in vectors] for a in vectors])
    errors = []
    for _ in range(8):
        key = os.urandom(32)
        got = gram([sketch([vector[:100], vector[100:]], key) for vector in vectors])
        errors.append(np.abs(got - wanted).max())
    # Each cosine is off by at most about 1 / sqrt(width); six of those are never seen in eight tries.
    assert max(errors) < 6 / np.sqrt(WIDTH)
    np.testing.assert_allclose(np.diagonal(got), 1, atol=1e-12)
    assert np.linalg.eigvalsh(got).min() > -1e-12


def test_a_sketch_is_the_same_at_every_site_and_another_under_another_key() -> None:
    vector = unit(np.random.default_rng(0), 9000)
    np.testing.assert_array_equal(sketch([vector], KEY), sketch([vector[:10], vector[10:]], KEY))
    assert abs(sketch([vector], KEY) @ sketch([vector], os.urandom(32))) < 0.3
    np.testing.assert_allclose(sketch([7 * vector], KEY), sketch([vector], KEY), atol=1e-6)


def test_a_zero_block_has_a_zero_row() -> None:
    vector = unit(np.random.default_rng(0), 5000)
    got = gram([sketch([vector], KEY), sketch([0 * vector], KEY)])
    np.testing.assert_allclose(got, [[1, 0], [0, 0]], atol=1e-12)


def test_what_is_not_finite_is_not_sketched() -> None:
    with pytest.raises(PrivacyRefusal, match="not finite"):
        sketch([np.array([1.0, np.nan], dtype=np.float32)], KEY)


def test_normal_numbers_are_normal() -> None:
    numbers = gaussian(KEY, 200_000)
    assert abs(numbers.mean()) < 5 / np.sqrt(len(numbers))
    assert abs(numbers.std() - 1) < 0.02
    assert abs((np.abs(numbers) < 1).mean() - 0.6827) < 0.006
    assert np.isfinite(numbers).all()


@settings(max_examples=15)
@given(st.integers(1, 60), st.binary(min_size=32, max_size=32))
def test_a_rotation_keeps_every_inner_product(size: int, key: bytes) -> None:
    turn = rotation(size, key)
    vectors = np.random.default_rng(size).normal(size=(4, size))
    np.testing.assert_allclose((vectors @ turn.T) @ (vectors @ turn.T).T, vectors @ vectors.T, atol=1e-9)
    np.testing.assert_allclose(turn.T @ turn, np.eye(size), atol=1e-10)


def test_what_a_rotation_shows_of_a_vector_is_its_length_alone() -> None:
    """Over keys, the first coordinate of a rotated unit vector has mean 0 and variance 1/d, whatever the vector."""
    for vector in (np.eye(6)[0], np.ones(6) / np.sqrt(6)):
        seen = np.array([rotation(6, os.urandom(32)) @ vector for _ in range(600)])
        assert np.abs(seen.mean(axis=0)).max() < 6 * np.sqrt(1 / 6 / 600)
        assert np.abs(seen.var(axis=0) - 1 / 6).max() < 0.07


def test_small_blocks_are_joined_with_their_neighbours() -> None:
    large = smallest_block() + 1
    blocks = {"a": ["a.w"], "b": ["b.w", "b.b"], "c": ["c.w"], "d": ["d.w"]}
    sizes = {"a.w": 10, "b.w": large, "b.b": 1, "c.w": large, "d.w": 5}
    assert merge_blocks(blocks, sizes) == {"a": ["a.w", "b.w", "b.b"], "c": ["c.w", "d.w"]}
    assert merge_blocks({"a": ["x"]}, {"x": 3}) == {"a": ["x"]}
    assert merge_blocks({}, {}) == {}
