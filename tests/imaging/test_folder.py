from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import load
from crossward.imaging.folder import PHANTOM_NOTE, is_phantom, phantom_name
from crossward.imaging.phantom import write_hospitals
from crossward.imaging.phantom_file import Label


def grey(value: float) -> float:
    return (value - 0.5) / 0.25


@pytest.fixture
def two_hospitals(tmp_path: Path, write_hospital) -> Path:
    for name in ("hospital-a", "hospital-b"):
        write_hospital(tmp_path / name, {"normal": 10, "nodule": 10})
    return tmp_path


def one_picture(root: Path, pixels: np.ndarray, write_dicom, write_labels, *, size: int) -> torch.Tensor:
    """The given picture as `load` gives it, in a hospital with enough company to be accepted."""
    rows = []
    for number in range(20):
        write_dicom(root / "one" / f"{number}.dcm", pixels)
        rows.append((f"{number}.dcm", str(number), "ab"[number % 2]))
    write_labels(root / "one", rows)
    return load(root, size=size, batch_size=1).sites["one"].train.images[0]


def test_a_folder_of_hospitals(two_hospitals: Path) -> None:
    cohort = load(two_hospitals, size=16, batch_size=8)
    assert (cohort.kind, cohort.channels, cohort.size, cohort.phantom) == ("dicom hospitals", 1, 16, False)
    assert cohort.classes == ("nodule", "normal")
    assert list(cohort.sites) == ["hospital-a", "hospital-b"]
    assert cohort.warnings == ()
    site = cohort.sites["hospital-a"]
    assert site.scanner == "Maker Model 1"
    # 10 patients of each label, the first of every three with a second image: 14 images of each.
    assert len(site.train) + len(site.val) + len(site.test) == 28
    people = [set(part.patients) for part in (site.train, site.val, site.test)]
    assert [len(part) for part in people] == [14, 2, 4]
    assert len(set.union(*people)) == 20
    for label, patient in zip(site.train.labels.tolist(), site.train.patients, strict=True):
        assert patient.startswith(cohort.classes[label])
    assert site.train.images.dtype == torch.float32
    assert site.train.images.is_contiguous()
    assert site.train.labels.dtype == torch.int64


def test_images_belong_to_their_ids(two_hospitals: Path, write_dicom) -> None:
    marked = two_hospitals / "hospital-a" / "images" / "nodule-1-0.dcm"
    write_dicom(marked, np.full((12, 12), 255, np.uint8))
    site = load(two_hospitals, size=12, batch_size=8).sites["hospital-a"]
    found = [
        (name, image.min().item())
        for part in (site.train, site.val, site.test)
        for name, image in zip(part.ids, part.images, strict=True)
        if image.min() == image.max()
    ]
    assert found == [("images/nodule-1-0.dcm", grey(1.0))]


def test_shrinking_takes_the_mean_of_what_a_pixel_covers(tmp_path: Path, write_dicom, write_labels) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16)).astype(np.uint8)
    image = one_picture(tmp_path, pixels, write_dicom, write_labels, size=8)
    expected = grey(pixels.reshape(8, 2, 8, 2).mean(axis=(1, 3)) / 255)
    np.testing.assert_allclose(image[0].numpy(), expected, atol=1e-5)


def test_the_shape_is_kept_by_dark_margins(tmp_path: Path, write_dicom, write_labels) -> None:
    image = one_picture(tmp_path, np.full((32, 16), 255, np.uint8), write_dicom, write_labels, size=16)[0]
    assert (image[:, :4] == grey(0)).all()
    assert (image[:, 12:] == grey(0)).all()
    torch.testing.assert_close(image[:, 4:12], torch.full((16, 8), grey(1)))


def test_small_images_are_enlarged_smoothly(tmp_path: Path, write_dicom, write_labels) -> None:
    ramp = np.tile(np.linspace(0, 250, 6).astype(np.uint8), (6, 1))
    image = one_picture(tmp_path, ramp, write_dicom, write_labels, size=24)[0]
    steps = image.diff(dim=1)
    assert (steps >= -1e-5).all()
    # Repeating pixels would jump by a fifth of the range (0.78); between neighbours it is a quarter of that.
    assert steps.max() < 0.25


def test_grey_and_colour_meet_as_colour(tmp_path: Path, write_hospital) -> None:
    write_hospital(tmp_path / "a", {"x": 6, "y": 6})
    write_hospital(tmp_path / "b", {"x": 6, "y": 6}, shape=(12, 10, 3))
    cohort = load(tmp_path, size=8, batch_size=4)
    assert cohort.channels == 3
    of_grey, of_colour = cohort.sites["a"].train.images, cohort.sites["b"].train.images
    assert of_grey.shape[1:] == of_colour.shape[1:] == (3, 8, 8)
    assert of_grey.is_contiguous()
    assert torch.equal(of_grey[:, 0], of_grey[:, 2])
    assert not torch.equal(of_colour[:, 0], of_colour[:, 2])


