"""What de-identification does with each DICOM attribute: the Basic Profile of PS3.15 Annex E and some of its options.

The standard lists what must go, and grows every year. Here it is the other way round: what an attribute can hold (its
VR) decides, and what can hold free text goes unless it is named below as needed to understand the image. So an
attribute that is new, unknown, private or of another kind than the standard says is removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydicom.datadict import dictionary_has_tag, dictionary_VR, keyword_for_tag
from pydicom.dataelem import DataElement
from pydicom.multival import MultiValue
from pydicom.tag import BaseTag


def _words(text: str) -> list[str]:
    return text.split()


class Action(StrEnum):
    """What happens to an attribute, as a report names it."""

    REMOVE = "removed"
    EMPTY = "emptied"
    REPLACE = "replaced"
    SHIFT = "shifted"
    CLEAN = "cleaned"
    KEEP = "kept"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which options of the profile are taken beside the usual ones.

    Attributes:
        device: keep what names the scanner (Retain Device Identity).
        patient: keep sex, age (90 and over as 90), size and weight (Retain Patient Characteristics).
        descriptors: keep those words of study and series descriptions that a closed list has (Clean Descriptors).
        structured: take structured reports, and keep their codes, numbers and references (Clean Structured Content).
    """

    device: bool = False
    patient: bool = False
    descriptors: bool = False
    structured: bool = False


METHOD = "Crossward: DICOM PS3.15 Annex E, see codes"
# Code, meaning (PS3.16 CID 7050) and the option that asks for it; None for what is always done.
METHODS: tuple[tuple[str, str, str | None], ...] = (
    ("113100", "Basic Application Confidentiality Profile", None),
    ("113107", "Retain Longitudinal Temporal Information Modified Dates Option", None),
    ("113111", "Retain Safe Private Option", None),
    ("113109", "Retain Device Identity Option", "device"),
    ("113108", "Retain Patient Characteristics Option", "patient"),
    ("113105", "Clean Descriptors Option", "descriptors"),
    ("113104", "Clean Structured Content Option", "structured"),
)

# Everything in these groups is about people, visits, requests, trials, places, signatures, printing or storage.
_REMOVED_GROUPS = frozenset(
    (0x0002, 0x0004, 0x0010, 0x0012, 0x0016, 0x0032, 0x0034, 0x0038, 0x0042, 0x0044, 0x0068, 0x0072, 0x0074, 0x0088,
     0x0400, 0x2000, 0x2010, 0x2020, 0x2100, 0x2110, 0x2200, 0x4000, 0x4008, 0x4010)
)  # fmt: skip

