"""One way to write a message as bytes: whatever is signed or hashed reads the same at every site.

A value is a letter for its kind, its length, and its content. Dictionaries are sorted by key. Nothing that was not
written this way is read: two different byte strings are never the same message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crossward.federation.errors import PrivacyRefusal

_LENGTH = 8
_DEEPEST = 16


class Malformed(PrivacyRefusal):
    """Bytes that are no canonical message, or a message without the fields that it must have."""


def encode(value: Any, *, _depth: int = 0) -> bytes:
    """Write None, whole numbers, text, bytes, lists and dictionaries of these with text as keys.

    Raises:
        Malformed: it is something else; numbers with a fraction in particular have no place in a signed message.
    """
    if _depth > _DEEPEST:
        raise Malformed("a message cannot be nested so deeply")
    for kind, (letter, write) in _WRITERS.items():
        if type(value) is kind:
            content = write(value, _depth + 1)
            return letter + len(content).to_bytes(_LENGTH) + content
    raise Malformed(f"a message cannot hold a value of the kind {type(value).__name__}")


def _write_list(values: Sequence[Any], depth: int) -> bytes:
    return b"".join(encode(value, _depth=depth) for value in values)


def _write_dictionary(value: Mapping[str, Any], depth: int) -> bytes:
    if not all(type(key) is str for key in value):
        raise Malformed("a message's fields have names")
    return _write_list([each for key in sorted(value) for each in (key, value[key])], depth)


_WRITERS: dict[type, tuple[bytes, Callable[[Any, int], bytes]]] = {
    type(None): (b"n", lambda value, depth: b""),
    int: (b"i", lambda value, depth: str(value).encode()),
    str: (b"s", lambda value, depth: value.encode()),
    bytes: (b"b", lambda value, depth: value),
    list: (b"l", _write_list),
    tuple: (b"l", _write_list),
    dict: (b"d", _write_dictionary),
}


def decode(data: bytes) -> Any:
    """Read what ``encode`` wrote; lists come back as lists.

    Raises:
        Malformed: it is not exactly one canonical message.
    """
    try:
        value, rest = _read(data, 0)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise Malformed("the bytes are no message") from error
    # Reading is forgiving in places (a number with a leading zero, unsorted keys); writing is not.
    if rest != len(data) or encode(value) != data:
        raise Malformed("the bytes are not a message in its one canonical form")
    return value


def _read(data: bytes, start: int, depth: int = 0) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    letter = data[start : start + 1]
    begin = start + 1 + _LENGTH
    end = begin + int.from_bytes(data[start + 1 : begin])
    if end > len(data):
        raise ValueError("ends early")
    return _READERS[letter](data, begin, end, depth), end


def _read_list(data: bytes, begin: int, end: int, depth: int) -> list[Any]:
    values = []
    while begin < end:
        value, begin = _read(data, begin, depth + 1)
        values.append(value)
    if begin != end:
        raise ValueError("a value reaches beyond its list")
    return values


def _read_dictionary(data: bytes, begin: int, end: int, depth: int) -> dict[str, Any]:
    flat = _read_list(data, begin, end, depth)
    return dict(zip(flat[::2], flat[1::2], strict=True))


_READERS: dict[bytes, Callable[[bytes, int, int, int], Any]] = {
    b"n": lambda data, begin, end, depth: None,
    b"i": lambda data, begin, end, depth: int(data[begin:end]),
    b"s": lambda data, begin, end, depth: data[begin:end].decode(),
    b"b": lambda data, begin, end, depth: data[begin:end],
    b"l": _read_list,
    b"d": _read_dictionary,
}


def digest(purpose: str, *values: Any) -> bytes:
    """SHA-256 of values, kept apart from every other purpose."""
    return hashlib.sha256(encode(["SA-1", purpose, *values])).digest()


def field(message: Any, name: str, kind: type) -> Any:
    """A field of a message, of exactly this kind.

    Raises:
        Malformed: it is not there, or is something else.
    """
    if type(message) is not dict or type(message.get(name)) is not kind:
        raise Malformed(f"a message without its field '{name}'")
    return message[name]