def test_held_out_and_hidden_folders_are_no_hospitals(two_hospitals: Path, write_hospital) -> None:
    write_hospital(two_hospitals / "held-out", {"other": 3})
    (two_hospitals / ".cache").mkdir()
    (two_hospitals / "notes.txt").write_text("hello")
    assert list(load(two_hospitals, size=8, batch_size=4).sites) == ["hospital-a", "hospital-b"]


def test_one_hospital_alone(two_hospitals: Path) -> None:
    cohort = load(two_hospitals / "hospital-b", size=8, batch_size=4)
    assert list(cohort.sites) == ["hospital-b"]
    assert torch.equal(
        cohort.sites["hospital-b"].test.images,
        load(two_hospitals, size=8, batch_size=4).sites["hospital-b"].test.images,
    )


def test_one_hospital_may_lack_a_class_of_its_partners(two_hospitals: Path) -> None:
    cohort = load(two_hospitals / "hospital-a", size=8, batch_size=4, classes=("effusion", "nodule", "normal"))
    assert cohort.classes == ("effusion", "nodule", "normal")
    assert set(cohort.sites["hospital-a"].train.labels.tolist()) == {1, 2}
    assert cohort.warnings == ("no image has the class 'effusion'",)


def test_files_may_be_named_from_the_images_folder_and_by_spreadsheets(tmp_path: Path, write_hospital) -> None:
    hospital = write_hospital(tmp_path / "a", {"x": 6, "y": 6})
    labels = hospital / "labels.csv"
    plain = labels.read_text(encoding="utf-8").replace("images/", "")
    labels.write_text("\ufeff" + plain.replace("file,patient", "file , patient", 1), encoding="utf-8")
    assert len(load(tmp_path, size=8, batch_size=4).sites["a"].test) > 0


def test_progress_counts_every_image(two_hospitals: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load(two_hospitals, size=8, batch_size=4, progress=lambda *call: calls.append(call))
    assert calls == [(site, done, 28) for site in ("hospital-a", "hospital-b") for done in range(1, 29)]


def test_the_same_patient_may_have_different_labels(two_hospitals: Path, write_labels) -> None:
    rows = [(f"images/n{kind}-{turn}-0.dcm", f"p{turn}", kind) for kind in ("odule", "ormal") for turn in range(10)]
    write_labels(two_hospitals / "hospital-a", rows)
    write_labels(two_hospitals / "hospital-b", rows)
    site = load(two_hospitals, size=8, batch_size=4).sites["hospital-a"]
    assert [len(part) for part in (site.train, site.val, site.test)] == [14, 2, 4]
    assert not set(site.train.patients) & set(site.test.patients)


def broken(hospital: Path, how: str) -> None:
    labels = hospital / "labels.csv"
    text = labels.read_text(encoding="utf-8")
    first = text.splitlines()[1]
    if how == "no labels.csv":
        labels.unlink()
    elif how == "no columns":
        labels.write_text(text.replace("file,patient,label", "name,person,label"))
    elif how == "semicolons":
        labels.write_text(text.replace(",", ";"))
    elif how == "no such file":
        labels.write_text(text + "images/gone.dcm,p,normal\n")
    elif how == "twice":
        labels.write_text(text + first.replace("images/", "") + "\n")
    elif how == "outside":
        labels.write_text(text + "../hospital-a/images/normal-0-0.dcm,p,normal\n")
    elif how == "absolute":
        labels.write_text(text + f"{hospital}/images/normal-0-0.dcm,p,normal\n")
    elif how == "empty label":
        labels.write_text(text + "images/normal-0-0.dcm,p,\n")
    elif how == "short line":
        labels.write_text(text + "images/normal-0-0.dcm\n")
    elif how == "no rows":
        labels.write_text("file,patient,label\n")
    elif how == "empty file":
        labels.write_text("")
    elif how == "not utf-8":
        labels.write_bytes(text.encode() + b"\xff\xfe,p,normal\n")
    elif how == "not dicom":
        (hospital / "images" / "normal-1-0.dcm").write_text("hello")
    elif how == "lonely label":
        labels.write_text(text.replace(",normal\r", ",tumour\r", 3).replace(",normal\n", ",tumour\n", 3))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no labels.csv", r"has no labels\.csv; add one .* --sites"),
        ("no columns", r"lacks the column\(s\) file, patient; "),
        ("semicolons", r"lacks the column\(s\) file, patient, label; .*separated by commas"),
        ("no such file", "line 30 names a file that is not there"),
        ("twice", "line 30 names a file a second time"),
        ("outside", "line 30 names a file outside"),
        ("absolute", "line 30 names a file outside"),
        ("empty label", "line 30 has no label"),
        ("short line", "line 30 has no patient, label"),
        ("no rows", "lists no images"),
        ("empty file", r"lacks the column\(s\)"),
        ("not utf-8", r"cannot be read \(UnicodeDecodeError\)"),
        ("not dicom", r"labels\.csv line \d+: not a DICOM file"),
        ("lonely label", r"3 image\(s\) have the label 'tumour'.* correct labels\.csv.*--classes"),
    ],
)
def test_a_broken_hospital_is_refused(how: str, message: str, two_hospitals: Path) -> None:
    broken(two_hospitals / "hospital-b", how)
    with pytest.raises(BadInput, match=message) as refusal:
        load(two_hospitals, size=8, batch_size=4)
    assert str(refusal.value).startswith("hospital-b: ")
    assert "\n" not in str(refusal.value)
    assert ".dcm" not in str(refusal.value)
    assert load(two_hospitals, size=8, batch_size=4, sites=["hospital-a"]).sites


