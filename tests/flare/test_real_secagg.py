"""Secure aggregation on real FLARE processes: five hospitals whose kits take no job without it."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from crossward.federation.contract import Plan, Report
from crossward.federation.scopes import Scope, names_in, tensors_digest
from crossward.federation.storage import read_json, read_tensors
from crossward.flare.explain import explain
from crossward.flare.jobs import export
from crossward.flare.kits import SERVER, provision
from crossward.flare.places import server_roots, site_credentials
from crossward.flare.simulator import simulate_job
from crossward.flare.system import JOB
from crossward.privacy.secagg.identity import Untrusted, check_signed
from crossward.privacy.secagg.settings import Settings
from crossward.site.declaration import Declaration
from crossward.site.handover import read_handover
from crossward.site.journal import read_journal
from crossward.site.study import Study
from crossward.site.troubles import Code
from tests.flare.faults import once, processes, run, send, settle
from tests.flare.real import TIMING, Hospitals, Timing, hospitals_in, largest_difference, small_study, tensors_in
from tests.flare.recording import Matches, Recording, Secret, forget, labels_of, scores_of, search

pytestmark = [pytest.mark.slow, pytest.mark.flare]

SITES = A, B, C, D, E = tuple(f"hospital-{letter}" for letter in "abcde")
EQUAL = 1e-6
PATIENT = Timing(join=300, round=600, grace=60)
WITHOUT_ONE = Timing(join=300, round=600, grace=10)
TEMPLATE = Path(__file__).resolve().parents[2] / "provisioning" / "project.yml"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def five(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    folder = tmp_path_factory.mktemp("five")
    with hospitals_in(folder, sites=SITES, secure_aggregation=True, record=place) as made:
        yield made


@pytest.fixture
def record(five: Hospitals, place: Path) -> Path:
    """The recorder's folder, with nothing of earlier tests."""
    settle(five)
    forget(place)
    return place


def masked(method: str, hospitals: Hospitals, **options: Any) -> Study:
    return small_study(method, hospitals.cohort, **options).masked(Settings())


def left(hospitals: Hospitals, site: str, job: str) -> list[dict[str, Any]]:
    """What the site's journal says that it let out in a job."""
    journal = read_journal(hospitals.system.state(site) / "journal.jsonl")
    return [entry for entry in journal if entry["job"] == job]


def steps(hospitals: Hospitals, site: str, job: str, *, number: int) -> list[str]:
    """The tasks of one round that the site answered in a job."""
    return [entry["task"] for entry in left(hospitals, site, job) if entry.get("round") == number]


def reports(record: Path) -> dict[tuple[str, int], list[Report]]:
    """What sites trained, by site and round: one for every time."""
    found: dict[tuple[str, int], list[Report]] = {}
    for path in sorted(record.glob("reports/*/*")):
        update, metadata = read_tensors(path)
        number = int(path.name.split("-")[1])
        tally = {key: np.array(value) for key, value in json.loads(metadata["tally"]).items()}
        report = Report(metadata["site"], number, metadata["model"], update, tally)
        found.setdefault((report.site, number), []).append(report)
    return found


def results(hospitals: Hospitals, name: str) -> list[Secret]:
    return [scores_of(site, read_json(hospitals.run_folder(site, name) / "result.json")) for site in SITES]


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> int:
    """How many values of tensors differ by more than they may, beside the largest value of their tensor."""
    assert one.keys() == other.keys()
    return sum(int(((one[name] - other[name]).abs() > EQUAL * one[name].abs().max()).sum()) for name in one)


def cut_off(history: Sequence[Mapping[str, Any]]) -> float:
    """How many products were outside the range that was agreed on: sums have these as large as they could be."""
    return float(sum(entry["secagg"]["cut_off"] for entry in history))


STEPS = [
    ("begin", {"code", "round", "shares"}),
    ("contribute", {"code", "round", "upload", "vector"}),
    ("survivors", {"code", "round", "opening"}),
]
"""What leaves a site for one sum that nobody drops out of."""


