from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossward.cli import bench_trace
from crossward.cli.bench_uncertainty import AVERAGE, NOISE, WRONG, compare, read_images, table
from crossward.federation.errors import BadInput, RunFailure
from crossward.imaging.data import load
from crossward.site.diagnostics import noised
from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line
from tests.site.packs import write_packs

SITES = ("alder", "birch")
ROUNDS = 3


def write_pictures(path: Path, pixels: np.ndarray) -> Path:
    np.savez(path, x=pixels, y=np.zeros(len(pixels), np.uint8))
    return path


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs"), SITES, images=64)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pixels = np.random.default_rng(5).integers(0, 256, (7, 16, 16), dtype=np.uint8)
    return write_pictures(tmp_path_factory.mktemp("other") / "other.npz", pixels)


@pytest.fixture
def trace(crossward: Command, packs: Path):
    def run(out: Path, *more: object, method: str = "rfeddis[epochs=1]", seed: int = 0) -> Any:
        words = ("--data", packs, "--method", method, "--rounds", ROUNDS, "--jobs", 1, "--seed", seed)
        return crossward("bench", "uncertainty-trace", *words, "--out", out, *more)

    return run


def test_what_odd_images_are_compared_with_by_hand() -> None:
    usual = {"uncertainty": np.array([0.1, 0.3, 0.5]), "conflict": np.array([0.2, 0.2, 0.2])}
    odd = {"uncertainty": np.array([0.4, 0.6]), "conflict": np.array([0.2, 0.1])}
    # Of six pairs the odd one is above in five; its conflict ties in three and is below in three.
    assert compare(usual, odd) == {
        "n": [3, 2],
        "uncertainty": [pytest.approx(0.3), pytest.approx(0.5)],
        "auroc": {"uncertainty": pytest.approx(5 / 6), "conflict": pytest.approx(1 / 4)},
    }
    nothing = {name: values[:0] for name, values in odd.items()}
    figures = compare(usual, nothing)
    assert (figures["n"], figures["uncertainty"][1], figures["auroc"]["uncertainty"]) == ([3, 0], None, None)


def test_noise_is_in_normalised_units_and_repeatable(packs: Path) -> None:
    split = load(packs).sites["alder"].test
    noisy = noised(split, 1.5, seed=3)
    difference = noisy.images - split.images
    assert float(difference.std()) == pytest.approx(1.5, rel=0.02)
    assert torch.equal(noised(split, 1.5, seed=3).images, noisy.images)
    assert torch.equal(noised(split, 0.0, seed=3).images, split.images)


