from __future__ import annotations

import io
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from crossward.cli import bench_secagg_turns
from crossward.cli.bench_secagg import PICTURE, QUICK, REAL, RESULT, secagg, tables
from crossward.cli.bench_secagg_flower import Flower, Peak, Updates, relative_error
from crossward.cli.bench_secagg_ours import Ours, Parts
from crossward.cli.bench_secagg_turns import FLOWER, OURS, Bench, Sizes, Worker, flower_command, working
from crossward.evaluate.secagg_plot import scaling_picture
from crossward.federation.errors import BadInput, RunFailure
from crossward.privacy.secagg.server import Attempt

COMMON = Path(bench_secagg_turns.bench_secagg_flower.__file__)

FAKE = """
import runpy
serve = runpy.run_path({common!r})["serve"]

class Subject:
    about = {{"flwr": "0.0"}}
    def prepare(self, parameters, sites, fitted=False):
        print("a library says something")
        self.sites, self.fitted = sites, fitted
        return {{}}
    def client(self, memory=False):
        return {{"seconds": 2.0, "processor": 4.0, "bytes": 8 * self.sites, "memory": 7 if memory else None}}
    def server(self):
        return {{"seconds": 3.0, "processor": 6.0, "error": 0.25 if self.fitted else 0.5}}
    def broken(self):
        raise ValueError("the very reason")

{start}
"""


