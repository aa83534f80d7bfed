from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from crossward.cli.show import show_result
from crossward.evaluate.facts import read_result, write_result
from crossward.evaluate.report import write_report
from crossward.evaluate.transfer import CPRR_IN_WORDS, measured, transfer_of, transfer_sheet
from crossward.imaging.dicom.film import UNKNOWN_SCANNER

# By hand, where the first two are one domain: LTA (.9 + .8 + .6) / 3 = .767; GASA (.8 + .8 + .6) / 3 = .733;
# ATA (.5 + .3) / 2 = .4 and (.4 + .2) / 2 = .3; GATA .35; CPRR .35 / .733 = .477.
MATRIX = [[0.9, 0.7, 0.5], [0.8, 0.8, 0.3], [0.4, 0.2, 0.6]]
NAMES = ("North", "South", "West")
Make = Callable[..., dict[str, Any]]


def figures(facts: Mapping[str, Any]) -> dict[str, str]:
    return dict(transfer_sheet(facts).sites)


def on_the_console(result: Mapping[str, Any]) -> str:
    shown = io.StringIO()
    show_result(Console(width=100, file=shown, color_system=None), result)
    return shown.getvalue()


def on_the_page(result: Mapping[str, Any], folder: Path) -> str:
    write_report(folder / "report.html", result)
    return (folder / "report.html").read_text(encoding="utf-8").replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("scanners", "domains"),
    [
        (("Acme", "Acme", "Best"), ["Acme", "Acme", "Best"]),
        (("", None, "Best"), ["North", "South", "Best"]),
        ((UNKNOWN_SCANNER, UNKNOWN_SCANNER, UNKNOWN_SCANNER), list(NAMES)),
    ],
)
def test_a_domain_is_a_scanner_or_a_hospital_whose_scanner_is_not_known(
    scanners: Sequence[str | None], domains: list[str]
) -> None:
    assert measured(NAMES, MATRIX, scanners)["domains"] == domains


def test_the_figures_stand_in_rows_with_the_papers_names() -> None:
    facts = measured(NAMES, MATRIX, ("Acme", "Acme", "Best"))
    assert figures(facts) == {
        "at home: each hospital's own test images (LTA)": "76.7",
        "at home: all test images of their own domain (GASA)": "73.3",
        "elsewhere: models of Acme (ATA)": "40.0",
        "elsewhere: models of Best (ATA)": "30.0",
        "elsewhere: mean of these domains (GATA)": "35.0",
        "kept elsewhere: GATA as a share of GASA (CPRR)": "47.7",
    }
    assert transfer_sheet(facts).notes == []


def test_one_domain_only_is_said_once_for_each_figure() -> None:
    sheet = transfer_sheet(measured(NAMES, MATRIX, ["Acme"] * 3))
    # At home in the domain: (.7 + .633 + .4) / 3.
    assert [cell for _, cell in sheet.sites] == ["76.7", "57.8", "n/a [1]", "n/a [2]", "n/a [3]"]
    assert sheet.notes == [f"{figure}: there is one domain only" for figure in ("ATA", "GATA", "CPRR")]


@pytest.mark.parametrize(
    ("hole", "marked"),
    [
        ((0, 0), {"LTA", "GASA", "CPRR"}),
        ((0, 1), {"GASA", "CPRR"}),
        ((0, 2), {"Acme (ATA", "GATA", "CPRR"}),
        ((2, 0), {"Best (ATA", "GATA", "CPRR"}),
    ],
)
def test_figures_that_leave_out_an_undefined_cell_say_so(hole: tuple[int, int], marked: set[str]) -> None:
    matrix = [[None if (i, j) == hole else value for j, value in enumerate(row)] for i, row in enumerate(MATRIX)]
    sheet = transfer_sheet(measured(NAMES, matrix, ("Acme", "Acme", "Best")))
    remarked = [words for words, cell in sheet.sites if cell.endswith(" [1]")]
    assert len(remarked) == len(marked)
    assert all(any(f"{name})" in words for words in remarked) for name in marked)
    assert sheet.notes == ["without the undefined cells of the matrix"]


def test_an_undefined_figure_has_its_reason_and_is_no_number() -> None:
    sheet = transfer_sheet(measured(NAMES, [[0.9, 0.7, None], [0.8, 0.8, None], MATRIX[2]], ("Acme", "Acme", "Best")))
    assert sheet.sites[2] == ("elsewhere: models of Acme (ATA)", "n/a [1]")
    assert sheet.notes[0] == "ATA: no model has a score on images of another domain"
    assert dict(sheet.sites)["elsewhere: mean of these domains (GATA)"] == "30.0 [2]"


def test_console_and_page_show_the_same_figures(make: Make, tmp_path: Path) -> None:
    result = make(cross_site=measured(NAMES, MATRIX, ("Acme", "Acme", "Best")))
    console, page = on_the_console(result), on_the_page(result, tmp_path)
    lines = [line.strip() for line in console.splitlines()]
    for words, figure in figures(result["cross_site"]).items():
        assert any(line.startswith(words) and line.endswith(f" {figure}") for line in lines), words
        assert f'<th scope="row">{words}</th><td>{figure}</td>' in page
    assert CPRR_IN_WORDS in " ".join(lines)
    assert CPRR_IN_WORDS in page


def test_reasons_are_on_the_console_and_on_the_page(make: Make, tmp_path: Path) -> None:
    result = make(cross_site=measured(NAMES, MATRIX, ["Acme"] * 3))
    for shown in (on_the_console(result), on_the_page(result, tmp_path)):
        assert "[3] CPRR: there is one domain only" in shown


def test_an_older_result_is_read_as_it_is_and_shown_with_the_figures_of_its_matrix(make: Make, tmp_path: Path) -> None:
    old = make(cross_site={"sites": list(NAMES), "accuracy": MATRIX})
    old["sites"]["South"]["scanner"] = old["sites"]["North"]["scanner"]
    del old["sites"]["West"]["scanner"]
    write_result(tmp_path / "result.json", old)
    read = read_result(tmp_path / "result.json")
    assert read["cross_site"] == old["cross_site"]
    assert transfer_of(read) == measured(NAMES, MATRIX, ("Scanner 0", "Scanner 0", "West"))
    assert "47.7" in on_the_console(read)
    assert "<td>47.7</td>" in on_the_page(read, tmp_path)


def test_without_a_matrix_there_are_no_figures(make: Make, tmp_path: Path) -> None:
    result = make(cross_site=None)
    assert transfer_of(result) is None
    assert "CPRR" not in on_the_console(result) + on_the_page(result, tmp_path)


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_figures_fit_100_columns_without_cutting_anything(make: Make, count: int) -> None:
    names = [f"Hospital of Saint Somebody {index}" for index in range(count)]
    matrix = [[0.5] * count for _ in names]
    scanners = [
        f"Makers of long names, model {index}, and what was bought later, kind {index}" for index in range(count)
    ]
    result = make(names=names, cross_site=measured(names, matrix, scanners))
    shown = on_the_console(result)
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    assert shown.count("(ATA)") == count
