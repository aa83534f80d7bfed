from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.imaging.conftest import WriteDicom
from tests.imaging.test_label_reading import code, image, item, listed, write_report

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.scans import Header
from crossward.imaging.inventory.scan import Found, scan
from crossward.imaging.labels.join import Labels, join
from crossward.imaging.refusals import Reason
from crossward.imaging.rules.site import LabelRule, SiteRules


def found(path: str, *, digest: str | None = None, **header: Any) -> Found:
    known = {"patient_id": f"of {path}", "sop_uid": f"1.{path}", "has_pixels": True}
    return Found(path=path, digest=digest, header=Header(**{**known, **header}))


def site(folder: Path, table: str = "", **labels: Any) -> SiteRules:
    (folder / "labels.csv").write_text(table)
    rule = LabelRule(**{"file": folder / "labels.csv", **labels})
    return SiteRules(path=folder / "site.yaml", data=folder, cache=folder / "cache", labels=rule)


def outcome(labels: Labels) -> dict[str, str | Reason | None]:
    """By file: its label, or the reason."""
    return {row.file: row.label for row in labels.rows} | {row.file: row.reason for row in labels.refused}


def test_files_get_their_labels(tmp_path: Path) -> None:
    table = "file,label\nin/a.dcm,normal\nin\\b.dcm,nodule\n./c.dcm,nodule\ngone.dcm,normal\n,normal\n../d.dcm,normal\n"
    labels = join(site(tmp_path, table), [found("in/a.dcm"), found("in/b.dcm"), found("c.dcm"), found("d.dcm")])
    assert outcome(labels) == {
        "in/a.dcm": "normal",
        "in/b.dcm": "nodule",
        "c.dcm": "nodule",
        "d.dcm": Reason.NO_LABEL,
    }
    assert labels.unused == (5, 6, 7)
    assert labels.patients == ("of in/a.dcm", "of in/b.dcm", "of c.dcm")
    assert labels.classes == ("nodule", "normal")
    assert any("outside the folder" in note for note in labels.notes)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("sop_uid", "sop_uid"),
        ("series_uid", "series_uid"),
        ("study_uid", "study_uid"),
        ("accession", "accession"),
        ("patient", "patient_id"),
    ],
)
def test_keys_of_the_header(tmp_path: Path, key: str, field: str) -> None:
    table = "thing,label\nX1,normal\nX2,nodule\nX3,nodule\n"
    files = [found("a", **{field: "X1"}), found("b", **{field: "X2"}), found("c", **{field: ""})]
    labels = join(site(tmp_path, table, key=key, key_column="thing"), files)
    assert outcome(labels) == {"a": "normal", "b": "nodule", "c": Reason.NO_LABEL}
    assert labels.unused == (4,)


def test_one_label_for_all_files_of_a_study(tmp_path: Path) -> None:
    files = [found(name, study_uid="1.8", patient_id="P") for name in "abc"]
    labels = join(site(tmp_path, "study_uid,label\n1.8,nodule\n", key="study_uid", key_column="study_uid"), files)
    assert labels.labels == ("nodule",) * 3


@pytest.mark.parametrize(
    ("lines", "mapping", "expected"),
    [
        ("a,x\na,x\n", {}, "x"),
        ("a,x\na,y\n", {}, Reason.CONFLICTING_LABELS),
        ("a,x\na,y\n", {"x": "one", "y": "one"}, "one"),
        ("a,x\na,y\n", {"x": "one", "y": "two"}, Reason.CONFLICTING_LABELS),
        ("a,x\na,y\n", {"x": "one"}, Reason.CONFLICTING_LABELS),
        ("a,X\n", {"x": "one"}, Reason.UNKNOWN_LABEL),
        ("a,one\n", {"x": "one"}, Reason.UNKNOWN_LABEL),
        ("a,\n", {}, Reason.NO_LABEL),
        ("a,\na,x\n", {}, "x"),
        ('a,"two\nlines"\n', {}, Reason.UNKNOWN_LABEL),
        (f"a,{'x' * 65}\n", {}, Reason.UNKNOWN_LABEL),
    ],
)
def test_what_the_table_says_about_one_file(
    tmp_path: Path, lines: str, mapping: dict[str, str], expected: str | Reason
) -> None:
    labels = join(site(tmp_path, f"file,label\n{lines}", mapping=mapping), [found("a")])
    assert outcome(labels) == {"a": expected}


