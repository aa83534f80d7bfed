from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_sites import (
    SITES,
    made_up_cohort,
    made_up_study,
    same_bits,
    tensors_on_disk,
    without_seconds,
)

from crossward.federation.storage import read_tensors
from crossward.site import participant
from crossward.site.inprocess import Event, simulate

METHODS = ("fedavg", "fedbn", "local")
SCRIPT = """
import sys
from pathlib import Path
from made_up_sites import run_children_until_killed

base = Path(sys.argv[1])
runs = [text.split("/") for text in sys.argv[2:]]
run_children_until_killed((point, method, base / point / method) for point, method in runs)
"""
LATER = [(site, number) for number in (3, 4) for site in SITES]

# Where the process is killed -> (round of the checkpoint that is left, what the resumed run still has to train).
POINTS = {
    "first round": (0, [("cedar", 1), *((site, 2) for site in SITES), *LATER]),
    "training": (1, [("birch", 2), ("cedar", 2), *LATER]),
    "vaulted": (1, [("birch", 2), ("cedar", 2), *LATER]),
    "outbox": (1, [("cedar", 2), *LATER]),
    "accepted": (1, [("birch", 2), ("cedar", 2), *LATER]),
    "checkpointed": (2, LATER),
    "assessing": (2, LATER),
    "writing": (2, LATER[3:]),
    "deploying": (4, []),
}
EVERY_METHOD = ("training", "outbox", "checkpointed")
RUNS = [(point, method) for point in POINTS for method in (METHODS if point in EVERY_METHOD else ("fedbn",))]

Finished = tuple[dict[str, Any], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    known: dict[str, Finished] = {}

    def run(method: str) -> Finished:
        if method not in known:
            folder = tmp_path_factory.mktemp(method) / "run"
            result = simulate(made_up_cohort(), made_up_study(method), folder, jobs=1)
            known[method] = without_seconds(result), tensors_on_disk(folder)
        return known[method]

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The (site, round) of every local training in this process."""
    calls = []
    original = participant.train_round

    def counted(model: Any, method: Any, split: Any, context: Any, **options: Any) -> Any:
        calls.append((context.site, context.round_number))
        return original(model, method, split, context, **options)

    monkeypatch.setattr(participant, "train_round", counted)
    return calls


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> Path:
    """One folder per point and method: runs that were ended by SIGKILL."""
    base = tmp_path_factory.mktemp("killed")
    done = run_script(SCRIPT, base, *(f"{point}/{method}" for point, method in RUNS))
    assert done.returncode == 0, done.stderr
    return base


@pytest.mark.parametrize(("point", "method"), RUNS)
def test_a_killed_run_resumes_to_the_same_result_bit_for_bit(
    point: str, method: str, killed: Path, trained: list[tuple[str, int]], uninterrupted: Any
) -> None:
    facts, tensors = uninterrupted(method)
    folder = killed / point / method
    left_at, still_to_train = POINTS[point]
    checkpoint = folder / "server" / "checkpoint.safetensors"
    assert checkpoint.exists() == bool(left_at)
    assert not left_at or int(read_tensors(checkpoint)[1]["round"]) == left_at
    trained.clear()
    events: list[Event] = []
    result = simulate(made_up_cohort(), made_up_study(method), folder, resume=True, jobs=1, listen=events.append)

    assert trained == still_to_train
    assert [event.round_number for event in events if event.kind == "resumed"] == ([left_at] if left_at else [])
    assert without_seconds(result) == facts
    assert same_bits(tensors_on_disk(folder), tensors)


def test_a_kill_leaves_no_litter_once_the_run_is_resumed(killed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed / "writing" / "fedbn", folder)
    # A half-written file beside the checkpoint: all a kill in the middle of a write leaves.
    (folder / "server" / ".checkpoint.safetensors.12345.part").write_bytes(b"half")
    simulate(made_up_cohort(), made_up_study("fedbn"), folder, resume=True, jobs=1)
    assert [path.name for path in folder.rglob("*.part")] == []


def test_resuming_a_finished_run_trains_nothing_and_gives_its_result_again(
    tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    study = made_up_study("fedbn", rounds=2)
    first = simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    before = tensors_on_disk(tmp_path / "run")
    trained.clear()
    again = simulate(made_up_cohort(), study, tmp_path / "run", resume=True, jobs=1)
    assert trained == []
    assert without_seconds(again) == without_seconds(first)
    assert same_bits(tensors_on_disk(tmp_path / "run"), before)