def test_a_masked_run_gives_the_open_model_and_only_messages_of_the_protocol_leave(
    five: Hospitals, record: Path, tmp_path: Path
) -> None:
    study = masked("fedavg", five, rounds=2)
    story = run(five, study, timing=PATIENT)
    outcome = story.outcome
    assert outcome.status == "completed", outcome.reason
    real, alone = five.tensors(outcome.run), five.in_process(study)
    assert largest_difference(alone, real) <= EQUAL
    assert largest_difference(five.in_process(small_study("fedavg", five.cohort, rounds=2)), real) <= EQUAL

    assert outcome.result is not None
    assert [entry["secagg"]["sites"] for entry in outcome.result["rounds"]] == [list(SITES)] * 2
    for entry in outcome.result["rounds"]:
        assert {json.dumps(facts) for facts in entry["sites"].values()} == {'{"status": "summed", "received": true}'}
    own = [read_json(five.run_folder(site, outcome.run) / "result.json") for site in SITES]
    images, correct = (round(sum(weight(facts) for facts in own)) for weight in (_images, _correct))
    assert outcome.result["privacy"]["test"]["n"] == images
    assert outcome.result["privacy"]["test"]["accuracy"] == pytest.approx(correct / images, abs=1e-12)

    keys = [("join", {"code", "hello"}), ("roster", {"code", "joined"}), ("keys", {"code"})]
    train, evaluate = ("train", {"code", "round"}), ("evaluate", {"code", "round"})
    rounds = [train, *STEPS, *STEPS, train, *STEPS]
    expected = [*keys, *rounds, evaluate, *STEPS, ("finish", {"code", "round"}), *STEPS]
    for site in SITES:
        entries = left(five, site, outcome.job)
        assert [(entry["task"], {name for name, *_ in entry["items"]}) for entry in entries] == expected
        shapes = {name: shape for entry in entries for name, shape, _ in entry["items"] if shape}
        assert set(shapes) == {"vector"}

    recording = Recording.read(record)
    assert len(recording.answers) == len(SITES) * len(expected)
    assert {(secret.site) for secret in recording.secrets} == set(SITES)
    labels = [labels_of(site, five.cohort.classes, five.cohort.sites[site].train.labels.tolist()) for site in SITES]
    matches = search(recording, [*results(five, outcome.run), *labels])
    assert not any(matches.found().values()), matches
    assert min(matches.sought().values()) >= 20, matches
    check_that_the_search_finds(recording, record)

    job = export(study, tmp_path / "job", timing=TIMING, min_sites=3)
    simulate_job(job, data=five.pack, sites=SITES, out=tmp_path / "out", timeout=240)
    state = tmp_path / "out" / "state"
    (made,) = (state / "runs").iterdir()
    files = {SERVER: made / "checkpoint.safetensors"}
    for site in SITES:
        files[site] = state / "sites" / site / "runs" / made.name / "vault" / "deployed.safetensors"
    assert largest_difference(alone, tensors_in(files)) <= EQUAL


def _images(facts: Mapping[str, Any]) -> float:
    return float(facts["n_test"])


def _correct(facts: Mapping[str, Any]) -> float:
    return float(facts["n_test"] * facts["accuracy"])


def check_that_the_search_finds(recording: Recording, record: Path) -> None:
    """The same search where a site's outbox and a vector without masks are among what was received."""
    outbox = b"\0".join(path.read_bytes() for path in record.glob("reports/*/*"))
    bare = {"answer/vector": next(words.view(np.uint8) for words in recording.vectors if len(words) > 1000)}
    shown = replace(recording, received=recording.received + outbox, answers=[*recording.answers, bare])
    found: Matches = search(shown)
    assert found.float32[0] == found.float32[1] > 10_000
    assert found.texts[0] >= len(reports(record))
    assert found.correlated[0] > 0


