from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from crossward.cli import bench_table
from crossward.cli.bench_table import BASELINE, Budget, budget, paired_interval, table
from crossward.evaluate.metrics import summarise
from crossward.evaluate.transfer import measured
from crossward.federation.errors import BadInput, RunFailure
from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line
from tests.site.packs import write_packs

SITES = ("alder", "birch")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs"), SITES, images=96)


def run(matrix: list[list[float | None]] | None = None, **accuracies: float | None) -> dict[str, Any]:
    """What a row needs of a result; the first site has three times as many test images as the others."""
    sites = {
        site: {
            "n": 1 if index else 3,
            "accuracy": value,
            "auc": value,
            "as_received": {"accuracy": value and value / 2, "auc": None},
        }
        for index, (site, value) in enumerate(accuracies.items())
    }
    cross_site = matrix and measured(list(sites), matrix, [None] * len(sites))
    return {"sites": sites, "summary": summarise(sites), "cross_site": cross_site}


def test_the_interval_of_three_paired_differences_is_that_worked_out_by_hand() -> None:
    # Mean 2, standard deviation 1, t of two degrees of freedom 4.303: 2 ± 4.303 / sqrt(3).
    mean, low, high = paired_interval([1.0, 2.0, 3.0]) or (0, 0, 0)
    assert mean == 2
    assert [low, high] == pytest.approx([2 - 2.4843, 2 + 2.4843], abs=1e-3)
    assert paired_interval([1.0]) is None


def test_a_row_says_sites_average_worst_std_and_the_paired_difference() -> None:
    cells = {
        "fedavg": [run(a=0.5, b=0.7), run(a=0.6, b=0.8), run(a=0.4, b=0.6)],
        "f2dc": [run(a=0.6, b=0.6), run(a=0.72, b=0.72), run(a=0.53, b=0.53)],
    }
    reference, row = table(cells, metric="accuracy", against="fedavg")
    assert reference == {
        "method": "fedavg",
        "a": "50.0 ± 10.0",
        "b": "70.0 ± 10.0",
        "avg": "60.0 ± 10.0",
        "all": "55.0 ± 10.0",
        "worst": "50.0 ± 10.0",
        "std over sites": "14.1 ± 0.0",
        "as received": "30.0 ± 5.0",
        "GATA": "–",
        "CPRR": "–",
        "against fedavg": "–",
    }
    # Differences of the averages by seed: 0, 2 and 3 points; mean 5/3, standard deviation 1.5275.
    assert row["against fedavg"] == "+1.7 (-2.1 to +5.5)"
    assert row["std over sites"] == "0.0 ± 0.0"


def test_one_seed_has_a_difference_without_an_interval_and_nothing_defined_has_none() -> None:
    cells = {"x": [run(a=0.5, b=None)], "y": [run(a=0.75, b=None)], "z": [run(a=None, b=None)]}
    rows = table(cells, metric="accuracy", against="x")
    assert [row["against x"] for row in rows] == ["–", "+25.0", "n/a"]
    assert (rows[1]["avg"], rows[1]["b"], rows[1]["std over sites"]) == ("75.0", "n/a", "n/a")


def test_a_row_says_what_models_reach_on_other_scanners_and_what_is_kept_of_it() -> None:
    # Elsewhere 30 and 48 % on average; at home 60 and 80 %: kept 50 and 60 %.
    first, second = [[0.5, 0.4], [0.2, 0.7]], [[0.9, 0.6], [0.36, 0.7]]
    cells = {BASELINE: [run(a=0.5, b=0.5)] * 2, "x": [run(first, a=0.5, b=0.7), run(second, a=0.9, b=0.7)]}
    baseline, row = table(cells, metric="accuracy", against="x")
    assert (row["GATA"], row["CPRR"]) == ("39.0 ± 12.7", "55.0 ± 7.1")
    assert (baseline["GATA"], baseline["CPRR"], baseline["all"]) == ("–", "–", "50.0 ± 0.0")


def test_sites_with_one_scanner_have_no_elsewhere() -> None:
    one_domain = run(a=0.5, b=0.7) | {"cross_site": measured(["a", "b"], [[0.5, 0.4], [0.2, 0.7]], ["S", "S"])}
    (row,) = table({"x": [one_domain]}, metric="accuracy", against="x")
    assert (row["GATA"], row["CPRR"]) == ("n/a", "n/a")


def test_cells_of_an_older_version_have_their_figures_from_the_matrix() -> None:
    old = run(a=0.9, b=0.8, c=0.6)
    old["cross_site"] = {"sites": ["a", "b", "c"], "accuracy": [[0.9, 0.7, 0.5], [0.8, 0.8, 0.3], [0.4, 0.2, 0.6]]}
    for site, scanner in zip("abc", ("S", "S", ""), strict=True):
        old["sites"][site]["scanner"] = scanner
    (row,) = table({"x": [old]}, metric="accuracy", against="x")
    # Elsewhere .4 for scanner S and .3 for c; at home (.8 + .8 + .6) / 3.
    assert (row["GATA"], row["CPRR"]) == ("35.0", "47.7")


def test_figures_of_accuracies_stand_beside_accuracy_alone() -> None:
    (row,) = table({"x": [run([[0.5, 0.4], [0.2, 0.7]], a=0.5, b=0.7)]}, metric="auc", against="x")
    assert list(row) == ["method", "a", "b", "avg", "worst", "std over sites", "as received", "against x"]


