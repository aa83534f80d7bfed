"""A multipart/related answer read part by part and piece by piece, never whole."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message

_LONGEST_HEADER = 16 * 1024


class Malformed(Exception):
    """The answer ends early, or is not what its content type says."""


def content_type(value: str | None) -> tuple[str, str]:
    """The media type of a Content-Type header in small letters, and its boundary, empty where it has none."""
    header = Message()
    header["Content-Type"] = value or "application/octet-stream"
    boundary = header.get_param("boundary", "")
    return header.get_content_type(), boundary if isinstance(boundary, str) else ""


class Multipart:
    """Goes through the parts of a body.

    Args:
        boundary: from the answer's content type.
        pieces: the body, cut anywhere.
    """

    def __init__(self, boundary: str, pieces: Iterator[bytes]) -> None:
        if not boundary:
            raise Malformed
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._pieces = pieces
        # The first delimiter may stand at the very beginning, without a line before it.
        self._held = b"\r\n"

    def __iter__(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Media type and body of each part; a body has to be read to its end before the next part.

        Raises:
            Malformed: the answer ended before its last delimiter.
        """
        for _ in self._until(self._delimiter):
            pass
        while not self._is_last():
            yield content_type(self._header())[0], self._until(self._delimiter)

    def _until(self, end: bytes) -> Iterator[bytes]:
        """The bytes up to `end`, which is taken out."""
        while (at := self._held.find(end)) < 0:
            # What is held may close with the beginning of `end`.
            safe = len(self._held) - len(end) + 1
            if safe > 0:
                yield self._held[:safe]
                self._held = self._held[safe:]
            self._more()
        before, self._held = self._held[:at], self._held[at + len(end) :]
        if before:
            yield before

    def _more(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            raise Malformed
        self._held += piece

    def _is_last(self) -> bool:
        while len(self._held) < 2:
            self._more()
        return self._held.startswith(b"--")

    def _header(self) -> str | None:
        """The Content-Type of the part that begins here."""
        rest_of_line = b"".join(self._short(b"\r\n"))
        if rest_of_line.strip(b" \t"):
            raise Malformed
        found = None
        while line := b"".join(self._short(b"\r\n")):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-type":
                found = value.strip().decode("latin-1")
        return found

    def _short(self, end: bytes) -> Iterator[bytes]:
        length = 0
        for piece in self._until(end):
            length += len(piece)
            if length > _LONGEST_HEADER:
                raise Malformed
            yield piece
