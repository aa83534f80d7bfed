"""The same federation in this process, in FLARE's simulator and in real FLARE processes; and what stays at a site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossward.federation.scopes import Scope, names_in, tensors_digest
from crossward.federation.storage import read_json, read_tensors
from crossward.flare.jobs import export
from crossward.flare.outcome import Outcome
from crossward.flare.simulator import simulate_job
from crossward.site.declaration import Declaration
from crossward.site.handover import read_handover
from crossward.site.journal import read_journal
from crossward.site.study import Study
from tests.flare.real import TIMING, Hospitals, largest_difference, small_study, tensors_in, watched

pytestmark = [pytest.mark.slow, pytest.mark.flare]

EQUAL = 1e-6


@pytest.mark.parametrize("method", ["f2dc", "rfeddis", "fedcode", "fdse"])
def test_in_process_simulator_and_real_processes_give_the_same_model(
    hospitals: Hospitals, method: str, tmp_path: Path
) -> None:
    study = small_study(method, hospitals.cohort)
    alone = hospitals.in_process(study)

    outcome, events = hospitals.run(study)
    assert outcome.status == "completed", outcome.reason
    assert largest_difference(alone, hospitals.tensors(outcome.run)) <= EQUAL
    assert [event.round_number for event in events if event.kind == "closed"] == [1, 2, 3]
    assert {event.site for event in events if event.kind == "trained"} == set(hospitals.system.sites)
    result = outcome.result
    assert result is not None
    assert set(result["sites"]) == set(hospitals.system.sites)
    assert all(facts["accuracy"] is not None for facts in result["sites"].values())
    assert str(hospitals.data) not in json.dumps(result)
    check_what_left(hospitals, study, outcome.job)
    check_what_is_personal(hospitals, study, outcome)
    handover = read_handover(hospitals.run_folder("server", outcome.run))
    assert handover.study == study

    job = export(study, tmp_path / "job", timing=TIMING, min_sites=2)
    simulate_job(job, data=hospitals.pack, sites=hospitals.system.sites, out=tmp_path / "out", timeout=240)
    state = tmp_path / "out" / "state"
    (run,) = (state / "runs").iterdir()
    files = {"server": run / "checkpoint.safetensors"}
    for site in hospitals.system.sites:
        files[site] = state / "sites" / site / "runs" / run.name / "vault" / "deployed.safetensors"
    assert largest_difference(alone, tensors_in(files)) <= EQUAL


def check_what_left(hospitals: Hospitals, study: Study, job: str) -> None:
    """Every site sent what was declared for each task, and nothing else: names, shapes, bytes."""
    declaration = Declaration(study)
    local = set(names_in(declaration.algebra.layout, Scope.LOCAL))
    assert local
    values = sum(spec.numel for spec in declaration.algebra.sent.values())
    for site in hospitals.system.sites:
        journal = read_journal(hospitals.system.state(site) / "journal.jsonl")
        mine = [entry for entry in journal if entry["job"] == job]
        assert [entry["task"] for entry in mine] == ["join", "train", "train", "train", "evaluate", "finish"]
        assert all(entry["left"] for entry in mine)
        updates = {name.removeprefix("update/"): shape for name, shape, _ in mine[1]["items"] if "update/" in name}
        assert updates == {name: list(spec.shape) for name, spec in declaration.algebra.sent.items()}
        assert not local & set(updates)
        assert 4 * values <= mine[1]["bytes"] <= 4 * values + 1024


def check_what_is_personal(hospitals: Hospitals, study: Study, outcome: Outcome) -> None:
    """Every site holds the personal tensors that the server made for it, and no other site's."""
    names = names_in(Declaration(study).algebra.layout, Scope.PERSONAL)
    assert (study.method.name == "fdse") == bool(names)
    assert outcome.result is not None
    sent = outcome.result["personal"]
    sites = hospitals.system.sites if names else ()
    assert set(sent) == set(sites)
    assert len(set(sent.values())) == len(sites)
    for site in sites:
        folder = hospitals.run_folder(site, outcome.run)
        received = read_tensors(folder / "vault" / f"model-{outcome.best_round:04d}.safetensors")[0]
        assert tensors_digest({name: received[name] for name in names}) == sent[site]
        assert read_json(folder / "result.json")["personal"] == sent[site]


def test_local_tensors_survive_a_restart_of_everything(hospitals: Hospitals) -> None:
    study = small_study("rfeddis", hospitals.cohort, rounds=4, steps=20)
    with hospitals.console() as console:
        stopped, _ = watched(console, hospitals.job(study), {("closed", 2): console.abort})
    assert stopped.status == "aborted"
    vault = hospitals.run_folder("hospital-a", stopped.run) / "vault"
    kept = {path.name: path.read_bytes() for path in vault.glob("local-*.safetensors")}
    assert kept
    assert vault.stat().st_mode & 0o777 == 0o700

    hospitals.system.stop()
    assert not hospitals.system.pids()
    hospitals.system.start()
    hospitals.system.wait_until_ready(120)
    assert {path.name: path.read_bytes() for path in vault.glob("local-*.safetensors")} == kept

    resumed = export(study, hospitals.folder / "resumed", timing=TIMING, min_sites=2, resume=stopped.run)
    with hospitals.console() as console:
        outcome, events = watched(console, resumed, {})
    assert outcome.status == "completed", outcome.reason
    assert outcome.run == stopped.run
    started = next(event for event in events if event.kind == "started")
    assert started.figures["resumed_after"] >= 2
    assert largest_difference(hospitals.in_process(study), hospitals.tensors(outcome.run)) <= EQUAL
