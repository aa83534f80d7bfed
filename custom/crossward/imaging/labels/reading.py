"""What a DICOM file itself says that can be a label: an element of its header, or the findings of a structured report.

Kept apart so that worker processes start without heavy imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydicom import Dataset, dcmread
from pydicom.errors import InvalidDicomError
from pydicom.multival import MultiValue

from crossward.imaging.refusals import Reason, Refused

_SEPARATOR = "\\"
_PARTIAL = "PARTIAL"


@dataclass(frozen=True)
class Finding:
    """A value that a report gives to a concept.

    Attributes:
        value: its code value, text or number.
        images: SOP instance UIDs of the images it is about; empty for the whole study.
    """

    value: str
    images: frozenset[str]


@dataclass(frozen=True)
class Report:
    """What one structured report says about a concept.

    Attributes:
        sop_uid: of the report.
        study_uid: of the study it belongs to.
        replaces: SOP instance UIDs of the reports that it carries on.
        complete: whether its author had finished.
        findings: values of the concept, in the order of the report.
    """

    sop_uid: str
    study_uid: str
    replaces: frozenset[str]
    complete: bool
    findings: tuple[Finding, ...]


def read_element(item: tuple[Path, str]) -> str:
    """The text of one element; several values are joined by backslashes, as DICOM writes them."""
    path, keyword = item
    value = _open(path, keyword).get(keyword)
    values = value if isinstance(value, MultiValue | list) else [value]
    return _SEPARATOR.join(str(each).strip() for each in values if each is not None).strip()


def read_report(item: tuple[Path, str]) -> Report:
    """Reads what a structured report says about the concept with this code value, anywhere in its tree.

    A value belongs to the images that are named below it, else to those named in the nearest part of the report around
    it that names any, else to the report's evidence, else to the whole study.
    """
    path, concept = item
    dataset = _open(
        path,
        "SOPInstanceUID",
        "StudyInstanceUID",
        "CompletionFlag",
        "PredecessorDocumentsSequence",
        "CurrentRequestedProcedureEvidenceSequence",
        "ConceptNameCodeSequence",
        "ValueType",
        "ContentSequence",
    )
    search = _Search(concept)
    left = search.walk(dataset)[1]
    evidence = frozenset(_instances(dataset.get("CurrentRequestedProcedureEvidenceSequence")))
    return Report(
        sop_uid=_text(dataset, "SOPInstanceUID"),
        study_uid=_text(dataset, "StudyInstanceUID"),
        replaces=frozenset(_instances(dataset.get("PredecessorDocumentsSequence"))),
        complete=_text(dataset, "CompletionFlag") != _PARTIAL,
        findings=(*search.findings, *(Finding(value, evidence) for value in left)),
    )


class _Search:
    def __init__(self, concept: str) -> None:
        self._concept = concept
        self.findings: list[Finding] = []

    def walk(self, item: Dataset) -> tuple[set[str], list[str]]:
        """The images that this part of the tree names, and values in it that no image was found for yet."""
        images = set(_referenced(item)) if _text(item, "ValueType") == "IMAGE" else set()
        values = []
        for child in item.get("ContentSequence") or ():
            below, left = self.walk(child)
            images |= below
            values += left
        if self._concept in _codes(item.get("ConceptNameCodeSequence")):
            values += [value for value in _VALUES.get(_text(item, "ValueType"), _no_value)(item) if value]
        if images:
            self.findings += [Finding(value, frozenset(images)) for value in values]
            values = []
        return images, values


def _codes(sequence: Iterable[Dataset] | None) -> list[str]:
    keywords = ("CodeValue", "LongCodeValue", "URNCodeValue")
    return [text for item in sequence or () for keyword in keywords if (text := _text(item, keyword))]


def _coded(item: Dataset) -> list[str]:
    return _codes(item.get("ConceptCodeSequence"))


def _written(item: Dataset) -> list[str]:
    return [_text(item, "TextValue")]


def _measured(item: Dataset) -> list[str]:
    return [_text(measured, "NumericValue") for measured in item.get("MeasuredValueSequence") or ()]


def _no_value(_: Dataset) -> list[str]:
    return []


_VALUES: dict[str, Callable[[Dataset], list[str]]] = {"CODE": _coded, "TEXT": _written, "NUM": _measured}


def _instances(studies: Iterable[Dataset] | None) -> list[str]:
    """The instances in a list by study and series."""
    return [
        uid
        for study in studies or ()
        for series in study.get("ReferencedSeriesSequence") or ()
        for uid in _referenced(series)
    ]


def _referenced(item: Dataset) -> list[str]:
    found = (_text(each, "ReferencedSOPInstanceUID") for each in item.get("ReferencedSOPSequence") or ())
    return [uid for uid in found if uid]


def _text(item: Dataset, keyword: str) -> str:
    value = item.get(keyword)
    return "" if value is None else str(value).strip()


def _open(path: Path, *keywords: str) -> Dataset:
    try:
        return dcmread(path, stop_before_pixels=True, specific_tags=list(keywords), force=True)
    except InvalidDicomError:
        raise Refused(Reason.NOT_DICOM) from None
    except OSError as error:
        raise Refused(Reason.UNREADABLE, type(error).__name__) from None
    except Exception as error:
        # Its text may quote the header.
        raise Refused(Reason.DAMAGED, type(error).__name__) from None