@pytest.mark.parametrize("side", [16, 8, 64], ids=["as it is", "enlarged", "shrunk"])
@pytest.mark.parametrize("colour", [False, True])
def test_other_images_are_read_as_those_of_a_pack(tmp_path: Path, side: int, colour: bool) -> None:
    rng = np.random.default_rng(side)
    pixels = rng.integers(0, 256, (40, side, side, 3) if colour else (40, side, side), dtype=np.uint8)
    folder = tmp_path / "pack"
    folder.mkdir()
    parts = np.arange(40) % 3
    labels = (np.arange(40) // 3 % 2).astype(np.uint8)
    np.savez(
        folder / "site.npz",
        x=pixels,
        y=labels,
        split=parts.astype(np.uint8),
        ids=np.arange(40).astype(str),
        classes=np.array(["a", "b"]),
    )
    expected = load(folder, size=16, batch_size=4, channels=3).sites["site"].test.images
    found = read_images(write_pictures(tmp_path / "x.npz", pixels), size=16, channels=3)
    assert torch.equal(found.images[torch.from_numpy(parts == 2)], expected)


def test_files_that_hold_no_pictures_are_refused(tmp_path: Path) -> None:
    def said(path: Path, *, channels: int = 3) -> str:
        with pytest.raises(BadInput) as refused:
            read_images(path, size=16, channels=channels)
        assert str(path) in str(refused.value)
        return str(refused.value)

    assert "cannot be read" in said(tmp_path / "nowhere.npz")
    (tmp_path / "text.npz").write_text("no pictures")
    assert "cannot be read" in said(tmp_path / "text.npz")
    np.savez(tmp_path / "empty.npz", y=np.zeros(3))
    assert "cannot be read" in said(tmp_path / "empty.npz")
    np.save(tmp_path / "single.npy", np.zeros((2, 8, 8), np.uint8))
    assert "cannot be read" in said(tmp_path / "single.npy")
    assert "square" in said(write_pictures(tmp_path / "wide.npz", np.zeros((2, 8, 9), np.uint8)))
    assert "uint8" in said(write_pictures(tmp_path / "float.npz", np.zeros((2, 8, 8))))
    colour = write_pictures(tmp_path / "colour.npz", np.zeros((2, 8, 8, 3), np.uint8))
    assert "grey" in said(colour, channels=1)


def test_rows_are_means_over_runs_and_the_average_is_over_sites() -> None:
    def figures(usual: float, auroc: float | None, n: int) -> dict[str, Any]:
        return {"n": [n, 2], "uncertainty": [usual, 0.5], "auroc": {"uncertainty": auroc}}

    facts = {
        "runs": [
            {"sites": {"a": {NOISE: figures(0.1, 0.6, 3)}, "b": {NOISE: figures(0.2, None, 4)}}},
            {"sites": {"a": {NOISE: figures(0.3, 0.8, 3)}, "b": {NOISE: figures(0.6, None, 5)}}},
        ]
    }
    a, b, average = table(facts)
    assert a["u usual"] == "0.200 ± 0.141"
    assert a["AUROC uncertainty"] == "0.700 ± 0.141"
    assert (b["n usual"], b["n odd"], b["AUROC uncertainty"]) == ("4–5", "2", "n/a")
    # By run 0.15 and 0.45; undefined sites are left out.
    assert (average["site"], average["n usual"], average["u usual"]) == (AVERAGE, "7–8", "0.300 ± 0.212")
    assert average["AUROC uncertainty"] == a["AUROC uncertainty"]


def test_a_trace_agrees_with_the_finished_run_and_is_whole_after_an_interruption(
    crossward: Command, trace: Any, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = trace(tmp_path / "run-0", "--json")
    assert undisturbed.code == 0, undisturbed.err
    facts = json.loads(undisturbed.out)
    assert [entry["round"] for entry in facts["rounds"]] == [1, 2, 3]

    record = bench_trace.Tracer.__call__

    def stop_after_the_second(self: Any, event: Any) -> None:
        record(self, event)
        if (event.kind, event.round_number) == ("aggregated", 2):
            raise RunFailure("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(bench_trace.Tracer, "__call__", stop_after_the_second)
        assert "the power went" in one_line(trace(tmp_path / "again"))
    assert "--noise" in one_line(trace(tmp_path / "again", "--noise", 1))
    resumed = trace(tmp_path / "again", "--json")
    assert json.loads(resumed.out) == facts

    assert trace(tmp_path / "run-1", seed=1).code == 0
    done = crossward("bench", "uncertainty", tmp_path / "run-0", tmp_path / "run-1", "--ood", other, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    best = json.loads((tmp_path / "run-0" / "result.json").read_text())
    for site, figures in found["runs"][0]["sites"].items():
        assert list(figures) == [NOISE, "other", WRONG]
        assert figures[NOISE] == facts["rounds"][best["best_round"] - 1]["sites"][site]
        assert set(figures[NOISE]["auroc"]) == {"uncertainty", "global", "local", "conflict"}
        assert figures["other"]["n"] == [16, 7]
        assert figures[WRONG]["n"][0] / 16 == best["sites"][site]["accuracy"]
    assert len(found["table"]) == 3 * (len(SITES) + 1)


def test_runs_that_do_not_fit_are_refused(crossward: Command, trace: Any, packs: Path, tmp_path: Path) -> None:
    assert trace(tmp_path / "fedavg", method="fedavg[epochs=1]").code == 0
    assert trace(tmp_path / "fedbn", method="fedbn[epochs=1]").code == 0
    shown = crossward("bench", "uncertainty", tmp_path / "fedavg", "--sites", "birch", "--markdown")
    assert shown.code == 0, shown.err
    assert "birch" in shown.out
    assert "alder" not in shown.out
    assert "conflict" not in shown.out

    def refused(*words: object) -> str:
        return one_line(crossward("bench", "uncertainty", *words))

    assert "differ in more than the seed" in refused(tmp_path / "fedavg", tmp_path / "fedbn")
    assert trace(tmp_path / "one", "--sites", "alder", method="fedavg[epochs=1]", seed=1).code == 0
    for pair in (("fedavg", "one"), ("one", "fedavg")):
        assert "give runs of the same sites" in refused(*(tmp_path / name for name in pair))
    assert "holds no run" in refused(tmp_path)
    assert "no site 'cedar'" in refused(tmp_path / "fedavg", "--sites", "cedar")
    others = write_packs(tmp_path / "others", SITES, images=128)
    assert "was tested on" in refused(tmp_path / "fedavg", "--data", others)
    (tmp_path / "fedbn" / "sites" / "alder" / "vault" / "deployed.safetensors").unlink()
    assert "no deployed model of alder" in refused(tmp_path / "fedbn")
    (tmp_path / "fedbn" / "result.json").unlink()
    assert "result.json" in refused(tmp_path / "fedbn")


def test_help_has_an_example(crossward: Command) -> None:
    for command in ("uncertainty", "uncertainty-trace", "table"):
        assert "Example:" in crossward("bench", command, "--help").out
