"""Real faults in real FLARE processes: what the run makes of them, and what the user gets to see."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossward.cli.job import refuse_twice
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, names_in
from crossward.federation.storage import read_tensors
from crossward.flare.explain import explain
from crossward.flare.jobs import export
from crossward.flare.kits import SERVER
from crossward.flare.system import JOB, PARENT
from crossward.flare.watch import Event, follow
from crossward.imaging.phantom import write_hospitals
from crossward.site.declaration import Declaration
from crossward.site.journal import read_journal
from crossward.site.study import Study
from crossward.site.troubles import Code
from tests.flare.faults import (
    PACE,
    Changed,
    changed_software,
    fill,
    kill_all_of,
    once,
    processes,
    run,
    send,
    settle,
    small_disk,
)
from tests.flare.real import Hospitals, Timing, largest_difference, small_study

pytestmark = [pytest.mark.slow, pytest.mark.flare]

EQUAL = 1e-6
A, B, C = "hospital-a", "hospital-b", "hospital-c"
PATIENT = Timing(join=300, round=600, grace=60)
"""For runs in which nobody goes missing: on a slow machine a site may well be late."""

WITHOUT_ONE = Timing(join=300, round=600, grace=8)
"""For runs that have to find out that a site is missing."""


@pytest.fixture(autouse=True)
def left_as_found(hospitals: Hospitals) -> Iterator[None]:
    settle(hospitals)
    yield
    settle(hospitals)


@pytest.fixture(scope="module")
def changed(hospitals: Hospitals, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    with changed_software(hospitals, tmp_path_factory.mktemp("changed")) as made:
        yield made


def assert_as_undisturbed(hospitals: Hospitals, study: Study, run_name: str) -> None:
    assert largest_difference(hospitals.in_process(study), hospitals.tensors(run_name)) <= EQUAL


def deployed(hospitals: Hospitals, site: str, run_name: str) -> Path:
    return hospitals.run_folder(site, run_name) / "vault" / "deployed.safetensors"


def test_a_halted_site_is_left_out_and_comes_back(hospitals: Hospitals) -> None:
    study = small_study("fedavg", hospitals.cohort, rounds=9, steps=30, quorum=2)
    halted: list[int] = []
    missed: list[int] = []

    def react(event: Event) -> None:
        number = event.round_number
        if not halted and event.kind == "closed" and C in event.figures["reported"]:
            halted.extend(processes(hospitals, C, kind=PARENT) + processes(hospitals, C, kind=JOB))
            send(signal.SIGSTOP, halted)
        # It stays halted for one more round, in which nobody should wait for it.
        if missed and event.kind == "closed" and number > missed[0]:
            send(signal.SIGCONT, halted)
        if halted and event.kind == "absent" and event.site == C:
            missed.append(number)

    try:
        story = run(hospitals, study, react, timing=WITHOUT_ONE)
    finally:
        send(signal.SIGCONT, halted)
    assert story.outcome.status == "completed", story.outcome.reason
    assert len(story.outcome.jobs) == 1
    (absent,) = (event for event in story.of("absent", C) if event.round_number == missed[0])
    back = next(event for event in story.of("back", C) if event.round_number > missed[0])
    assert absent.figures["code"] == Code.NO_ANSWER
    assert WITHOUT_ONE.grace <= absent.figures["numbers"]["seconds"] < WITHOUT_ONE.round
    assert 2 <= absent.round_number < back.round_number - 1

    def waited(number: int) -> float:
        """Seconds from the last report of a round to its end."""
        last = max(event.time for event in story.of("trained") if event.round_number == number)
        (closed,) = (event for event in story.of("closed") if event.round_number == number)
        return closed.time - last

    reported = story.reported()
    assert reported[absent.round_number] == [A, B]
    assert waited(absent.round_number) >= WITHOUT_ONE.grace - 1
    assert waited(absent.round_number + 1) < WITHOUT_ONE.grace - 1
    assert any(C in reported[number] for number in range(back.round_number, study.task.rounds + 1))
    # Statistics are refreshed on every site's own images; all else is the one model of the best round.
    one, other = (read_tensors(deployed(hospitals, site, story.outcome.run))[0] for site in (A, C))
    shared = [name for name in one if "running_" not in name and "num_batches" not in name]
    assert all(one[name].equal(other[name]) for name in shared)


def test_a_site_whose_processes_are_all_killed_is_left_out_and_takes_part_in_the_next_job(hospitals: Hospitals) -> None:
    study = small_study("fedavg", hospitals.cohort, rounds=5, steps=40, quorum=2)
    killed: list[int] = []
    story = run(
        hospitals, study, once("closed", 1, lambda: killed.extend(kill_all_of(hospitals, C))), timing=WITHOUT_ONE
    )
    assert story.outcome.status == "completed", story.outcome.reason
    assert len(story.outcome.jobs) == 1
    assert story.codes("absent", C) == {Code.NO_ANSWER}
    assert story.reported()[5] == [A, B]

    settle(hospitals)
    assert not set(killed) & set(processes(hospitals, C, kind=PARENT)), "the watchdog has started another"
    following = run(hospitals, small_study("fedavg", hospitals.cohort, rounds=1), timing=PATIENT)
    assert following.outcome.status == "completed", following.outcome.reason
    assert following.reported() == {1: [A, B, C]}


def test_a_run_goes_on_by_itself_after_the_job_process_of_a_site_was_killed(hospitals: Hospitals) -> None:
    study = small_study("fedbn", hospitals.cohort, rounds=4, steps=40)
    runs: list[str] = []
    halves: list[Path] = []

    def kill(event: Event) -> None:
        if event.kind == "started":
            runs.append(event.figures["run"])
        if not halves and (event.kind, event.round_number) == ("closed", 1):
            send(signal.SIGKILL, processes(hospitals, C, kind=JOB))
            # As if it had been writing just then.
            halves.append(hospitals.run_folder(C, runs[0]) / "vault" / ".local-0002.safetensors.1.part")
            halves[0].write_bytes(b"half a file")

    story = run(hospitals, study, kill, timing=PATIENT)
    assert story.outcome.status == "completed", story.outcome.reason
    assert len(story.outcome.jobs) > 1
    assert story.first("resuming").figures["run"] == story.outcome.run == story.outcome.jobs[0]
    assert story.of("started")[0].figures["resumed_after"] is None
    assert story.of("started")[-1].figures["resumed_after"] >= 1
    assert story.reported().keys() == {1, 2, 3, 4}
    assert halves
    assert not halves[0].exists()
    assert_as_undisturbed(hospitals, study, story.outcome.run)


@pytest.mark.parametrize("what", ["all of its processes", "its job process"])
def test_a_run_goes_on_by_itself_after_the_server_was_killed(hospitals: Hospitals, what: str) -> None:
    study = small_study("fedbn", hospitals.cohort, rounds=5, steps=40)
    moments: dict[str, float] = {}
    killed: list[int] = []

    def react(event: Event) -> None:
        if "killed" in moments:
            moments.setdefault(event.kind, time.monotonic() - moments["killed"])
        if "killed" not in moments and (event.kind, event.round_number) == ("closed", 2):
            moments["killed"] = time.monotonic()
            if what == "its job process":
                send(signal.SIGKILL, processes(hospitals, SERVER, kind=JOB))
            else:
                killed.extend(kill_all_of(hospitals, SERVER))

    story = run(hospitals, study, react, timing=PATIENT)
    print({kind: round(seconds, 1) for kind, seconds in moments.items() if kind != "killed"})
    assert story.outcome.status == "completed", story.outcome.reason
    assert story.outcome.run == story.outcome.jobs[0]
    assert story.first("resuming").figures["after"] >= 2
    assert story.of("started")[-1].figures["resumed_after"] >= 2
    assert not set(killed) & set(processes(hospitals, SERVER, kind=PARENT)), "the watchdog has started another"
    assert_as_undisturbed(hospitals, study, story.outcome.run)


def test_sites_whose_data_do_not_suit_the_job_refuse_it_before_anything_is_trained(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    study = small_study("fedavg", hospitals.cohort, rounds=2)
    films, kept = hospitals.data, tmp_path / "kept"
    films.rename(kept)
    try:
        write_hospitals(films, sites=3, patients=24, seed=5)
        lines = (films / A / "labels.csv").read_text().splitlines(keepends=True)
        lines[1:4] = [f"{line.rpartition(',')[0]},fracture\n" for line in lines[1:4]]
        (films / A / "labels.csv").write_text("".join(lines))
        next((films / B / "images").iterdir()).write_bytes(b"not an image")
        shutil.rmtree(films / C)
        (films / C).mkdir()
        story = run(hospitals, study, timing=PATIENT)
        with hospitals.console() as console:
            told = {line.site: line for line in reversed(explain(console, story.outcome.job))}
    finally:
        shutil.rmtree(films, ignore_errors=True)
        kept.rename(films)
    expected = {A: Code.LABELS, B: Code.UNREADABLE_DATA, C: Code.NO_DATA}
    outcome = story.outcome
    assert outcome.status == "failed"
    assert outcome.code == expected[outcome.site or ""]
    assert len(outcome.jobs) == 1, "what a person has to mend is not tried again"
    assert {site: story.codes("refused", site) for site in expected} == {
        site: {code} for site, code in expected.items()
    }
    assert story.first("refused", A).figures["numbers"] == {}
    assert not story.of("round")
    assert not list(hospitals.run_folder(A, outcome.run).glob("vault/*"))
    assert "not one of the job's classes" in told[A].cause
    assert "labels.csv" in told[A].next_step
    assert "cannot be read" in told[B].cause
    assert "log" in told[B].next_step
    assert "no data folder, or an empty one" in told[C].cause
    assert "data_root" in told[C].next_step


def test_a_full_disk_at_a_site_leaves_that_site_out(hospitals: Hospitals) -> None:
    study = small_study("fedavg", hospitals.cohort, rounds=3, quorum=2)
    model = 4 * sum(spec.numel for spec in Declaration(study).algebra.sent.values())
    # Room for the description, the journal and the report of the first round, but not for a model as well.
    with small_disk(hospitals.system.state(C), size=model + 96 * 1024):
        story = run(hospitals, study, timing=PATIENT)
        settle(hospitals)
        kept = sorted(path.name for path in hospitals.run_folder(C, story.outcome.run).rglob("*") if path.is_file())
    assert story.outcome.status == "completed", story.outcome.reason
    assert story.codes("failed", C) == {Code.DISK_FULL}
    assert story.reported()[3] == [A, B]
    assert "run.json" in kept
    assert not [name for name in kept if name.endswith(".part")], "half a file was left behind"
    assert story.outcome.result is not None
    assert story.outcome.result["sites"][C]["accuracy"] is None
    assert story.outcome.result["sites"][A]["accuracy"] is not None


def test_a_full_disk_at_the_server_loses_no_finished_round(hospitals: Hospitals) -> None:
    study = small_study("fedbn", hospitals.cohort, rounds=5, steps=40)
    state = hospitals.system.state(SERVER)

    def react(event: Event) -> None:
        # Again and again: a file that is replaced gives its room back.
        if event.kind == "closed" or event.round_number > 1:
            fill(state)

    with small_disk(state, size=8 << 20):
        story = run(hospitals, study, react, timing=PATIENT)
        outcome = story.outcome
        assert (outcome.status, outcome.code) == ("failed", Code.SERVER_DISK_FULL), outcome.reason
        assert len(outcome.jobs) == 1
        assert outcome.resumable
        assert "disk is full" in outcome.reason
        assert 1 <= outcome.round_number < 5
        settle(hospitals)
        (state / "filler").unlink()
        job = export(study, hospitals.folder / f"after-{outcome.run}", timing=PATIENT, min_sites=2, resume=outcome.run)
        following = run(hospitals, study, job=job)
        assert following.outcome.status == "completed", following.outcome.reason
        assert following.first("started").figures["resumed_after"] == outcome.round_number
        assert_as_undisturbed(hospitals, study, outcome.run)
        settle(hospitals)


def test_two_jobs_at_once_run_one_after_the_other_and_none_twice(hospitals: Hospitals) -> None:
    first, second = (small_study(method, hospitals.cohort, rounds=1) for method in ("fedavg", "fedbn"))
    job = hospitals.job(first, timing=PATIENT)
    with hospitals.console() as console:
        refuse_twice(console, job, first)
        ids = [console.submit(job), console.submit(hospitals.job(second, timing=PATIENT))]
        with pytest.raises(BadInput, match=f"{ids[0]}.*--again"):
            refuse_twice(console, job, first)
        together: list[list[str]] = []
        events: list[list[Event]] = [[], []]

        def first_listen(event: Event) -> None:
            events[0].append(event)
            together.append(console.running_jobs())

        outcomes = [follow(console, ids[0], listen=first_listen, pace=PACE)]
        outcomes.append(follow(console, ids[1], listen=events[1].append, pace=PACE))
        refuse_twice(console, job, first)
    assert [outcome.status for outcome in outcomes] == ["completed", "completed"]
    assert [outcome.jobs for outcome in outcomes] == [(ids[0],), (ids[1],)]
    assert any(together)
    assert all(len(running) < 2 for running in together)
    (ended,) = (event.time for event in events[0] if event.kind == "ended")
    (started,) = (event.time for event in events[1] if event.kind == "started")
    assert ended <= started


def test_a_vault_of_another_version_is_named_and_left_as_it_is(hospitals: Hospitals) -> None:
    study = small_study("fedbn", hospitals.cohort, rounds=6, steps=40, quorum=2)
    with hospitals.console() as console:
        job = hospitals.job(study, timing=PATIENT)
        job_id = console.submit(job)
        abort = once("closed", 2, lambda: console.abort(job_id))
        stopped = follow(console, job_id, listen=abort, job=job, pace=PACE)
    assert stopped.status == "aborted"
    assert 2 <= stopped.round_number < 6
    settle(hospitals)

    vault = hospitals.run_folder(C, stopped.run) / "vault"
    older = {}
    for path in vault.glob("local-*.safetensors"):
        older[path] = path.read_bytes().replace(b"crossward.vault/1", b"crossward.vault/0", 1)
        path.write_bytes(older[path])
    assert older
    resumed = export(study, hospitals.folder / f"on-{stopped.run}", timing=PATIENT, min_sites=2, resume=stopped.run)
    story = run(hospitals, study, job=resumed)
    assert story.outcome.status == "completed", story.outcome.reason
    assert story.codes("failed", C) == {Code.OTHER_VAULT}
    assert story.reported()[6] == [A, B]
    assert {path: path.read_bytes() for path in older} == older
    with hospitals.console() as console:
        told = {line.site: line for line in reversed(explain(console, story.outcome.job))}
    assert "another version" in told[C].cause


def test_a_local_tensor_in_an_answer_is_stopped_at_the_site(hospitals: Hospitals, changed: Changed) -> None:
    study = small_study("fedbn", hospitals.cohort, rounds=2, quorum=2)
    layout = Declaration(study).algebra.layout
    name = next(name for name in names_in(layout, Scope.LOCAL) if name.endswith(".weight"))
    (changed.planted / C).write_text(name, encoding="utf-8")
    try:
        story = run(hospitals, study, timing=PATIENT)
    finally:
        (changed.planted / C).unlink()
    outcome = story.outcome
    assert outcome.status == "completed", outcome.reason
    assert story.codes("failed", C) == {Code.GATE}
    assert not story.of("trained", C)
    assert story.reported() == {1: [A, B], 2: [A, B]}
    journal = read_journal(hospitals.system.state(C) / "journal.jsonl")
    trained = [entry for entry in journal if entry["job"] == outcome.job and entry["task"] == "train"]
    assert len(trained) == 2
    assert all(not entry["left"] and f"'{name}'" in entry["reason"] for entry in trained)
    log = (hospitals.system.kit(C) / outcome.job / "log.txt").read_text(encoding="utf-8")
    assert f"the gate stopped an answer to 'train': train: update holds '{name}'" in log
    for path in hospitals.run_folder(SERVER, outcome.run).rglob("*"):
        assert not path.is_file() or name.encode() not in path.read_bytes()
