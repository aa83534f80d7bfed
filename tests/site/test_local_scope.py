from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_sites import SITES, made_up_cohort, made_up_study, made_up_task
from torch import nn

from crossward.federation.contract import Payload, Report
from crossward.federation.coordinator import Coordinator
from crossward.federation.storage import read_tensors
from crossward.methods.registry import create
from crossward.site.inprocess import Event, simulate
from crossward.site.participant import Participant


def batchnorm_names() -> set[str]:
    """By module type, from a bare walk over the model."""
    model = create("fedbn").build(made_up_task())
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for name in module.state_dict()
    }


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Payload | Report]:
    """Everything that passes between sites and server."""
    passed: list[Payload | Report] = []
    accept, payload = Coordinator.accept, Coordinator.payload

    def spy_accept(self: Coordinator, report: Report) -> None:
        passed.append(report)
        accept(self, report)

    def spy_payload(self: Coordinator, site: str) -> Payload:
        passed.append(payload(self, site))
        return payload(self, site)

    monkeypatch.setattr(Coordinator, "accept", spy_accept)
    monkeypatch.setattr(Coordinator, "payload", spy_payload)
    return passed


def vault_file(folder: Path, site: str, name: str) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "sites" / site / "vault" / f"{name}.safetensors")[0]


def test_fedbn_keeps_batchnorm_at_the_site(tmp_path: Path, messages: list[Payload | Report]) -> None:
    names = batchnorm_names()
    simulate(made_up_cohort(), made_up_study("fedbn", rounds=2), tmp_path / "run", jobs=1)
    assert {type(message) for message in messages} == {Payload, Report}
    for message in messages:
        tensors = message.update if isinstance(message, Report) else message.tensors
        assert tensors.keys().isdisjoint(names)
        assert any(name.endswith("weight") for name in tensors)
    sent, _ = read_tensors(tmp_path / "run" / "server" / "checkpoint.safetensors")
    assert {name.removeprefix("*/") for name in sent}.isdisjoint(names)

    models = {site: vault_file(tmp_path / "run", site, "model-0002") for site in SITES}
    for one, other in combinations(SITES, 2):
        for name in models[one]:
            equal = torch.equal(models[one][name], models[other][name])
            counter = name.endswith("num_batches_tracked")
            assert equal == (name not in names or counter), (one, other, name)


