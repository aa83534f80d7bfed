"""crossward adapt, and the benchmark that leaves one hospital out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossward.cli import bench_adapt
from crossward.cli.bench_adapt import table
from crossward.imaging.folder import LABELS
from tests.cli.conftest import SMALL, Command
from tests.cli.test_bad_input import one_line
from tests.site.packs import write_packs


@pytest.fixture
def trained(crossward: Command, phantoms: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    options = ("--data", phantoms, "--out", run, "--no-diagnostics", *SMALL)
    assert crossward("simulate", "--method", "fdse", *options).code == 0
    return run


def test_with_labels_half_of_the_patients_fit_it_and_the_others_show_what_it_was_worth(
    crossward: Command, trained: Path, phantoms: Path, tmp_path: Path
) -> None:
    done = crossward("adapt", trained, "--data", phantoms / "hospital-a", "--out", tmp_path / "out", "--epochs", 2)
    assert done.code == 0, done.err
    for words in ("before and after", "as received", "adapted, own statistics", "right %", "epoch   2/2"):
        assert words in done.out
    facts = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert facts["n_fitting"] > 0
    assert facts["n_test"] > 0
    for stage in facts["stages"].values():
        low, high = stage["accuracy_interval"]
        assert low <= stage["accuracy"] <= high
        assert sum(stage["answers"].values()) == facts["n_test"]
    assert facts["stages"]["as received"]["changed"] == 0
    assert len(facts["losses"]) == 2
    assert facts["deployed"] == "adapted, own statistics"
    assert (tmp_path / "out" / "adapted.safetensors").exists()


def test_without_labels_it_says_what_changed_and_names_no_file(
    crossward: Command, trained: Path, own_phantoms: Path, tmp_path: Path
) -> None:
    hospital = own_phantoms / "hospital-b"
    (hospital / LABELS).unlink()
    first = next(iter(sorted(hospital.rglob("*.dcm"))))
    first.write_bytes(first.read_bytes()[:400])
    done = crossward("adapt", trained, "--data", hospital, "--out", tmp_path / "out", "--epochs", 1, "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["n_test"] == 0
    assert all(stage["accuracy"] is None for stage in facts["stages"].values())
    assert sum(facts["rejected"].values()) == 1
    assert first.name not in done.out + done.err
    assert "left out: 1 file(s)" in done.err


def test_a_method_without_parts_to_fit_says_so(crossward: Command, phantoms: Path, tmp_path: Path) -> None:
    options = ("--data", phantoms, "--out", tmp_path / "run", "--no-diagnostics", *SMALL)
    assert crossward("simulate", "--method", "fedbn", *options).code == 0
    done = crossward("adapt", tmp_path / "run", "--data", phantoms / "hospital-a", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "fedbn has no part to fit without labels beyond its statistics" in done.out


def test_bad_input_is_one_line(crossward: Command, trained: Path, own_phantoms: Path, tmp_path: Path) -> None:
    hospital = own_phantoms / "hospital-a"
    assert "finished run" in one_line(crossward("adapt", tmp_path, "--data", hospital, "--out", tmp_path / "o"))
    nowhere = crossward("adapt", trained, "--data", tmp_path / "no", "--out", tmp_path / "o")
    assert "no such folder" in one_line(nowhere)
    labels = (hospital / LABELS).read_text().replace("normal", "abnormal")
    (hospital / LABELS).write_text(labels)
    unknown = crossward("adapt", trained, "--data", hospital, "--out", tmp_path / "o")
    assert "'abnormal' is none of the study's" in one_line(unknown)


def test_leaving_one_out_runs_every_cell_once_and_reads_it_the_next_time(
    crossward: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = ("alder", "birch", "cedar")
    packs = write_packs(tmp_path / "packs", sites, images=96)
    command = ("bench", "adapt", "--data", packs, "--out", tmp_path / "out", "--methods", "fedavg,fdse", "--seeds", 0)
    once = crossward(*command, "--rounds", 1, "--metric", "accuracy,auc", "--json")
    assert once.code == 0, once.err
    tables = json.loads(once.out)
    assert [(row["method"], row["model"]) for row in tables["accuracy"]] == [
        ("fedavg", "as received"),
        ("fedavg", "own statistics"),
        ("fdse", "as received"),
        ("fdse", "adapted"),
        ("fdse", "own statistics"),
        ("fdse", "adapted, own statistics"),
    ]
    assert set(tables["auc"][0]) == {"method", "model", *sites, "avg"}
    for site in sites:
        described = json.loads((tmp_path / "out" / f"fdse-without-{site}-0" / "run.json").read_text())
        assert set(described["sites"]) == set(sites) - {site}
    monkeypatch.setattr(bench_adapt, "adapt", None)
    assert json.loads(crossward(*command, "--rounds", 1, "--metric", "accuracy,auc", "--json").out) == tables


def test_the_table_averages_over_hospitals_first_and_over_seeds_then() -> None:
    def stages(value: float) -> dict[str, dict[str, float]]:
        return {"as received": {"accuracy": value}}

    runs = {("m", "a"): [stages(0.5), stages(0.7)], ("m", "b"): [stages(0.7), stages(0.9)]}
    assert table(runs, metric="accuracy") == [
        {"method": "m", "model": "as received", "a": "60.0 ± 14.1", "b": "80.0 ± 14.1", "avg": "70.0 ± 14.1"}
    ]


def test_two_hospitals_are_too_few_to_leave_one_out(crossward: Command, tmp_path: Path) -> None:
    packs = write_packs(tmp_path / "packs", ("alder", "birch"), images=32)
    assert "needs three or more" in one_line(crossward("bench", "adapt", "--data", packs, "--out", tmp_path / "o"))