def fake_worker(folder: Path, start: str = "serve(Subject)") -> list[str]:
    path = folder / "fake.py"
    path.write_text(FAKE.format(common=str(COMMON), start=start))
    return [sys.executable, "-I", str(path)]


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(secagg)
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "250"})


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The command from end to end, where Flower is not installed."""
    folder = tmp_path_factory.mktemp("secagg")
    start = "def fail(): raise ModuleNotFoundError(name='flwr')\nserve(fail)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crossward.cli.bench_secagg.flower_command", lambda python: fake_worker(folder, start))
        return run("--quick", "--repetitions", 2, "--out", folder / "out"), folder / "out"


def facts_of(quick: tuple[Result, Path]) -> dict[str, Any]:
    return json.loads((quick[1] / RESULT).read_text())


def test_without_flower_one_line_says_how_to_get_it_and_the_rest_is_measured(quick: tuple[Result, Path]) -> None:
    result, _ = quick
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert "Flower is not compared: this environment has no 'flwr'" in lines[0]
    assert "pip install flwr" in lines[0]
    assert "--flower-python" in lines[0]
    assert "Flower" not in result.stdout
    assert "ours / limit" in result.stdout


def test_a_quick_run_has_every_figure(quick: tuple[Result, Path]) -> None:
    facts = facts_of(quick)
    assert [(row["parameters"], row["peers"]) for row in facts["site"]] == QUICK.sites()
    assert [row["sites"] for row in facts["server"]] == [peers + 1 for peers in QUICK.peers]
    assert [(row["parameters"], row["sites"]) for row in facts["error"]] == QUICK.errors()
    assert facts["machine"].keys() == {"cores", "load", OURS}
    for row in facts["site"]:
        assert row["ours / limit"]["median"] > 0
        assert min(row[OURS]["seconds"], row["limit seconds"], row["keys once a job, seconds"]) > 0
        assert row[OURS]["bytes"] > 4 * row["parameters"]
        assert row[OURS]["memory"] > 0
    for row in facts["server"]:
        assert row["ours / plain"]["median"] > 0
        assert row[OURS]["seconds"] > row["steps"]["open"] > 0
        assert 0 < row[OURS]["error"] < 1e-6
    assert all(0 < row["ours"] < 1e-6 for row in facts["error"])


def test_masks_do_not_change_the_error(quick: tuple[Result, Path]) -> None:
    facts = facts_of(quick)
    without = {(row["parameters"], row["sites"]): row["ours"] for row in facts["error"]}
    through = {(row["parameters"], row["sites"]): row[OURS]["error"] for row in facts["server"]}
    assert through
    assert all(without[case] == error for case, error in through.items())


def test_a_picture_is_written_and_is_not_blank(quick: tuple[Result, Path]) -> None:
    with Image.open(quick[1] / PICTURE) as picture:
        assert picture.width > 600
        pixels = np.asarray(picture.convert("RGB"))
    assert (pixels == [0x00, 0x72, 0xB2]).all(axis=2).sum() > 200
    assert (pixels == [0xB3, 0x59, 0x00]).all(axis=2).sum() == 0


def test_the_picture_shows_flower_where_it_was_measured() -> None:
    row = {"parameters": 1000, "limit seconds": 0.001, OURS: {"seconds": 0.002}}
    rows = [{**row, "peers": 2, FLOWER: {"seconds": 0.01}}, {**row, "peers": 4, FLOWER: {"seconds": 0.02}}]
    pixels = np.asarray(Image.open(io.BytesIO(scaling_picture(rows, parameters=1000, peers=2))).convert("RGB"))
    assert (pixels == [0xB3, 0x59, 0x00]).all(axis=2).sum() > 200


def test_a_worker_answers_whatever_libraries_print(tmp_path: Path) -> None:
    with working(fake_worker(tmp_path)) as worker:
        assert worker.about["flwr"] == "0.0"
        assert worker.about.keys() == {"python", "numpy", "flwr"}
        assert not worker.missing
        assert worker.ask("prepare", parameters=1, sites=3) == {}
        assert worker.ask("client", memory=True) == {"seconds": 2.0, "processor": 4.0, "bytes": 24, "memory": 7}


def test_a_worker_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with (
        working(fake_worker(tmp_path)) as worker,
        pytest.raises(RunFailure, match="failed: ValueError: the very reason"),
    ):
        worker.ask("broken")


def test_a_worker_that_talks_nonsense_and_goes_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="it said nothing"):
        Worker(fake_worker(tmp_path, "print('nonsense', flush=True)\nimport time\ntime.sleep(600)"))


@pytest.mark.skipif(find_spec("flwr") is not None, reason="flwr is installed here")
def test_flowers_own_worker_says_that_flower_is_missing() -> None:
    with working(flower_command(None)) as worker:
        assert worker.missing == "flwr"


def test_flowers_own_functions_give_the_average() -> None:
    pytest.importorskip("flwr")
    flower = Flower()
    flower.prepare(parameters=3000, sites=4, fitted=True)
    assert flower.client()["bytes"] > 8 * 3000
    assert flower.server()["error"] < 1e-4


def test_a_worker_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="it said nothing"):
        Worker(fake_worker(tmp_path, "raise SystemExit"))
    with pytest.raises(BadInput, match="nowhere/python cannot be started"):
        Worker(["nowhere/python"])


class Told:
    """A worker in this process whose answers are known, and who remembers what all were asked."""

    def __init__(self, name: str, order: list[str], **answers: Any) -> None:
        self._name, self._order, self._answers = name, order, answers

    def ask(self, what: str, **details: Any) -> Any:
        self._order.append(f"{self._name} {what}")
        answer = self._answers[what]
        return answer.pop(0) if isinstance(answer, list) else answer


def turns(*seconds: float, **more: Any) -> list[dict[str, Any]]:
    return [{"seconds": each, "processor": 10 * each, "bytes": 44, "memory": 5, **more} for each in seconds]


def test_sites_take_turns_and_the_first_turn_is_not_timed() -> None:
    order: list[str] = []
    rates = [{"aes": 1000.0, "add": 4000.0}, {"aes": 2000.0, "add": 2000.0}, {"aes": 2000.0, "add": 2000.0}]
    ours = Told(OURS, order, prepare={"seconds": 0.5}, client=turns(99.0, 1.0, 2.0, 4.0), limit=rates)
    flower = Told(FLOWER, order, prepare={}, client=turns(99.0, 8.0, 10.0, 24.0))
    row = Bench({OURS: ours, FLOWER: flower}, repetitions=3, threads=2).site(100, 4, flower=True)  # type: ignore[dict-item]
    turn = ["ours client", "flower client", "ours limit"]
    assert order == ["ours prepare", "flower prepare", "ours client", "flower client", *3 * turn]
    assert row[OURS] == {"seconds": 2.0, "bytes": 44, "memory": 5}
    assert row[FLOWER]["seconds"] == 10.0
    # 8/1, 10/2 and 24/4: the ratio of the medians would be 5.
    assert row["flower / ours"] == {"median": 6.0, "range": [5.0, 8.0], "processor": 6.0}
    # Five masks of 400 bytes: 2000/1000 + 2000/4000 and twice 2000/2000 + 2000/2000 seconds, on two threads.
    assert row["limit seconds"] == 1.0
    assert row["ours / limit"]["median"] == 2.0
    assert row["ours / limit"]["range"] == [1.0 / 1.25, 4.0]
    assert row["keys once a job, seconds"] == 0.5


def test_servers_take_turns_with_a_plain_sum(tmp_path: Path) -> None:
    order: list[str] = []
    steps = {"sum": {"seconds": 0.25}, "open": {"seconds": 0.5}, "decode": {"seconds": 1.0}, "shares": {"seconds": 9.0}}
    ours = Told(
        OURS, order, prepare={}, server=turns(99.0, 6.0, 9.0, steps=steps, error=1e-7), plain=turns(99.0, 2.0, 1.0)
    )
    with working(fake_worker(tmp_path)) as flower:
        row = Bench({OURS: ours, FLOWER: flower}, repetitions=2, threads=1).server(100, 5)  # type: ignore[dict-item]
    assert order == ["ours prepare", *3 * ["ours server", "ours plain"]]
    assert row["ours / plain"]["range"] == [3.0, 9.0]
    assert row["steps"] == {"sum": 0.25, "open": 0.5, "decode": 1.0, "shares": 9.0}
    assert row[FLOWER] == {"seconds": 3.0, "error": 0.5, "error, fitted": 0.25}
    assert row["flower / ours"]["range"] == [3.0 / 9.0, 0.5]
    shown = tables({"site": [], "server": [row], "error": []})["The server, once all vectors are there"]
    assert shown[0]["Flower error (fitted)"] == "5.0e-01 (2.5e-01)"
    assert shown[0]["of it sum, open, decode"] == "250.0, 500.0, 1000.0"


def test_flower_takes_part_up_to_its_sizes_only() -> None:
    assert REAL.with_flower(5_000_000, 19)
    assert not REAL.with_flower(50_000_000, 19)
    assert not REAL.with_flower(5_000_000, 49)


@pytest.mark.parametrize("text", ["1", "4,x", "300"])
def test_peers_that_cannot_be_are_refused(text: str) -> None:
    found = run("--quick", "--peers", text).exception
    assert isinstance(found, BadInput)
    assert f"--peers {text}" in str(found)


def test_options_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sizes] = []

    def stop(self: Bench, sizes: Sizes, progress: object) -> None:
        seen.append(sizes)
        raise RunFailure("seen")

    class Nobody:
        missing, about = "", {}

        def close(self) -> None: ...

    monkeypatch.setattr(bench_secagg_turns, "Worker", lambda command, *, threads=1: Nobody())
    monkeypatch.setattr(Bench, "run", stop)
    assert isinstance(run("--parameters", 7000, "--peers", "30,3,30").exception, RunFailure)
    assert isinstance(run("--flower-large").exception, RunFailure)
    assert (seen[0].parameters, seen[0].peers) == (7000, (3, 30))
    assert seen[0].with_flower(7000, 30)
    assert not seen[0].with_flower(7001, 3)
    assert all(seen[1].with_flower(*case) for case in seen[1].sites())
    assert (50_000_000, 19) in seen[1].sites()


@pytest.mark.parametrize("parameters", [1, 999, 1001, 12_345])
def test_made_updates_have_every_parameter_and_no_two_sites_alike(parameters: int) -> None:
    updates = Updates(parameters, 3)
    sites = [updates.of(site) for site in range(3)]
    assert [sum(tensor.size for tensor in site) for site in sites] == 3 * [parameters]
    assert all(np.array_equal(one, again) for one, again in zip(sites[1], updates.of(1), strict=True))
    assert not np.array_equal(sites[0][0], sites[1][0])
    bounds = updates.largest()
    assert all(np.abs(tensor).max() <= bound for site in sites for tensor, bound in zip(site, bounds, strict=True))


def test_the_average_that_errors_are_taken_from_is_weighted_by_samples() -> None:
    updates = Updates(50, 3)
    assert updates.samples == [1000, 996, 992]
    expected = sum(n * updates.of(site)[0].astype(np.float64) for site, n in enumerate(updates.samples)) / 2988
    np.testing.assert_allclose(updates.average()[0], expected, rtol=1e-14)


def test_the_error_is_relative_and_over_all_tensors() -> None:
    exact = [np.array([3.0, 0.0]), np.array([4.0])]
    assert relative_error([np.array([3.0, 3.0]), np.array([0.0])], exact) == 1.0
    assert relative_error(exact, exact) == 0.0


def test_no_value_is_cut_off_by_the_limits() -> None:
    parts = Parts(3000, 4)
    total = sum((parts.encode(parts.of(site)) for site in range(4)), np.zeros(parts.layout.words, dtype=np.uint32))
    numbers = parts.layout.numbers(total)
    outside = [float(value) for key, value in numbers.items() if key[0] == "outside"]
    assert outside == [0.0] * len(parts.updates.sizes)
    assert math.isclose(float(numbers["coefficient", "*", "tensor-0"]), 1.0, abs_tol=4 * 2.0**-25)


def test_a_server_that_does_not_take_masks_off_is_seen_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "open", lambda self: self.sum)
    ours = Ours()
    ours.prepare(parameters=2000, sites=3)
    assert ours.server()["error"] > 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel counts peaks on Linux only")
def test_peak_memory_is_what_was_held_at_once_and_not_what_was_there_before() -> None:
    before = np.ones(1 << 22)
    with Peak() as peak:
        for _ in range(3):
            assert np.ones(1 << 21).sum() == 1 << 21
    assert before[0] == 1
    assert peak.extra is not None
    assert 16 << 20 <= peak.extra < 24 << 20
