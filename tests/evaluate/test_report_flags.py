from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console
from tests.evaluate.test_report import Page

from crossward.cli.show import show_flags
from crossward.evaluate.flag_sheet import by_kind, by_site, in_words, some_scans
from crossward.evaluate.report import write_report
from crossward.evaluate.report_flags import flagged_scans


def counts(n, flagged, *, right=None, kinds):
    return {
        "n": n,
        "flagged": flagged,
        "accuracy_flagged": None if right is None or not flagged else right[0],
        "accuracy_rest": None if right is None else right[1],
        "kinds": {kind: dict(zip(("n", "flagged", "auroc"), entry, strict=True)) for kind, entry in kinds.items()},
    }


def scan(site, what, number, kind, uncertainty, **changes):
    head = {"class": "nodule", "belief": 0.625, "uncertainty": 0.25}
    return {
        "site": site,
        "set": what,
        "number": number,
        "id": f"ID{number}",
        "what": kind,
        "predicted": "nodule",
        "uncertainty": uncertainty,
        "threshold": 0.3,
        "global": head,
        "local": head | {"class": "healthy"},
        "conflict": 0.125,
        "reason": "more uncertain than the threshold",
        "picture": f"flag/{site}/{what}/{number}",
    } | changes


def make_flags(sites=("North", "South"), each=8):
    """Every site flags 1 of 10 own scans, all from the other scanner, and of the spoiled ones all but the empty."""
    facts, scans = {}, []
    for site in sites:
        facts[site] = {
            "threshold": 0.3,
            "n_validation": 24,
            "note": "",
            "sets": {
                "own test": counts(10, 1, right=(0.0, 1.0), kinds={"healthy": (10, 1, None)}),
                "unseen scanner": counts(4, 2, right=(0.5, 0.5), kinds={"nodule": (4, 2, 0.75)}),
                "spoiled": counts(each + 4, each, kinds={"empty": (4, 0, 0.125), "inverted": (each, each, 0.875)}),
            },
            "auroc": {"unseen scanner": 0.75, "spoiled": 0.625},
        }
        scans.append(scan(site, "own test", 3, "healthy", 0.31))
        scans += [scan(site, "unseen scanner", number, "nodule", 0.5 - number / 100) for number in (1, 2)]
        scans += [scan(site, "spoiled", number, "inverted", 0.9 - number / 100) for number in range(1, each + 1)]
    return {"percentile": 95, "sites": facts, "scans": scans}


def pictures_for(flags):
    return {entry["picture"]: np.full((4, 4), 7, np.uint8) for entry in flags["scans"]}


