from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from pydicom import dcmread
from tests.imaging.planted import ID, NAME, marks_in, save, small

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.deidentify import file as worker
from crossward.imaging.deidentify import folder as module
from crossward.imaging.deidentify.file import Outcome, Row
from crossward.imaging.deidentify.folder import deidentify
from crossward.imaging.deidentify.report import Summary
from crossward.imaging.deidentify.rules import Options
from crossward.imaging.refusals import Reason

SECRET = bytes(range(32))


def run(folder: Path, out: Path, **options: Any) -> Summary:
    return deidentify(folder, out, **{"secret": SECRET, "processes": 0, **options})


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shows_text() -> np.ndarray:
    canvas = Image.new("L", (160, 120), 0)
    ImageDraw.Draw(canvas).text((6, 6), "PLANTED PERSON", fill=255, font=ImageFont.load_default(16))
    return np.asarray(canvas)


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    folder = tmp_path / "PLANTED PERSON"
    for number in range(6):
        save(small(number, patient=f"{ID}{number % 2}"), folder / f"PLANTED-{number}" / f"planted{number}.dcm")
    return folder


def test_files_lie_by_pseudonyms_and_originals_are_not_touched(originals: Path, tmp_path: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in originals.rglob("*.dcm")}
    summary = run(originals, tmp_path / "out")
    assert summary.count(Outcome.OK) == 6
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in originals.rglob("*.dcm")} == before
    clean = tmp_path / "out" / "clean"
    found = sorted(clean.rglob("*.dcm"))
    assert len(found) == 6
    assert len({path.relative_to(clean).parts[0] for path in found}) == 2
    for path in found:
        patient, *_ = path.relative_to(clean).parts
        assert dcmread(path).PatientID == patient
        assert marks_in(path.read_bytes() + str(path.relative_to(clean)).encode()) == []
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [
        "clean", "journal.jsonl", "report.json", "report.txt"
    ]  # fmt: skip