def test_after_resuming_from_disk_a_site_has_its_own_batchnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = batchnorm_names()
    folder = tmp_path / "run"

    def stop(event: Event) -> None:
        if (event.kind, event.round_number) == ("round", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(made_up_cohort(), made_up_study("fedbn"), folder, jobs=1, listen=stop)
    kept = {site: vault_file(folder, site, "local-0002") for site in SITES}
    installed: dict[str, dict[str, torch.Tensor]] = {}
    receive = Participant.receive

    def spy(self: Participant, payload: Payload) -> Any:
        tally = receive(self, payload)
        if payload.round_number == 2:
            installed[self.name] = vault_file(folder, self.name, "model-0002")
        return tally

    monkeypatch.setattr(Participant, "receive", spy)
    simulate(made_up_cohort(), made_up_study("fedbn"), folder, resume=True, jobs=1)
    assert installed.keys() == set(SITES)
    for site in SITES:
        assert kept[site].keys() == names
        assert all(torch.equal(installed[site][name], tensor) for name, tensor in kept[site].items())


def test_an_absent_site_keeps_its_vault_and_still_receives_and_is_evaluated(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    study = made_up_study("fedbn", participation=0.5, rounds=4)
    invited: dict[int, list[str]] = {}
    local: dict[tuple[int, str], dict[str, bytes]] = {}

    def listen(event: Event) -> None:
        if event.kind == "round":
            invited[event.round_number] = event.figures["invited"]
        if event.kind == "aggregated":
            for site in SITES:
                vault = folder / "sites" / site / "vault"
                local[event.round_number, site] = {p.name: p.read_bytes() for p in vault.glob("local-*")}
                assert (vault / f"model-{event.round_number:04d}.safetensors").exists()

    result = simulate(made_up_cohort(), study, folder, jobs=1, listen=listen)
    assert {len(names) for names in invited.values()} == {2}
    absences = [(number, site) for number in (2, 3, 4) for site in SITES if site not in invited[number]]
    assert len(absences) == 3
    for number, site in absences:
        assert local[number, site] == local[number - 1, site]
    for entry in result["rounds"]:
        for site, facts in entry["sites"].items():
            assert facts["status"] == ("reported" if site in invited[entry["round"]] else "absent")
            assert facts["val_accuracy"] is not None
    assert all(site["accuracy"] is not None for site in result["sites"].values())


def test_an_absent_site_installs_its_own_last_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = simulate(made_up_cohort(), made_up_study("fedbn", participation=0.5, rounds=4), folder, jobs=1)
    last = result["rounds"][-1]["sites"]
    (absent,) = (site for site in SITES if last[site]["status"] == "absent")
    vault = folder / "sites" / absent / "vault"
    newest = max(vault.glob("local-*"))
    assert newest.name < "local-0004"
    own = read_tensors(newest)[0]
    received = read_tensors(vault / "model-0004.safetensors")[0]
    assert all(torch.equal(received[name], tensor) for name, tensor in own.items())


def test_the_same_sites_are_invited_whatever_order_they_are_listed_in(tmp_path: Path) -> None:
    def invitations(names: tuple[str, ...], folder: Path) -> list[set[str]]:
        found: list[set[str]] = []

        def listen(event: Event) -> None:
            if event.kind == "round":
                found.append(set(event.figures["invited"]))

        simulate(
            made_up_cohort(names), made_up_study("local", participation=0.5, steps=1), folder, jobs=1, listen=listen
        )
        return found

    assert invitations(SITES, tmp_path / "one") == invitations(SITES[::-1], tmp_path / "other")


def test_a_round_completes_without_a_failing_site_where_the_quorum_allows(tmp_path: Path) -> None:
    cohort = made_up_cohort()
    clean = cohort.sites["birch"].train.images.clone()
    failed = []

    def listen(event: Event) -> None:
        if event.kind == "round":
            cohort.sites["birch"].train.images[:] = torch.nan if event.round_number == 2 else clean
        if event.kind == "aggregated":
            cohort.sites["birch"].train.images[:] = clean
        if event.kind == "failed":
            failed.append((event.round_number, event.site))

    result = simulate(cohort, made_up_study("fedbn", rounds=3, quorum=2), tmp_path / "run", jobs=1, listen=listen)
    assert failed == [(2, "birch")]
    first, second, third = (entry["sites"] for entry in result["rounds"])
    assert second["birch"]["status"] == "failed"
    assert "birch, round 2: the loss is not a finite number" in second["birch"]["reason"]
    assert {facts["status"] for facts in (*first.values(), *third.values())} == {"reported"}
    assert [second[site]["status"] for site in ("alder", "cedar")] == ["reported", "reported"]
    assert result["rounds"][1]["bytes_up"] * 3 == result["rounds"][0]["bytes_up"] * 2


def test_the_survivors_alone_make_the_model(tmp_path: Path, messages: list[Payload | Report]) -> None:
    """The mean over the two that reported, weighted by their images, from the reports themselves."""
    cohort = made_up_cohort()
    images = cohort.sites["birch"].train.images
    clean = images.clone()
    images[:] = torch.nan
    folder = tmp_path / "run"

    def mend(event: Event) -> None:
        if event.kind == "failed":
            images[:] = clean

    simulate(cohort, made_up_study("fedavg", rounds=1, quorum=2), folder, jobs=1, listen=mend)
    reports = [message for message in messages if isinstance(message, Report)]
    assert sorted(report.site for report in reports) == ["alder", "cedar"]
    start = create("fedavg").build(made_up_task(rounds=1)).state_dict()
    after, metadata = read_tensors(folder / "server" / "checkpoint.safetensors")
    assert metadata["round"] == "1"
    for name, tensor in after.items():
        name = name.removeprefix("*/")
        mean = sum(report.update[name].double() for report in reports) / 2
        assert torch.allclose(tensor.double(), start[name].double() + mean, rtol=1e-6, atol=1e-7)


def test_a_site_that_fails_in_an_unforeseen_way_is_named_and_the_quorum_still_holds(tmp_path: Path) -> None:
    """One colour image too many channels: PyTorch's own error, which knows neither site nor round."""
    cohort = made_up_cohort()
    train = cohort.sites["birch"].train
    clean = train.images

    def listen(event: Event) -> None:
        if event.kind == "round":
            object.__setattr__(train, "images", clean.expand(-1, 2, -1, -1))
        if event.kind in ("failed", "trained") and event.site == "cedar":
            object.__setattr__(train, "images", clean)

    result = simulate(cohort, made_up_study("fedavg", rounds=1, quorum=2), tmp_path / "run", jobs=1, listen=listen)
    facts = result["rounds"][0]["sites"]["birch"]
    assert facts["status"] == "failed"
    assert "birch, round 1" in facts["reason"]
