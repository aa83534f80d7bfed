from __future__ import annotations

import hashlib
import os
import stat
from base64 import b32encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.secret import SECRET_BYTES, keyed, pseudonym, site_secret

SECRET = bytes(range(32))


def hmac_by_hand(key: bytes, message: bytes) -> bytes:
    """RFC 2104 for a key that is shorter than a block."""
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in padded) + inner).digest()


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "site.secret"
    first = site_secret(path)
    assert len(first) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert site_secret(path) == first == path.read_bytes()
    assert site_secret(tmp_path / "other") != first
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["keys", "other", "site.secret"]


def test_all_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: site_secret(tmp_path / "secret"), range(40)))
    assert made == {(tmp_path / "secret").read_bytes()}
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_of_another_length_is_refused_and_left_alone(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * size)
    path.chmod(0o600)
    with pytest.raises(BadInput, match="32 bytes"):
        site_secret(path)
    assert path.read_bytes() == b"x" * size


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    site_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(BadInput, match="chmod 600"):
        site_secret(tmp_path / "secret")


def test_links_folders_pipes_and_files_of_others_are_refused(tmp_path: Path) -> None:
    site_secret(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "nowhere", "folder", "pipe"):
        with pytest.raises((BadInput, StorageFailure)):
            site_secret(tmp_path / name)
    assert not (tmp_path / "missing").exists()
    if os.geteuid() == 0:
        os.chown(tmp_path / "secret", 12345, -1)
        with pytest.raises(BadInput, match="another user"):
            site_secret(tmp_path / "secret")


def test_pseudonyms_are_hmac_sha256_of_kind_and_value() -> None:
    assert keyed(SECRET, "patient", "X 1") == hmac_by_hand(SECRET, b"patient\0X 1")
    assert pseudonym(SECRET, "patient", "X 1") == b32encode(hmac_by_hand(SECRET, b"patient\0X 1")[:10]).decode()


@given(st.text(), st.text())
def test_pseudonyms_fit_dicom_and_differ_by_value_kind_and_secret(one: str, other: str) -> None:
    name = pseudonym(SECRET, "patient", one)
    assert len(name) == 16
    assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")
    assert (name == pseudonym(SECRET, "patient", other)) == (one == other)
    assert name != pseudonym(SECRET, "study", one)
    assert name != pseudonym(bytes(32), "patient", one)