def test_a_lonely_label_is_allowed_when_classes_are_chosen(two_hospitals: Path) -> None:
    broken(two_hospitals / "hospital-b", "lonely label")
    cohort = load(two_hospitals, size=8, batch_size=4, classes=("normal", "nodule"))
    site = cohort.sites["hospital-b"]
    assert len(site.train) + len(site.val) + len(site.test) == 25
    assert load(two_hospitals, size=8, batch_size=4, classes=("normal", "nodule", "tumour")).classes[2] == "tumour"


def test_lists_are_checked_before_images_are_read(two_hospitals: Path) -> None:
    broken(two_hospitals / "hospital-a", "not dicom")
    broken(two_hospitals / "hospital-b", "lonely label")
    with pytest.raises(BadInput, match="tumour"):
        load(two_hospitals, size=8, batch_size=4)


def test_a_sliver_is_refused(tmp_path: Path, write_dicom, write_labels) -> None:
    with pytest.raises(BadInput, match=r"one: labels\.csv line \d+: 400 x 3 pixels is too narrow"):
        one_picture(tmp_path, np.zeros((400, 3), np.uint8), write_dicom, write_labels, size=8)


def test_phantom_hospitals(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "made", sites=2, patients=24, seed=3, unseen=True, spoiled=True)
    cohort = load(tmp_path / "made", size=32, batch_size=8)
    assert list(cohort.sites) == ["hospital-a", "hospital-b"]
    assert cohort.phantom
    assert cohort.kind == "dicom hospitals"
    assert cohort.sites["hospital-a"].scanner != cohort.sites["hospital-b"].scanner
    for site in cohort.sites.values():
        assert len({*site.train.patients, *site.val.patients, *site.test.patients}) == 24
        # The margin beside the chest is air: dark at every hospital, also where the films are stored inverted.
        images = site.train.images
        corner, centre = images[:, 0, 2:6, 4:8].mean(), images[:, 0, 10:22, 10:22].mean()
        assert corner < centre
    for part in ("hospital-b", "held-out/unseen-scanner", "held-out/spoiled"):
        assert is_phantom(tmp_path / "made" / part), part
    assert load(tmp_path / "made" / "held-out" / "unseen-scanner", size=32, batch_size=8).phantom
    # Every film of theirs has a short name, and it is the one that the writer gave it.
    for site in cohort.sites.values():
        assert all(file == f"images/{phantom_name(file)}.dcm" for file in site.train.ids)
    assert phantom_name(f"images/{Label('U', 17, 2, seed=3).file_name}") == "U0017-2"


@pytest.mark.parametrize(
    "below", ["project/hospital", "project/held-out/set", "hospital-a/inner", "held-out/spoiled/inner", "project"]
)
def test_real_scans_below_a_folder_of_phantoms_are_not_taken_for_them(below: str, tmp_path: Path, write_labels) -> None:
    (tmp_path / PHANTOM_NOTE).write_text("made up")
    write_labels(tmp_path / below / ("hospital" if below == "project" else ""), [])
    assert not is_phantom(tmp_path / below)


@pytest.mark.parametrize(
    "file",
    [
        "images/MRN-00471182-1.dcm",
        "DOE_JANE_1957.dcm",
        "images/A00471182-1.dcm",
        "A0047-11.dcm",
        "a0047-1.dcm",
        "A0047-1",
        "A0047-1.dcm.old",
        "A0047-1.dcm\n",
        "A0047-1.dcm/scan.dcm",
        "DOE\\A0047-1.dcm",
    ],
)
def test_no_other_file_has_a_short_name(file: str) -> None:
    assert phantom_name(file) is None