# What the VR or the group alone would decide otherwise.
_NAMED: dict[str, Action] = {
    **dict.fromkeys(("PatientName", "PatientID", "AccessionNumber"), Action.REPLACE),
    **dict.fromkeys(
        _words("""PatientBirthDate PatientSex ReferringPhysicianName StudyID PositionReferenceIndicator
        AcquisitionContextSequence SpecimenPreparationSequence IssuerOfTheContainerIdentifierSequence
        IssuerOfTheSpecimenIdentifierSequence ContainerIdentifier SpecimenIdentifier"""),
        Action.EMPTY,
    ),
    **dict.fromkeys(
        _words("""ActualHumanPerformersSequence AdmittingDiagnosesCodeSequence AffectedSOPInstanceUID
        AuthorObserverSequence ConsultingPhysicianIdentificationSequence ContentCreatorIdentificationCodeSequence
        ContentSequence CustodialOrganizationSequence GraphicAnnotationSequence InstanceOriginStatus
        InstitutionCodeSequence InstitutionalDepartmentTypeCodeSequence
        IntendedRecipientsOfResultsIdentificationSequence OperatorIdentificationSequence ParticipantSequence
        PerformedStationGeographicLocationCodeSequence PerformedStationNameCodeSequence
        PerformingPhysicianIdentificationSequence PersonIdentificationCodeSequence
        PhysiciansOfRecordIdentificationSequence PhysiciansReadingStudyIdentificationSequence ModifyingDeviceID
        PrescriptionNotesSequence ReasonForRequestedProcedureCodeSequence ReferencedPatientSequence
        ReferencedPerformedProcedureStepSequence ReferencedStudySequence ReferringPhysicianIdentificationSequence
        RequestAttributesSequence ROICreatorSequence ROIInterpreterSequence ScheduledHumanPerformersSequence
        ScheduledPerformingPhysicianIdentificationSequence ScheduledStationGeographicLocationCodeSequence
        ScheduledStationNameCodeSequence TransducerIdentificationSequence UDISequence
        VerbalSourceIdentifierCodeSequenceTrial VerifyingObserverIdentificationCodeSequence VerifyingObserverSequence
        WaveformAnnotationSequence WaveformSequence TextObjectSequence CompoundGraphicSequence StorageMediaFileSetUID
        DigitalSignaturesSequence"""),
        Action.REMOVE,
    ),
    # Text that is needed to understand the image, and that the standard does not ask to remove.
    **dict.fromkeys(
        _words("""SpecificCharacterSet Manufacturer ManufacturerModelName SoftwareVersions ConvolutionKernel
        SequenceName FilterType ImagedNucleus RescaleType CodeValue LongCodeValue CodingSchemeDesignator
        CodingSchemeVersion CodeMeaning"""),
        Action.KEEP,
    ),
    # Binary values that belong to the picture; all others go.
    **dict.fromkeys(
        _words("""PixelData FloatPixelData DoubleFloatPixelData ExtendedOffsetTable ExtendedOffsetTableLengths LUTData
        RedPaletteColorLookupTableData GreenPaletteColorLookupTableData BluePaletteColorLookupTableData
        SegmentedRedPaletteColorLookupTableData SegmentedGreenPaletteColorLookupTableData
        SegmentedBluePaletteColorLookupTableData"""),
        Action.KEEP,
    ),
}

# By option: attributes that it keeps or cleans.
_BY_OPTION: dict[str, dict[str, Action]] = {
    "device": dict.fromkeys(
        _words("""StationName DeviceSerialNumber DeviceUID DetectorID GantryID GeneratorID PlateID CassetteID
        GridID"""),
        Action.KEEP,
    ),
    "patient": {
        **dict.fromkeys(("PatientSex", "PatientSize", "PatientWeight"), Action.KEEP),
        "PatientAge": Action.CLEAN,
    },
    "descriptors": dict.fromkeys(("StudyDescription", "SeriesDescription", "ProtocolName"), Action.CLEAN),
    "structured": {"ContentSequence": Action.KEEP},
}

_BY_VR: dict[str, Action] = {
    **dict.fromkeys(("US", "SS", "UL", "SL", "UV", "SV", "FL", "FD", "AT", "DS", "IS", "CS", "TM"), Action.KEEP),
    **dict.fromkeys(("DA", "DT"), Action.SHIFT),
    "UI": Action.REPLACE,
    "SQ": Action.KEEP,
}

# A value that does not look like its kind is text in disguise. TM: whole days are added to dates, so times stay.
_LOOKS: dict[str, re.Pattern[str]] = {
    "CS": re.compile(r"[A-Z0-9 _]{0,16}"),
    "IS": re.compile(r" *[-+]?[0-9]{1,10} *|"),
    "DS": re.compile(r" *[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)? *|"),
    "TM": re.compile(r"([0-9]{2}){1,3}(\.[0-9]{1,6})? *|[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)? *|"),
    "AS": re.compile(r"[0-9]{3}[DWMY]|"),
    "text": re.compile(r"[^\x00-\x1f\x7f]{0,64}"),
}

