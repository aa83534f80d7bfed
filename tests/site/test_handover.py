"""What a federation hands to a hospital that never trained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from made_up_sites import made_up_cohort, made_up_study

from crossward.federation.contract import State
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.storage import read_tensors, write_tensors
from crossward.site.handover import HANDOVER, read_handover, write_handover
from crossward.site.inprocess import simulate


def test_personal_tensors_are_the_mean_over_the_sites_that_have_them() -> None:
    own = {
        "alder": {"dse": torch.tensor([1.0, 2.0]), "bias": torch.tensor([0.5])},
        "birch": {"dse": torch.tensor([3.0, -4.0])},
    }
    state = State(3, {"dfe": torch.tensor([7.0]), "dse": torch.zeros(2), "bias": torch.zeros(1)}, own)
    common = state.common()
    assert common["dse"].tolist() == [2.0, -1.0]
    assert common["bias"].tolist() == [0.5]
    assert common["dfe"].tolist() == [7.0]
    assert state.tensors["dse"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedcode", "fdse", "local"])
def test_a_finished_run_hands_over_what_leaves_a_site_and_what_a_newcomer_needs(method: str, tmp_path: Path) -> None:
    study = made_up_study(method, rounds=2)
    simulate(made_up_cohort(["alder", "birch"]), study, tmp_path / "run", jobs=1)
    handover = read_handover(tmp_path / "run")
    assert handover.study == study
    assert handover.round_number in (1, 2)
    leaving = set(names_in(layout_of(study.model()), *(scope for scope in Scope if scope.leaves)))
    assert set(handover.tensors) == leaving | ({"prototypes"} if method == "fedcode" else set())
    assert read_handover(tmp_path / "run" / "server" / HANDOVER).tensors.keys() == handover.tensors.keys()


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_model_of_the_best_round(tmp_path: Path, seed: int) -> None:
    study = made_up_study("fdse", rounds=4, seed=seed)
    result = simulate(made_up_cohort(["alder", "birch"]), study, tmp_path / "run", jobs=1)
    handover = read_handover(tmp_path / "run")
    best = result["best_round"]
    assert handover.round_number == best
    vaults = [
        read_tensors(tmp_path / "run" / "sites" / site / "vault" / f"model-{best:04d}.safetensors")[0]
        for site in ("alder", "birch")
    ]
    for name, tensor in handover.tensors.items():
        mean = torch.stack([vault[name].double() for vault in vaults]).mean(0).float()
        assert torch.equal(tensor, mean), name


def test_a_folder_without_it_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="finished run"):
        read_handover(tmp_path)
    with pytest.raises(BadInput, match="finished run"):
        read_handover(tmp_path / "nothing")
    write_tensors(tmp_path / HANDOVER, {"a": torch.tensor([math.pi])}, {"format": "something else"})
    with pytest.raises(BadInput, match="not what a federation hands over"):
        read_handover(tmp_path)


def test_it_is_found_in_a_jobs_download(tmp_path: Path) -> None:
    study = made_up_study("fedavg")
    state = study.method.start(study.task, study.model())
    place = tmp_path / "job-results" / "some-job" / "workspace" / "crossward"
    place.mkdir(parents=True)
    write_handover(place / HANDOVER, study, state)
    assert read_handover(tmp_path).study == study
