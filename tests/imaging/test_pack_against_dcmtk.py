"""Every file of the DICOM pack: read with the grey levels of an independent reader, or refused with its reason.

The other reader is dcmtk. Debian's has no JPEG 2000, so those files go two other ways: stored values by GDCM, which
parses the file itself and has its own copy of OpenJPEG (for HTJ2K, which it lacks, Pillow), and, where the pack has
the same picture in a lossless syntax that dcmtk reads, that picture.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread
from pydicom.encaps import get_frame

from crossward.imaging.dicom.display import display
from crossward.imaging.dicom.files import read_header, read_scan
from crossward.imaging.dicom.look import contact_sheet
from crossward.imaging.dicom.scans import Frame
from crossward.imaging.refusals import Reason, Refused

pytestmark = pytest.mark.shared

REFUSED = {
    "019": Reason.LAYOUT,  # one bit per pixel
    "024": Reason.NO_PIXELS,
    "033": Reason.LAYOUT,  # dcmtk and pydicom differ in the order of its 16-bit words
    "054": Reason.LAYOUT,  # floating point
    "061": Reason.NOT_AN_IMAGE,
    "066": Reason.NOT_AN_IMAGE,
    "067": Reason.NOT_AN_IMAGE,
    "072": Reason.NOT_AN_IMAGE,
}
BY_GDCM = ("004", "018", "022", "063", "073", "081")
BY_PILLOW = ("034", "069")
# Has an odd number of pixels, and dcmtk counts the pad byte when it looks for the smallest.
NO_MIN_MAX = ("013",)
DECOMPRESSORS = ("dcmdjpeg", "dcmdjpls", "dcmdrle")


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "dicom" / "files"
    if not folder.is_dir():
        pytest.skip("the data packs are not beside the repository (../shared/data)")
    return {path.name[:3]: path for path in sorted(folder.iterdir())}


def dcmtk(path: Path, frame: int, options: list[str], scratch: Path) -> np.ndarray:
    """The picture as dcmtk shows it, decompressed first where it must be."""
    out, plain = scratch / "out.pnm", scratch / "plain.dcm"
    shown = ["-O", "+F", str(frame + 1), *options, "+op"]
    for tool in DECOMPRESSORS:
        if not subprocess.run(["dcm2pnm", *shown, str(path), str(out)], capture_output=True, check=False).returncode:
            return np.asarray(Image.open(out))
        subprocess.run([tool, str(path), str(plain)], capture_output=True, check=False)
        if plain.exists():
            path = plain
    subprocess.run(["dcm2pnm", *shown, str(path), str(out)], capture_output=True, check=True)
    return np.asarray(Image.open(out))


def ways(number: str, frame: Frame) -> dict[str, tuple[list[str], dict[str, Any]]]:
    if frame.colour:
        return {"colour": ([], {})}
    found: dict[str, tuple[list[str], dict[str, Any]]] = {"stored range": (["-W"], {"window": None, "range": "stored"})}
    if number not in NO_MIN_MAX:
        found["min and max"] = (["+Wm"], {"window": None})
    for place, window in enumerate(frame.windows):
        # Told to dcmtk, which does not look for windows in functional groups.
        given = ["+Ww", str(window.centre), str(window.width)]
        found[f"window {place + 1}"] = (given, {"window": place})
    return found


@pytest.mark.skipif(shutil.which("dcm2pnm") is None, reason="dcmtk is not installed")
def test_grey_levels_are_dcmtks_within_one(files: dict[str, Path], tmp_path: Path) -> None:
    """Padding is black here and shown by dcmtk, so it is compared as if it were a picture."""
    compared = 0
    far: list[str] = []
    for number, path in files.items():
        if number in (*REFUSED, *BY_GDCM, *BY_PILLOW):
            continue
        scan = read_scan(path)
        for frame in {0: scan.frames[0], len(scan.frames) - 1: scan.frames[-1]}.values():
            for name, (options, how) in ways(number, frame).items():
                theirs = dcmtk(path, frame.index, options, tmp_path).astype(int)
                ours = display(replace(frame, valid=None), **how).astype(int)
                apart = np.abs(ours - theirs).max() if ours.shape == theirs.shape else -1
                if not 0 <= apart <= 1:
                    far.append(f"{number} frame {frame.index} {name}: {apart}")
                compared += 1
        (tmp_path / "plain.dcm").unlink(missing_ok=True)
    assert not far
    assert compared >= 100


def gdcm_values(path: Path) -> np.ndarray:
    import gdcm

    reader = gdcm.ImageReader()
    reader.SetFileName(str(path))
    assert reader.Read()
    image = reader.GetImage()
    kind = image.GetPixelFormat()
    dtype = f"{'i' if kind.GetPixelRepresentation() else 'u'}{kind.GetBitsAllocated() // 8}"
    values = np.frombuffer(image.GetBuffer().encode("utf-8", "surrogateescape"), dtype=dtype)
    columns, rows = image.GetDimension(0), image.GetDimension(1)
    return values.reshape((rows, columns, 3) if kind.GetSamplesPerPixel() == 3 else (rows, columns))


@pytest.mark.parametrize("number", BY_GDCM)
def test_jpeg_2000_has_the_values_that_gdcm_reads(number: str, files: dict[str, Path]) -> None:
    frame = read_scan(files[number]).frames[0]
    dataset = dcmread(files[number])
    stored = gdcm_values(files[number]).astype(np.float64)
    if frame.colour:
        np.testing.assert_array_equal(np.rint(frame.values * 255), stored)
        return
    if number == "018":
        # GDCM gives the unsigned patterns of the stream; the header says that they are signed, with 13 bits.
        stored = np.where(stored >= 4096, stored - 8192, stored)
    slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
    np.testing.assert_allclose(frame.values, stored * slope + intercept, rtol=1e-6)


@pytest.mark.parametrize("number", BY_PILLOW)
def test_htj2k_has_the_colours_that_pillow_reads(number: str, files: dict[str, Path]) -> None:
    stream = get_frame(dcmread(files[number]).PixelData, 0, number_of_frames=1)
    theirs = np.asarray(Image.open(io.BytesIO(stream)))
    np.testing.assert_array_equal(np.rint(read_scan(files[number]).frames[0].values * 255), theirs)


@pytest.mark.parametrize(
    ("one", "other", "largest"), [("081", "082", 0), ("006", "082", 5), ("063", "064", 60), ("034", "069", 0.25)]
)
def test_the_same_picture_in_two_syntaxes(one: str, other: str, largest: float, files: dict[str, Path]) -> None:
    """JPEG 2000 and JPEG-LS, both lossless, give the same numbers; lossy ones come close."""
    apart = np.abs(read_scan(files[one]).frames[0].values - read_scan(files[other]).frames[0].values)
    assert apart.max() <= largest


def test_what_is_refused_and_why(files: dict[str, Path]) -> None:
    found = {}
    for number, path in files.items():
        read_header(path)
        try:
            read_scan(path)
        except Refused as refused:
            found[number] = refused.reason
    assert found == REFUSED
    assert len(files) == 56


def test_values_are_those_of_the_manifest(files: dict[str, Path]) -> None:
    """Smallest and largest stored value of every grey file that its maker's decoder read: a third opinion."""
    manifest = next(iter(files.values())).parents[1] / "manifest.csv"
    checked = 0
    with manifest.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        number = row["file"][:3]
        grey = row["photometric"].startswith("MONOCHROME") and row["pydicom_decode"] == "ok"
        if not grey or number in REFUSED:
            continue
        dataset = dcmread(files[number], stop_before_pixels=True)
        if "RescaleSlope" in dataset or row["multiframe"] == "yes":
            continue
        values = read_scan(files[number]).frames[0].values
        assert (values.min(), values.max()) == (float(row["min"]), float(row["max"])), number
        checked += 1
    assert checked >= 15


def test_a_contact_sheet_of_the_pack(files: dict[str, Path], tmp_path: Path) -> None:
    rows = contact_sheet(next(iter(files.values())).parent, tmp_path / "sheet.png", processes=0)
    assert [row.number for row in rows] == list(range(56))
    assert sum(row.thumbnail is not None for row in rows) == 56 - len(REFUSED)
    assert all(bool(row.reason) != (row.thumbnail is not None) for row in rows)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 1600
    names = {dcmread(path, specific_tags=["PatientName"]).get("PatientName") for path in files.values()}
    told = " ".join(row.caption + row.reason for row in rows)
    assert not [name for name in names if len(str(name or "")) > 3 and str(name) in told]
