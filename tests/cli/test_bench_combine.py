from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from crossward.cli import bench_combine
from crossward.cli.bench_combine import MadeReports, measure, values_sent
from crossward.cli.bench_variants import parse_variant
from crossward.federation.algebra import Algebra
from crossward.federation.combine import combine_spooled, spool
from crossward.federation.contract import SAMPLES
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, names_in
from crossward.methods import Task, available, create
from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line

NARROW = {"depth": 10, "width": 0.0625, "repeats": 1}
TASK = Task(classes=("a", "b"), channels=1, size=32, rounds=1, depth=10, width=0.0625)


def algebra_of(name: str) -> Algebra:
    method = create(name)
    return method.algebra(TASK, method.build(TASK))


@pytest.mark.parametrize("name", sorted(set(available()) - {"local"}))
def test_every_method_is_combined_with_its_own_rules(name: str) -> None:
    algebra, fedavg = algebra_of(name), algebra_of("fedavg")
    row = measure(parse_variant(name), 3, **NARROW)
    assert (row["method"], row["plan needs"], row["sites"]) == (name, algebra.needs, 3)
    assert row["sent MB"] == pytest.approx(4e-6 * values_sent(algebra))
    assert row["FedAvg's MB"] == pytest.approx(4e-6 * values_sent(fedavg))
    assert row["personal MB, all sites"] == pytest.approx(12e-6 * values_sent(algebra, Scope.PERSONAL))
    assert row["seconds"] > 0
    assert row["numpy seconds"] > 0
    assert row["ratio"] == row["seconds"] / row["numpy seconds"]
    assert row["peak / sent"] * row["sent MB"] == pytest.approx(row["peak / FedAvg's"] * row["FedAvg's MB"])
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("name", ["fedavg", "fedcode", "fdse"])
def test_made_reports_are_those_that_a_site_could_send(name: str) -> None:
    algebra = algebra_of(name)
    reports = MadeReports(algebra, 4)
    for site in range(4):
        report = reports[site]
        algebra.check(report)
        measured = algebra.measure(report.update)
        assert report.tally.keys() == measured.keys() | {SAMPLES}
        assert all(np.array_equal(report.tally[key], value) for key, value in measured.items())


def test_made_reports_are_no_two_alike_and_the_same_when_asked_again() -> None:
    algebra = algebra_of("fdse")
    reports = MadeReports(algebra, 4)
    flat = np.stack([np.concatenate([t.numpy().ravel() for t in reports[k].update.values()]) for k in range(4)])
    assert np.abs(np.corrcoef(flat) - np.eye(4)).max() < 0.05
    again = reports[2]
    assert all(np.array_equal(tensor, again.update[name]) for name, tensor in reports[2].update.items())


def test_the_plan_of_made_reports_weighs_every_site(tmp_path: Path) -> None:
    # Sites that all sent the same would make the planning easier than it is.
    method = create("fdse")
    model = method.build(TASK)
    algebra, start = method.algebra(TASK, model), method.start(TASK, model)
    reports = MadeReports(algebra, 5)
    after = combine_spooled(algebra, start, [spool(tmp_path, reports[site]) for site in range(5)], 1)
    shared = names_in(algebra.layout, Scope.SHARED)
    largest = max(shared, key=lambda name: algebra.sent[name].numel)
    assert (after.plan.values["shared"]["weights"][shared.index(largest)] > 0.1).all()
    assert set(after.personal) == {f"site-{site}" for site in range(5)}


def test_ours_and_numpys_are_timed_in_turns_and_the_first_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 2.0, 1.0, 6.0, 4.0, 3.0, 1.0])
    order = []

    def timed(kind):
        def run(*arguments):
            order.append(kind)
            return next(times)

        return run

    for kind in ("_spooled", "_streamed", "_plain_average"):
        monkeypatch.setattr(bench_combine, kind, timed(kind))
    row = measure(parse_variant("fdse"), 2, **{**NARROW, "repeats": 3})
    assert order == ["_spooled", *["_spooled", "_plain_average"] * 3]
    # 2/1, 6/4 and 3/1: the ratio of the medians would be 3.
    assert (row["seconds"], row["numpy seconds"], row["ratio"]) == (3.0, 1.0, 2.0)


def test_a_method_that_sends_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="local sends nothing"):
        measure(parse_variant("local"), 2, **NARROW)


def test_the_command_measures_each_in_a_process_of_its_own(crossward: Command) -> None:
    done = crossward(
        *("bench", "combine", "--methods", "fedavg,fdse[layers=layer]", "--sites", 2, "--depth", 10),
        *("--width", 0.0625, "--repeats", 1, "--json"),
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert [(row["method"], row["plan needs"]) for row in rows] == [
        ("fedavg", "nothing"),
        ("fdse[layers=layer]", "gram"),
    ]
    assert all(row["peak / sent"] > 0 for row in rows)


def test_the_table_has_a_row_per_method_and_number_of_sites(
    crossward: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(variant, sites, *, depth, width, repeats):
        return {"method": variant.text, "sites": sites, "sent MB": float(depth)}

    monkeypatch.setattr(bench_combine, "in_own_process", row)
    shown = crossward("bench", "combine", "--sites", "4,50", "--markdown")
    assert shown.code == 0, shown.err
    assert [line.split("|")[1:3] for line in shown.out.splitlines() if "18.00" in line] == [
        [f" {method} ", f" {sites} "] for method in ("fedavg", "fedcode", "fdse") for sites in (4, 50)
    ]


def test_bad_input(crossward: Command) -> None:
    assert "fedavgg" in one_line(crossward("bench", "combine", "--methods", "fedavgg"))
    assert "without a site" in one_line(crossward("bench", "combine", "--sites", "4,0"))
    assert "depth" in one_line(crossward("bench", "combine", "--depth", 12))
