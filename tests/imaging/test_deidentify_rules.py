from __future__ import annotations

import pytest
from pydicom.datadict import DicomDictionary, tag_for_keyword
from pydicom.tag import Tag

from crossward.imaging.deidentify.rules import Action, Options, action, looks_right

# Text and bytes that may stay; everything else of these kinds must go. Written by hand from PS3.15 Table E.1-1.
MAY_STAY = set(
    """Manufacturer ManufacturerModelName SoftwareVersions ConvolutionKernel SequenceName FilterType
    ImagedNucleus RescaleType CodeValue LongCodeValue CodingSchemeDesignator CodingSchemeVersion CodeMeaning PixelData
    FloatPixelData DoubleFloatPixelData ExtendedOffsetTable ExtendedOffsetTableLengths LUTData
    RedPaletteColorLookupTableData GreenPaletteColorLookupTableData BluePaletteColorLookupTableData
    SegmentedRedPaletteColorLookupTableData SegmentedGreenPaletteColorLookupTableData
    SegmentedBluePaletteColorLookupTableData""".split()  # noqa: SIM905
)
FREE = {"PN", "LO", "SH", "ST", "LT", "UC", "UT", "UR", "AE", "AS", "OB", "OW", "OF", "OD", "OL", "OV", "UN"}


def of(keyword: str, options: Options | None = None) -> Action:
    tag = Tag(tag_for_keyword(keyword))
    return action(tag, DicomDictionary[tag][0].split(" or ")[0], options or Options())


def test_no_attribute_that_can_hold_text_or_bytes_stays_unless_it_is_on_the_list() -> None:
    kept = {
        keyword
        for tag, (vr, _, _, _, keyword) in DicomDictionary.items()
        if FREE & set(vr.split(" or ")) and keyword and of(keyword) is Action.KEEP
    }
    assert kept == MAY_STAY


def test_no_date_stays_and_every_uid_is_mapped_or_removed() -> None:
    for vr, _, _, _, keyword in DicomDictionary.values():
        if vr in ("DA", "DT") and keyword:
            assert of(keyword) in (Action.SHIFT, Action.REMOVE, Action.EMPTY), keyword
        if vr == "UI" and keyword:
            assert of(keyword) in (Action.REPLACE, Action.REMOVE), keyword


@pytest.mark.parametrize(
    ("wanted", "keywords"),
    [
        (Action.REPLACE, "PatientID PatientName AccessionNumber StudyInstanceUID FrameOfReferenceUID DeviceUID"),
        (Action.EMPTY, "PatientBirthDate PatientSex StudyID ReferringPhysicianName"),
        (Action.SHIFT, "StudyDate SeriesDate AcquisitionDateTime ContentDate DateOfLastCalibration"),
        (
            Action.REMOVE,
            """PatientAge PatientSize PatientWeight PatientAddress OtherPatientIDs OtherPatientIDsSequence
            PatientComments EthnicGroup PregnancyStatus SmokingStatus MilitaryRank InstitutionName InstitutionAddress
            InstitutionCodeSequence OperatorsName PhysiciansOfRecord StationName DeviceSerialNumber ImageComments
            StudyDescription SeriesDescription ProtocolName RequestAttributesSequence ReferencedPatientSequence
            IconImageSequence OriginalAttributesSequence DigitalSignaturesSequence GraphicAnnotationSequence
            ContentSequence DataSetTrailingPadding GPSLatitude TimezoneOffsetFromUTC PersonIdentificationCodeSequence
            AdmittingDiagnosesCodeSequence CurrentPatientLocation ClinicalTrialSubjectID EncapsulatedDocument
            PerformedProcedureStepID UDISequence ModifyingDeviceID RetrieveAETitle""",
        ),
        (
            Action.KEEP,
            """Rows Columns PixelSpacing RescaleSlope WindowCenter Modality BodyPartExamined ViewPosition KVP
            MagneticFieldStrength ImagePositionPatient SliceThickness PhotometricInterpretation BurnedInAnnotation
            SharedFunctionalGroupsSequence StudyTime ImageType""",
        ),
    ],
)
def test_actions_of_attributes_as_the_standard_lists_them(wanted: Action, keywords: str) -> None:
    assert {keyword: of(keyword) for keyword in keywords.split()} == dict.fromkeys(keywords.split(), wanted)


def test_options_change_what_they_name_and_nothing_else() -> None:
    named = {
        Options(device=True): {"StationName", "DeviceSerialNumber", "DeviceUID", "DetectorID", "GantryID",
                               "GeneratorID", "PlateID", "CassetteID", "GridID"},
        Options(patient=True): {"PatientSex", "PatientAge", "PatientSize", "PatientWeight"},
        Options(descriptors=True): {"StudyDescription", "SeriesDescription", "ProtocolName"},
        Options(structured=True): {"ContentSequence"},
    }  # fmt: skip
    keywords = [entry[4] for entry in DicomDictionary.values() if entry[4]]
    for options, expected in named.items():
        assert {keyword for keyword in keywords if of(keyword, options) is not of(keyword)} == expected


def test_an_unknown_attribute_and_one_of_another_kind_are_removed() -> None:
    assert action(Tag(0x00080003), "US", Options()) is Action.REMOVE
    assert action(Tag(0x00280010), "US", Options()) is Action.KEEP
    assert action(Tag(0x00280010), "LO", Options()) is Action.REMOVE
    assert action(Tag(0x00100010), "CS", Options()) is Action.REMOVE


@pytest.mark.parametrize(
    ("vr", "good", "bad"),
    [
        ("CS", ["CHEST", "", "T1 MAP", "A_1"], ["Planted", "A^B", "X" * 17, "A\0B"]),
        ("DS", ["1", "-1.5e-3", " 2. ", ".5", ""], ["1a", "PLANTED", "1^2", "1-2", "nan"]),
        ("IS", ["12", "-3", ""], ["1.5", "PLANTED", "12345678901"]),
        ("TM", ["101112", "10", "101112.25", "10:11:12", ""], ["PLANTED", "1", "101112^X"]),
        ("LO", ["Maker", "\ud76c", ""], ["X" * 65, "A\0B", "A\nB"]),
    ],
)
def test_values_must_look_like_their_kind(vr: str, good: list[str], bad: list[str]) -> None:
    assert all(looks_right(vr, text) for text in good)
    assert not any(looks_right(vr, text) for text in bad)
