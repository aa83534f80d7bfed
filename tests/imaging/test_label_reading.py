from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ComprehensiveSRStorage, ExplicitVRLittleEndian
from tests.imaging.conftest import WriteDicom

from crossward.imaging.labels.reading import Finding, read_element, read_report
from crossward.imaging.refusals import Reason, Refused

FINDING = "121071"


def item(kind: str, *children: Dataset, concept: str = "", **values: Any) -> Dataset:
    """One node of a report's tree."""
    node = Dataset()
    node.RelationshipType = "CONTAINS"
    node.ValueType = kind
    if concept:
        node.ConceptNameCodeSequence = [coded(concept)]
    for keyword, value in values.items():
        setattr(node, keyword, value)
    if children:
        node.ContentSequence = list(children)
    return node


def coded(value: str) -> Dataset:
    code = Dataset()
    code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = value, "DCM", "PLANTED MEANING"
    return code


def image(*uids: str) -> Dataset:
    return item("IMAGE", ReferencedSOPSequence=references(uids))


def references(uids: Sequence[str]) -> list[Dataset]:
    found = []
    for uid in uids:
        reference = Dataset()
        reference.ReferencedSOPClassUID, reference.ReferencedSOPInstanceUID = "1.2.3", uid
        found.append(reference)
    return found


def code(value: str, *children: Dataset) -> Dataset:
    return item("CODE", *children, concept=FINDING, ConceptCodeSequence=[coded(value)])


def text(value: str, *children: Dataset) -> Dataset:
    return item("TEXT", *children, concept=FINDING, TextValue=value)


def listed(uids: Sequence[str]) -> list[Dataset]:
    """By study and series, as evidence and earlier reports are."""
    series, study = Dataset(), Dataset()
    series.SeriesInstanceUID, series.ReferencedSOPSequence = "1.9", references(uids)
    study.StudyInstanceUID, study.ReferencedSeriesSequence = "1.8", [series]
    return [study]


def write_report(
    path: Path, *content: Dataset, uid: str = "1.1", study: str = "1.8", complete: bool = True, **values: Any
) -> Path:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = ComprehensiveSRStorage, uid
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    report = FileDataset(path, Dataset(), file_meta=meta, preamble=b"\0" * 128)
    report.SOPClassUID, report.SOPInstanceUID, report.StudyInstanceUID = ComprehensiveSRStorage, uid, study
    report.PatientName, report.PatientID, report.Modality = "PLANTED^NAME", "PLANTED-ID", "SR"
    report.CompletionFlag = "COMPLETE" if complete else "PARTIAL"
    report.ValueType, report.ConceptNameCodeSequence = "CONTAINER", [coded("126000")]
    report.ContentSequence = list(content)
    for keyword, value in values.items():
        setattr(report, keyword, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    report.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([code("A", image("1.5"))], [("A", {"1.5"})]),
        ([item("CONTAINER", code("A"), image("1.5", "1.6"))], [("A", {"1.5", "1.6"})]),
        (
            [item("CONTAINER", code("A"), image("1.5")), item("CONTAINER", image("1.6"), code("B"))],
            [("A", {"1.5"}), ("B", {"1.6"})],
        ),
        (
            [item("CONTAINER", image("1.5"), image("1.6")), item("CONTAINER", item("CONTAINER", code("A")))],
            [("A", {"1.5", "1.6"})],
        ),
        ([text("a lump", image("1.5"))], [("a lump", {"1.5"})]),
        ([item("NUM", image("1.5"), concept=FINDING, MeasuredValueSequence=[])], []),
        ([item("PNAME", image("1.5"), concept=FINDING, PersonName="PLANTED^NAME")], []),
        ([item("CODE", image("1.5"), concept="111", ConceptCodeSequence=[coded("A")])], []),
        (
            [item("CODE", item("SCOORD", image("1.5")), concept=FINDING, ConceptCodeSequence=[coded("A")])],
            [("A", {"1.5"})],
        ),
        ([code("A")], [("A", set())]),
    ],
    ids=["below", "beside", "two groups", "library", "text", "no number", "person", "other", "region", "study"],
)
def test_a_value_belongs_to_the_images_nearest_to_it(
    tmp_path: Path, content: list[Dataset], expected: list[tuple[str, set[str]]]
) -> None:
    report = read_report((write_report(tmp_path / "sr.dcm", *content), FINDING))
    assert report.findings == tuple(Finding(value, frozenset(images)) for value, images in expected)
    assert (report.sop_uid, report.study_uid, report.complete) == ("1.1", "1.8", True)


def test_a_number_is_a_value(tmp_path: Path) -> None:
    measured = Dataset()
    measured.NumericValue = "4"
    node = item("NUM", concept=FINDING, MeasuredValueSequence=[measured])
    report = read_report((write_report(tmp_path / "sr.dcm", node), FINDING))
    assert report.findings == (Finding("4", frozenset()),)


def test_evidence_stands_in_where_the_tree_names_no_image(tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "sr.dcm",
        code("A"),
        complete=False,
        CurrentRequestedProcedureEvidenceSequence=listed(["1.5", "1.6"]),
        PredecessorDocumentsSequence=listed(["1.0"]),
    )
    report = read_report((path, FINDING))
    assert report.findings == (Finding("A", frozenset({"1.5", "1.6"})),)
    assert report.replaces == {"1.0"}
    assert not report.complete


def test_an_element_of_the_header(tmp_path: Path, write_dicom: WriteDicom) -> None:
    pixels = np.zeros((4, 4), np.uint8)
    path = write_dicom(tmp_path / "a.dcm", pixels, BodyPartExamined="CHEST ", ImageType=["ORIGINAL", "PRIMARY"])
    assert read_element((path, "BodyPartExamined")) == "CHEST"
    assert read_element((path, "ImageType")) == "ORIGINAL\\PRIMARY"
    assert read_element((path, "ViewPosition")) == ""


def test_a_file_that_went_away_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        read_element((tmp_path / "PLANTED.dcm", "BodyPartExamined"))
    assert refused.value.reason is Reason.UNREADABLE
    assert "PLANTED" not in str(refused.value)
