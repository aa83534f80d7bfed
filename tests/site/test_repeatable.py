from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_sites import SITES, made_up_cohort, made_up_study, same_bits, tensors_on_disk, without_seconds

from crossward.site.inprocess import simulate

METHODS = ("fedavg", "fedbn")
THREADS = """
import sys
from pathlib import Path
import torch
from made_up_sites import made_up_cohort, made_up_study, same_bits, simulate, tensors_on_disk

torch.set_num_threads(4)
folder = Path(sys.argv[1])
for jobs in (1, 3):
    simulate(made_up_cohort(), made_up_study("fedavg", rounds=2), folder / str(jobs), jobs=jobs)
assert torch.get_num_threads() == 4, "the caller's setting was changed"
assert same_bits(tensors_on_disk(folder / "1"), tensors_on_disk(folder / "3"))
"""

Run = tuple[dict[str, Any], dict[str, torch.Tensor]]


def run(folder: Path, method: str, *, names: tuple[str, ...] = SITES, jobs: int = 1, **training: Any) -> Run:
    study = made_up_study(method, rounds=3, **training)
    result = simulate(made_up_cohort(names), study, folder, jobs=jobs)
    return without_seconds(result), tensors_on_disk(folder)


@pytest.fixture(scope="module", params=METHODS)
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    return request.param, run(tmp_path_factory.mktemp("first") / "run", request.param)


def test_the_same_seed_gives_the_same_run(first: tuple[str, Run], tmp_path: Path) -> None:
    method, (facts, tensors) = first
    again, other = run(tmp_path / "run", method)
    assert again == facts
    assert same_bits(other, tensors)


def test_another_seed_gives_another_run(first: tuple[str, Run], tmp_path: Path) -> None:
    method, (_, tensors) = first
    _, other = run(tmp_path / "run", method, seed=1)
    assert not same_bits(other, tensors)


def test_another_start_gives_another_run(first: tuple[str, Run], tmp_path: Path) -> None:
    method, (_, tensors) = first
    study = made_up_study(method, rounds=3)
    study = replace(study, task=replace(study.task, seed=1))
    simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    assert not same_bits(tensors_on_disk(tmp_path / "run"), tensors)


def test_sites_at_the_same_time_give_the_same_run(first: tuple[str, Run], tmp_path: Path) -> None:
    method, (facts, tensors) = first
    again, other = run(tmp_path / "run", method, jobs=2)
    assert again == facts
    assert same_bits(other, tensors)


def test_the_order_of_sites_does_not_matter(first: tuple[str, Run], tmp_path: Path) -> None:
    method, (facts, tensors) = first
    again, other = run(tmp_path / "run", method, names=SITES[::-1])
    assert other.keys() == tensors.keys()
    for name, tensor in tensors.items():
        scale = tensor.double().abs().max().item()
        assert torch.allclose(other[name].double(), tensor.double(), rtol=1e-6, atol=1e-6 * scale), name
    assert {name: site["accuracy"] for name, site in again["sites"].items()} == {
        name: site["accuracy"] for name, site in facts["sites"].items()
    }
    assert again["best_round"] == facts["best_round"]


def test_neither_threads_nor_jobs_change_the_model(tmp_path: Path, run_script: Any) -> None:
    """Where PyTorch may use several threads, as on a real machine."""
    done = run_script(THREADS, tmp_path, without="OMP_NUM_THREADS")
    assert done.returncode == 0, done.stderr