# Numbers of makers that the standard's list of safe private attributes (PS3.15 E.3.10) or the makers' conformance
# statements explain, and that diffusion imaging and PET need: (creator, group, element) and the VR they must have.
SAFE_PRIVATE: dict[tuple[str, int, int], frozenset[str]] = {
    ("SIEMENS MR HEADER", 0x0019, 0x0C): frozenset({"IS"}),  # b value
    ("SIEMENS MR HEADER", 0x0019, 0x0E): frozenset({"FD"}),  # diffusion gradient direction
    ("SIEMENS MR HEADER", 0x0019, 0x27): frozenset({"FD"}),  # b matrix
    ("GEMS_ACQU_01", 0x0019, 0xBB): frozenset({"DS"}),  # diffusion gradient direction, x
    ("GEMS_ACQU_01", 0x0019, 0xBC): frozenset({"DS"}),  # y
    ("GEMS_ACQU_01", 0x0019, 0xBD): frozenset({"DS"}),  # z
    ("GEMS_PARM_01", 0x0043, 0x39): frozenset({"IS"}),  # b value
    ("Philips Imaging DD 001", 0x2001, 0x03): frozenset({"FL"}),  # b value
    ("Philips MR Imaging DD 001", 0x2005, 0x0D): frozenset({"FL"}),  # scale intercept
    ("Philips MR Imaging DD 001", 0x2005, 0x0E): frozenset({"FL"}),  # scale slope
    ("Philips PET Private Group", 0x7053, 0x00): frozenset({"DS"}),  # SUV factor
    ("Philips PET Private Group", 0x7053, 0x09): frozenset({"DS"}),  # activity concentration factor
}

# Codes of these schemes are public; an item with any other scheme may be the hospital's own words, and goes.
PUBLIC_SCHEMES = frozenset(
    _words("""DCM SCT SRT SNM3 LN UCUM RADLEX RADELEMENT FMA NCIt UMLS MSH NEU I9C I10 I10P ICDO3 BI UBERON ITIS_TSN
    ISO3166_1 RXNORM CPT4 C4 BARI""")
)

# Items of a report that say something in codes, numbers, references or shapes; text and names go.
REPORT_VALUES = frozenset(_words("CONTAINER CODE NUM IMAGE COMPOSITE SCOORD SCOORD3D TCOORD UIDREF"))

# The words that may stay in a description.
DESCRIPTION_WORDS = frozenset(
    _words("""2D 3D ABD ABDOMEN ADC ANGIO ANKLE AP ARTERIAL AX AXIAL BONE BRAIN BREAST CARDIAC CC CERVICAL CHEST
    CONTRAST COR CORONAL CR CT CTA DELAYED DIFFUSION DTI DWI DX DYNAMIC ELBOW EPI FAT FLAIR FOOT FS GRE HAND HEAD
    HEART HIP IR KNEE LAT LATERAL LEFT LEG LIVER LOCALIZER LUMBAR LUNG MAMMO MG MIP MLO MPR MR MRA NECK NON OBL
    OBLIQUE PA PELVIS PET PERFUSION PHASE PLAIN PORTAL POST PRE PROSTATE RECON RIGHT SAG SAGITTAL SCOUT SE SHOULDER
    SINUS SKULL SPACE SPINE STIR SUPINE SWI T1 T1W T2 T2W TFE THORACIC THORAX THIN TOF TRA TSE US VENOUS WITH WITHOUT
    WO WRIST XR""")
)


def keyword(tag: BaseTag) -> str:
    """How a report names an attribute: private ones together, since even their creator is free text."""
    if tag.is_private:
        return "private"
    return keyword_for_tag(tag) or f"({tag.group:04X},{tag.element:04X})"


def standard_vrs(tag: BaseTag) -> frozenset[str]:
    """The VRs that the standard gives an attribute; none for one that it does not know."""
    return frozenset(dictionary_VR(tag).split(" or ")) if dictionary_has_tag(tag) else frozenset()


def action(tag: BaseTag, vr: str, options: Options) -> Action:
    """What to do with an attribute that is not private."""
    name = keyword_for_tag(tag)
    vrs = standard_vrs(tag)
    if not name or (vr not in vrs and " or " not in vr):
        return Action.REMOVE
    for option, named in _BY_OPTION.items():
        if getattr(options, option) and name in named:
            return named[name]
    if name in _NAMED:
        return _NAMED[name]
    if tag.group in _REMOVED_GROUPS:
        return Action.REMOVE
    return min((_BY_VR.get(each, Action.REMOVE) for each in vrs), key=list(Action).index)


def looks_right(vr: str, text: str) -> bool:
    """Whether a written value looks like its kind."""
    return _LOOKS.get(vr, _LOOKS["text"]).fullmatch(text) is not None


def values(element: DataElement) -> list[Any]:
    """An element's values, one or several or none."""
    value = element.value
    if value is None:
        return []
    return list(value) if isinstance(value, MultiValue | list) else [value]
