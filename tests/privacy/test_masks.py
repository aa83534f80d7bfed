from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.masks import CHUNK_BYTES, Mask, apply_masks, keystream
from tests.privacy.federation import Federation, binding, run_round

CHUNK = CHUNK_BYTES // 4
CIPHERS: list[Any] = ["aes-256-ctr", "chacha20"]


def _octets(key: bytes, count: int, cipher: str) -> bytes:
    """The stream straight from the library, from its first byte and in one go."""
    kinds = {
        "aes-256-ctr": lambda: Cipher(algorithms.AES(key), modes.CTR(bytes(16))),
        "chacha20": lambda: Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None),
    }
    return kinds[cipher]().encryptor().update(bytes(count))


def _words(key: bytes, count: int, cipher: str) -> list[int]:
    octets = _octets(key, 4 * count, cipher)
    return [int.from_bytes(octets[at : at + 4], "little") for at in range(0, 4 * count, 4)]


def test_the_aes_stream_of_a_key_of_zeros() -> None:
    """NIST's known answer for AES-256 (all-zero key and block) is the first block of the stream."""
    assert keystream(bytes(32), 4).tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_the_chacha20_stream_of_a_key_of_zeros() -> None:
    """RFC 8439, appendix A.1, test vectors 1 and 2: blocks 0 and 1 of the all-zero key and nonce."""
    stream = keystream(bytes(32), 32, cipher="chacha20").tobytes().hex()
    assert stream.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert stream[128:].startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed")


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_every_word_of_the_stream(cipher: Any, count: int) -> None:
    key = bytes(range(32))
    found = keystream(key, count, cipher=cipher)
    assert found.astype("<u4").tobytes() == _octets(key, 4 * count, cipher)


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("threads", [2, 3, 5, 64])
def test_threads_do_what_one_does(cipher: Any, threads: int) -> None:
    count = 4 * CHUNK + 1234
    masks = [Mask(bytes([number]) * 32, 1 if number % 2 else -1) for number in range(3)]
    one, many = np.arange(count, dtype=np.uint32), np.arange(count, dtype=np.uint32)
    apply_masks(one, masks, cipher=cipher)
    apply_masks(many, masks, cipher=cipher, threads=threads)
    np.testing.assert_array_equal(one, many)
    expected = np.arange(count, dtype=np.int64)
    for mask in masks:
        expected += mask.sign * np.frombuffer(_octets(mask.key, 4 * count, cipher), "<u4").astype(np.int64)
    np.testing.assert_array_equal(one, expected % 2**32)


_keys = st.binary(min_size=32, max_size=32)


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.lists(st.tuples(_keys, st.sampled_from([1, -1])), max_size=4),
    st.sampled_from(CIPHERS),
)
@settings(max_examples=50)
def test_masks_are_added_as_whole_numbers_would_be(
    values: list[int], masks: list[tuple[bytes, int]], cipher: Any
) -> None:
    words = np.array(values, dtype=np.uint32)
    apply_masks(words, [Mask(key, sign) for key, sign in masks], cipher=cipher)
    expected = list(values)
    for key, sign in masks:
        stream = _words(key, len(values), cipher)
        expected = [(value + sign * number) % 2**32 for value, number in zip(expected, stream, strict=True)]
    assert words.tolist() == expected
    apply_masks(words, [Mask(key, -sign) for key, sign in reversed(masks)], cipher=cipher)
    assert words.tolist() == values


def test_the_ciphers_differ_and_so_do_keys() -> None:
    streams = {keystream(bytes([number]) * 32, 8, cipher=cipher).tobytes() for number in range(4) for cipher in CIPHERS}
    assert len(streams) == 8


@pytest.mark.parametrize(("key", "sign"), [(bytes(16), 1), (bytes(33), 1), (b"", 1), (bytes(32), 0), (bytes(32), 2)])
def test_a_short_key_or_an_odd_sign_is_no_mask(key: bytes, sign: int) -> None:
    with pytest.raises(PrivacyRefusal):
        Mask(key, sign)


def test_a_mask_does_not_print_its_key() -> None:
    assert "65" not in repr(Mask(b"A" * 32, 1))
    assert "A" not in repr(Mask(b"A" * 32, 1)).replace("Mask", "")


@pytest.mark.parametrize(
    "words",
    [np.zeros(4, np.int32), np.zeros(4, np.uint64), np.zeros((2, 2), np.uint32), np.zeros(8, np.uint32)[::2]],
)
def test_only_a_contiguous_vector_of_words_is_masked(words: Any) -> None:
    with pytest.raises(PrivacyRefusal):
        apply_masks(words, [Mask(bytes(32), 1)])


@pytest.mark.parametrize("order", [["b", "a", "c"], ["c", "b", "a"], ["Z", "a", "M"], ["site-10", "site-9", "site-1"]])
def test_the_signs_of_masks_follow_names_and_not_the_order_of_arrival(order: list[str]) -> None:
    """With signs by position, rosters in another order than by name would leave masks in the sum."""
    federation = Federation.of(order)
    vectors = {name: np.array([10**number], np.uint32) for number, name in enumerate(order)}
    assert run_round(federation, binding(order), vectors).sum.tolist() == [111]