def test_a_job_without_it_is_refused_by_every_site_before_data_are_read(five: Hospitals, record: Path) -> None:
    images = five.data / A / f"{A}.npz"
    images.rename(record / images.name)
    try:
        story = run(five, small_study("fedavg", five.cohort, rounds=1), timing=PATIENT)
        with five.console() as console:
            told = {line.site: line for line in explain(console, story.outcome.job)}
    finally:
        (record / images.name).rename(images)
    assert (story.outcome.status, story.outcome.code) == ("failed", Code.OPEN_JOB)
    assert len(story.outcome.jobs) == 1, "what a person has to mend is not tried again"
    for site in SITES:
        assert story.codes("refused", site) == {Code.OPEN_JOB}
        assert not five.run_folder(site, story.outcome.run).exists()
        ((entry),) = left(five, site, story.outcome.job)
        assert [name for name, *_ in entry["items"]] == ["code"]
        assert "demands secure aggregation" in told[site].cause
        assert "secure_aggregation in the site's local/privacy.json" in told[site].next_step
    assert not story.of("round")


def test_a_sum_goes_on_without_a_halted_site_and_a_run_after_a_killed_one_and_nothing_is_trained_again(
    five: Hospitals, record: Path
) -> None:
    study = masked("fedavg", five, rounds=4)
    # With the seed of the run before, sites had trained the same in round 2, and were in its sum with all five.
    study = replace(study, training=replace(study.training, seed=1))
    wishes = record / "stumble"
    wishes.mkdir()
    # In one round a site is halted before its vector, and another is killed when the others open the sum with its own.
    (wishes / E).write_text("contribute 2 SIGSTOP\ncontribute 3 SIGSTOP")
    (wishes / D).write_text("reveal 2 SIGKILL\ncontribute 3 SIGSTOP")

    # FLARE ends a process that is halted when its job ends; those of the third round are to go on.
    wake = once("closed", 3, lambda: send(signal.SIGCONT, processes(five, D, E, kind=JOB)))
    story = run(five, study, wake, timing=WITHOUT_ONE)
    assert story.outcome.status == "completed", story.outcome.reason
    assert story.outcome.result is not None
    assert not any((wishes / site).read_text() for site in (D, E)), "everything happened"
    history = story.outcome.result["rounds"]
    everybody, without_one, without_two = list(SITES), [A, B, C, D], [A, B, C]
    assert [entry["secagg"]["sites"] for entry in history] == [everybody, without_one, without_two, everybody]
    # Three vectors do not open a sum that five were asked for.
    assert [entry["secagg"]["attempt"] for entry in history] == [1, 1, 2, 1]
    assert history[1]["sites"][E]["status"] == "dropped"
    assert {history[2]["sites"][site]["status"] for site in (D, E)} == {"dropped"}
    first, second = story.outcome.jobs
    for site in SITES:
        for job in (first, second):
            tasks = Counter(entry["task"] for entry in left(five, site, job))
            assert (tasks["join"], tasks["keys"]) == (1, 1), "the same keys, as long as the job lasts"
    # Who helped to open the sum is in no other, so the next job has the site in it that died, and not the other one.
    # The job ends as soon as one of them has died: the others may or may not have answered by then.
    assert {site for site in SITES if "reveal" in steps(five, site, first, number=2)} <= {A, B, C}
    assert steps(five, D, first, number=2) == ["train", "begin", "contribute", "survivors"]
    for site in without_one:
        assert steps(five, site, second, number=2) == ["train", "begin", "contribute", "survivors"]
    assert steps(five, E, second, number=2) == ["train"]

    trained = reports(record)
    assert {key: len(times) for key, times in trained.items()} == {(s, n): 1 for s in SITES for n in (1, 2, 3, 4)}
    expected = study.method.start(study.task, study.model()).tensors
    for number, entry in enumerate(history, start=1):
        summed = [trained[site, number][0] for site in entry["secagg"]["sites"]]
        images = sum(float(report.tally["n"].item()) for report in summed)
        for name, value in expected.items():
            total = sum(float(report.tally["n"].item()) * report.update[name].double() for report in summed)
            expected[name] = (value.double() + total / images).float()
    server, _ = read_tensors(five.run_folder(SERVER, story.outcome.run) / "checkpoint.safetensors")
    assert differing(expected, {name: server[f"*/{name}"] for name in expected}) <= cut_off(history)

    best = read_handover(five.run_folder(SERVER, story.outcome.run)).tensors
    for site in SITES:
        deployed, _ = read_tensors(five.run_folder(site, story.outcome.run) / "vault" / "deployed.safetensors")
        # Statistics are refreshed on every site's own images.
        shared = [name for name in best if "running_" not in name and "num_batches" not in name]
        assert shared
        assert all(deployed[name].equal(best[name]) for name in shared)


