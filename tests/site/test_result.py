from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_sites import (
    CLASSES,
    ROUNDS,
    SITES,
    cohort_of,
    made_up_cohort,
    made_up_site,
    made_up_split,
    made_up_study,
    made_up_task,
)
from torch import nn

from crossward.evaluate.facts import read_result, write_result
from crossward.federation.storage import read_tensors
from crossward.methods.registry import create
from crossward.site.gathered import gathered
from crossward.site.inprocess import Event, simulate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[Event]]:
    folder = tmp_path_factory.mktemp("result") / "run"
    events: list[Event] = []
    return simulate(made_up_cohort(), made_up_study(), folder, jobs=1, listen=events.append), folder, events


def sent_values(model: nn.Module, *, batchnorm: bool) -> int:
    """Floating-point values of a model that leave the site, counted by a bare walk."""
    count = 0
    for module in model.modules():
        if not batchnorm and isinstance(module, nn.BatchNorm2d):
            continue
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        count += sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    return count


def test_the_result_has_the_agreed_fields(run: tuple[dict[str, Any], Path, list[Event]], tmp_path: Path) -> None:
    result, _, _ = run
    wanted = ("method", "data", "options", "rounds", "sites", "summary", "privacy", "versions", "seconds")
    assert result.keys() >= {*wanted, "best_round", "cross_site", "warnings"}
    assert result["method"] == "fedavg"
    assert [entry["round"] for entry in result["rounds"]] == list(range(1, ROUNDS + 1))
    for entry in result["rounds"]:
        assert entry.keys() >= {"round", "seconds", "bytes_up", "bytes_down", "sites"}
        assert entry["seconds"] > 0
        assert entry["sites"].keys() == set(SITES)
        for facts in entry["sites"].values():
            assert facts["status"] == "reported"
            assert facts["loss"] > 0
            assert 0 <= facts["train_accuracy"] <= 1
    for name, site in result["sites"].items():
        assert (site["n_train"], site["n_val"], site["n_test"]) == (20, 9, 9)
        assert site["scanner"] == f"scanner {SITES.index(name)}"
    assert result["summary"].keys() >= {"avg", "std", "all", "worst_site"}
    assert result["privacy"] == {"secagg": False, "dp": False, "epsilon": dict.fromkeys(SITES)}
    assert result["data"] == {"path": "made up", "kind": "pack", "classes": list(CLASSES), "phantom": True, "size": 8}
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result


def test_the_model_learns(run: tuple[dict[str, Any], Path, list[Event]]) -> None:
    """Chance is one in three; a pipeline that mixes up images and labels stays there."""
    assert run[0]["summary"]["avg"] > 0.6


@pytest.mark.parametrize(("method", "batchnorm"), [("fedavg", True), ("fedprox", True), ("fedbn", False)])
def test_bytes_are_what_the_sent_tensors_weigh(tmp_path: Path, method: str, batchnorm: bool) -> None:
    result = simulate(made_up_cohort(), made_up_study(method, rounds=1, steps=1), tmp_path / "run", jobs=1)
    weight = 4 * sent_values(create(method).build(made_up_task()), batchnorm=batchnorm) * len(SITES)
    assert result["rounds"][0]["bytes_up"] == weight
    assert result["rounds"][0]["bytes_down"] == weight


def test_local_training_sends_nothing(tmp_path: Path) -> None:
    result = simulate(made_up_cohort(), made_up_study("local", rounds=2, steps=1), tmp_path / "run", jobs=1)
    assert [(entry["bytes_up"], entry["bytes_down"]) for entry in result["rounds"]] == [(0, 0), (0, 0)]
    assert read_tensors(tmp_path / "run" / "server" / "checkpoint.safetensors")[0] == {}


def test_the_deployed_file_is_the_model_that_was_scored(run: tuple[dict[str, Any], Path, list[Event]]) -> None:
    result, folder, _ = run
    cohort = made_up_cohort()
    for row, name in enumerate(SITES):
        model = create("fedavg").build(made_up_task())
        model.load_state_dict(read_tensors(folder / "sites" / name / "vault" / "deployed.safetensors")[0])
        model.eval()
        for column, other in enumerate(SITES):
            test = cohort.sites[other].test
            with torch.no_grad():
                accuracy = (model(test.images).logits.argmax(1) == test.labels).double().mean().item()
            assert result["cross_site"]["accuracy"][row][column] == pytest.approx(accuracy)
        assert result["cross_site"]["accuracy"][row][row] == pytest.approx(result["sites"][name]["accuracy"])
    assert result["cross_site"]["sites"] == list(SITES)


def test_hospitals_with_the_same_scanner_are_one_domain_in_process_and_gathered(tmp_path: Path) -> None:
    """The figures follow from the accuracies and the scanners; a site that names none is a domain of its own."""
    sites = made_up_cohort().sites
    scanners = dict(zip(SITES, ("Acme", "Acme", ""), strict=True))
    cohort = cohort_of({name: replace(site, scanner=scanners[name]) for name, site in sites.items()})
    study = made_up_study(rounds=1, steps=2)
    facts = simulate(cohort, study, tmp_path / "run", jobs=1)
    matrix = facts["cross_site"]
    (aa, ab, ac), (ba, bb, bc), (ca, cb, cc) = matrix["accuracy"]
    assert matrix["domains"] == ["Acme", "Acme", "cedar"]
    assert matrix["LTA"] == pytest.approx((aa + bb + cc) / 3)
    assert matrix["GASA"] == pytest.approx(((aa + ab) / 2 + (ba + bb) / 2 + cc) / 3)
    assert matrix["ATA"] == pytest.approx({"Acme": (ac + bc) / 2, "cedar": (ca + cb) / 2})
    assert matrix["GATA"] == pytest.approx(((ac + bc) / 2 + (ca + cb) / 2) / 2)
    assert matrix["CPRR"] == pytest.approx(matrix["GATA"] / matrix["GASA"])
    whole = gathered(facts, cohort, study, {name: tmp_path / "run" / "sites" / name for name in SITES})
    assert whole["cross_site"] == matrix