def shown(result, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    show_flags(console, result)
    return console.export_text()


def test_the_words_say_what_was_flagged_what_was_missed_and_how_the_rest_was_read():
    flags = make_flags()
    flags["sites"]["South"]["auroc"]["spoiled"] = 0.375
    assert in_words(flags) == [
        "Flagged: own test 2 of 20 (10 %), unseen scanner 4 of 8 (50 %), spoiled 16 of 24 (67 %).",
        "Read correctly among those without a flag: own test 100.0 %, unseen scanner 50.0 %.",
        "More uncertain than own test scans, as AUROC (0.5 is chance): unseen scanner 0.75–0.75, spoiled 0.38–0.62.",
        "Less than half flagged, so do not rely on it for: spoiled (empty 0 of 8).",
    ]


def test_the_share_read_correctly_is_pooled_over_scans_and_not_over_hospitals():
    flags = make_flags()
    flags["sites"]["North"]["sets"]["own test"] |= {"n": 31, "flagged": 1, "accuracy_rest": 0.5}
    # 15 of 30 at North and 9 of 9 at South.
    assert "own test 61.5 %" in in_words(flags)[1]


def test_a_kind_that_is_never_flagged_is_a_row_of_its_own():
    flags = make_flags()
    flags["sites"]["South"]["sets"]["spoiled"]["kinds"]["empty"] = {"n": 4, "flagged": 1, "auroc": 0.5}
    rows = {row[1]: row for row in by_kind(flags).sites}
    assert rows["empty"] == ("spoiled", "empty", "1 of 8 (12 %)", "North: 0 of 4", "0.12–0.50")
    assert rows["inverted"] == ("", "inverted", "16 of 16 (100 %)", "North: 8 of 8", "0.88–0.88")
    assert rows["healthy"][4] == ""


def test_the_table_has_a_row_per_hospital_and_set_and_a_note_for_a_rough_threshold():
    flags = make_flags()
    flags["sites"]["South"] |= {"threshold": None, "n_validation": 0, "note": "no validation scans"}
    sheet = by_site(flags)
    assert sheet.sites[0] == ("North", "own test", "1 of 10 (10 %)", "", "0.0", "100.0", "0.30 (n=24)")
    assert sheet.sites[1] == ("", "unseen scanner", "2 of 4 (50 %)", "0.75", "50.0", "50.0", "")
    assert sheet.sites[3][6] == "n/a (n=0) [1]"
    assert sheet.notes == ["no validation scans"]
    assert sheet.summary[0] == ("all hospitals", "own test", "2 of 20 (10 %)", "", "", "", "")


def test_the_scans_shown_are_the_most_uncertain_of_every_set_with_hospitals_in_turn():
    chosen = some_scans(make_flags(), 12)
    assert [(entry["set"], entry["site"], entry["number"]) for entry in chosen] == [
        ("own test", "North", 3),
        ("own test", "South", 3),
        ("unseen scanner", "North", 1),
        ("unseen scanner", "South", 1),
        ("unseen scanner", "North", 2),
        ("unseen scanner", "South", 2),
        *(("spoiled", site, number) for number in (1, 2, 3) for site in ("North", "South")),
    ]
    assert len(some_scans(make_flags(each=1), 12)) == 8


@pytest.mark.parametrize("width", [100, 160])
def test_the_console_shows_twelve_scans_their_opinions_and_the_total_within_its_width(width):
    text = shown({"flags": make_flags()}, width)
    lines = text.splitlines()
    tables = lines[: next(index for index, line in enumerate(lines) if line.startswith("Flagged:"))]
    assert max(map(len, tables)) <= width
    assert "12 of 22" in text
    assert text.count("0.62, u 0.25") == 24
    assert len(re.findall(r"ID\d", text)) == 12
    assert "empty 0 of 8" in text
    assert "not calibrated" in text


def test_a_method_without_evidence_leaves_the_columns_of_the_heads_blank():
    flags = make_flags()
    flags["scans"] = [entry | {"global": None, "local": None, "conflict": None} for entry in flags["scans"]]
    text = shown({"flags": flags})
    assert "12 of 22" in text
    assert ", u " not in text
    assert "None" not in text
    page = Page(flagged_scans({"flags": flags, "data": {"phantom": True}}, pictures_for(flags)))
    assert "global:" not in page.text
    assert "None" not in page.text


def test_a_scan_without_a_number_says_why_it_is_flagged():
    flags = make_flags(each=1)
    flags["scans"][0] |= {
        "uncertainty": None,
        "predicted": None,
        "id": None,
        "reason": "its uncertainty is not a number",
    }
    assert "no answer" in shown({"flags": flags})
    assert "no. 3" in shown({"flags": flags})
    page = Page(flagged_scans({"flags": flags, "data": {"phantom": True}}, pictures_for(flags)))
    assert "its uncertainty is not a number" in page.text
    assert "None" not in page.text


def test_the_report_shows_at_most_six_pictures_of_a_hospital_and_set_and_says_of_how_many(make, tmp_path):
    flags = make_flags(each=9)
    result = make(names=("North", "South", "West"), flags=flags)
    write_report(tmp_path / "report.html", result, None, pictures_for(flags))
    page = Page((tmp_path / "report.html").read_text())
    assert "North, spoiled: 6 of 9 flagged scans" in page.text
    assert "South, own test: 1 of 1 flagged scans" in page.text
    pictures = [image["alt"] for image in page.all("img")]
    assert len(pictures) == 2 * (1 + 2 + 6)
    assert "Flagged scan ID3 of North, own test: healthy" in pictures
    for words in ("not calibrated", "empty 0 of 8", "uncertainty 0.31", "limit 0.30", "healthy", "0.62, u 0.25"):
        assert words in page.text, words


def test_without_pictures_the_report_keeps_the_tables(make, tmp_path):
    write_report(tmp_path / "report.html", make(flags=make_flags()))
    page = Page((tmp_path / "report.html").read_text())
    assert "By kind of scan" in page.text
    assert page.all("img") == []
    assert "do not pass this page on" not in page.text


def test_pictures_of_patients_come_with_a_caution():
    flags = make_flags()
    page = Page(flagged_scans({"flags": flags, "data": {"phantom": False}}, pictures_for(flags)))
    assert "do not pass this page on" in page.text
    page = Page(flagged_scans({"flags": flags, "data": {"phantom": True}}, pictures_for(flags)))
    assert "do not pass this page on" not in page.text


@pytest.mark.parametrize("flags", [None, {}, {"percentile": 95, "sites": {}, "scans": []}])
def test_nothing_is_shown_where_no_flags_were_worked_out(flags):
    assert flagged_scans({"flags": flags, "data": {}}, {}) == ""
    assert shown({"flags": flags}) == ""


@pytest.mark.parametrize("field", ["site", "set", "kind", "id", "predicted", "head", "note"])
def test_nothing_from_the_flags_becomes_markup(field):
    evil = "<script>alert('x')</script>[red]\"><img src=x onerror=y>"
    flags = make_flags(each=1)
    if field == "site":
        flags = make_flags(sites=(evil,), each=1)
    elif field == "set":
        for site in flags["sites"].values():
            site["sets"][evil] = site["sets"].pop("spoiled")
            site["auroc"][evil] = site["auroc"].pop("spoiled")
        flags["scans"] = [s | {"set": evil} if s["set"] == "spoiled" else s for s in flags["scans"]]
    elif field == "kind":
        for site in flags["sites"].values():
            site["sets"]["spoiled"]["kinds"][evil] = site["sets"]["spoiled"]["kinds"].pop("empty")
    elif field == "note":
        flags["sites"]["North"]["note"] = evil
    elif field == "head":
        flags["scans"][0]["global"] = {"class": evil, "belief": 0.5, "uncertainty": 0.5}
    else:
        flags["scans"][0][field] = evil
    source = flagged_scans({"flags": flags, "data": {"phantom": True}}, pictures_for(flags))
    page = Page(source)
    assert evil in page.text
    assert page.all("script") == []
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    # The console has a markup of its own.
    assert "[red]" in shown({"flags": flags}, width=400)
