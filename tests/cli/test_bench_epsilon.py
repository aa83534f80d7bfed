from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from crossward.cli.bench_epsilon import LARGER, averages, table, with_settings
from crossward.cli.bench_table import BASELINE
from crossward.evaluate.epsilon_plot import Panel, epsilon_picture
from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line
from tests.site.packs import write_packs


def run(**accuracies: float | None) -> dict[str, Any]:
    """A result of sites with three images of one class and one of another."""
    per_class = {"no": {"n": 3}, "yes": {"n": 1}}
    return {"sites": {site: {"accuracy": value, "per_class": per_class} for site, value in accuracies.items()}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fedavg", "fedavg[dp=8;lr=1]"),
        ("f2dc[stages=[3,4]]", "f2dc[stages=[3,4];dp=8;lr=1]"),
    ],
)
def test_settings_are_put_into_the_brackets(text: str, expected: str) -> None:
    assert with_settings(text, {"dp": "8", "lr": "1"}) == expected


def test_averages_leave_out_what_is_undefined() -> None:
    assert averages([run(a=0.5, b=0.7), run(a=None, b=0.9), run(a=None, b=None)], "accuracy") == [0.6, 0.9]


def test_rows_are_methods_and_columns_epsilons() -> None:
    found = {"fedavg": {"1": [run(a=0.5, b=0.7), run(a=0.7, b=0.7)], "none": [run(a=0.9, b=0.9)]}}
    rows = table(found, {BASELINE: [run(a=0.8, b=0.6)]}, metric="accuracy")
    assert rows == [
        {"method": LARGER, "1": "75.0", "none": "75.0"},
        {"method": BASELINE, "1": "–", "none": "70.0"},
        {"method": "fedavg", "1": "65.0 ± 7.1", "none": "90.0"},
    ]


def test_the_command_runs_the_grid_draws_it_and_reads_it_again(crossward: Command, tmp_path: Path) -> None:
    packs = write_packs(tmp_path / "packs", ("alder", "birch"), images=96)
    base = ("bench", "epsilon", "--data", packs, "--out", tmp_path / "cells", "--rounds", 1, "--jobs", 1)
    asked = (
        "--methods",
        "fedavg,fedbn[epochs=1]",
        "--epsilons",
        "8,none",
        "--settings",
        "batch=64;epochs=1;width=0.05,fedavg:batch=48",
    )
    done = crossward(*base, *asked, "--plot", tmp_path / "epsilon.png", "--metric", "auc,accuracy", "--json")
    assert done.code == 0, done.err
    tables = json.loads(done.out)
    assert [row["method"] for row in tables["auc"]] == [LARGER, BASELINE, "fedavg", "fedbn[epochs=1]"]
    assert list(tables["auc"][0].values()) == [LARGER, "50.0", "50.0"]
    folders = sorted(folder.name for folder in (tmp_path / "cells").iterdir())
    private = [name for name in folders if "dp=8" in name]
    assert (len(folders), len(private)) == (4, 2)
    for name in folders:
        described = json.loads((tmp_path / "cells" / name / "run.json").read_text())["options"]
        assert (described["privacy"] is not None) == (name in private)
        assert described["task"]["width"] == (0.05 if name in private else 0.25)
        assert described["training"]["batch_size"] == ((48 if "fedavg" in name else 64) if name in private else 32)
    with Image.open(tmp_path / "epsilon.png") as picture:
        assert picture.format == "PNG"
    again = crossward(*base, *asked, "--metric", "auc,accuracy", "--json")
    assert (again.code, again.out) == (0, done.out)
    marked = crossward(*base, *asked, "--markdown")
    assert "| method | 8 | none |" in marked.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--epsilons", "1,two"), "'two' is neither"),
        (("--epsilons", "0"), "'0' is neither"),
        (("--epsilons", "inf"), "'inf' is neither"),
        (("--epsilons", ","), "names none"),
        (("--methods", "fedavgg"), "did you mean"),
        (("--settings", "breadth=1"), "breadth"),
        (("--settings", "lr=1,f2d:lr=2"), "'f2d' is none of the methods"),
        (("--methods", "fedavg[dp=8]"), "an epsilon or noise of its own"),
        (("--metric", "f1"), "f1"),
    ],
)
def test_bad_input_is_refused_before_any_image_is_read(
    crossward: Command, tmp_path: Path, more: tuple[str, str], said: str
) -> None:
    assert said in one_line(
        crossward("bench", "epsilon", "--data", tmp_path / "nowhere", "--out", tmp_path / "out", *more)
    )


def test_every_metric_has_a_panel_and_another_curve_is_another_picture() -> None:
    def picture(value: float, metrics: int = 1) -> bytes:
        curves = {"fedavg": {"1": [0.5, 0.6], "none": [value]}, "f2dc": {"1": [], "none": [0.9]}}
        return epsilon_picture([Panel("auc", curves, 0.5)] * metrics)

    sizes = [Image.open(io.BytesIO(picture(0.7, metrics))).size for metrics in (1, 2)]
    assert sizes == [(696, 528), (1224, 528)]
    assert picture(0.7) == picture(0.7) != picture(0.8)
