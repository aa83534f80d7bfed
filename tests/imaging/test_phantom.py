from __future__ import annotations

import csv
import hashlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.uid import UID

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging import phantom
from crossward.imaging.anatomy import CLASSES
from crossward.imaging.dicom.film import read_image
from crossward.imaging.phantom import write_hospitals
from crossward.imaging.scanner_profiles import HOSPITAL_SCANNERS, UNSEEN_SCANNER
from crossward.imaging.spoiled import KINDS

PATIENTS = 16

# What PS3.3 asks of the Digital X-Ray and Computed Radiography objects: type 1 must hold a value, type 2 may be empty.
TYPE_1 = """
    SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID Modality ImageType SamplesPerPixel
    PhotometricInterpretation Rows Columns BitsAllocated BitsStored HighBit PixelRepresentation PixelData
    PresentationIntentType ImageLaterality AnatomicRegionSequence PixelIntensityRelationship
    PixelIntensityRelationshipSign RescaleSlope RescaleIntercept RescaleType PresentationLUTShape
    LossyImageCompression BurnedInAnnotation PatientOrientation WindowCenter WindowWidth ImagerPixelSpacing
    DeidentificationMethod
"""
TYPE_2 = """
    PatientName PatientID PatientBirthDate PatientSex StudyDate StudyTime ReferringPhysicianName StudyID
    AccessionNumber SeriesNumber Manufacturer InstanceNumber BodyPartExamined ViewPosition DetectorType
    AcquisitionContextSequence
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "all"
    write_hospitals(out, sites=8, patients=PATIENTS, seed=3, unseen=True, spoiled=True)
    return out


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "labels.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_file_is_listed_and_nothing_else_is_written(made: Path) -> None:
    sets = [made / f"hospital-{letter}" for letter in "abcdefgh"]
    sets += [made / "held-out" / "unseen-scanner", made / "held-out" / "spoiled"]
    listed = {folder / row["file"] for folder in sets for row in rows_of(folder)}
    notes = {made / "PHANTOMS.txt", *(folder / "labels.csv" for folder in sets)}
    assert {path for path in made.rglob("*") if path.is_file()} == listed | notes
    assert "computer-drawn" in (made / "PHANTOMS.txt").read_text(encoding="utf-8")


def test_every_file_is_valid_dicom_and_says_phantom(made: Path) -> None:
    instances = set()
    for path in sorted(made.rglob("*.dcm")):
        film = dcmread(path)
        assert [name for name in TYPE_1.split() if film.get(name) in (None, "")] == []
        assert [name for name in TYPE_2.split() if name not in film] == []
        assert film.PatientID.startswith("PHANTOM-")
        assert str(film.PatientName).startswith("PHANTOM^")
        assert film.InstitutionName.startswith("Phantom Hospital ")
        assert film.ImageComments == "PHANTOM: computer-drawn, not a patient"
        assert (film.PatientIdentityRemoved, film.BurnedInAnnotation) == ("YES", "NO")
        assert film.file_meta.MediaStorageSOPInstanceUID == film.SOPInstanceUID
        assert film.file_meta.MediaStorageSOPClassUID == film.SOPClassUID
        for uid in (film.SOPInstanceUID, film.StudyInstanceUID, film.SeriesInstanceUID):
            assert UID(uid).is_valid
            assert uid.startswith("2.25.")
        assert film.pixel_array.shape == (film.Rows, film.Columns)
        instances.add(film.SOPInstanceUID)
    assert len(instances) == len(list(made.rglob("*.dcm")))


def test_each_hospital_stores_as_its_scanner_declares(made: Path) -> None:
    folders = [made / f"hospital-{letter}" for letter in "abcdefgh"] + [made / "held-out" / "unseen-scanner"]
    for folder, scanner in zip(folders, (*HOSPITAL_SCANNERS, UNSEEN_SCANNER), strict=True):
        film = dcmread(folder / rows_of(folder)[0]["file"])
        assert (film.BitsStored, film.HighBit) == (scanner.bits, scanner.bits - 1)
        assert film.BitsAllocated == (8 if scanner.bits == 8 else 16)
        assert film.PhotometricInterpretation == ("MONOCHROME1" if scanner.inverted else "MONOCHROME2")
        assert (film.Manufacturer, film.ManufacturerModelName) == (scanner.maker, scanner.model)
        assert (float(film.RescaleSlope), float(film.RescaleIntercept)) == (scanner.slope, scanner.intercept)
        assert film.pixel_array.max() < 2**scanner.bits
        # Uses its depth: a 12-bit film squeezed into 8 bits would stay below.
        assert film.pixel_array.max() > 2 ** (scanner.bits - 1)


def test_bones_are_bright_at_every_hospital_once_read_correctly(made: Path) -> None:
    for letter in "abcdefgh":
        folder = made / f"hospital-{letter}"
        normal = [row["file"] for row in rows_of(folder) if row["label"] == "normal"]
        picture = np.mean([_middle(read_image(folder / name).pixels) for name in normal], axis=0)
        spine, lungs = picture[:, 15:17].mean(), picture[:, [8, 9, 22, 23]].mean()
        assert spine > lungs + 0.1


def _middle(pixels: np.ndarray) -> np.ndarray:
    """Rows from a third to the middle of the film, at 32 columns, nearest."""
    height, width = pixels.shape
    return pixels[height // 3 : height // 2][np.linspace(0, 20, 16, dtype=int)][
        :, np.linspace(0, width - 1, 32).astype(int)
    ]


def test_classes_are_balanced_and_patients_keep_their_label(made: Path) -> None:
    for letter in "abcdefgh":
        rows = rows_of(made / f"hospital-{letter}")
        labels = {row["patient"]: row["label"] for row in rows}
        assert all(labels[row["patient"]] == row["label"] for row in rows)
        assert Counter(labels.values()) == dict.fromkeys(CLASSES, PATIENTS // 4)
        assert len(set(Counter(row["label"] for row in rows).values())) == 1
        films = Counter(row["patient"] for row in rows)
        assert sum(count > 1 for count in films.values()) == PATIENTS // 4
        assert max(films.values()) <= 3


def test_the_order_of_the_list_does_not_give_the_class_away(made: Path) -> None:
    labels = [row["label"] for row in rows_of(made / "hospital-a")]
    changes = sum(before != after for before, after in itertools.pairwise(labels))
    assert changes > len(labels) / 3


def test_held_out_sets_are_labelled_by_class_and_by_kind_of_spoiling(made: Path) -> None:
    assert {row["label"] for row in rows_of(made / "held-out" / "unseen-scanner")} == set(CLASSES)
    assert {row["label"] for row in rows_of(made / "held-out" / "spoiled")} == set(KINDS)


def test_films_of_one_patient_show_one_person_taken_twice(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def remember(person: object, finding: object, x: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn.append((person, finding))
        return np.zeros_like(x), np.zeros_like(x)

    monkeypatch.setattr(phantom, "draw_chest", remember)
    plan = phantom._set_of_films("x", "A", HOSPITAL_SCANNERS[:1], CLASSES, PATIENTS, 3)
    for film in plan:
        phantom._draw(film)
    people: dict[str, set[object]] = {}
    for film, shown in zip(plan, drawn, strict=True):
        people.setdefault(film.label.patient, set()).add(shown)
    assert all(len(shown) == 1 for shown in people.values())
    assert len(set.union(*people.values())) == PATIENTS

    folder = made / "hospital-a"
    pixels = {row["file"]: dcmread(folder / row["file"]).pixel_array.tobytes() for row in rows_of(folder)}
    assert len(set(pixels.values())) == len(pixels)


def test_same_seed_same_bytes_and_another_seed_other_pixels(tmp_path: Path) -> None:
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        write_hospitals(tmp_path / name, sites=2, patients=4, seed=seed, unseen=True, spoiled=True)
    assert digests(tmp_path / "one") == digests(tmp_path / "again")
    film = "hospital-a/images/A0001-1.dcm"
    pixels = [dcmread(tmp_path / name / film).pixel_array for name in ("one", "other")]
    assert (pixels[0] != pixels[1]).mean() > 0.5


def test_a_hospital_does_not_depend_on_how_many_others_there_are(made: Path, tmp_path: Path) -> None:
    write_hospitals(tmp_path / "alone", sites=1, patients=PATIENTS, seed=3)
    assert digests(tmp_path / "alone" / "hospital-a") == digests(made / "hospital-a")


def test_summary_and_progress_count_what_is_there(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    summary = write_hospitals(
        tmp_path / "out", sites=2, patients=8, progress=lambda what, done, total: calls.append((what, done, total))
    )
    files = len(list((tmp_path / "out").rglob("*.dcm")))
    assert (summary.hospitals, summary.classes) == (("hospital-a", "hospital-b"), CLASSES)
    assert (summary.files, summary.patients) == (files, 16)
    assert [done for _, done, _ in calls] == list(range(1, files + 1))
    assert {total for _, _, total in calls} == {files}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sites": 0}, "0 hospitals"),
        ({"sites": 9}, "9 hospitals"),
        ({"patients": 3}, "3 patients"),
        ({"seed": -1}, "negative"),
    ],
)
def test_impossible_options_are_refused_and_nothing_is_made(
    tmp_path: Path, options: dict[str, int], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        write_hospitals(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    for out in (tmp_path, tmp_path / "mine.txt", tmp_path / "mine.txt" / "below"):
        with pytest.raises(BadInput):
            write_hospitals(out, sites=1, patients=4)
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BadInput, match=r"cannot be written \(Permission denied\)"):
        write_hospitals(tmp_path / "out", sites=1, patients=4)


@pytest.mark.parametrize("existed", [True, False])
def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    written = []

    def fail_late(path: Path, *_: object, **__: object) -> None:
        written.append(path)
        path.write_bytes(b"half a film")
        if len(written) > 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(phantom, "write_film", fail_late)
    with pytest.raises(StorageFailure, match="No space left"):
        write_hospitals(out, sites=2, patients=4)
    assert out.exists() == existed
    assert not existed or list(out.iterdir()) == []


def test_an_interrupted_run_leaves_nothing_that_could_be_taken_for_a_hospital(tmp_path: Path) -> None:
    def interrupt(_what: str, done: int, _total: int) -> None:
        # What stands on disk at the moment of a hard kill: no hospital under its own name, no labels anywhere.
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
        assert list((tmp_path / "out").rglob("labels.csv")) == []
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hospitals(tmp_path / "out", sites=1, patients=4, progress=interrupt)
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    out = tmp_path / "mount"
    out.mkdir()
    write_hospitals(out, sites=1, patients=4)
    assert sorted(path.name for path in out.iterdir()) == ["PHANTOMS.txt", "hospital-a"]
