"""Why a file is not read: a closed list of reasons, so that reports can count them and never quote a header."""

from __future__ import annotations

from enum import StrEnum

from crossward.federation.errors import BadInput


class Reason(StrEnum):
    """Kinds of refusal; the value is what a report prints."""

    NOT_DICOM = "not a DICOM file"
    UNREADABLE = "cannot be opened or read"
    DAMAGED = "damaged: the file ends early or its header makes no sense"
    NO_PIXELS = "has no pixel data"
    NO_SIZE = "has no rows or no columns"
    TOO_LARGE = "would take more memory than is allowed"
    TOO_MANY_FRAMES = "has several frames, and the rule takes single images"
    PHOTOMETRIC = "its photometric interpretation is not one that is read"
    LAYOUT = "its bits, samples or sign are missing or contradict one another"
    OUT_OF_RANGE = "has pixel values that do not fit its stored bits"
    RESCALE = "its rescale, window or lookup table makes no sense"
    PALETTE = "its colour palette is missing or makes no sense"
    COMPRESSION = "its compression is not supported"
    NOT_DECODED = "its pixel data cannot be decoded"
    TIMED_OUT = "took longer to read than is allowed"
    CRASHED = "its decoder crashed"
    GEOMETRY = "its position, orientation or spacing is missing or contradicts its series"
    TOO_NARROW = "is too narrow for a picture"
    NOT_AN_IMAGE = "is not an image (report, plan, waveform or the like)"
    DUPLICATE = "is a copy of another file"
    NO_LABEL = "has no label"
    UNKNOWN_LABEL = "has a label that the label map does not name"
    CONFLICTING_LABELS = "has two different labels"
    NO_PATIENT = "does not say whose it is, so it cannot be split by patient"
    PATIENT_CLASH = "two different people share its patient id"
    NO_DOMAIN = "fits no scanner domain of the rule"
    COLOUR = "is in colour, and the images are to be grey"
    BURNED_IN = "may show burned-in text"
    IDENTIFIER = "still holds an identifier"
    TRANSFORM = "its transforms give no finite picture"
    CHANGED = "changed while it was read"


class Refused(BadInput):
    """A file that is not read.

    Args:
        reason: the kind.
        detail: more words, made from numbers and closed terms only: never from text of the file's header.
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value} ({detail})" if detail else reason.value)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[Refused], tuple[Reason, str]]:
        """As it travels between processes."""
        return Refused, (self.reason, self.detail)