def test_the_report_counts_attributes_and_files_and_has_no_values(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for number in range(3):
        save(small(number, SeriesDescription="PLANTED"), folder / f"{number}.dcm")
    (folder / "note.txt").write_text("no image")
    run(folder, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["files"], report["ok"], report["held"], report["refused"]) == (4, 3, 0, 1)
    assert report["attributes"]["SeriesDescription"] == {"removed": 3}
    assert report["attributes"]["StudyDate"] == {"shifted": 3}
    assert report["attributes"]["SOPInstanceUID"] == {"replaced": 3}
    assert report["reasons"] == {"refused": {"not a DICOM file": 1}}
    assert [row["file"] for row in report["rows"]] == ["0.dcm", "1.dcm", "2.dcm", "note.txt"]
    for name in ("report.json", "report.txt", "journal.jsonl"):
        path = tmp_path / "out" / name
        assert marks_in(path.read_bytes()) == []
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"0.dcm" not in (tmp_path / "out" / "journal.jsonl").read_bytes()


def test_what_still_names_somebody_is_held(originals: Path, tmp_path: Path) -> None:
    save(small(7, Manufacturer="Planted Imaging"), originals / "seven.dcm")
    summary = run(originals, tmp_path / "out")
    row = summary.rows["seven.dcm"]
    assert (row.outcome, row.reason, row.detail) == (Outcome.HELD, Reason.IDENTIFIER, "name in Manufacturer")
    assert (tmp_path / "out" / "held" / row.output).is_file()
    assert not (tmp_path / "out" / "clean" / row.output).exists()
    again = run(originals, tmp_path / "out", reviewed=frozenset({row.output, "seven.dcm"}))
    assert again.rows["seven.dcm"].outcome is Outcome.HELD


@pytest.mark.parametrize("by", ["output", "path"])
def test_drawn_text_is_held_until_a_person_has_looked(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small(1, pixels=shows_text()), tmp_path / "in" / "one.dcm")
    row = run(tmp_path / "in", tmp_path / "out").rows["one.dcm"]
    assert (row.outcome, row.reason) == (Outcome.HELD, Reason.BURNED_IN)
    held, clean = (tmp_path / "out" / area / row.output for area in ("held", "clean"))
    content = held.read_bytes()
    monkeypatch.setattr(module, "deidentify_file", None)
    reviewed = frozenset({row.output if by == "output" else "one.dcm"})
    assert run(tmp_path / "in", tmp_path / "out", reviewed=reviewed).count(Outcome.OK) == 1
    assert clean.read_bytes() == content
    assert not held.exists()
    assert run(tmp_path / "in", tmp_path / "out").count(Outcome.OK) == 1


def test_a_second_run_does_nothing_again(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(originals, tmp_path / "out")
    before = tree(tmp_path / "out")
    monkeypatch.setattr(module, "deidentify_file", None)
    assert run(originals, tmp_path / "out").rows == first.rows
    assert tree(tmp_path / "out") == before


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(originals: Path, tmp_path: Path) -> None:
    run(originals, tmp_path / "whole")

    def stop(_what: str, done: int, _total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(originals, tmp_path / "out", progress=stop)
    assert len(list((tmp_path / "out" / "clean").rglob("*.dcm"))) == 3
    # A line that was being written when the power went.
    with (tmp_path / "out" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"key": "ab')
    done: list[int] = []
    run(originals, tmp_path / "out", progress=lambda what, number, total: done.append(total))
    assert done == [3, 3, 3]
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_kill_nine_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for number in range(60):
        save(small(number), folder / f"{number}.dcm")
    script = (
        "import sys; from pathlib import Path; from crossward.imaging.deidentify.folder import deidentify\n"
        "deidentify(Path(sys.argv[1]), Path(sys.argv[2]), secret=bytes(range(32)), processes=0)"
    )
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", script, str(folder), str(out)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(out.glob("clean/*/*/*/*.dcm"))) < 5 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(out.glob("clean/*/*/*/*.dcm")))
    assert done >= 5
    redone: list[int] = []
    run(folder, out, progress=lambda what, number, total: redone.append(number))
    # The file whose line was not yet in the journal is done twice.
    assert len(redone) <= 61 - done
    run(folder, tmp_path / "whole")
    assert tree(out / "clean") == tree(tmp_path / "whole" / "clean")
    assert not (out / ".staging").exists()


def test_worker_processes_give_the_same(originals: Path, tmp_path: Path) -> None:
    run(originals, tmp_path / "here")
    run(originals, tmp_path / "there", processes=1)
    assert tree(tmp_path / "here") == tree(tmp_path / "there")


def test_a_changed_original_is_done_again_and_what_it_was_is_gone(originals: Path, tmp_path: Path) -> None:
    first = run(originals, tmp_path / "out").rows["PLANTED-0/planted0.dcm"]
    victim = originals / "PLANTED-0" / "planted0.dcm"
    save(small(0, patient="PLANTED-NEW"), victim)
    os.utime(victim, ns=(1, 1))
    second = run(originals, tmp_path / "out").rows["PLANTED-0/planted0.dcm"]
    assert second.output != first.output
    assert not (tmp_path / "out" / "clean" / first.output).exists()
    assert (tmp_path / "out" / "clean" / second.output).is_file()
    victim.write_bytes(b"no longer an image")
    assert run(originals, tmp_path / "out").rows["PLANTED-0/planted0.dcm"].reason == Reason.NOT_DICOM
    assert not (tmp_path / "out" / "clean" / second.output).exists()


def test_copies_are_refused_once_and_the_same_one_every_time(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save(small(1), folder / "a.dcm")
    save(small(1), folder / "b.dcm")
    save(small(1, pixels=np.zeros((8, 8), np.uint8)), folder / "c.dcm")
    rows = run(folder, tmp_path / "out").rows
    assert sorted(row.outcome for row in rows.values()) == ["ok", "refused", "refused"]
    assert {row.reason for row in rows.values()} == {"", Reason.DUPLICATE}
    assert {row.detail for row in rows.values()} >= {"with the same UID and other content"}
    assert run(folder, tmp_path / "again").rows == rows


def test_a_copy_takes_the_place_of_an_original_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save(small(1), folder / "a.dcm")
    save(small(1), folder / "b.dcm")
    rows = run(folder, tmp_path / "out").rows
    (first,) = (path for path, row in rows.items() if row.outcome is Outcome.OK)
    (folder / first).unlink()
    (row,) = run(folder, tmp_path / "out").rows.values()
    assert row.outcome is Outcome.OK
    assert (tmp_path / "out" / "clean" / row.output).is_file()


def test_answers_are_taken_in_order_whatever_the_order_they_come_in() -> None:
    answers = [(2, "c"), (0, "a"), (3, "d"), (1, "b")]
    assert list(module._in_order(iter(answers))) == sorted(answers)


def test_odd_things_in_a_folder_are_rows_and_never_a_crash(originals: Path, tmp_path: Path) -> None:
    whole = (originals / "PLANTED-1" / "planted1.dcm").read_bytes()
    (originals / "cut.dcm").write_bytes(whole[:-40])
    (originals / "head.dcm").write_bytes(whole[:150])
    (originals / "empty.dcm").write_bytes(b"")
    (originals / "link.dcm").symlink_to(originals / "PLANTED-1" / "planted1.dcm")
    (originals / "around").symlink_to(originals)
    os.mkfifo(originals / "pipe.dcm")
    (originals / ".crossward-scan").mkdir()
    (originals / ".crossward-scan" / "journal").write_text("ours")
    rows = run(originals, tmp_path / "out").rows
    assert len(rows) == 6 + 6
    refused = {path: row.reason for path, row in rows.items() if row.outcome is Outcome.REFUSED}
    assert refused == {
        "cut.dcm": Reason.LAYOUT,
        "head.dcm": Reason.DAMAGED,
        "empty.dcm": Reason.NOT_DICOM,
        "link.dcm": Reason.UNREADABLE,
        "around": Reason.UNREADABLE,
        "pipe.dcm": Reason.UNREADABLE,
    }


def test_a_file_that_changes_while_it_is_read_is_refused_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(small(1), tmp_path / "in" / "a.dcm")
    plain = worker._read

    def meddled(source: Path) -> Any:
        dataset = plain(source)
        os.utime(source, ns=(5, 5))
        return dataset

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(worker, "_read", meddled)
        row = run(path.parent, tmp_path / "out").rows["a.dcm"]
    assert (row.outcome, row.reason, row.output) == (Outcome.REFUSED, Reason.CHANGED, "")
    assert run(path.parent, tmp_path / "out").rows["a.dcm"].outcome is Outcome.OK


def test_a_full_disk_stops_the_run_and_nothing_is_called_refused(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(worker, "dcmwrite", full)
        with pytest.raises(StorageFailure, match="No space left"):
            run(originals, tmp_path / "out")
    assert run(originals, tmp_path / "out").count(Outcome.OK) == 6


def test_folders_that_lie_in_one_another_are_refused(originals: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(originals)
    for out in (originals, originals / "out", tmp_path, tmp_path / "link" / "out"):
        with pytest.raises(BadInput, match="lie in one another"):
            run(originals, out)
    with pytest.raises(BadInput, match="no folder"):
        run(tmp_path / "missing", tmp_path / "out")
    assert not (originals / "out").exists()


def test_other_options_or_another_secret_do_not_mix_into_a_folder(originals: Path, tmp_path: Path) -> None:
    run(originals, tmp_path / "out")
    for other in ({"options": Options(device=True)}, {"secret": bytes(32)}):
        with pytest.raises(BadInput, match="other options or another secret"):
            run(originals, tmp_path / "out", **other)


def test_two_runs_at_once_do_not_write_into_one_folder(originals: Path, tmp_path: Path) -> None:
    def second(*_: object) -> None:
        with pytest.raises(BadInput, match="another run"):
            run(originals, tmp_path / "out")

    assert run(originals, tmp_path / "out", progress=second).count(Outcome.OK) == 6


def test_a_mapping_is_written_only_when_asked_for(originals: Path, tmp_path: Path) -> None:
    run(originals, tmp_path / "out")
    mapping = tmp_path / "out" / "mapping.jsonl"
    assert not mapping.exists()
    summary = run(originals, tmp_path / "out", mapping=True)
    assert stat.S_IMODE(mapping.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in mapping.read_text().splitlines()]
    assert {line["file"]: line["output"] for line in lines} == {path: row.output for path, row in summary.rows.items()}
    assert {line["PatientName"] for line in lines} == {NAME}
    run(originals, tmp_path / "out", mapping=True)
    assert len(mapping.read_text().splitlines()) == 6


def test_rows_that_share_a_tally_share_its_memory(originals: Path, tmp_path: Path) -> None:
    rows: list[Row] = list(run(originals, tmp_path / "out").rows.values())
    assert len({id(row.tally) for row in rows}) == 1
    journal = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    assert sum('"tally": [[' in line for line in journal) == 1


@pytest.mark.shared
@pytest.mark.slow
def test_real_files_pass_are_held_or_are_refused_and_keep_their_pixels(shared_data: Path, tmp_path: Path) -> None:
    summary = run(shared_data / "dicom" / "files", tmp_path / "out", processes=2)
    assert len(summary.rows) == 56
    assert summary.count(Outcome.OK) >= 20
    assert {row.reason for row in summary.rows.values()} <= {"", *Reason}
    for path, row in summary.rows.items():
        if row.outcome is Outcome.OK:
            before = dcmread(shared_data / "dicom" / "files" / path)
            after = dcmread(tmp_path / "out" / "clean" / row.output)
            assert after.PixelData.rstrip(b"\0") == before.PixelData.rstrip(b"\0"), path
            assert str(before.get("PatientID") or "-") not in (str(after.PatientID), str(after.PatientName))
