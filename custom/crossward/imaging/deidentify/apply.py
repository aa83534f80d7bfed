"""One DICOM dataset without its identifiers: every attribute at every depth is looked at, and must earn its place."""

from __future__ import annotations

import logging
import re
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta

import numpy as np
from pydicom import config
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.tag import BaseTag
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, UID_dictionary

from crossward.imaging.deidentify.rules import (
    DESCRIPTION_WORDS,
    METHOD,
    METHODS,
    PUBLIC_SCHEMES,
    REPORT_VALUES,
    SAFE_PRIVATE,
    Action,
    Options,
    action,
    keyword,
    looks_right,
    values,
)
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.secret import keyed, pseudonym

PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
Counts = Counter[tuple[str, str]]

# Dates move into the past, by a month to ten years, so that none lies in the future.
_LEAST_DAYS, _SPAN_DAYS = 30, 3650
_DATE = re.compile(r"([0-9]{4})\.?([0-9]{2})\.?([0-9]{2})")
_DATE_TIME = re.compile(r"([0-9]{8})((?:[0-9]{2}){0,3}(?:\.[0-9]{1,6})?(?:[-+][0-9]{4})?)")
_OLDEST_AGE = 90
_BINARY = frozenset(("OB", "OW", "OF", "OD", "OL", "OV"))
_NUMBERS = frozenset(("US", "SS", "UL", "SL", "UV", "SV", "FL", "FD", "AT"))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep pydicom from quoting values: its warnings and log lines hold what they complain about."""
    log = logging.getLogger("pydicom")
    was = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings(), config.disable_value_validation():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was


def check_kind(dataset: Dataset, options: Options) -> None:
    """Refuses what is no image, or whose content cannot be known.

    Raises:
        Refused: with the reason.
    """
    for name in ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID"):
        if not str(dataset.get(name) or ""):
            raise Refused(Reason.DAMAGED, f"no {name}")
    kind = UID(str(dataset.SOPClassUID))
    if kind not in UID_dictionary:
        raise Refused(Reason.NOT_AN_IMAGE, "not a kind of object that is known")
    if _syntax(dataset) not in UID_dictionary:
        raise Refused(Reason.COMPRESSION, "no transfer syntax of the standard")
    report = kind.keyword.endswith("SRStorage") or ("ContentSequence" in dataset and not has_pixels(dataset))
    if "EncapsulatedDocument" in dataset or kind.keyword.startswith("Encapsulated"):
        raise Refused(Reason.NOT_AN_IMAGE, "an encapsulated document")
    if report and not options.structured:
        raise Refused(Reason.NOT_AN_IMAGE, "a structured report")
    if not report and not has_pixels(dataset):
        image = "Image" in kind.keyword
        raise Refused(Reason.NO_PIXELS if image else Reason.NOT_AN_IMAGE)


def has_pixels(dataset: Dataset) -> bool:
    """Whether it has pixel data of any kind."""
    return any(name in dataset for name in PIXELS)


def patient_of(dataset: Dataset) -> str:
    """What says whose a file is: the patient id, or the study where there is none."""
    return str(dataset.get("PatientID") or "").strip() or f"study {dataset.StudyInstanceUID}"


class Deidentifier:
    """De-identifies datasets with one site's secret.

    Args:
        secret: of the site.
        options: of the profile.
    """

    def __init__(self, secret: bytes, options: Options) -> None:
        self._secret = secret
        self._options = options

    def place(self, dataset: Dataset) -> str:
        """Where the file belongs: patient, study, series and file by pseudonym; to be asked before ``apply``."""
        parts = (("patient", patient_of(dataset)), ("study", dataset.StudyInstanceUID),
                 ("series", dataset.SeriesInstanceUID), ("file", dataset.SOPInstanceUID))  # fmt: skip
        return "/".join(pseudonym(self._secret, kind, str(value)) for kind, value in parts) + ".dcm"

    def apply(self, dataset: Dataset) -> Counts:
        """De-identify a dataset in place.

        Returns:
            How often each attribute met each action, by (keyword, action).
        """
        counts: Counts = Counter()
        patient = patient_of(dataset)
        # An even draw: 2^64 is so much larger than the span that the remainder's bias cannot be noticed.
        draw = int.from_bytes(keyed(self._secret, "days", patient)[:8], "big")
        walk = _Walk(self._secret, self._options, patient, _LEAST_DAYS + draw % _SPAN_DAYS, counts)
        walk.clean(dataset)
        # Type 2 in every image: there, even where the file had none.
        dataset.PatientName = dataset.PatientID = pseudonym(self._secret, "patient", patient)
        for name in ("PatientBirthDate", "PatientSex", "AccessionNumber", "ReferringPhysicianName", "StudyID"):
            if name not in dataset:
                setattr(dataset, name, "")
        self._say_what_was_done(dataset)
        _new_meta(dataset)
        return counts

    def _say_what_was_done(self, dataset: Dataset) -> None:
        dataset.PatientIdentityRemoved = "YES"
        dataset.LongitudinalTemporalInformationModified = "MODIFIED"
        dataset.DeidentificationMethod = METHOD
        codes = []
        for value, meaning, option in METHODS:
            if option is None or getattr(self._options, option):
                code = Dataset()
                code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = value, "DCM", meaning
                codes.append(code)
        dataset.DeidentificationMethodCodeSequence = Sequence(codes)


class _Walk:
    """The way through one file's attributes."""

    def __init__(self, secret: bytes, options: Options, patient: str, days: int, counts: Counts) -> None:
        self._secret = secret
        self._options = options
        self._patient = patient
        self._days = days
        self._counts = counts
        self._do: dict[Action, Callable[[DataElement], Action]] = {
            Action.REMOVE: lambda _: Action.REMOVE,
            Action.EMPTY: self._empty,
            Action.REPLACE: self._replace,
            Action.SHIFT: self._shift,
            Action.CLEAN: self._clean_words,
            Action.KEEP: self._keep,
        }

    def clean(self, dataset: Dataset) -> None:
        safe = {tag: creator for tag in list(dataset.keys()) if (creator := _safe_creator(dataset, tag)) is not None}
        for tag in list(dataset.keys()):
            self._counts[keyword(tag), str(self._treat(dataset, tag, safe))] += 1
        for tag, creator in safe.items():
            if tag in dataset:
                dataset.add_new(BaseTag(tag.group << 16 | tag.element >> 8), "LO", creator)

    def _treat(self, dataset: Dataset, tag: BaseTag, safe: dict[BaseTag, str]) -> Action:
        try:
            element = dataset[tag]
            if tag.is_private:
                wanted = Action.KEEP if tag in safe else Action.REMOVE
            else:
                wanted = action(tag, element.VR, self._options)
            done = self._do[wanted](element)
        except Exception:
            # A value that cannot be read as what it claims to be cannot be judged either.
            done = Action.REMOVE
        if done is Action.REMOVE:
            del dataset[tag]
        return done

    def _empty(self, element: DataElement) -> Action:
        element.value = Sequence() if element.VR == "SQ" else ""
        return Action.EMPTY

    def _replace(self, element: DataElement) -> Action:
        texts = _texts(element)
        if element.VR == "UI":
            mapped = [self._uid(text) for text in texts]
            element.value = mapped if len(mapped) > 1 else "".join(mapped)
            return Action.KEEP if mapped == texts else Action.REPLACE
        if element.keyword == "AccessionNumber":
            number = "".join(texts).strip()
            element.value = pseudonym(self._secret, "accession", number) if number else ""
        else:
            element.value = pseudonym(self._secret, "patient", self._patient)
        return Action.REPLACE

    def _uid(self, text: str) -> str:
        """Names of the standard itself stay; all others, also those that only look like the standard's, are mapped."""
        if not text or text in UID_dictionary:
            return text
        return f"2.25.{uuid.UUID(bytes=keyed(self._secret, 'uid', text)[:16], version=5).int}"

    def _shift(self, element: DataElement) -> Action:
        shifted = [self._moved(text.strip()) for text in _texts(element)]
        element.value = shifted if len(shifted) > 1 else "".join(shifted)
        return Action.SHIFT if any(shifted) else Action.EMPTY

    def _moved(self, text: str) -> str:
        """A date or date and time, moved; empty where it has no whole date."""
        moment = _DATE_TIME.fullmatch(text)
        day, rest = moment.groups() if moment else (text, "")
        parts = _DATE.fullmatch(day)
        if parts is None:
            return ""
        try:
            moved = date(*(int(part) for part in parts.groups())) - timedelta(days=self._days)
        except (ValueError, OverflowError):
            return ""
        return f"{moved.year:04d}{moved.month:02d}{moved.day:02d}{rest}"

    def _clean_words(self, element: DataElement) -> Action:
        if element.keyword == "PatientAge":
            return self._cap_age(element)
        words = [word for text in _texts(element) for word in re.findall(r"[A-Z0-9]+", text.upper())]
        element.value = " ".join(word for word in words if word in DESCRIPTION_WORDS)[:64].strip()
        return Action.CLEAN

    def _cap_age(self, element: DataElement) -> Action:
        (age,) = _texts(element) or [""]
        if not looks_right("AS", age):
            return Action.REMOVE
        if age.endswith("Y") and int(age[:3]) >= _OLDEST_AGE:
            element.value = f"{_OLDEST_AGE:03d}Y"
            return Action.CLEAN
        return Action.KEEP

    def _keep(self, element: DataElement) -> Action:
        if element.VR == "SQ":
            return self._go_into(element)
        return Action.KEEP if _fits(element) else Action.REMOVE

    def _go_into(self, element: DataElement) -> Action:
        before = len(element.value)
        items = [item for item in element.value if _may_stay(item, report=element.keyword == "ContentSequence")]
        for item in items:
            self.clean(item)
        if before and not any(len(item) for item in items):
            return Action.REMOVE
        # Items that became empty stay: frames are matched to items by their number.
        element.value = Sequence(items)
        return Action.KEEP if len(items) == before else Action.CLEAN