def test_nobodys_images_are_refused(tmp_path: Path) -> None:
    labels = join(site(tmp_path, "file,label\na,x\n"), [found("a", patient_id=" ")])
    assert outcome(labels) == {"a": Reason.NO_PATIENT}


def test_everybody_under_an_id_that_two_people_share_is_refused(tmp_path: Path) -> None:
    files = [
        found("a", patient_id="7", birth_date="19700101"),
        found("b", patient_id="7"),
        found("c", patient_id="7", birth_date="19710101"),
        found("d", patient_id="8", birth_date="19710101"),
    ]
    table = "file,label\na,x\nb,x\nd,x\n"
    labels = join(site(tmp_path, table), files)
    assert outcome(labels) == {
        "a": Reason.PATIENT_CLASH,
        "b": Reason.PATIENT_CLASH,
        "c": Reason.NO_LABEL,
        "d": "x",
    }, "the unlabelled file gives them away"


def test_patients_of_the_table_go_before_those_of_the_header(tmp_path: Path) -> None:
    table = "file,label,who\na,x,P1\nb,x,P1\nc,x,\nd,x,P2\nd,x,P3\n"
    files = [
        found("a", patient_id="7", birth_date="19700101"),
        found("b", patient_id="7", birth_date="19710101"),
        found("c"),
        found("d"),
    ]
    labels = join(site(tmp_path, table, patient_column="who"), files)
    assert outcome(labels) == {"a": "x", "b": "x", "c": Reason.NO_PATIENT, "d": Reason.NO_PATIENT}
    assert labels.patients == ("P1", "P1")


def test_a_label_by_an_id_that_two_people_share_is_nobodys(tmp_path: Path) -> None:
    files = [found("a", patient_id="7", sex="M"), found("b", patient_id="7", sex="F")]
    rules = site(tmp_path, "id,label,who\n7,x,P1\n", key="patient", key_column="id", patient_column="who")
    assert set(outcome(join(rules, files)).values()) == {Reason.PATIENT_CLASH}


def test_copies(tmp_path: Path) -> None:
    table = "file,label\na,x\nb,x\nc,x\nd,y\ne,x\nf,x\ng,x\nh,x\n"
    same = {"patient_id": "7"}
    files = [
        found("a", sop_uid="1.1", digest="p", **same),
        found("b", sop_uid="1.1", digest="p", **same),
        found("c", sop_uid="1.2", digest="p", **same),
        found("d", sop_uid="1.2", digest="p", **same),
        found("e", sop_uid="1.3", digest="p"),
        found("f", sop_uid="1.3", digest="p"),
        found("g", sop_uid="1.4", digest="p", **same),
        found("h", sop_uid="1.4", digest="q", **same),
    ]
    assert outcome(join(site(tmp_path, table), files)) == {
        "a": "x",
        "b": Reason.DUPLICATE,
        "c": Reason.CONFLICTING_LABELS,
        "d": Reason.CONFLICTING_LABELS,
        "e": Reason.NO_PATIENT,
        "f": Reason.NO_PATIENT,
        "g": "x",
        "h": "x",
    }


def test_what_is_no_image_or_was_refused_before(tmp_path: Path) -> None:
    files = [
        Found(path="broken", reason=Reason.DAMAGED),
        found("plan", has_pixels=False, modality="RTPLAN"),
        found("report", has_pixels=False, sop_class="1.2.840.10008.5.1.4.1.1.88.11"),
    ]
    labels = join(site(tmp_path, "file,label\nbroken,x\nplan,x\nreport,x\n"), files)
    assert outcome(labels) == {"plan": Reason.NO_PIXELS, "report": Reason.NOT_AN_IMAGE}
    assert labels.unused == ()
    assert labels.reasons == {Reason.NO_PIXELS: 1, Reason.NOT_AN_IMAGE: 1}


