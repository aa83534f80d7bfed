from __future__ import annotations

import json

import pytest

from crossward.cli import bench_dp
from crossward.cli.bench_dp import GHOST, HOOKS, OURS, PLAIN, measure, table
from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line

TINY = ("--width", 0.0625, "--size", 8, "--batch-size", 3, "--repeats", 1)


def test_every_way_is_timed_in_turns_and_the_first_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    clock = iter(range(1000))
    for way in (PLAIN, OURS, HOOKS, GHOST):

        def make(model, images, labels, noise, way=way):
            return lambda: (order.append((way, noise)), [next(clock) for _ in range(3 * noise)])

        monkeypatch.setitem(bench_dp._WAYS, way, make)
    monkeypatch.setattr(bench_dp.time, "process_time", lambda: next(clock))
    rows = measure([10], width=0.0625, size=8, batch_size=2, repeats=3)
    turn = [(PLAIN, False), *((way, noise) for way in (OURS, HOOKS, GHOST) for noise in (True, False))]
    assert order == 4 * turn
    assert [(row["step"], row["noise"]) for row in rows] == turn
    assert [row["time_ratio"] for row in rows] == [1, 4, 1, 4, 1, 4, 1]
    assert all(row["time_ratio_range"] == [row["time_ratio"]] * 2 for row in rows)


def test_norms_are_those_of_batches_of_one() -> None:
    rows = measure([10], width=0.0625, size=8, batch_size=3, repeats=1)
    assert {row["net"] for row in rows} == {"ResNet-10"}
    assert {row["step"]: row["norms_off_by"] is None for row in rows} == {
        PLAIN: True,
        OURS: False,
        HOOKS: False,
        GHOST: False,
    }
    assert all(row["norms_off_by"] is None or row["norms_off_by"] < 1e-4 for row in rows)
    assert table(rows)[1]["norms off by"].endswith(("e-08", "e-07", "e-06", "e-05"))


def test_the_command_prints_a_table_and_json(crossward: Command) -> None:
    shown = crossward("bench", "dp", "--depths", "10", *TINY, "--markdown")
    assert shown.code == 0, shown.err
    assert "time / plain SGD" in shown.out
    assert "| ResNet-10 | crossward | yes |" in shown.out
    rows = json.loads(crossward("bench", "dp", "--depths", "10,18", *TINY, "--json").out)
    assert len(rows) == 14
    assert "Example:" in crossward("bench", "dp", "--help").out


def test_bad_input(crossward: Command) -> None:
    assert "depth" in one_line(crossward("bench", "dp", "--depths", "11"))
    assert "list of whole numbers" in one_line(crossward("bench", "dp", "--depths", "x"))
    assert "width" in one_line(crossward("bench", "dp", "--width", 0))
