from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.scans import Header
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.rules.domains import FIELDS, check_name, check_pattern, domain_of, safe_name
from crossward.imaging.rules.site import DomainRule

SIGNA = Header(manufacturer="GE MEDICAL SYSTEMS", model="SIGNA  Pioneer", modality="MR", field_strength=3.0)


def fits(header: Header, **patterns: str) -> bool:
    rule = DomainRule(names=(("hit", patterns),), fields=())
    try:
        return domain_of(header, rule) == "hit"
    except Refused:
        return False


def test_fields_make_up_a_name_where_no_match_fits() -> None:
    assert domain_of(SIGNA, DomainRule()) == "ge-medical-systems-signa-pioneer"
    rule = DomainRule(fields=("modality", "field_strength"))
    assert domain_of(SIGNA, rule) == "mr-3"


def test_the_first_match_whose_patterns_all_fit_decides() -> None:
    names = (
        ("ct", {"modality": "CT"}),
        ("philips-3t", {"manufacturer": "philips*", "field_strength": "3"}),
        ("ge-3t", {"manufacturer": "ge *", "field_strength": ">=2.5"}),
        ("ge", {"manufacturer": "ge *"}),
    )
    assert domain_of(SIGNA, DomainRule(names=names)) == "ge-3t"
    assert domain_of(dataclasses.replace(SIGNA, field_strength=1.5), DomainRule(names=names)) == "ge"


def test_spelling_in_large_letters_and_blanks_is_the_same_scanner() -> None:
    assert fits(SIGNA, model="signa pioneer")
    assert fits(SIGNA, manufacturer="*Medical*")
    assert fits(SIGNA, manufacturer="GE*", model="SIGNA ??????r")
    assert not fits(SIGNA, model="signa")


@pytest.mark.parametrize(
    ("value", "pattern", "expected"),
    [
        (3.0, "3", True),
        (3.0, "3.0", True),
        (2.89, "3", False),
        (2.89, ">=2.5", True),
        (2.5, ">=2.5", True),
        (2.5, ">2.5", False),
        (1.5, ">=1.4 <1.6", True),
        (1.6, ">=1.4 <1.6", False),
        (1.3, ">=1.4<1.6", False),
        (120.0, "=120", True),
        (1.5, "1.*", True),
        (1.5, "*", True),
        (None, "*", True),
        (None, "", True),
        (3.0, "", False),
        (None, ">=0", False),
        (None, "<5", False),
    ],
)
def test_numbers(value: float | None, pattern: str, expected: bool) -> None:
    check_pattern("field_strength", pattern)
    assert fits(Header(field_strength=value), field_strength=pattern) is expected


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ("field_strength", "high"),
        ("kvp", ">"),
        ("kvp", ">=1 or 2"),
        ("kvp", "1..2 kV"),
        ("model", ">=3"),
        ("view", "=AP"),
    ],
)
def test_a_pattern_that_can_never_fit_is_refused(field: str, pattern: str) -> None:
    with pytest.raises(BadInput):
        check_pattern(field, pattern)


def test_a_file_that_lacks_a_field_is_refused_not_thrown_in_with_others() -> None:
    with pytest.raises(Refused) as refused:
        domain_of(Header(manufacturer="Maker"), DomainRule())
    assert (refused.value.reason, refused.value.detail) == (Reason.NO_DOMAIN, "its header has no model")
    assert fits(Header(manufacturer="Maker"), manufacturer="maker", model="")


def test_the_folder_decides_nothing_and_patients_cannot() -> None:
    assert {"patient_id", "patient_name", "sop_uid", "accession"}.isdisjoint(FIELDS)
    fields = {field.name: field for field in dataclasses.fields(Header)}
    assert fields.keys() >= set(FIELDS)


def test_hospital_and_device_are_told_apart_without_being_named() -> None:
    rule = DomainRule(fields=("model", "institution", "serial", "station"))
    names = {
        domain_of(Header(model="M", institution=place, serial=serial, station="ROOM-7"), rule)
        for place in ("PLANTED HOSPITAL", "OTHER")
        for serial in ("PLANTED-1", "PLANTED-2")
    }
    assert len(names) == 4
    assert not any("planted" in name or "room" in name for name in names)


@pytest.mark.parametrize(
    "header",
    [
        Header(manufacturer="PLANTED^NAME", model="M"),
        Header(manufacturer="Maker", model="of Planted", patient_name="NAME^PLANTED"),
        Header(manufacturer="Maker", model="no 98765", patient_id="98765"),
        Header(manufacturer="Maker", model="born 19700203", birth_date="19700203"),
    ],
)
def test_a_name_in_the_wrong_field_never_becomes_a_domain(header: Header) -> None:
    with pytest.raises(Refused) as refused:
        domain_of(header, DomainRule())
    assert "planted" not in str(refused.value).lower()
    assert "98765" not in str(refused.value)


def test_a_patient_whose_name_is_a_part_of_a_makers_word_does_no_harm() -> None:
    header = Header(manufacturer="Phantomworks", model="Lumen", patient_name="PHANTOM^A0001")
    assert domain_of(header, DomainRule()) == "phantomworks-lumen"


def test_scanners_whose_letters_are_lost_stay_apart() -> None:
    one, other = safe_name("東芝 Aquilion"), safe_name("日立 Aquilion")
    assert one != other
    assert one.startswith("aquilion-")
    assert safe_name("Société Générale") == "societe-generale"
    assert safe_name("default") != "default"
    assert safe_name("Definition AS+") == "definition-as-plus"
    assert safe_name("Model #1") != safe_name("Model 1") == "model-1"


@given(st.text())
def test_every_name_is_safe(text: str) -> None:
    name = safe_name(text)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name)
    check_name(name)
    assert safe_name(text) == name


def test_names_that_are_cut_short_stay_apart() -> None:
    assert safe_name("x" * 70) != safe_name("x" * 71)


@given(
    st.floats(allow_nan=False, allow_infinity=False, width=32) | st.none(),
    st.floats(-1e6, 1e6),
)
def test_a_number_is_below_or_not_below(value: float | None, edge: float) -> None:
    header = Header(kvp=value)
    below, not_below = fits(header, kvp=f"<{edge!r}"), fits(header, kvp=f">={edge!r}")
    assert (below, not_below) == ((False, False) if value is None else (value < edge, value >= edge))
