from __future__ import annotations

import io

import pytest
from rich.console import Console

from crossward.evaluate.metrics import score, summarise
from crossward.evaluate.table import matrix_table, site_sheet, site_table


def lines(table, width=100):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()


def test_rows_hold_the_figures_of_each_hospital(make):
    sheet = site_sheet(make())
    # 4 of 4 right: Wilson's lower limit is 4 / (4 + 1.96^2) = .510. Two against two images ranked without a fault:
    # at a true AUC of .3855 the variance of Hanley and McNeil is .0983, and (1 - .3855)^2 = .3776 = 1.96^2 * .0983.
    assert sheet.sites[0] == ("North", "Scanner 0", "10", "4", "100.0 (51–100)", "100.0", "1.00 (0.39–1.00)", "50.0")
    assert sheet.sites[1][4:6] == ("75.0 (30–95)", "75.0")


def test_an_undefined_metric_is_a_footnote_and_not_a_number(make):
    sheet = site_sheet(make())
    assert sheet.sites[2][6] == "n/a [1]"
    assert sheet.notes[0] == "AUC: no image of nodule, n=4"


def test_summary_rows_name_the_worst_hospital_and_who_is_left_out(make):
    average, pooled, worst = site_sheet(make()).summary
    # accuracies 1, .75, .75; AUC 1 and .75 (the third is undefined)
    assert average == ("average ± std", "", "33", "12", "83.3 ± 14.4", "83.3", "0.88 [2]", "66.7")
    assert pooled[4] == "83.3"
    assert worst[0] == "worst: South"
    assert worst[4] == "75.0 (30–95)"
    assert site_sheet(make()).notes[1] == "without West, where AUC is undefined"


def test_hospitals_with_the_same_reason_share_a_footnote(make):
    result = make(names=("A", "B", "C"))
    for name in "BC":
        result["sites"][name]["as_received"] = None
    sheet = site_sheet(result)
    assert sheet.notes.count("as received: not measured") == 1
    assert sheet.sites[1][7] == sheet.sites[2][7]


def test_a_hospital_without_test_images_is_left_out_of_the_average_and_named(make):
    result = make()
    result["sites"]["North"] |= score([], [], ("healthy", "nodule")) | {"n_test": 0}
    result["summary"] = summarise(result["sites"])
    sheet = site_sheet(result)
    assert sheet.sites[0][4] == "n/a [1]"
    assert sheet.notes[0] == "accuracy: no images to score, n=0"
    assert "without North, where accuracy is undefined" in sheet.notes
    assert sheet.summary[0][4].startswith("75.0 ± 0.0 [")


def test_no_defined_accuracy_at_all_is_said(make):
    result = make(names=("Only",))
    result["sites"]["Only"] |= score([], [], ("healthy", "nodule")) | {"n_test": 0}
    result["summary"] = summarise(result["sites"])
    assert "average: no hospital has a defined accuracy" in site_sheet(result).notes
    assert any("no hospital has a defined accuracy" in line for line in lines(site_table(result)))


def test_one_hospital_has_no_standard_deviation(make):
    assert site_sheet(make(names=("Only",))).summary[0][4] == "100.0"


@pytest.mark.parametrize("count", [1, 4, 12])
def test_tables_fit_100_columns_without_cutting_anything(make, count):
    result = make(names=[f"Hospital of Saint Somebody {index}" for index in range(count)])
    for table in (site_table(result), matrix_table(result)):
        shown = lines(table)
        assert max(map(len, shown)) <= 100
        assert "…" not in "".join(shown)
    figures = "\n".join(lines(site_table(result)))
    for row in site_sheet(result).sites:
        assert all(cell in figures for cell in row[2:])


def test_names_are_shown_as_they_are_and_never_read_as_markup(make):
    result = make(names=("[red]North[/red]", "[/]", "W"))
    shown = "\n".join(lines(site_table(result)) + lines(matrix_table(result)))
    assert "[red]North[/red]" in shown
    assert "[/]" in shown


def test_matrix_has_rows_of_models_and_columns_of_images(make):
    result = make()
    result["cross_site"]["accuracy"] = [[0.9, 0.1, None], [0.2, 0.8, 0.3], [0.4, 0.5, 0.7]]
    shown = [line.split() for line in lines(matrix_table(result))]
    assert ["model", "of", "North", "South", "West"] in shown
    assert ["North", "90.0", "10.0", "n/a"] in shown
    assert ["West", "40.0", "50.0", "70.0"] in shown


def test_no_matrix_where_it_was_not_measured(make):
    assert matrix_table(make(cross_site=None)) is None