def test_every_site_has_erasers_of_its_own_that_the_server_cannot_read(five: Hospitals, record: Path) -> None:
    study = masked("fdse", five, rounds=2)
    story = run(five, study, timing=PATIENT)
    assert story.outcome.status == "completed", story.outcome.reason
    assert story.outcome.result is not None
    algebra = Declaration(study).algebra
    names = names_in(algebra.layout, Scope.PERSONAL)
    received = {}
    for site in SITES:
        model, _ = read_tensors(five.run_folder(site, story.outcome.run) / "vault" / "model-0002.safetensors")
        received[site] = {name: model[name] for name in names}
    assert len({tensors_digest(own) for own in received.values()}) == len(SITES)
    personal = {read_json(five.run_folder(site, story.outcome.run) / "result.json")["personal"] for site in SITES}
    assert len(personal) == len(SITES)

    _, metadata = read_tensors(five.run_folder(SERVER, story.outcome.run) / "checkpoint.safetensors")
    plan = Plan.from_json(metadata["plan"])
    trained = reports(record)
    parts = [algebra.contribute(trained[site, 2][0], plan, me) for me, site in enumerate(plan.cohort)]
    for site in SITES:
        expected = {}
        for name in names:
            shares = [part[site][name] for part in parts]
            weights = [float(np.asarray(share.coefficient)) for share in shares]
            products = [weight * share.value.double() for weight, share in zip(weights, shares, strict=True)]
            expected[name] = (torch.stack(products).sum(dim=0) / sum(weights)).float()
        assert differing(expected, received[site]) <= cut_off(story.outcome.result["rounds"])

    own = [Secret(site, {name: value.numpy() for name, value in received[site].items()}, ()) for site in SITES]
    start = list(study.method.start(study.task, study.model()).tensors.values())
    recording = Recording.read(record)
    seen = search(recording, [*own, *results(five, story.outcome.run)], public=arrays(start))
    assert not any(seen.found().values()), seen
    # Beside the model that all sites share, the server's files have the mean of the erasers, and them only sealed.
    folder = five.run_folder(SERVER, story.outcome.run)
    means = [
        tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in read_tensors(path)[0].items()
        if name.startswith("*mean/")
    ]
    files = b"\0".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    kept = search(replace(recording, received=files), own, public=arrays([*start, *means]))
    assert kept.float32[0] == kept.float64[0] == 0, kept
    vault = (five.run_folder(A, story.outcome.run) / "vault" / "model-0002.safetensors").read_bytes()
    found = search(replace(recording, received=vault, secrets=[]), own[:1], public=arrays([*start, *means]))
    assert found.float32[0] == found.float32[1] > 100, found


def arrays(tensors: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    return [tensor.numpy() for tensor in tensors]


def test_a_provisioned_hospital_signs_with_what_its_kit_holds(five: Hospitals, tmp_path: Path) -> None:
    kits = provision(TEMPLATE, tmp_path)
    hospital, server = kits / "hospital-a", kits / "server.example.org"
    here = five.system.kit(A)
    assert _startup(hospital) == _startup(here)
    for kit, root in ((hospital, server), (here, five.system.kit(SERVER))):
        identity = site_credentials(_context(kit)).identity
        signature = identity.sign(b"keys of a job")
        roots = server_roots(_context(root))
        check_signed(b"keys of a job", signature, certificate=identity.certificate, name=A, roots=roots)
        with pytest.raises(Untrusted):
            check_signed(b"keys of a job", signature, certificate=identity.certificate, name=B, roots=roots)


def _startup(kit: Path) -> set[str]:
    return {path.name for path in (kit / "startup").iterdir()}


def _context(kit: Path) -> FLContext:
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit)), private=True)
    return context
