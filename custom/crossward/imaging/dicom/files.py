"""DICOM files in: a header as plain facts, or a scan with its frames in the units of the modality.

What cannot be read without guessing is refused with a reason from a closed list; see `Reason`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydicom.uid import UID_dictionary

from crossward.imaging.dicom.elements import MALFORMED, Elements, tag
from crossward.imaging.dicom.opening import Opened, opened
from crossward.imaging.dicom.pixels import OVERLAY_TAGS, Limits, read_layout, stored_frames
from crossward.imaging.dicom.scans import Header, Scan
from crossward.imaging.dicom.units import Groups, make_frame, plane, spacing_of
from crossward.imaging.refusals import Reason, Refused

_TEXTS = {
    "patient_id": "PatientID",
    "patient_name": "PatientName",
    "birth_date": "PatientBirthDate",
    "sex": "PatientSex",
    "issuer": "IssuerOfPatientID",
    "accession": "AccessionNumber",
    "study_uid": "StudyInstanceUID",
    "series_uid": "SeriesInstanceUID",
    "sop_uid": "SOPInstanceUID",
    "frame_of_reference": "FrameOfReferenceUID",
    "sop_class": "SOPClassUID",
    "modality": "Modality",
    "manufacturer": "Manufacturer",
    "model": "ManufacturerModelName",
    "software": "SoftwareVersions",
    "station": "StationName",
    "serial": "DeviceSerialNumber",
    "institution": "InstitutionName",
    "body_part": "BodyPartExamined",
    "view": "ViewPosition",
    "image_type": "ImageType",
    "photometric": "PhotometricInterpretation",
    "burned_in": "BurnedInAnnotation",
}
_INTEGERS = {
    "samples": "SamplesPerPixel",
    "bits_allocated": "BitsAllocated",
    "bits_stored": "BitsStored",
    "rows": "Rows",
    "columns": "Columns",
    "instance_number": "InstanceNumber",
}
# Elements of the file or, in enhanced files, of a functional group that all frames share.
_NUMBERS = {
    "kvp": ("KVP", "CTXRayDetailsSequence"),
    "field_strength": ("MagneticFieldStrength", ""),
    "slice_thickness": ("SliceThickness", "PixelMeasuresSequence"),
}
_KERNEL = ("ConvolutionKernel", "CTReconstructionSequence")
_OTHERS = (
    "ImageLaterality",
    "Laterality",
    "PixelRepresentation",
    "NumberOfFrames",
    "ConvolutionKernel",
    "PixelSpacing",
    "ImagerPixelSpacing",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "SharedFunctionalGroupsSequence",
)
_FOR_PIXELS = (
    "PlanarConfiguration",
    "HighBit",
    "ModalityLUTSequence",
    "RescaleSlope",
    "RescaleIntercept",
    "VOILUTSequence",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "PixelPaddingValue",
    "PixelPaddingRangeLimit",
    *(
        f"{colour}PaletteColorLookupTable{part}"
        for colour in ("Red", "Green", "Blue")
        for part in ("Descriptor", "Data")
    ),
    "PerFrameFunctionalGroupsSequence",
    "ExtendedOffsetTable",
)
_HEADER_TAGS = [
    tag(name) for name in (*_TEXTS.values(), *_INTEGERS.values(), *(name for name, _ in _NUMBERS.values()), *_OTHERS)
]
_SCAN_TAGS = [*_HEADER_TAGS, *(tag(name) for name in _FOR_PIXELS), *OVERLAY_TAGS]
_HEADER_BYTES = 1 << 23


def read_header(path: Path) -> Header:
    """What a file's header says; its pixel data are not touched.

    Raises:
        Refused: it cannot be read, is not DICOM or is damaged.
    """
    with opened(path, _HEADER_TAGS, header_bytes=_HEADER_BYTES) as file:
        return _header(file)


def read_scan(path: Path, *, frames: Sequence[int] | None = None, limits: Limits | None = None) -> Scan:
    """A file's header and frames.

    Decoders of compressed files are C libraries: call this in a worker process for files that are not trusted.

    Args:
        path: of the file.
        frames: numbers from 0 in the order wanted; all when not given.
        limits: what is too large.

    Raises:
        Refused: the file cannot be read, or not without guessing.
    """
    limits = limits or Limits()
    with opened(path, _SCAN_TAGS, header_bytes=limits.header_bytes) as file:
        header = _header(file)
        if file.pixels is None:
            raise Refused(Reason.NO_PIXELS if _is_image(header) else Reason.NOT_AN_IMAGE)
        layout = read_layout(file, limits)
        wanted = range(layout.frames) if frames is None else frames
        if frames is not None and any(not 0 <= number < layout.frames for number in frames):
            raise Refused(Reason.LAYOUT, f"it has {layout.frames} frames, and another one was asked for")
        groups = Groups(file.elements, layout.frames)
        return Scan(
            header,
            tuple(
                make_frame(stored, index=number, rgb=rgb, layout=layout, groups=groups, file=file.elements)
                for number, stored, rgb in stored_frames(file, layout, wanted, limits)
            ),
        )


def _is_image(header: Header) -> bool:
    return bool(header.rows) or "Image Storage" in str(UID_dictionary.get(header.sop_class, ("",))[0])


def _header(file: Opened) -> Header:
    elements = file.elements
    facts: dict[str, Any] = {name: elements.text(keyword) for name, keyword in _TEXTS.items()}
    facts |= {name: _integer(elements, keyword) for name, keyword in _INTEGERS.items()}
    groups = Groups(elements, None)
    for name, (keyword, sequence) in _NUMBERS.items():
        facts[name] = _number(groups.of(0, sequence) if sequence else elements, keyword)
    sign = _integer(elements, "PixelRepresentation")
    position, orientation = plane(groups, 0)
    return Header(
        **facts,
        laterality=elements.text("ImageLaterality") or elements.text("Laterality"),
        kernel=groups.of(0, _KERNEL[1]).text(_KERNEL[0]),
        spacing=spacing_of(groups.of(0, "PixelMeasuresSequence")),
        transfer_syntax=file.syntax,
        signed=bool(sign) if sign in (0, 1) else None,
        frames=_frames(elements),
        position=position,
        orientation=orientation,
        has_pixels=file.pixels is not None and file.pixels.length != 0,
    )


def _frames(elements: Elements) -> int:
    try:
        frames = elements.integer("NumberOfFrames")
    except MALFORMED:
        frames = 0
    if frames is not None and frames < 1:
        raise Refused(Reason.LAYOUT, "its number of frames")
    return 1 if frames is None else frames


def _integer(elements: Elements, keyword: str) -> int | None:
    try:
        return elements.integer(keyword)
    except MALFORMED:
        return None


def _number(elements: Elements, keyword: str) -> float | None:
    try:
        number = elements.number(keyword)
    except MALFORMED:
        return None
    return number if number is not None and math.isfinite(number) else None