def _fits(element: DataElement) -> bool:
    """Whether a value is what its kind says, so that no text hides in it."""
    if element.VR in _BINARY or " or " in element.VR:
        return True
    if element.VR in _NUMBERS:
        return not any(isinstance(value, str | bytes) for value in values(element))
    return all(looks_right(element.VR, text) for text in _texts(element))


def _may_stay(item: Dataset, *, report: bool) -> bool:
    """Whether an item of a sequence may stay: codes only of public schemes, and no text of reports."""
    coded = any(name in item for name in ("CodeValue", "LongCodeValue", "URNCodeValue", "CodeMeaning"))
    if coded and str(item.get("CodingSchemeDesignator") or "").strip() not in PUBLIC_SCHEMES:
        return False
    return not report or str(item.get("ValueType") or "").strip() in REPORT_VALUES


def _safe_creator(dataset: Dataset, tag: BaseTag) -> str | None:
    """The creator of a private attribute that is known to be safe, None for any other."""
    if not tag.is_private or tag.is_private_creator:
        return None
    try:
        creator = str(dataset[BaseTag(tag.group << 16 | tag.element >> 8)].value).strip()
        vrs = SAFE_PRIVATE.get((creator, tag.group, tag.element & 0xFF), frozenset())
        return creator if dataset[tag].VR in vrs else None
    except Exception:
        return None


