from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.privacy.secagg.canonical import Malformed, decode, digest, encode, field

_texts = st.text(max_size=8)
_leaves = st.none() | st.integers() | _texts | st.binary(max_size=8)
messages = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4), max_leaves=12
)


def _framed(letter: bytes, content: bytes) -> bytes:
    return letter + len(content).to_bytes(8, "big") + content


def test_the_bytes_are_those_that_the_format_says() -> None:
    assert encode({"b": [1, None], "a": b"\x00"}) == _framed(
        b"d",
        _framed(b"s", b"a")
        + _framed(b"b", b"\x00")
        + _framed(b"s", b"b")
        + _framed(b"l", _framed(b"i", b"1") + _framed(b"n", b"")),
    )


@given(messages)
def test_what_was_written_is_read_again(message: Any) -> None:
    assert decode(encode(message)) == message


@given(messages, messages)
def test_two_messages_never_have_the_same_bytes(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (one == other)


@given(st.dictionaries(_texts, st.integers(), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_the_order_in_which_fields_were_set_does_not_show(message: dict[str, int], dice: Any) -> None:
    keys = list(message)
    dice.shuffle(keys)
    assert encode({key: message[key] for key in keys}) == encode(message)


@given(messages, st.data())
def test_a_changed_byte_is_refused_or_is_another_message(message: Any, data: st.DataObject) -> None:
    written = encode(message)
    where = data.draw(st.integers(0, len(written) - 1))
    changed = written[:where] + bytes([written[where] ^ data.draw(st.integers(1, 255))]) + written[where + 1 :]
    try:
        read = decode(changed)
    except Malformed:
        return
    assert read != message
    assert encode(read) == changed


@given(messages, st.binary(min_size=1, max_size=12))
def test_bytes_after_the_end_or_none_at_the_end_are_refused(message: Any, more: bytes) -> None:
    written = encode(message)
    with pytest.raises(Malformed):
        decode(written + more)
    with pytest.raises(Malformed):
        decode(written[:-1])


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read = decode(data)
    except Malformed:
        return
    assert encode(read) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        _framed(b"x", b""),
        _framed(b"n", b"1"),
        _framed(b"i", b""),
        _framed(b"i", b"01"),
        _framed(b"i", b"+1"),
        _framed(b"i", b" 1"),
        _framed(b"i", b"1_0"),
        _framed(b"i", b"-0"),
        _framed(b"i", "٣".encode()),
        _framed(b"i", b"9" * 5000),
        _framed(b"s", b"\xff"),
        _framed(b"s", b"\xed\xa0\x80"),
        _framed(b"l", b"n"),
        b"l" + (4).to_bytes(8, "big") + _framed(b"s", b"abc"),
        b"s" + (2**64 - 1).to_bytes(8, "big"),
        _framed(b"d", _framed(b"s", b"a")),
        _framed(b"d", _framed(b"i", b"1") + _framed(b"n", b"")),
        _framed(b"d", b"".join(_framed(b"s", key) + _framed(b"n", b"") for key in (b"b", b"a"))),
        _framed(b"d", b"".join(_framed(b"s", key) + _framed(b"n", b"") for key in (b"a", b"a"))),
    ],
)
def test_what_has_no_place_in_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


def test_endless_nesting_is_refused() -> None:
    data = b""
    for _ in range(3000):
        data = _framed(b"l", data)
    with pytest.raises(Malformed):
        decode(data)


@pytest.mark.parametrize(
    "value", [True, False, 1.0, float("nan"), {1: 2}, {b"a": 1}, {1, 2}, bytearray(b"a"), object()]
)
def test_other_kinds_cannot_be_written(value: Any) -> None:
    with pytest.raises(Malformed):
        encode(value)
    with pytest.raises(Malformed):
        encode({"inside": [value]})


def test_a_digest_is_of_its_purpose_too() -> None:
    expected = hashlib.sha256(
        _framed(b"l", _framed(b"s", b"SA-1") + _framed(b"s", b"purpose") + _framed(b"i", b"7"))
    ).digest()
    assert digest("purpose", 7) == expected
    assert len({digest("a", "b"), digest("ab"), digest("a", b"b"), digest("b", "a"), digest("a", ["b"])}) == 5


@pytest.mark.parametrize(
    ("message", "kind"), [({}, str), ({"name": 1}, str), ([], str), (None, int), ({"name": "1"}, int)]
)
def test_a_field_is_there_and_of_its_kind(message: Any, kind: type) -> None:
    with pytest.raises(Malformed):
        field(message, "name", kind)
    assert field({"name": kind()}, "name", kind) == kind()
