from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from tests.site.packs import fill

from crossward.federation.errors import StorageFailure
from crossward.site.journal import Journal, read_journal
from crossward.site.member import is_disk_full

LONG = "x" * 3000


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_entries_come_back_in_order_with_the_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state" / "journal.jsonl")
    before = time.time()
    journal.write({"task": "join", "left": True})
    journal.write({"task": "train", "items": [["update/w", [2, 3], 24]], "word": "Säge\n"})
    first, second = read_journal(tmp_path / "state" / "journal.jsonl")
    assert first == {"time": first["time"], "task": "join", "left": True}
    assert second["items"] == [["update/w", [2, 3], 24]]
    assert second["word"] == "Säge\n"
    assert before - 0.001 <= first["time"] <= second["time"] <= time.time() + 0.001


def test_nobody_else_can_look_into_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        Journal(folder / "journal.jsonl").write({"task": "join"})
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    assert mode_of(folder / "journal.jsonl") == 0o600


def test_a_journal_goes_on_after_a_restart(tmp_path: Path) -> None:
    for number in range(3):
        Journal(tmp_path / "journal.jsonl").write({"number": number})
    assert [entry["number"] for entry in read_journal(tmp_path / "journal.jsonl")] == [0, 1, 2]


def test_each_entry_is_on_disk_before_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_text(encoding="utf-8"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    Journal(tmp_path / "journal.jsonl").write({"number": 7})
    (content,) = synced
    assert json.loads(content)["number"] == 7


def test_lines_of_several_writers_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def write(writer: int) -> None:
        journal = Journal(tmp_path / "journal.jsonl")
        for number in range(50):
            journal.write({"writer": writer, "number": number, "text": LONG})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = read_journal(tmp_path / "journal.jsonl")
    for writer in range(4):
        assert [entry["number"] for entry in entries if entry["writer"] == writer] == list(range(50))
    assert {entry["text"] for entry in entries} == {LONG}


def test_a_number_that_is_not_finite_is_an_error_and_not_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Journal(tmp_path / "journal.jsonl").write({"bytes": float("nan")})
    assert not (tmp_path / "journal.jsonl").exists()


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).write({"number": 1})
    path.write_bytes(path.read_bytes() + b'{"time": 17, "numb')
    assert [entry["number"] for entry in read_journal(path)] == [1]


def test_what_is_written_after_a_line_that_was_cut_short_is_not_lost(tmp_path: Path) -> None:
    """After a power failure the site goes on: its journal has to stay readable."""
    path = tmp_path / "journal.jsonl"
    Journal(path).write({"number": 1})
    path.write_bytes(path.read_bytes() + b'{"time": 17, "numb')
    Journal(path).write({"number": 2})
    Journal(path).write({"number": 3})
    assert [entry["number"] for entry in read_journal(path)] == [1, 2, 3]


def test_damage_in_the_middle_is_said_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number in range(3):
        Journal(path).write({"number": number})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-4], lines[2]]) + "\n")
    with pytest.raises(StorageFailure, match=r"journal\.jsonl is damaged at line 2"):
        read_journal(path)


def test_a_journal_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageFailure, match="cannot be read: No such file"):
        read_journal(tmp_path / "journal.jsonl")


def test_a_journal_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(StorageFailure, match="cannot be written: Is a directory"):
        Journal(tmp_path / "journal.jsonl").write({"number": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailure, match="cannot be used"):
        Journal(tmp_path / "file" / "journal.jsonl")


def test_a_full_disk_is_said_and_costs_no_entry_before_or_after(small_disk: Path) -> None:
    path, ballast = small_disk / "journal.jsonl", small_disk / "ballast"
    journal = Journal(path)
    journal.write({"number": 1, "text": LONG})
    fill(ballast)
    # The page that the file has begun takes a part of this line; then the disk is full.
    with pytest.raises(StorageFailure, match="cannot be written") as caught:
        journal.write({"number": 2, "text": LONG})
    ballast.unlink()
    journal.write({"number": 3, "text": LONG})
    journal.write({"number": 4, "text": LONG})
    assert [entry["number"] for entry in read_journal(path)] == [1, 3, 4]
    assert is_disk_full(caught.value)