def test_what_is_given_wins_over_a_preset() -> None:
    assert budget(None, rounds=None, fraction=None) == Budget(rounds=16, fraction=1.0)
    assert budget("cpu", rounds=None, fraction=None) == Budget(rounds=16, fraction=0.5, augment="shift-flip")
    assert budget("cpu", rounds=3, fraction=1.0, augment="none") == Budget(rounds=3, fraction=1.0, augment="none")
    with pytest.raises(BadInput, match="cpu"):
        budget("gpu", rounds=None, fraction=None)


def test_finished_cells_are_read_interrupted_ones_resumed_and_others_refused(
    crossward: Command, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cells"
    methods = "fedavg[epochs=1],f2dc[lambda1=0;epochs=1]"
    base = ("bench", "table", "--data", packs, "--out", out, "--seeds", "0,4", "--rounds", 2, "--jobs", 1)
    real, asked = bench_table.simulate, []

    def stopping_in_the_third(cohort: Any, study: Any, folder: Path, *, resume: bool, **more: Any) -> Any:
        asked.append((folder.name, resume))
        if len(asked) == 3:

            def stop(event: Any) -> None:
                if event.kind == "aggregated":
                    raise RunFailure("the power went")

            real(cohort, study, folder, resume=resume, **{**more, "listen": stop})
        return real(cohort, study, folder, resume=resume, **more)

    monkeypatch.setattr(bench_table, "simulate", stopping_in_the_third)
    stopped = crossward(*base, "--methods", methods)
    assert "the power went" in one_line(stopped)
    again = crossward(*base, "--methods", methods, "--metric", "accuracy,auc", "--json")
    assert again.code == 0, again.err
    assert asked == [
        ("fedavg-epochs=1-0", False),
        ("f2dc-lambda1=0-epochs=1-0", False),
        ("fedavg-epochs=1-4", False),
        ("fedavg-epochs=1-4", True),
        ("f2dc-lambda1=0-epochs=1-4", False),
    ]
    tables = json.loads(again.out)
    assert set(tables) == {"accuracy", "auc"}
    assert [row["method"] for row in tables["auc"]] == [BASELINE, "fedavg[epochs=1]", "f2dc[lambda1=0;epochs=1]"]
    stored = [json.loads((out / f"fedavg-epochs=1-{seed}" / "result.json").read_text()) for seed in (0, 4)]
    average = sum(result["summary"]["avg"] for result in stored) / 2
    assert tables["accuracy"][1]["avg"].startswith(f"{100 * average:.1f} ±")
    kept = sum(result["cross_site"]["CPRR"] for result in stored) / 2
    assert tables["accuracy"][1]["CPRR"].startswith(f"{100 * kept:.1f} ±")
    assert "all" not in tables["auc"][1]

    shown = crossward(*base, "--methods", methods, "--markdown", "--against", "f2dc[lambda1=0;epochs=1]")
    assert shown.code == 0, shown.err
    assert len(asked) == 5
    lines = [line for line in shown.out.splitlines() if line.startswith("|")]
    assert "against f2dc[lambda1=0;epochs=1]" in lines[0]
    assert re.fullmatch(r"\|( --- \|)+", lines[1])
    assert {line.count("|") for line in lines} == {len(SITES) + 10}

    assert "task.rounds" in one_line(crossward(*base[:-4], "--methods", methods, "--rounds", 3))
    assert "sites." in one_line(crossward(*base, "--methods", methods, "--fraction", 0.7))
    assert "birch" in one_line(crossward(*base, "--methods", methods, "--sites", "alder"))
    other = out / "fedavg-epochs=1-0" / "run.json"
    described = json.loads(other.read_text())
    del described["options"]["task"]["net"]  # as an older version wrote it
    other.write_text(json.dumps(described))
    older = crossward(*base, "--methods", methods, "--metric", "accuracy,auc", "--json")
    assert (older.code, older.out) == (0, again.out)
    described["options"]["training"]["momentum"] = 0.5
    other.write_text(json.dumps(described))
    assert "options.training.momentum = 0.5 and not 0.9" in one_line(crossward(*base, "--methods", methods))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--methods", "fedavg,f2dc[lambda9=1]"), "lambda9"),
        (("--methods", "fedavg[block=magic]"), "magic"),
        (("--metric", "auc,f1"), "f1"),
        (("--metric", ","), "there is: accuracy"),
        (("--against", "f2dc"), "none of the methods"),
        (("--preset", "gpu"), "cpu"),
        (("--seeds", "0;1"), "whole numbers"),
    ],
)
def test_bad_input_is_refused_before_any_image_is_read(
    crossward: Command, tmp_path: Path, more: tuple[str, str], said: str
) -> None:
    nowhere = ("bench", "table", "--data", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert said in one_line(crossward(*nowhere, *more))
    assert "no such folder" in one_line(crossward(*nowhere))


def test_tuning_scores_validation_images_and_never_sees_test_images(
    crossward: Command, packs: Path, tmp_path: Path
) -> None:
    base = ("bench", "table", "--data", packs, "--methods", "fedavg[epochs=1]", "--seeds", 0, "--rounds", 1)
    tuned = crossward(*base, "--out", tmp_path / "tuned", "--tune")
    assert tuned.code == 0, tuned.err
    assert "on validation images" in tuned.out
    facts = json.loads((tmp_path / "tuned" / "fedavg-epochs=1-0" / "result.json").read_text())
    for name, site in facts["sites"].items():
        assert site["n_test"] == site["n_val"] == site["n"]
        # One model, the same images: what validation counted is what was scored.
        assert site["accuracy"] == pytest.approx(facts["rounds"][0]["sites"][name]["val_accuracy"])
    assert "sites." in one_line(crossward(*base, "--out", tmp_path / "tuned"))
