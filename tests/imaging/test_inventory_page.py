"""The page of an inventory: pictures of every scanner, and nothing that names anybody."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from crossward.imaging.dicom.scans import Header
from crossward.imaging.inventory.facts import facts
from crossward.imaging.inventory.page import PICTURES, choose, may_show_text, write_page
from crossward.imaging.inventory.scan import Found, scan
from crossward.imaging.inventory.thumbnail import LONGEST_SIDE, thumbnail
from crossward.imaging.refusals import Reason, Refused

from .conftest import WriteDicom

RAMP = np.tile(np.arange(0, 256, dtype=np.uint8), (192, 1))


class Outline(HTMLParser):
    """Sections of a page with how many pictures each has, and every address that it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, int] = {"": 0}
        self.sources: list[str] = []
        self._in_heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_heading = tag == "h2"
        for name, value in attrs:
            if name in ("src", "href") and value:
                self.sources.append(value)
        if tag == "img":
            self.sections[list(self.sections)[-1]] += 1

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.sections[data] = 0
            self._in_heading = False


def page_of(folder: Path, out: Path, *, processes: int = 0) -> tuple[str, Outline]:
    inventory = scan(folder, processes=0)
    write_page(out, folder, inventory, facts(inventory), processes=processes)
    text = out.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    return text, outline


def test_every_scanner_has_its_section_and_pictures(tmp_path: Path, write_dicom: WriteDicom) -> None:
    for number in range(PICTURES + 3):
        write_dicom(tmp_path / "in" / f"{number}.dcm", RAMP, PatientID=f"P-{number}", Manufacturer="First <Maker>")
    write_dicom(tmp_path / "in" / "other.dcm", RAMP, Manufacturer="Second", ManufacturerModelName="")
    (tmp_path / "in" / "notes.txt").write_text("none")
    text, outline = page_of(tmp_path / "in", tmp_path / "page.html", processes=2)
    assert outline.sections == {"": 0, "First <Maker> Model 1": PICTURES, "Second": 1, "Not read": 0}
    assert all(source.startswith("data:image/png;base64,") for source in outline.sources)
    assert Reason.NOT_DICOM.value in text
    assert "http" not in text.replace("http-equiv", "")


def test_the_page_names_nobody(tmp_path: Path, write_dicom: WriteDicom) -> None:
    planted = {
        "PatientName": "PLANTEDNAME^GIVEN",
        "PatientID": "PLANTEDID",
        "PatientBirthDate": "19510203",
        "AccessionNumber": "PLANTEDACC",
        "InstitutionName": "PLANTEDPLACE",
        "StationName": "PLANTEDSTATION",
        "StudyInstanceUID": "1.2.3.44444",
        "SoftwareVersions": "for PLANTEDNAME",
    }
    write_dicom(tmp_path / "PLANTEDFOLDER" / "PLANTEDFILE.dcm", RAMP, **planted)
    (tmp_path / "PLANTEDFOLDER" / "PLANTEDREFUSED.txt").write_text("none")
    text, outline = page_of(tmp_path / "PLANTEDFOLDER", tmp_path / "page.html")
    assert outline.sections["Maker Model 1"] == 1
    words = re.sub(r"base64,[^\"]*", "", text)
    assert "PLANTED" not in words
    assert "19510203" not in words
    assert "44444" not in words
    (picture,) = outline.sources
    assert b"PLANTED" not in base64.b64decode(picture.partition(",")[2])


def test_a_picture_that_cannot_be_read_is_said_with_its_reason(tmp_path: Path, write_dicom: WriteDicom) -> None:
    write_dicom(tmp_path / "in" / "a.dcm", RAMP, PatientID="P-1")
    write_dicom(tmp_path / "in" / "b.dcm", RAMP, PatientID="P-2", RescaleSlope="0", RescaleIntercept="0")
    text, outline = page_of(tmp_path / "in", tmp_path / "page.html")
    assert outline.sections["Maker Model 1"] == 1
    assert f"1 of the images chosen for pictures cannot be shown: {Reason.RESCALE.value}" in text


@pytest.mark.parametrize(
    ("tags", "hidden"),
    [
        ({"BurnedInAnnotation": "YES"}, True),
        ({"BurnedInAnnotation": "NO", "Modality": "US"}, False),
        ({"Modality": "US"}, True),
        ({"Modality": "CT"}, False),
    ],
)
def test_what_may_show_text_is_not_shown(
    tmp_path: Path, write_dicom: WriteDicom, tags: dict[str, Any], hidden: bool
) -> None:
    write_dicom(tmp_path / "in" / "a.dcm", RAMP, **tags)
    text, outline = page_of(tmp_path / "in", tmp_path / "page.html")
    assert outline.sections["Maker Model 1"] == int(not hidden)
    assert ("1 images may show burned-in text" in text) is hidden


def test_secondary_captures_may_show_text() -> None:
    capture = Header(sop_class="1.2.840.10008.5.1.4.1.1.7.2", modality="MR")
    assert may_show_text(capture)
    assert not may_show_text(replace(capture, burned_in="NO"))
    assert not may_show_text(replace(capture, sop_class="1.2.840.10008.5.1.4.1.1.4"))


def test_drawn_text_is_seen_in_the_pixels(tmp_path: Path, write_dicom: WriteDicom) -> None:
    picture = Image.new("L", (256, 256), 20)
    plain = write_dicom(tmp_path / "plain.dcm", np.asarray(picture))
    ImageDraw.Draw(picture).text((8, 8), "PLANTED NAME 4711", fill=250)
    written = write_dicom(tmp_path / "written.dcm", np.asarray(picture))
    assert thumbnail((str(plain), 0))
    with pytest.raises(Refused) as refusal:
        thumbnail((str(written), 0))
    assert refusal.value.reason is Reason.BURNED_IN


def test_a_thumbnail_is_the_picture_made_small(tmp_path: Path, write_dicom: WriteDicom) -> None:
    file = write_dicom(tmp_path / "a.dcm", RAMP, PhotometricInterpretation="MONOCHROME1")
    small = np.asarray(Image.open(io.BytesIO(thumbnail((str(file), 0)))))
    assert small.shape == (96, LONGEST_SIDE)
    # Two columns become one, and MONOCHROME1 is turned: 255 - (0 + 1) / 2 and so on, to the nearest level.
    assert np.abs(small[0] - (254.5 - 2.0 * np.arange(LONGEST_SIDE))).max() <= 0.5


def found(path: str, patient: str) -> Found:
    return Found(path=path, header=Header(patient_id=patient, has_pixels=True))


def test_pictures_are_spread_over_patients() -> None:
    many = [found(f"{patient:02}/{turn}", f"P-{patient}") for patient in range(15) for turn in range(3)]
    chosen = choose(many)
    assert [each.path for each in chosen] == ["00/0", "02/0", "04/0", "06/0", "08/0", "10/0", "12/0", "14/0"]
    few = many[:9]
    assert [each.path for each in choose(few)] == [few[number].path for number in (0, 1, 2, 3, 4, 5, 6, 8)]
    assert choose(many[:4]) == many[:4]
    assert choose([]) == []
