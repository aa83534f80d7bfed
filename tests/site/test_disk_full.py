from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_up_sites import made_up_cohort, made_up_study, made_up_task, same_bits, tensors_on_disk, without_seconds

from crossward.federation.contract import Report
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import StorageFailure
from crossward.federation.scopes import tensors_digest
from crossward.federation.storage import read_tensors
from crossward.methods.registry import create
from crossward.site.inprocess import Event, simulate


def fill(path: Path) -> None:
    """Write until the disk has no byte left."""
    with path.open("wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            while True:
                try:
                    if not stream.write(bytes(size)):
                        break
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
        os.fsync(stream.fileno())


def fill_at(kind: str, round_number: int, site: str | None, ballast: Path) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if (event.kind, event.round_number, event.site) == (kind, round_number, site):
            fill(ballast)

    return listen


@pytest.mark.parametrize(
    ("kind", "site", "file"),
    [("trained", "cedar", "checkpoint.safetensors"), ("round", None, "local-0003.safetensors")],
    ids=["checkpoint", "vault"],
)
def test_a_full_disk_costs_nothing_but_the_round(
    small_disk: Path, tmp_path: Path, kind: str, site: str | None, file: str
) -> None:
    study = made_up_study("fedbn")
    expected = simulate(made_up_cohort(), study, tmp_path / "whole", jobs=1)
    folder, ballast = small_disk / "run", small_disk / "ballast"
    with pytest.raises(StorageFailure, match=f"disk full while writing .*{file}.*free some space and resume"):
        simulate(made_up_cohort(), study, folder, jobs=1, listen=fill_at(kind, 3, site, ballast))
    _, metadata = read_tensors(folder / "server" / "checkpoint.safetensors")
    assert metadata["round"] == "2"
    assert not list(folder.rglob("*.part")), "what was half written would keep the disk full"

    ballast.unlink()
    result = simulate(made_up_cohort(), study, folder, resume=True, jobs=1)
    assert without_seconds(result) == without_seconds(expected)
    assert same_bits(tensors_on_disk(folder), tensors_on_disk(tmp_path / "whole"))


def test_a_full_disk_at_the_very_start_is_said_and_leaves_nothing_to_clear_up(small_disk: Path) -> None:
    study = made_up_study("local", rounds=1, steps=1)
    ballast = small_disk / "ballast"
    fill(ballast)
    with pytest.raises(StorageFailure, match="disk full"):
        simulate(made_up_cohort(), study, small_disk / "run", jobs=1)
    ballast.unlink()
    assert simulate(made_up_cohort(), study, small_disk / "run", jobs=1)["rounds"]


def test_a_round_that_could_not_be_stored_can_be_closed_again(small_disk: Path) -> None:
    """A server that stays up and frees space closes the same round again: the reports must not be lost."""
    method, task = create("fedavg"), made_up_task()
    model = method.build(task)
    coordinator = Coordinator(
        small_disk / "server", method.algebra(task, model), method.start(task, model), sites=["alder"], rounds=1, seed=0
    )
    start = coordinator.payload("alder").tensors
    update = {name: torch.ones_like(tensor) for name, tensor in start.items()}
    coordinator.accept(Report("alder", 1, tensors_digest(start), update, {"n": torch.ones(1).double().numpy()}))
    ballast = small_disk / "ballast"
    fill(ballast)
    with pytest.raises(StorageFailure, match="disk full"):
        coordinator.close_round({})
    assert coordinator.state.round_number == 0
    ballast.unlink()
    after = coordinator.close_round({}).tensors
    assert all(torch.allclose(after[name], tensor + 1) for name, tensor in start.items())