def test_the_deployed_model_is_that_of_the_best_round(run: tuple[dict[str, Any], Path, list[Event]]) -> None:
    """Best on all validation images together, the latest of equals; only its statistics were refreshed."""
    result, folder, events = run
    scores = {event.round_number: event.figures["val_accuracy"] for event in events if event.kind == "aggregated"}
    assert scores.keys() == set(range(1, ROUNDS + 1))
    pooled = {
        entry["round"]: sum(facts["val_accuracy"] * 9 for facts in entry["sites"].values()) / 27
        for entry in result["rounds"]
    }
    assert scores == pytest.approx(pooled)
    best = result["best_round"]
    assert scores[best] == max(scores.values())
    assert best == max(number for number, score in scores.items() if score == scores[best])
    for name in SITES:
        vault = folder / "sites" / name / "vault"
        deployed = read_tensors(vault / "deployed.safetensors")[0]
        received = read_tensors(vault / f"model-{best:04d}.safetensors")[0]
        for key, tensor in received.items():
            if "running_" not in key and "num_batches" not in key:
                assert torch.equal(deployed[key], tensor)


def test_the_best_round_need_not_be_the_last(tmp_path: Path) -> None:
    """Labels are exchanged after round 1, so later models are worse, and round 1 is what is deployed."""
    cohort = made_up_cohort()
    snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def listen(event: Event) -> None:
        if event.kind == "aggregated":
            path = tmp_path / "run" / "sites" / "alder" / "vault" / f"model-{event.round_number:04d}.safetensors"
            snapshots[event.round_number] = read_tensors(path)[0]
        if (event.kind, event.round_number) == ("aggregated", 1):
            for site in cohort.sites.values():
                site.train.labels[:] = (site.train.labels + 1) % len(CLASSES)

    study = made_up_study("fedbn", epochs=4, schedule="constant")
    result = simulate(cohort, study, tmp_path / "run", jobs=1, listen=listen)
    best = result["best_round"]
    assert best == 1
    deployed = read_tensors(tmp_path / "run" / "sites" / "alder" / "vault" / "deployed.safetensors")[0]
    name = "head.linear.weight"
    assert torch.equal(deployed[name], snapshots[best][name])
    assert not torch.equal(deployed[name], snapshots[ROUNDS][name])


def test_events_come_in_order(run: tuple[dict[str, Any], Path, list[Event]]) -> None:
    _, _, events = run
    expected = [
        step
        for number in range(1, ROUNDS + 1)
        for step in [("round", number, None), *(("trained", number, s) for s in SITES), ("aggregated", number, None)]
    ]
    assert [(event.kind, event.round_number, event.site) for event in events] == expected


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "local"])
def test_poor_sites_give_a_result_without_nan(tmp_path: Path, method: str) -> None:
    """One class only at one site, no validation images at another, three test images of one class at a third."""
    one_class = replace(made_up_site("alder"), train=made_up_split(20, seed=1, classes=1))
    one_class = replace(one_class, val=made_up_split(4, seed=2, classes=1), test=made_up_split(4, seed=3, classes=1))
    no_validation = made_up_site("birch", val=0, number=1)
    few = made_up_site("cedar", train=5, val=1, test=0, number=2)
    cohort = cohort_of({site.name: site for site in (one_class, no_validation, few)})
    result = simulate(cohort, made_up_study(method, rounds=2), tmp_path / "run", jobs=1)
    json.dumps(result, allow_nan=False)
    write_result(tmp_path / "result.json", result)
    assert result["sites"]["alder"]["auc"] is None
    assert result["sites"]["cedar"]["accuracy"] is None
    assert result["summary"]["left_out"] == ["cedar"]
    last = result["rounds"][-1]["sites"]
    assert last["birch"]["val_accuracy"] is None
    assert last["alder"]["val_accuracy"] is not None
    assert [row[2] for row in result["cross_site"]["accuracy"]] == [None, None, None]


def test_without_any_validation_images_the_last_round_is_deployed(tmp_path: Path) -> None:
    result = simulate(made_up_cohort(val=0), made_up_study(rounds=3, steps=1), tmp_path / "run", jobs=1)
    assert result["best_round"] == 3
    assert all(facts["val_accuracy"] is None for entry in result["rounds"] for facts in entry["sites"].values())


def test_everything_that_is_received_is_counted_under_partial_participation(tmp_path: Path) -> None:
    """Every site receives every result, also one that was not invited to train."""
    study = made_up_study(rounds=2, steps=1, participation=0.5)
    result = simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    model = 4 * sent_values(create("fedavg").build(made_up_task()), batchnorm=True)
    assert [entry["bytes_up"] for entry in result["rounds"]] == [2 * model, 2 * model]
    assert sum(entry["bytes_down"] for entry in result["rounds"]) >= 2 * model + 3 * model
