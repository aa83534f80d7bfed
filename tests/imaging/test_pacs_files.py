from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import dcmread
from pydicom.uid import DeflatedExplicitVRLittleEndian

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.pacs.files import ImageFolder, check_instance, file_name
from crossward.imaging.pacs.query import FoundStudy
from crossward.imaging.pacs.state import PullState
from crossward.imaging.pacs.trouble import Lost, Trouble, quiet_libraries

PIXELS = np.arange(400, dtype=np.uint16).reshape(20, 20)
WriteDicom = Callable[..., Path]


@pytest.fixture(scope="module")
def film(write_dicom: WriteDicom, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    file = write_dicom(tmp_path_factory.mktemp("film") / "a.dcm", PIXELS)
    return str(dcmread(file).SOPInstanceUID), file.read_bytes()


def test_a_file_is_kept_once_and_says_whether_it_is_new(film: tuple[str, bytes], tmp_path: Path) -> None:
    uid, content = film
    changed = content.replace(b"SECRET-ID ", b"SECRET-NO ")
    assert len(changed) == len(content)
    assert changed != content
    with ImageFolder(tmp_path / "out") as images:
        assert uid not in images
        assert images.put(uid, [content[:100], memoryview(content)[100:]]) == ("new", len(content))
        assert images.put(uid, [content]) == ("same", len(content))
        assert images.put(uid, [changed]) == ("replaced", len(content))
        assert uid in images
        assert images.has_file(file_name(uid))
        assert images.path(uid).read_bytes() == changed
        assert stat.S_IMODE(images.path(uid).stat().st_mode) == 0o600
        assert uid not in str(images.path(uid))


@settings(max_examples=60)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_and_leaves_nothing(film: tuple[str, bytes], data: st.DataObject) -> None:
    uid, content = film
    end = data.draw(st.integers(0, len(content) - 1))
    with quiet_libraries(), tempfile.TemporaryDirectory() as name, ImageFolder(Path(name)) as images:
        with suppress(Lost):
            images.put(uid, [content[:end]])
        if uid in images:
            # Only a cut between two elements looks whole, and then what is left is the first of the elements.
            kept, whole = dcmread(images.path(uid)), dcmread(BytesIO(content))
            assert all(whole[element.tag] == element for element in kept)
            assert content.startswith(images.path(uid).read_bytes())
        assert not list(Path(name).rglob("*.part"))


def test_cut_pixels_are_damage_and_another_uid_is_told(film: tuple[str, bytes], tmp_path: Path) -> None:
    uid, content = film
    with ImageFolder(tmp_path) as images:
        for trouble, asked, given_bytes in (
            (Trouble.DAMAGED, uid, content[:-1]),
            (Trouble.OTHER, "1.2.3", content),
            (Trouble.NOT_DICOM, uid, b"<html>log in</html>" * 20),
            (Trouble.NOT_DICOM, uid, b""),
        ):
            with pytest.raises(Lost) as caught:
                images.put(asked, [given_bytes])
            assert caught.value.trouble is trouble


def test_a_deflated_file_is_checked_too(film: tuple[str, bytes], tmp_path: Path) -> None:
    uid, content = film
    (tmp_path / "a.dcm").write_bytes(content)
    dataset = dcmread(tmp_path / "a.dcm")
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.save_as(tmp_path / "b.dcm")
    check_instance(tmp_path / "b.dcm", uid)
    (tmp_path / "c.dcm").write_bytes((tmp_path / "b.dcm").read_bytes()[:-40])
    with pytest.raises(Lost):
        check_instance(tmp_path / "c.dcm", uid)


def test_pieces_that_fail_leave_the_old_file_alone(film: tuple[str, bytes], tmp_path: Path) -> None:
    uid, content = film

    def broken() -> Iterator[bytes]:
        yield content[:50]
        raise RuntimeError("the line went dead")

    with ImageFolder(tmp_path) as images:
        images.put(uid, [content])
        with pytest.raises(RuntimeError, match="went dead"):
            images.put(uid, broken())
        assert images.path(uid).read_bytes() == content
        assert not list(tmp_path.rglob("*.part"))


def test_one_process_at_a_time_and_a_killed_one_is_cleaned_up_after(tmp_path: Path) -> None:
    half, told = os.pipe()
    # A fork, as a new process would take seconds to import torch.
    child = os.fork()
    if child == 0:
        try:

            def pieces() -> Iterator[bytes]:
                yield b"x" * 100_000
                os.write(told, b"x")
                signal.pause()

            ImageFolder(tmp_path).put("1.2.3", pieces())
        finally:
            os._exit(1)
    try:
        assert os.read(half, 1) == b"x"
        with pytest.raises(BadInput, match="another process is filling it"):
            ImageFolder(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert list(tmp_path.rglob("*.part"))
    with ImageFolder(tmp_path) as images:
        assert not list(tmp_path.rglob("*.part"))
        assert "1.2.3" not in images


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailure, match="cannot be used"):
        ImageFolder(tmp_path / "file")


def test_the_state_knows_whole_studies_and_forgets_torn_lines(film: tuple[str, bytes], tmp_path: Path) -> None:
    uid, content = film
    with ImageFolder(tmp_path) as images:
        images.put(uid, [content])
        state = PullState(tmp_path)
        state.write("1.2", there=[uid], missing={})
        state.write("1.3", there=[], missing={"1.3.1": Trouble.GONE})
        state.write("1.4", there=[uid], missing={}, trouble=Trouble.SHORT_LIST)
        file = tmp_path / "pull.jsonl"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        torn = file.read_bytes() + json.dumps({"study": "1.2", "files": [], "missing": {"x": "y"}}).encode()[:-3]
        file.write_bytes(torn)

        state = PullState(tmp_path)
        assert state.is_whole(FoundStudy("1.2", instances=1), images)
        assert not state.is_whole(FoundStudy("1.2", instances=2), images)
        assert not state.is_whole(FoundStudy("1.2"), images)
        assert not state.is_whole(FoundStudy("1.3", instances=0), images)
        assert not state.is_whole(FoundStudy("1.4", instances=1), images)
        assert not state.is_whole(FoundStudy("1.5", instances=0), images)

        # The line after a torn one is a line of its own, and the last one about a study counts.
        state.write("1.3", there=[uid], missing={})
        state.write("1.2", there=[], missing={uid: Trouble.DAMAGED})
        state = PullState(tmp_path)
        assert state.is_whole(FoundStudy("1.3", instances=1), images)
        assert not state.is_whole(FoundStudy("1.2", instances=1), images)
        os.unlink(images.path(uid))
        assert not state.is_whole(FoundStudy("1.3", instances=1), images)
