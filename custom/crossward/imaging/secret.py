"""The site's secret: the key that turns identifiers into pseudonyms. Whoever has it can test guesses; others cannot."""

from __future__ import annotations

import hmac
import os
import stat
from base64 import b32encode
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes

from crossward.federation.errors import BadInput, StorageFailure

SECRET_BYTES = 32
# 80 bits: a million patients share a pseudonym with probability 4e-13, and 16 letters fit DICOM's shortest text (SH).
_PSEUDONYM_BYTES = 10


def site_secret(path: Path) -> bytes:
    """The secret in a file, which is made with new random bytes where it is not there yet.

    Raises:
        BadInput: the file is not a secret that only this user can read.
        StorageFailure: it cannot be written or read.
    """
    try:
        if not os.path.lexists(path):
            _make(path)
        return _read(path)
    except OSError as error:
        raise StorageFailure(f"the site's secret {path} cannot be used: {error.strerror or error}") from error


def keyed(secret: bytes, kind: str, value: str) -> bytes:
    """32 bytes that follow from a value, and that say nothing about it without the secret."""
    return hmac.digest(secret, f"{kind}\0{value}".encode("utf-8", "surrogatepass"), "sha256")


def pseudonym(secret: bytes, kind: str, value: str) -> str:
    """16 capital letters and digits for a value; the same value of another kind has another pseudonym."""
    return b32encode(keyed(secret, kind, value)[:_PSEUDONYM_BYTES]).decode("ascii")


def _make(path: Path) -> None:
    """Write the whole file under another name first; of two that do so at once, one is kept, and both go on with it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{token_bytes(4).hex()}.part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(token_bytes(SECRET_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    # Checked on the opened file, so that it cannot be exchanged between the check and the reading.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise BadInput(f"the site's secret {path} is not a plain file; name another one")
        if facts.st_uid != os.geteuid():
            raise BadInput(f"the site's secret {path} belongs to another user; run as that user or name another file")
        if facts.st_mode & 0o077:
            raise BadInput(f"the site's secret {path} can be read by others; chmod 600 it, or make a new one")
        secret = stream.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise BadInput(
            f"the site's secret {path} does not hold {SECRET_BYTES} bytes; it is damaged: restore it from a backup, "
            "or name another file (pseudonyms will then differ from earlier ones)"
        )
    return secret