@pytest.mark.parametrize("label", ["PLANTED^NAME", "planted-id", "19700101", "1.2.3.4"])
def test_a_column_of_names_is_not_taken_for_labels(tmp_path: Path, label: str) -> None:
    header = {
        "patient_id": "PLANTED-ID",
        "patient_name": "PLANTED^NAME",
        "birth_date": "19700101",
        "study_uid": "1.2.3.4",
    }
    with pytest.raises(BadInput, match="1 labels are what headers hold") as told:
        join(site(tmp_path, f"file,label\na,{label}\n"), [found("a", **header)])
    assert label not in str(told.value)
    mapped = site(tmp_path, f"file,label\na,{label}\n", mapping={label: "nodule"})
    assert join(mapped, [found("a", **header)]).labels == ("nodule",)


def test_a_column_of_many_things_is_not_taken_for_labels(tmp_path: Path) -> None:
    table = "file,label\n" + "".join(f"f{number},word{number}\n" for number in range(65))
    with pytest.raises(BadInput, match="65 different labels"):
        join(site(tmp_path, table), [found(f"f{number}") for number in range(65)])


def test_paths_that_count_from_the_table(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.dcm").touch()
    rules = site(tmp_path, "file,label\nimages/a.dcm,x\n")
    rules = SiteRules(path=rules.path, data=tmp_path / "images", cache=rules.cache, labels=rules.labels)
    labels = join(rules, [found("a.dcm")])
    assert labels.unused == (2,)
    assert any("from its own folder" in note for note in labels.notes)


def test_labels_of_an_element(tmp_path: Path, write_dicom: WriteDicom) -> None:
    pixels = np.zeros((4, 4), np.uint8)
    for name, part in (("a", "CHEST"), ("b", "KNEE"), ("c", "")):
        write_dicom(tmp_path / "images" / name, pixels, BodyPartExamined=part)
    rules = site(tmp_path, source="tag", tag="BodyPartExamined", mapping={"CHEST": "chest"}, file=None)
    rules = SiteRules(path=rules.path, data=tmp_path / "images", cache=rules.cache, labels=rules.labels)
    files = [*scan(rules.data, processes=0).files, found("gone", patient_id="SECRET-ID")]
    labels = join(rules, files, processes=0)
    assert outcome(labels) == {
        "a": "chest",
        "b": Reason.UNKNOWN_LABEL,
        "c": Reason.NO_LABEL,
        "gone": Reason.UNREADABLE,
    }


class TestReports:
    """Structured reports among the files; the images are headers alone."""

    IMAGES = (
        found("i1", sop_uid="1.5", study_uid="1.8", patient_id="P"),
        found("i2", sop_uid="1.6", study_uid="1.8", patient_id="P"),
        found("i3", sop_uid="1.7", study_uid="1.81", patient_id="Q"),
    )

    def labels(self, folder: Path, *others: Found) -> Labels:
        rules = site(folder, source="sr", concept="121071", mapping={"A": "nodule", "B": "normal"}, file=None)
        reports = [
            found(file.name, has_pixels=False, modality="SR", sop_uid=file.name) for file in sorted(folder.glob("*.sr"))
        ]
        return join(rules, [*self.IMAGES, *reports, *others], processes=0)

    def test_images_and_studies(self, tmp_path: Path) -> None:
        groups = (item("CONTAINER", code("A"), image("1.5")), item("CONTAINER", code("B"), image("1.6")))
        write_report(tmp_path / "1.sr", *groups, uid="1.1")
        write_report(tmp_path / "2.sr", code("B"), uid="1.2", study="1.81")
        labels = self.labels(tmp_path)
        assert outcome(labels) == {
            "i1": "nodule",
            "i2": "normal",
            "i3": "normal",
            "1.sr": Reason.NOT_AN_IMAGE,
            "2.sr": Reason.NOT_AN_IMAGE,
        }
        assert labels.unused == ()

    def test_two_reports_that_disagree(self, tmp_path: Path) -> None:
        write_report(tmp_path / "1.sr", code("A", image("1.5")), uid="1.1")
        write_report(tmp_path / "2.sr", code("B"), uid="1.2", study="1.8")
        found_by_file = outcome(self.labels(tmp_path))
        assert (found_by_file["i1"], found_by_file["i2"]) == (Reason.CONFLICTING_LABELS, "normal")

    def test_a_later_report_goes_before_the_one_it_carries_on(self, tmp_path: Path) -> None:
        write_report(tmp_path / "1.sr", code("A"), uid="1.1")
        write_report(tmp_path / "2.sr", code("B"), uid="1.2", PredecessorDocumentsSequence=listed(["1.1"]))
        labels = self.labels(tmp_path)
        assert outcome(labels)["i1"] == "normal"
        assert labels.notes == ("1 reports were replaced by later ones",)

    def test_a_later_report_without_the_finding_replaces_nothing(self, tmp_path: Path) -> None:
        write_report(tmp_path / "1.sr", code("A"), uid="1.1")
        write_report(tmp_path / "2.sr", image("1.5"), uid="1.2", PredecessorDocumentsSequence=listed(["1.1"]))
        labels = self.labels(tmp_path)
        assert outcome(labels)["i1"] == "nodule"
        assert labels.notes == ("1 reports say nothing about the concept",)

    def test_reports_that_are_of_no_use(self, tmp_path: Path) -> None:
        write_report(tmp_path / "1.sr", code("A"), uid="1.1", complete=False)
        write_report(tmp_path / "2.sr", code("A", image("9.9")), uid="1.2")
        labels = self.labels(tmp_path, found("gone.sr", has_pixels=False, modality="SR"))
        assert {outcome(labels)[name] for name in ("i1", "i2", "i3")} == {Reason.NO_LABEL}
        assert labels.unused == (1,)
        assert set(labels.notes) == {"1 reports could not be read", "1 reports are not finished and were not used"}

    def test_there_is_none(self, tmp_path: Path) -> None:
        assert "no structured report" in self.labels(tmp_path).notes[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(
        st.tuples(
            st.sampled_from("PQR "), st.sampled_from(["1.1", "1.2", "1.3", ""]), st.booleans(), st.sampled_from("MF ")
        ),
        max_size=8,
    ),
    lines=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["x", "y", ""])), min_size=1, max_size=12),
)
def test_every_image_is_used_or_refused_and_who_is_used_is_sure(
    tmp_path: Path, files: list[tuple[str, str, bool, str]], lines: list[tuple[int, str]]
) -> None:
    images = [
        found(f"f{index}", patient_id=patient.strip(), sop_uid=uid, has_pixels=pixels, sex=sex.strip(), digest="p")
        for index, (patient, uid, pixels, sex) in enumerate(files)
    ]
    table = "file,label\n" + "".join(f"f{index},{label}\n" for index, label in lines)
    labels = join(site(tmp_path, table), images)
    assert sorted(row.file for row in (*labels.rows, *labels.refused)) == sorted(file.path for file in images)
    assert sum(labels.reasons.values()) == len(labels.refused)
    told = {f"f{index}": {label for at, label in lines if at == index and label} for index in range(10)}
    for row in labels.rows:
        assert {row.label} == told[row.file]
        assert row.patient == row.header.patient_id != ""
        assert row.header.has_pixels
    used = [row.header.sop_uid for row in labels.rows if row.header.sop_uid]
    assert len(used) == len(set(used))
    backwards = join(site(tmp_path, table), images[::-1])
    assert backwards.reasons == labels.reasons, "the order of the files decides nothing"
