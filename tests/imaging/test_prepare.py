from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread
from tests.imaging.prepared_sites import SITE, SIZE, Hospital
from tests.site.conftest import _mounted

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.prepare import file as prepare_file
from crossward.imaging.prepare import site as preparing
from crossward.imaging.prepare.cache import Kept, Pages, places
from crossward.imaging.prepare.levels import LEVELS
from crossward.imaging.prepare.lines import Lines
from crossward.imaging.prepare.manifest import Manifest, Picture
from crossward.imaging.refusals import Reason

PATIENTS = 12
FILES = 16


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital(tmp_path / "hospital").films(PATIENTS)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files whose pixels were read, as they are read."""
    names: list[str] = []
    original = prepare_file.read_scan

    def counted(path: Path, **options: Any) -> Any:
        names.append(path.name)
        return original(path, **options)

    monkeypatch.setattr(prepare_file, "read_scan", counted)
    return names


def pixels(hospital: Hospital, manifest: Manifest, picture: Picture) -> np.ndarray:
    pages = Pages(hospital.cache / manifest.pixels, channels=1, size=SIZE)
    return pages.take(*places([Kept(picture.record, picture.checksum)]))[0] / LEVELS


def reasons(manifest: Manifest) -> dict[str, Reason]:
    return {row.file: row.reason for row in manifest.rejected}


def test_every_file_is_accepted_rejected_or_left_out(hospital: Hospital) -> None:
    (hospital.folder / "images" / "notes.txt").write_text("no image")
    hospital.film("damaged.dcm", "PLANTED-000", "x").write_bytes(b"\0" * 128 + b"DICM" + b"\1" * 40)
    hospital.film("lonely.dcm", "PLANTED-001", "y")
    hospital.rows.pop()
    hospital.label("gone.dcm", "PLANTED-001", "y")
    manifest = hospital.prepare()
    assert (manifest.seen, manifest.accepted, manifest.left_out) == (FILES + 3, FILES, 0)
    found = reasons(manifest)
    assert found.pop("damaged.dcm") in (Reason.DAMAGED, Reason.NOT_DICOM)
    assert found == {"notes.txt": Reason.NOT_DICOM, "lonely.dcm": Reason.NO_LABEL}
    assert any("labels are for files that are not there" in warning for warning in manifest.warnings)
    assert Manifest.read(hospital.cache) == manifest
    assert (hospital.cache / "manifest.json").stat().st_mode & 0o777 == 0o600


def test_counts_worked_out_from_the_rows(hospital: Hospital) -> None:
    manifest = hospital.prepare()
    summary = manifest.summary()
    assert summary["files"] == {"seen": FILES, "accepted": FILES, "rejected": 0, "left_out": 0}
    assert summary["patients"] == PATIENTS
    # Patients 0, 3, 6 and 9 have two films; even numbers are x.
    assert Counter(picture.label for picture in manifest.pictures) == {"x": 8, "y": 8}
    assert sum(sum(counts.values()) for counts in summary["parts"].values()) == FILES
    assert [sum(summary["domains"]["maker-model-1"].values()), len(summary["domains"])] == [FILES, 1]
    # Six patients a class, at 0.7, 0.1 and 0.2: by largest remainder 4, 1 and 1.
    patients = Counter(part for _, part in {(picture.patient, picture.part) for picture in manifest.pictures})
    assert patients == {0: 8, 1: 2, 2: 2}


def test_a_picture_is_the_file_by_the_stored_bits_and_by_area(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    grey = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16) * 16
    hospital.film("ramp.dcm", "PLANTED-R", "x", pixels=grey, BitsStored=12)
    manifest = hospital.prepare()
    (picture,) = (picture for picture in manifest.pictures if picture.file == "ramp.dcm")
    # Twice as large as the picture: every pixel is the mean of two by two.
    expected = grey.reshape(8, 2, 8, 2).mean(axis=(1, 3)) / 4095
    np.testing.assert_allclose(pixels(hospital, manifest, picture)[0], expected, atol=8e-6)


def test_the_manifest_names_no_patient(hospital: Hospital) -> None:
    hospital.prepare()
    for path in (hospital.cache / "manifest.json", hospital.cache / "index"):
        text = path.read_text()
        assert "PLANTED" not in text
        assert "SECRET" not in text


def test_the_second_run_reads_nothing_and_changes_nothing(hospital: Hospital, read: list[str]) -> None:
    first = hospital.prepare()
    assert len(read) == FILES
    read.clear()
    assert hospital.prepare() == first
    assert read == []


def test_a_refusal_is_kept_too(hospital: Hospital, read: list[str]) -> None:
    hospital.film("strip.dcm", "PLANTED-S", "x", pixels=np.full((2, 400), 7, np.uint8))
    assert reasons(hospital.prepare()) == {"strip.dcm": Reason.TOO_NARROW}
    read.clear()
    assert reasons(hospital.prepare()) == {"strip.dcm": Reason.TOO_NARROW}
    assert read == []


def test_what_changed_is_redone_and_what_is_gone_disappears(hospital: Hospital, read: list[str]) -> None:
    before = hospital.prepare()
    read.clear()
    images = hospital.folder / "images"
    hospital.film("000-0.dcm", "PLANTED-000", "x", pixels=np.full((9, 9), 255, np.uint8))
    hospital.rows.pop()
    (images / "001-0.dcm").unlink()
    hospital.film("new.dcm", "PLANTED-new", "y")
    os.utime(images / "002-0.dcm")
    shutil.move(images / "004-0.dcm", images / "moved.dcm")
    hospital.label("moved.dcm", "PLANTED-004", "x")
    manifest = hospital.prepare()
    # A file that was only touched or moved is known by its hash.
    assert sorted(read) == ["000-0.dcm", "new.dcm"]
    names = [picture.file for picture in manifest.pictures]
    assert sorted({*(picture.file for picture in before.pictures)} ^ {*names}) == [
        "001-0.dcm",
        "004-0.dcm",
        "moved.dcm",
        "new.dcm",
    ]
    assert (hospital.cache / manifest.pixels).stat().st_size == len(names) * SIZE * SIZE * 2
    changed = next(picture for picture in manifest.pictures if picture.file == "000-0.dcm")
    assert (pixels(hospital, manifest, changed) == 1).all()
    for path in (hospital.folder / "cache").rglob("*"):
        if path.is_file():
            assert b"001-0.dcm" not in path.read_bytes(), path.name
    read.clear()
    assert hospital.prepare() == manifest
    assert read == []


def test_other_steps_make_other_pictures_and_only_of_their_domain(tmp_path: Path, read: list[str]) -> None:
    hospital = Hospital(tmp_path / "h").films(8)
    for number in range(8):
        hospital.film(f"b{number}.dcm", f"PLANTED-b{number}", "xy"[number % 2], ManufacturerModelName="Model 2")
    first = hospital.prepare()
    read.clear()
    hospital.rules(SITE + "transforms:\n  maker-model-2:\n    - percentile: {low: 0, high: 100}\n")
    second = hospital.prepare()
    assert sorted(read) == [f"b{number}.dcm" for number in range(8)]
    assert first.transforms["maker-model-1"] == second.transforms["maker-model-1"]
    assert first.transforms["maker-model-2"] != second.transforms["maker-model-2"]
    assert len(second.pictures) == len(first.pictures)


def test_steps_learn_from_training_images_only(tmp_path: Path, read: list[str]) -> None:
    hospital = Hospital(tmp_path / "h").films(10)
    hospital.rules(SITE + "transforms:\n  default:\n    - nyul\n")
    manifest = hospital.prepare()
    training = {picture.file for picture in manifest.pictures if picture.part == 0}
    # Training files are read twice: to learn from, and to be made.
    assert {name for name, count in Counter(read).items() if count == 2} == training
    digest = manifest.transforms["maker-model-1"]
    read.clear()
    assert hospital.prepare().transforms == manifest.transforms
    assert read == []
    test = next(picture.file for picture in manifest.pictures if picture.part == 2)
    patient, label = next((row[1], row[2]) for row in hospital.rows if row[0] == test)
    hospital.film(test, patient, label, pixels=np.full((9, 9), 3, np.uint8) + np.eye(9, dtype=np.uint8))
    hospital.rows.pop()
    assert hospital.prepare().transforms == {"maker-model-1": digest}
    assert read == [test]
    train = next(iter(sorted(training)))
    patient, label = next((row[1], row[2]) for row in hospital.rows if row[0] == train)
    hospital.film(train, patient, label, pixels=np.eye(9, dtype=np.uint8) * 200)
    hospital.rows.pop()
    assert hospital.prepare().transforms != {"maker-model-1": digest}


def test_a_domain_without_training_images_cannot_learn(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(30)
    manifest = hospital.prepare()
    test = next(picture.file for picture in manifest.pictures if picture.part == 2)
    patient, label = next((row[1], row[2]) for row in hospital.rows if row[0] == test)
    hospital.film(test, patient, label, ManufacturerModelName="Model 9")
    hospital.rows.pop()
    hospital.rules(SITE + "transforms:\n  default:\n    - nyul\n")
    manifest = hospital.prepare()
    assert reasons(manifest) == {test: Reason.TRANSFORM}
    assert manifest.rejected[0].detail == "its domain has no training images to learn from"


def frames(count: int) -> np.ndarray:
    return np.stack([np.full((9, 9), 10 * number, np.uint8) for number in range(count)])


def multi(hospital: Hospital, name: str, patient: str, count: int) -> None:
    stack = frames(count)
    hospital.film(name, patient, "x", pixels=stack[0], NumberOfFrames=count, PixelData=stack.tobytes())


@pytest.mark.parametrize(
    ("rule", "levels"), [("each", [0, 10, 20, 30]), ("first", [0]), ("middle", [20]), ("single", [])]
)
def test_frames_of_a_file(tmp_path: Path, rule: str, levels: list[int]) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    multi(hospital, "loop.dcm", "PLANTED-m", 4)
    hospital.rules(SITE + f"frames: {rule}\n")
    manifest = hospital.prepare()
    own = [picture for picture in manifest.pictures if picture.file == "loop.dcm"]
    found = [round(255 * pixels(hospital, manifest, picture)[0, 4, 4]) for picture in own]
    assert found == levels
    assert len({(picture.patient, picture.part) for picture in own}) <= 1
    assert manifest.seen == manifest.accepted + len(manifest.rejected) + manifest.left_out
    assert reasons(manifest) == ({} if levels else {"loop.dcm": Reason.TOO_MANY_FRAMES})


@pytest.mark.parametrize(("rule", "slices"), [("each", [0, 1, 2, 3, 4]), ("first", [3]), ("middle", [4])])
def test_slices_of_a_series_are_ordered_by_place(tmp_path: Path, rule: str, slices: list[int]) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    for number, place in enumerate([10.0, 5.0, 20.0, -5.0, 7.5]):
        hospital.film(
            f"slice-{number}.dcm",
            "PLANTED-s",
            "x",
            SeriesInstanceUID="2.25.77",
            FrameOfReferenceUID="2.25.78",
            ImagePositionPatient=[0, 0, place],
            ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
            InstanceNumber=number + 1,
            PixelSpacing=[1, 1],
        )
    hospital.rules(SITE + f"frames: {rule}\n")
    manifest = hospital.prepare()
    own = [picture.file for picture in manifest.pictures if picture.file.startswith("slice")]
    assert own == [f"slice-{number}.dcm" for number in slices]
    assert manifest.left_out == 5 - len(slices)
    assert manifest.seen == manifest.accepted + len(manifest.rejected) + manifest.left_out


def test_a_series_that_is_no_stack_is_refused_where_one_slice_is_to_be_taken(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    for number in range(2):
        hospital.film(f"slice-{number}.dcm", "PLANTED-s", "x", SeriesInstanceUID="2.25.77")
    hospital.rules(SITE + "frames: middle\n")
    assert reasons(hospital.prepare()) == dict.fromkeys(("slice-0.dcm", "slice-1.dcm"), Reason.GEOMETRY)


def test_volumes_are_refused_in_words(hospital: Hospital) -> None:
    hospital.rules(SITE + "frames: volume\n")
    with pytest.raises(BadInput, match="volume keeps 3-D arrays, and the networks here take 2-D pictures"):
        hospital.prepare()


def test_one_bad_frame_refuses_the_file(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    stack = frames(3)
    stack[0, 0, 0] = 1
    stack[2, 0, 0] = 1
    hospital.film("loop.dcm", "PLANTED-m", "x", pixels=stack[0], NumberOfFrames=3, PixelData=stack.tobytes())
    hospital.rules(SITE + "frames: each\ntransforms:\n  default:\n    - percentile: {low: 0, high: 100}\n")
    assert reasons(hospital.prepare()) == {"loop.dcm": Reason.TRANSFORM}
    assert reasons(hospital.prepare()) == {"loop.dcm": Reason.TRANSFORM}


def test_an_absurd_number_of_frames(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    hospital.film("absurd.dcm", "PLANTED-m", "x", NumberOfFrames=10**9)
    hospital.rules(SITE + "frames: each\n")
    assert reasons(hospital.prepare()) == {"absurd.dcm": Reason.TOO_LARGE}


def with_text() -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.new("L", (256, 256), 40)
    ImageDraw.Draw(image).text((8, 8), "PLANTED NAME 1950", fill=255, font_size=20)
    return np.asarray(image)


@pytest.mark.parametrize("rule", ["refuse", "take"])
def test_burned_in_text_by_the_header_and_by_the_picture(tmp_path: Path, rule: str) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    hospital.film("said.dcm", "PLANTED-1", "x", BurnedInAnnotation="YES")
    hospital.film("seen.dcm", "PLANTED-2", "x", pixels=with_text())
    for _ in range(2):
        hospital.rules(SITE + f"burned_in: {rule}\n")
        expected = dict.fromkeys(("said.dcm", "seen.dcm"), Reason.BURNED_IN) if rule == "refuse" else {}
        assert reasons(hospital.prepare()) == expected
        rule = {"refuse": "take", "take": "refuse"}[rule]


def test_colour_needs_three_channels(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    colour = np.zeros((9, 9, 3), np.uint8) + np.array([200, 100, 0], np.uint8)
    hospital.film("colour.dcm", "PLANTED-c", "x", pixels=colour)
    assert reasons(hospital.prepare()) == {"colour.dcm": Reason.COLOUR}
    manifest = hospital.prepare(channels=3)
    assert reasons(manifest) == {}
    pages = Pages(hospital.folder / "cache" / "8x8x3" / manifest.pixels, channels=3, size=SIZE)
    (picture,) = (picture for picture in manifest.pictures if picture.file == "colour.dcm")
    levels = pages.take(*places([Kept(picture.record, picture.checksum)]))[0, :, 3, 3]
    assert np.rint(levels / LEVELS * 255).tolist() == [200, 100, 0]


def test_classes_that_are_kept(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(12, labels=("x", "y", "z"))
    manifest = hospital.prepare(classes=["y", "x"])
    assert manifest.classes == ("x", "y")
    left = {name: Reason.UNKNOWN_LABEL for name, _, label in hospital.rows if label == "z"}
    assert reasons(manifest) == left


def same_bytes(hospital: Hospital, name: str, patient: str, label: str) -> None:
    """A copy under another name of a file that has no SOP instance UID, so that only its bytes tell."""
    source = hospital.folder / "images" / "plain.dcm"
    shutil.copy(source, hospital.folder / "images" / name)
    hospital.label(name, patient, label)


@pytest.mark.parametrize(
    ("patient", "label", "expected"),
    [
        ("PLANTED-p", "x", {"copy.dcm": Reason.DUPLICATE}),
        ("PLANTED-p", "y", dict.fromkeys(("copy.dcm", "plain.dcm"), Reason.CONFLICTING_LABELS)),
        ("PLANTED-q", "x", dict.fromkeys(("copy.dcm", "plain.dcm"), Reason.NO_PATIENT)),
    ],
    ids=["same", "another label", "another patient"],
)
def test_copies(tmp_path: Path, patient: str, label: str, expected: dict[str, Reason]) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    plain = hospital.film("plain.dcm", "PLANTED-p", "x")
    dataset = dcmread(plain)
    del dataset.SOPInstanceUID
    dataset.save_as(plain)
    same_bytes(hospital, "copy.dcm", patient, label)
    found = reasons(hospital.prepare())
    if expected == {"copy.dcm": Reason.DUPLICATE}:
        assert list(found.values()) == [Reason.DUPLICATE]
        assert set(found) < {"copy.dcm", "plain.dcm"}
    else:
        assert found == expected


def test_the_same_picture_of_two_patients_is_told(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "h").films(6)
    for patient in ("PLANTED-p", "PLANTED-q"):
        hospital.film(f"{patient[-1]}.dcm", patient, "x", pixels=np.eye(9, dtype=np.uint8))
    warnings = hospital.prepare().warnings
    assert "1 pictures are the same under two patients: look for copies with another id" in warnings


def test_a_damaged_cache_is_repaired(hospital: Hospital, read: list[str]) -> None:
    manifest = hospital.prepare()
    read.clear()
    path = hospital.cache / manifest.pixels
    content = bytearray(path.read_bytes())
    victim = manifest.pictures[4]
    content[victim.record * SIZE * SIZE * 2 + 3] ^= 64
    path.write_bytes(bytes(content))
    again = hospital.prepare()
    assert read == [victim.file]
    assert "1 cached pictures were damaged, and were made anew" in again.warnings
    for old, new in zip(manifest.pictures, again.pictures, strict=True):
        assert (old.file, old.checksum) == (new.file, new.checksum)
        pixels(hospital, again, new)


def test_a_file_that_changes_while_it_is_read(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    original = prepare_file.read_scan

    def touching(path: Path, **options: Any) -> Any:
        if path.name == "005-0.dcm":
            os.utime(path, ns=(1, 1))
        return original(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_file, "read_scan", touching)
        assert reasons(hospital.prepare()) == {"005-0.dcm": Reason.CHANGED}
    assert reasons(hospital.prepare()) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 7}, "images of 7 pixels"),
        ({"channels": 2}, "2 channels"),
        ({"classes": ["x"]}, "give two or more"),
        ({"classes": ["x", "x"]}, "each once"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(hospital: Hospital, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        hospital.prepare(**options)
    assert not (hospital.folder / "cache").exists()


def forked(hospital: Hospital) -> int:
    """Prepare in a process of its own that puts every picture on disk at once, slowly; gives its id."""
    process = os.fork()
    if process:
        return process
    try:
        preparing._SECONDS_BETWEEN_COMMITS = 0.0  # type: ignore[misc]
        original = prepare_file.read_scan

        def slow(path: Path, **options: Any) -> Any:
            time.sleep(0.02)
            return original(path, **options)

        prepare_file.read_scan = slow  # type: ignore[assignment]
        hospital.prepare()
    finally:
        os._exit(0)


def pictures_on_disk(hospital: Hospital) -> int:
    """Lines of the index, but for its heading."""
    return max(0, sum(1 for _ in Lines(hospital.cache / "index").read()) - 1)


def test_killed_and_resumed_without_doing_anything_twice(hospital: Hospital, tmp_path: Path, read: list[str]) -> None:
    process = forked(hospital)
    while pictures_on_disk(hospital) < 6:
        time.sleep(0.005)
    with pytest.raises(BadInput, match="another process prepares images"):
        hospital.prepare()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert not (hospital.cache / "manifest.json").exists()
    manifest = hospital.prepare()
    assert 0 < len(read) <= FILES - 5
    shutil.rmtree(hospital.folder / "cache")
    whole = hospital.prepare()
    assert [(each.file, each.checksum) for each in whole.pictures] == [
        (each.file, each.checksum) for each in manifest.pictures
    ]


def test_a_full_disk_is_told_and_nothing_is_lost(hospital: Hospital, tmp_path: Path, read: list[str]) -> None:
    with _mounted(tmp_path / "disk", "size=96k") as disk:
        hospital.rules(SITE.replace("cache: cache", f"cache: {disk}/cache"))
        with pytest.raises(StorageFailure, match=r"could not write|disk full"):
            hospital.prepare(size=64)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        manifest = hospital.prepare(size=64)
        assert len(manifest.pictures) == FILES


def test_a_cache_that_cannot_be_written(hospital: Hospital, tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "ro,size=64k") as disk:
        hospital.rules(SITE.replace("cache: cache", f"cache: {disk}/cache"))
        with pytest.raises(StorageFailure, match="Read-only"):
            hospital.prepare()


SCRIPT = """\
import sys
from pathlib import Path
from crossward.imaging.rules.config import read_site_rules
from crossward.imaging.prepare import site as prepare
prepare._SECONDS_BETWEEN_COMMITS = 0.0
if __name__ == "__main__":
    prepare.prepare(read_site_rules(Path(sys.argv[1])), size=8, processes=2)
"""


@pytest.mark.slow
def test_kill_minus_nine_with_workers(tmp_path: Path, read: list[str]) -> None:
    hospital = Hospital(tmp_path / "h").films(150)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), str(hospital.folder)], start_new_session=True)
    try:
        while pictures_on_disk(hospital) < 20 and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
        done = pictures_on_disk(hospital)
        assert 20 <= done < 200
        manifest = hospital.prepare()
        assert len(manifest.pictures) == 200
        # Pictures come before the hashes of their files: one may be on disk without the other.
        assert len(read) <= 200 - done + 1
    finally:
        process.kill()
        deadline = time.monotonic() + 20
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert members(process.pid) == [], "workers outlive the process that they work for"


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def test_the_manifest_is_json_that_says_what_was_done(hospital: Hospital) -> None:
    manifest = hospital.prepare()
    content = json.loads((hospital.cache / "manifest.json").read_text())
    assert content["summary"] == json.loads(json.dumps(manifest.summary()))