def _texts(element: DataElement) -> list[str]:
    return [str(value) for value in values(element)]


def _syntax(dataset: Dataset) -> str:
    return str(getattr(getattr(dataset, "file_meta", None), "TransferSyntaxUID", "") or "")


def _new_meta(dataset: Dataset) -> None:
    """Preamble and file meta information from scratch: the old ones name stations and programs, or worse."""
    syntax = _syntax(dataset)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    # Deflated bytes could not be searched for what was missed.
    meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax == DeflatedExplicitVRLittleEndian else UID(syntax)
    meta.ImplementationVersionName = "CROSSWARD"
    dataset.file_meta = meta
    dataset.preamble = b"\0" * 128


def clear_hidden_bits(dataset: Dataset) -> None:
    """Sees to it that uncompressed pixel data holds pixels and nothing else; to be called before ``apply``.

    Old scanners draw text into the bits above the stored ones, and say so by an overlay: these bits are cleared.

    Raises:
        Refused: the bits above the stored ones, or bytes behind the last pixel, hold something that nothing explains.
    """
    syntax = UID(_syntax(dataset))
    if "PixelData" not in dataset or syntax.is_encapsulated:
        return
    try:
        allocated, stored, high = (int(dataset[name].value) for name in ("BitsAllocated", "BitsStored", "HighBit"))
        samples = 2 if dataset.PhotometricInterpretation == "YBR_FULL_422" else int(dataset.SamplesPerPixel)
        count = int(dataset.Rows) * int(dataset.Columns) * samples * int(dataset.get("NumberOfFrames") or 1)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused(Reason.LAYOUT) from None
    length = (count * allocated + 7) // 8
    if len(dataset.PixelData) not in (length, length + length % 2):
        raise Refused(Reason.LAYOUT, "its pixel data is longer or shorter than its size")
    if allocated == stored or allocated == 1:
        return
    if allocated not in (8, 16, 32) or high != stored - 1:
        raise Refused(Reason.LAYOUT)
    kind = np.dtype(f"u{allocated // 8}").newbyteorder("<" if syntax.is_little_endian else ">")
    words = np.frombuffer(dataset.PixelData[:length], dtype=kind)
    above = words >> stored
    sign = (words >> high) & 1 if int(dataset.get("PixelRepresentation") or 0) else np.zeros_like(words)
    extended = sign * ((1 << (allocated - stored)) - 1)
    if not np.any((above != 0) & (above != extended)):
        return
    if not any(dataset.get((group, 0x0102)) and dataset[group, 0x0102].value for group in range(0x6000, 0x6020, 2)):
        raise Refused(Reason.OUT_OF_RANGE)
    pixels = (words & ((1 << stored) - 1)) | (extended << stored).astype(words.dtype)
    dataset.PixelData = pixels.astype(words.dtype).tobytes() + b"\0" * (length % 2)
