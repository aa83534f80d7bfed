from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.imaging.pacs.multipart import Malformed, Multipart, content_type

BOUNDARY = "edge-7"
# Bodies that look like the delimiter, or like its beginning.
BODIES = st.lists(
    st.sampled_from([b"\r\n", b"--", b"\r\n--", b"\r\n--edge-", b"edge-7", b"--edge-7", b"\r", b"\0", b"DICM"])
    | st.binary(max_size=20)
).map(b"".join)


def message(bodies: list[bytes], *, before: bytes = b"") -> bytes:
    parts = b"".join(b"\r\n--edge-7\r\nContent-Type: application/dicom\r\n\r\n" + body for body in bodies)
    return (before + parts).removeprefix(b"\r\n") + b"\r\n--edge-7--\r\nafter"


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(whole)) for place in places} | {0, len(whole)})
    return [whole[first:last] for first, last in pairwise(ends)]


def read(pieces: list[bytes], boundary: str = BOUNDARY) -> list[tuple[str, bytes]]:
    return [(kind, b"".join(body)) for kind, body in Multipart(boundary, iter(pieces))]


@given(
    bodies=st.lists(BODIES.filter(lambda body: b"\r\n--edge-7" not in b"\r\n" + body + b"\r"), max_size=3),
    places=st.lists(st.integers(0, 400)),
)
def test_parts_come_back_however_the_answer_is_cut(bodies: list[bytes], places: list[int]) -> None:
    assert read(cut(message(bodies), places)) == [("application/dicom", body) for body in bodies]


@given(bodies=st.lists(st.binary(max_size=30), min_size=1, max_size=2), data=st.data())
def test_an_answer_that_ends_early_is_never_taken_for_whole(bodies: list[bytes], data: st.DataObject) -> None:
    whole = message(bodies)
    shorter = whole[: data.draw(st.integers(0, len(whole) - len("--\r\nafter") - 1))]
    with pytest.raises(Malformed):
        read([shorter])


def test_one_byte_at_a_time_and_a_preamble() -> None:
    whole = message([b"a\r\n--edge", b""], before=b"read me first")
    assert read([bytes([byte]) for byte in whole]) == [
        ("application/dicom", b"a\r\n--edge"),
        ("application/dicom", b""),
    ]


def test_a_large_part_is_never_held_whole() -> None:
    piece = b"x" * 100_000
    pieces = [b"--edge-7\r\n\r\n", *([piece] * 50), b"\r\n--edge-7--"]
    sizes = []
    for _, body in Multipart(BOUNDARY, iter(pieces)):
        sizes = [len(part) for part in body]
    assert sum(sizes) == 5_000_000
    assert max(sizes) <= len(piece) + 20


@pytest.mark.parametrize(
    ("boundary", "text"),
    [
        ("", b"--\r\n\r\nx\r\n----"),
        (BOUNDARY, b""),
        (BOUNDARY, b"<html>log in</html>"),
        (BOUNDARY, b"--edge-7 and more\r\n\r\nx\r\n--edge-7--"),
        (BOUNDARY, b"--edge-7\r\n" + b"X: y\r\n" * 10 + b"Z" * 40_000),
    ],
)
def test_what_is_not_multipart_is_refused(boundary: str, text: bytes) -> None:
    with pytest.raises(Malformed):
        read([text[place : place + 1000] for place in range(0, len(text), 1000)], boundary)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('multipart/related; type="application/dicom"; boundary="a b"', ("multipart/related", "a b")),
        ("Multipart/Related;boundary=x", ("multipart/related", "x")),
        ("application/dicom", ("application/dicom", "")),
        (None, ("application/octet-stream", "")),
    ],
)
def test_content_types(value: str | None, expected: tuple[str, str]) -> None:
    assert content_type(value) == expected
