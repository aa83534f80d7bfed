"""An inventory of a folder: every file a row, whatever is in the folder and whenever the scan is killed."""

from __future__ import annotations

import csv
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.imaging.conftest import WriteDicom

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.inventory import journal as inventory_journal
from crossward.imaging.inventory import scan as inventory_module
from crossward.imaging.inventory.file import Place, pixel_digest, read_facts
from crossward.imaging.inventory.journal import Journal, Record
from crossward.imaging.inventory.scan import Found, Inventory, scan
from crossward.imaging.inventory.walk import STATE_FOLDER, walk
from crossward.imaging.refusals import Reason, Refused

PIXELS = np.arange(12, dtype=np.uint16).reshape(3, 4)
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose headers are read, in order; for scans in this process."""
    seen: list[str] = []

    def noted(item: tuple[str, Place]) -> dict[str, Any]:
        seen.append(item[1].path)
        return read_facts(item)

    monkeypatch.setattr(inventory_module, "read_facts", noted)
    return seen


def reasons(inventory: Inventory) -> dict[str, tuple[Reason | None, str]]:
    return {found.path: (found.reason, found.detail) for found in inventory.files}


def journal_of(state: Path) -> Path:
    (path,) = state.glob("*.jsonl")
    return path


def test_a_file_is_found_with_what_its_header_says(folder: Path, write_dicom: WriteDicom) -> None:
    file = write_dicom(folder / "a" / "b.dcm", PIXELS, KVP="120", PixelSpacing=[0.5, 0.25], SoftwareVersions=["A", "B"])
    (found,) = scan(folder, processes=0).files
    assert (found.path, found.size, found.reason, found.digest) == ("a/b.dcm", file.stat().st_size, None, None)
    assert found.header is not None
    assert (found.header.rows, found.header.columns, found.header.kvp) == (3, 4, 120.0)
    assert found.header.spacing == (0.5, 0.25)
    assert found.header.patient_id == "SECRET-ID"
    assert found.header.has_pixels


def test_workers_and_this_process_find_the_same(folder: Path, write_dicom: WriteDicom) -> None:
    for number in range(30):
        write_dicom(folder / f"{number}.dcm", PIXELS + number)
    (folder / "notes.txt").write_text("nothing")
    told: list[tuple[str, int, int]] = []
    alone = scan(folder, processes=0)
    assert scan(folder, processes=2, progress=lambda *news: told.append(news), pixels=True).files == tuple(
        Found(**{name: getattr(found, name) for name in ("path", "size", "header", "reason", "detail")}, digest=digest)
        for found in alone.files
        for digest in [pixel_digest((str(folder), place_of(folder, found.path))) if found.header else None]
    )
    assert ("folders", 1, 1) in told
    assert ("files", 31, 31) in told
    assert ("pixels", 30, 30) in told


def place_of(folder: Path, path: str) -> Place:
    status = (folder / path).stat()
    return Place(path, status.st_size, status.st_mtime_ns)


def test_whatever_lies_in_the_folder_is_a_row(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dicom(folder / "good.dcm", PIXELS)
    (folder / "empty.dcm").touch()
    (folder / "notes.txt").write_text("not an image" * 30)
    (folder / "more.ZIP").write_bytes(b"PK\3\4" + bytes(300))
    (folder / "more.tar.gz").write_bytes(b"\x1f\x8b" + bytes(300))
    (folder / "short.dcm").write_bytes((folder / "good.dcm").read_bytes()[:200])
    (folder / "round").mkdir()
    (folder / "round" / "back").symlink_to(folder)
    (folder / "itself").symlink_to(folder / "itself")
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(folder / "pipe.dcm")
    monkeypatch.chdir(folder)  # The path of a socket may not be long.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.dcm")
    elsewhere = tmp_path / "elsewhere"
    write_dicom(elsewhere / "far.dcm", PIXELS)
    (folder / "mounted").symlink_to(elsewhere)
    (folder / "mounted-again").symlink_to(elsewhere)

    rows = reasons(scan(folder, processes=1))
    archive = (Reason.NOT_DICOM, "an archive, which is not opened")
    loop = (Reason.UNREADABLE, "a link to a folder that is walked already")
    dead = (Reason.UNREADABLE, "a link that leads nowhere")
    assert rows.pop("short.dcm")[0] is Reason.DAMAGED
    assert rows == {
        "good.dcm": (None, ""),
        "empty.dcm": (Reason.NOT_DICOM, ""),
        "notes.txt": (Reason.NOT_DICOM, ""),
        "more.ZIP": archive,
        "more.tar.gz": archive,
        "round/back": loop,
        "itself": dead,
        "nowhere": dead,
        "pipe.dcm": (Reason.UNREADABLE, "a pipe"),
        "socket.dcm": (Reason.UNREADABLE, "a socket"),
        "mounted/far.dcm": (None, ""),
        "mounted-again": loop,
    }


def _walk_as_nobody(folder: Path, answer: Any) -> None:
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    answer.send([(path, str(refusal)) for path, refusal in walk(folder)[1]])


def test_a_folder_that_may_not_be_opened_is_a_row(write_dicom: WriteDicom) -> None:
    # pytest's own temporary folders are closed to others.
    folder = Path("/tmp") / f"crossward-shut-{os.getpid()}"
    try:
        write_dicom(folder / "open" / "a.dcm", PIXELS)
        (folder / "shut").mkdir(mode=0o000)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_walk_as_nobody, args=(folder, theirs))
        process.start()
        assert ours.recv() == [("shut", f"{Reason.UNREADABLE.value} (a folder that cannot be opened)")]
        process.join()
    finally:
        (folder / "shut").chmod(0o700)
        shutil.rmtree(folder)


def test_a_file_that_goes_or_changes_meanwhile_is_a_row(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "changed", "left"):
        write_dicom(folder / f"{name}.dcm", PIXELS)

    def walk_then_spoil(*arguments: Any, **options: Any) -> Any:
        walked = walk(*arguments, **options)
        (folder / "gone.dcm").unlink()
        write_dicom(folder / "changed.dcm", PIXELS, StationName="OTHER")
        return walked

    with monkeypatch.context() as patch:
        patch.setattr(inventory_module, "walk", walk_then_spoil)
        rows = reasons(scan(folder, processes=0, state=tmp_path / "state"))
    assert rows == {
        "gone.dcm": (Reason.CHANGED, "it is gone"),
        "changed.dcm": (Reason.CHANGED, ""),
        "left.dcm": (None, ""),
    }
    assert reasons(scan(folder, processes=0, state=tmp_path / "state")) == {
        "changed.dcm": (None, ""),
        "left.dcm": (None, ""),
    }


def test_a_file_that_changes_before_its_pixels_are_read_is_a_row(
    folder: Path, write_dicom: WriteDicom, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dicom(folder / "a.dcm", PIXELS)

    def spoil_then_hash(item: tuple[str, Place]) -> str:
        write_dicom(folder / "a.dcm", PIXELS, StationName="OTHER")
        return pixel_digest(item)

    monkeypatch.setattr(inventory_module, "pixel_digest", spoil_then_hash)
    assert reasons(scan(folder, processes=0, pixels=True)) == {"a.dcm": (Reason.CHANGED, "")}


def test_no_folder_is_bad_input(folder: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        scan(folder / "missing")


def test_the_second_scan_reads_only_what_is_new_or_changed(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, reads: list[str]
) -> None:
    state = tmp_path / "state"
    for name in ("a", "b", "c"):
        write_dicom(folder / f"{name}.dcm", PIXELS, PatientID=f"PLANTED-{name}")
    (folder / "d.txt").write_text("no image")
    first = scan(folder, processes=0, state=state)
    assert sorted(reads) == ["a.dcm", "b.dcm", "c.dcm", "d.txt"]
    reads.clear()
    assert scan(folder, processes=0, state=state) == first
    assert reads == []

    write_dicom(folder / "b.dcm", PIXELS, PatientID="PLANTED-NEW")
    (folder / "c.dcm").unlink()
    write_dicom(folder / "e.dcm", PIXELS)
    again = scan(folder, processes=0, state=state)
    assert sorted(reads) == ["b.dcm", "e.dcm"]
    assert again == scan(folder, processes=0)
    kept = journal_of(state).read_text()
    assert "PLANTED-a" in kept
    # Who is no longer in the folder is not kept in the journal either.
    assert "PLANTED-b" not in kept
    assert "PLANTED-c" not in kept

    reads.clear()
    assert scan(folder, processes=0, state=state, fresh=True) == again
    assert len(reads) == 4


def test_what_may_pass_is_asked_again(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dicom(folder / "a.dcm", PIXELS)

    def slow(item: tuple[str, Place]) -> dict[str, Any]:
        raise Refused(Reason.TIMED_OUT)

    with monkeypatch.context() as patch:
        patch.setattr(inventory_module, "read_facts", slow)
        assert reasons(scan(folder, processes=0, state=tmp_path)) == {"a.dcm": (Reason.TIMED_OUT, "")}
    assert reasons(scan(folder, processes=0, state=tmp_path)) == {"a.dcm": (None, "")}


def test_the_journal_is_its_owners_alone_and_not_part_of_the_inventory(folder: Path, write_dicom: WriteDicom) -> None:
    write_dicom(folder / "a.dcm", PIXELS)
    state = folder / "state"
    scan(folder, processes=0, state=folder / STATE_FOLDER)
    assert [found.path for found in scan(folder, processes=0, state=state).files] == ["a.dcm"]
    assert [found.path for found in scan(folder, processes=0, state=state).files] == ["a.dcm"]
    assert state.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in state.iterdir()} == {0o600}


def test_names_in_any_bytes_survive_the_journal(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, reads: list[str]
) -> None:
    write_dicom(folder / "a.dcm", PIXELS).rename(os.fsdecode(os.fsencode(folder) + b"/\xff\n \xe9.dcm"))
    first = scan(folder, processes=0, state=tmp_path / "state")
    assert len(reads) == 1
    assert scan(folder, processes=0, state=tmp_path / "state") == first
    assert len(reads) == 1


def test_one_state_folder_serves_several_folders(tmp_path: Path, write_dicom: WriteDicom, reads: list[str]) -> None:
    for name in ("one", "two"):
        write_dicom(tmp_path / name / "a.dcm", PIXELS, PatientID=name)
    found = {name: scan(tmp_path / name, processes=0, state=tmp_path / "state") for name in ("one", "two")}
    assert len(reads) == 2
    assert found["one"] != found["two"]
    assert found["one"] == scan(tmp_path / "one", processes=0, state=tmp_path / "state")
    assert len(reads) == 2


def test_two_scans_of_one_folder_do_not_share_a_journal(folder: Path, tmp_path: Path) -> None:
    with Journal(tmp_path, folder), pytest.raises(BadInput, match="another scan"):
        scan(folder, state=tmp_path)
    scan(folder, state=tmp_path)


def test_a_journal_that_cannot_be_kept_is_said(folder: Path) -> None:
    (folder / "state").write_text("a file")
    with pytest.raises(StorageFailure):
        scan(folder, state=folder / "state")


def test_a_journal_of_another_version_is_not_used(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dicom(folder / "a.dcm", PIXELS)
    scan(folder, processes=0, state=tmp_path / "state")
    monkeypatch.setattr(inventory_journal, "_SEED", 1)
    scan(folder, processes=0, state=tmp_path / "state")
    scan(folder, processes=0, state=tmp_path / "state")
    assert reads == ["a.dcm", "a.dcm"]
    assert journal_of(tmp_path / "state").read_bytes().count(b"\n") == 1


RECORDS = [
    Record(Place("a.dcm", 10, 1), {"patient_id": "PLANTED", "spacing": [0.5, 0.5]}),
    Record(Place("b/c.dcm", 11, 2), None, Reason.NOT_DICOM, "an archive"),
    Record(Place("a.dcm", 10, 1), None, digest="00ff"),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_damaged_journal_gives_whole_records_only(tmp_path: Path, data: st.DataObject) -> None:
    state = tmp_path / "state"
    with Journal(state, tmp_path, fresh=True) as journal:
        for record in RECORDS:
            journal.add(record)
    path = journal_of(state)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="cut at")
    flip = data.draw(st.integers(0, max(cut - 1, 0)), label="flipped byte")
    damaged = bytearray(whole[:cut])
    if damaged:
        damaged[flip] ^= data.draw(st.integers(1, 255), label="bits")
    path.write_bytes(damaged)
    later = Record(Place("later.dcm", 1, 1), {})
    with Journal(state, tmp_path) as journal:
        before = list(journal.records())
        journal.add(later)
        after = list(journal.records())
    assert all(record in RECORDS for record in before)
    # One line at most is hit by the flip, and one by the cut.
    assert len(before) >= whole[:cut].count(b"\n") - 2
    assert after == [*before, later]


# The pauses leave time to kill it half-way, however busy the machine is.
SCAN = """
import sys, time
from pathlib import Path
from crossward.imaging.inventory.scan import scan
scan(Path(sys.argv[1]), state=Path(sys.argv[2]), processes=2, progress=lambda *news: time.sleep(0.01))
"""


def test_a_scan_that_was_killed_goes_on_where_it_was(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, reads: list[str]
) -> None:
    count, state = 500, tmp_path / "state"
    original = write_dicom(tmp_path / "one.dcm", PIXELS)
    for number in range(count):
        os.link(original, folder / f"{number:04}.dcm")
    with subprocess.Popen([sys.executable, "-c", SCAN, str(folder), str(state)]) as process:
        until = time.monotonic() + 120
        while not any(path.stat().st_size > 40_000 for path in state.glob("*.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = journal_of(state).read_bytes().count(b"\n")
    assert 50 < kept < count - 50, "killed too early or too late for this test to tell anything"
    with_journal = scan(folder, processes=0, state=state)
    assert len(reads) == count - kept
    assert len(set(reads)) == len(reads)
    assert with_journal == scan(folder, processes=0)


def test_the_hash_is_of_the_pixel_data_alone(folder: Path, write_dicom: WriteDicom) -> None:
    write_dicom(folder / "a.dcm", PIXELS, PatientID="ONE")
    write_dicom(folder / "b.dcm", PIXELS, PatientID="TWO", StationName="LONGER HEADER")
    write_dicom(folder / "c.dcm", PIXELS + 1)
    digests = {found.path: found.digest for found in scan(folder, processes=0, pixels=True).files}
    assert digests["a.dcm"] == digests["b.dcm"]
    assert digests["a.dcm"] != digests["c.dcm"]


def test_only_files_that_share_their_uid_are_hashed(
    folder: Path, tmp_path: Path, write_dicom: WriteDicom, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def noted(item: tuple[str, Place]) -> str:
        hashed.append(item[1].path)
        return pixel_digest(item)

    monkeypatch.setattr(inventory_module, "pixel_digest", noted)
    for name, uid in (("a", "1.2.3"), ("b", "1.2.3"), ("c", "1.2.4")):
        write_dicom(folder / f"{name}.dcm", PIXELS, SOPInstanceUID=uid)
    first = scan(folder, processes=0, state=tmp_path / "state")
    assert sorted(hashed) == ["a.dcm", "b.dcm"]
    assert [bool(found.digest) for found in first.files] == [True, True, False]
    assert scan(folder, processes=0, state=tmp_path / "state") == first
    assert len(hashed) == 2
    scan(folder, processes=0, state=tmp_path / "state", pixels=True)
    assert hashed[2:] == ["c.dcm"]
    # The journal was rewritten by the second scan, and still knows both.
    assert scan(folder, processes=0, state=tmp_path / "state").files[0].digest


def test_equal_texts_are_kept_once(folder: Path, write_dicom: WriteDicom) -> None:
    for number in range(2):
        write_dicom(folder / f"{number}.dcm", PIXELS, StudyInstanceUID="1.2.3.4.5")
    one, other = (header for _, header in scan(folder, processes=0).read())
    assert one.study_uid is other.study_uid
    assert one.manufacturer is other.manufacturer


@pytest.mark.shared
def test_the_pack_is_read_as_its_manifest_says(shared_data: Path) -> None:
    with (shared_data / "dicom" / "manifest.csv").open(newline="", encoding="utf-8") as lines:
        manifest = list(csv.DictReader(lines))
    found = {file.path: file.header for file in scan(shared_data / "dicom" / "files", processes=0).files}
    assert set(found) == {row["file"] for row in manifest}
    for row in manifest:
        header = found[row["file"]]
        assert header is not None
        assert (header.modality, header.manufacturer) == (row["modality"], row["manufacturer"]), row["file"]
        assert header.transfer_syntax == row["transfer_syntax_uid"]
        assert header.photometric == row["photometric"]
        numbers = (header.rows, header.columns, header.bits_allocated, header.bits_stored)
        said = [int(row[name]) if row[name] else None for name in ("rows", "cols", "bits_allocated", "bits_stored")]
        assert list(numbers) == said, row["file"]
        assert header.frames == int(row["frames"] or 1)
