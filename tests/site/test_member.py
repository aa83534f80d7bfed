from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.imaging.prepared_sites import Hospital
from tests.site.made_up_sites import BATCH, NARROW, SITES, die, made_up_study, same_bits
from tests.site.packs import carried, cohort_in, fill, write_packs

import crossward
from crossward.federation.contract import Payload
from crossward.federation.coordinator import Coordinator
from crossward.federation.storage import read_json, read_tensors, write_tensors
from crossward.imaging.data import load
from crossward.imaging.phantom import write_hospitals
from crossward.methods.base import Task
from crossward.methods.registry import create
from crossward.site import messages, participant
from crossward.site.declaration import Declaration
from crossward.site.inprocess import simulate
from crossward.site.member import Member, is_disk_full, refusal_of
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, SCORES, TRAIN
from crossward.site.participant import Participant, Plugs
from crossward.site.policy import Policy
from crossward.site.study import Study
from crossward.site.trainer import Training
from crossward.site.troubles import Code, Refusal

RUN = "run-1"
ME = SITES[0]
PHANTOM_CLASSES = ("effusion", "nodule", "normal", "pneumothorax")

Answer = dict[str, Any]


@pytest.fixture(autouse=True)
def _without_fsync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tests that kill or fill ask whether something is on disk."""
    if "on_disk" not in request.fixturenames:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def on_disk() -> None:
    """Asks for a real fsync."""


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data")


@pytest.fixture
def own_packs(packs: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(packs, tmp_path / "own-packs"))


@pytest.fixture
def training_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls = []
    original = participant.train_round

    def counted(model: Any, method: Any, split: Any, context: Any, **options: Any) -> Any:
        calls.append(context.round_number)
        return original(model, method, split, context, **options)

    monkeypatch.setattr(participant, "train_round", counted)
    return calls


@pytest.fixture
def made(tmp_path: Path, packs: Path) -> Iterator[Callable[..., Member]]:
    """Make members, and let go of their state in the end."""
    members: list[Member] = []

    def make(study: Study | None = None, *, name: str = ME, data: Path | None = packs, **policy: Any) -> Member:
        settings = {"state_root": tmp_path / "state" / name, "secure_aggregation": False, **policy}
        study = study or made_up_study()
        members.append(Member(name, study.options(), Policy(data_root=data, **settings), patience=0.0))
        return members[-1]

    yield make
    for member in members:
        member.close()


def coordinator_of(study: Study, folder: Path, sites: tuple[str, ...] = SITES) -> Coordinator:
    model = study.method.build(study.task)
    return Coordinator(
        folder,
        study.method.algebra(study.task, model),
        study.method.start(study.task, model),
        sites=sites,
        rounds=study.task.rounds,
        seed=study.training.seed,
        participation=study.participation,
        quorum=study.quorum,
        study=study.digest(),
    )


def addressed(study: Study, number: int, payload: Payload | None = None, /, **changes: Any) -> Answer:
    message = messages.address(run=RUN, study=study.digest(), round_number=number)
    return message | (messages.pack_payload(payload) if payload else {}) | changes


def start_of(study: Study) -> Payload:
    return Payload(0, study.method.start(study.task, study.method.build(study.task)).tensors)


def moved(payload: Payload, number: int, **changes: Any) -> Payload:
    tensors = {name: tensor + 0.01 * number for name, tensor in payload.tensors.items()}
    return replace(payload, round_number=number, tensors=tensors, **changes)


def only_code(answer: Answer) -> Code:
    """The code of an answer that holds nothing but a code and its numbers."""
    assert answer.keys() == {"code", "numbers"}
    assert type(answer["code"]) is int
    assert all(type(value) is float for value in answer["numbers"].values())
    return Code(answer["code"])


class Server:
    """Drives members by hand through a coordinator: every message is packed, carried and unpacked."""

    def __init__(self, study: Study, members: Mapping[str, Member], folder: Path) -> None:
        self.study = study
        self.members = members
        self.coordinator = coordinator_of(study, folder, tuple(members))
        self.declaration = Declaration(study)
        self.published: dict[str, Answer] = {}

    def ask(self, site: str, task: str, number: int, payload: Payload | None = None) -> Answer:
        answer = self.members[site].answer(task, carried(addressed(self.study, number, payload)))
        content = carried(self.declaration.rebuild(task, answer))
        assert content["code"] == OK, Refusal(Code(content["code"]))
        return content

    def run(self, *, until: int | None = None) -> None:
        coordinator = self.coordinator
        for site in coordinator.sites:
            self.ask(site, JOIN, coordinator.state.round_number)
        while coordinator.state.round_number < (until or coordinator.rounds):
            self._round()
        if until is None:
            self._end()

    def _round(self) -> None:
        coordinator, number = self.coordinator, self.coordinator.state.round_number + 1
        validated = []
        for site in coordinator.sites:
            task = TRAIN if site in coordinator.cohort(number) else EVALUATE
            if task == EVALUATE and number == 1:
                continue
            answer = self.ask(site, task, number, coordinator.payload(site))
            assert ("validation" in answer) == (number > 1)
            validated.append(answer.get("validation", {}))
            if task == TRAIN:
                coordinator.accept(messages.unpack_report(site, answer))
        coordinator.assess(validated)
        coordinator.close_round({"round": number})

    def _end(self) -> None:
        coordinator, number = self.coordinator, self.coordinator.state.round_number
        answers = [self.ask(site, EVALUATE, number, coordinator.payload(site)) for site in coordinator.sites]
        coordinator.assess([answer["validation"] for answer in answers])
        assert coordinator.best_round is not None
        self.published = {site: self.ask(site, FINISH, coordinator.best_round) for site in coordinator.sites}


def deployed(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "vault" / "deployed.safetensors")[0]


def test_phantom_hospitals_driven_by_messages_equal_the_run_in_process_bit_for_bit(tmp_path: Path) -> None:
    data = tmp_path / "hospitals"
    names = write_hospitals(data, sites=2, patients=24, seed=3).hospitals
    study = Study(
        method=create("fedbn"),
        task=Task(classes=PHANTOM_CLASSES, channels=1, size=16, rounds=2, width=NARROW),
        training=Training(epochs=1, batch_size=BATCH),
        plugs=Plugs(),
    )
    cohort = load(data, size=16, classes=PHANTOM_CLASSES, batch_size=BATCH)
    expected = simulate(cohort, study, tmp_path / "sim", jobs=1)
    # One site has a folder of its own, as a hospital has; the other finds itself by name in a folder of all.
    roots = {names[0]: data / names[0], names[1]: data}
    rules = {"minimum_cell": 0, "secure_aggregation": False}
    policies = {name: Policy(data_root=roots[name], state_root=tmp_path / name, **rules) for name in names}
    members = {name: Member(name, study.options(), policies[name]) for name in names}
    server = Server(study, members, tmp_path / "server")
    server.run()

    checkpoint = read_tensors(tmp_path / "server" / "checkpoint.safetensors")[0]
    assert same_bits(checkpoint, read_tensors(tmp_path / "sim" / "server" / "checkpoint.safetensors")[0])
    assert server.coordinator.best_round == expected["best_round"]
    for name in names:
        folder = policies[name].run_folder(RUN)
        assert same_bits(deployed(folder), deployed(tmp_path / "sim" / "sites" / name))
        facts, scores = expected["sites"][name], server.published[name]["scores"]
        assert scores == {**{key: facts[key] for key in SCORES[:-1]}, SCORES[-1]: facts["as_received"]["accuracy"]}
        kept = read_json(folder / "result.json")
        assert (kept["site"], kept["run"], kept["method"]) == (name, RUN, "fedbn")
        assert kept["accuracy"] == facts["accuracy"]
        assert folder.stat().st_mode & 0o777 == 0o700
        members[name].close()


@pytest.mark.parametrize(
    ("method", "participation"), [("fedavg", 1.0), ("fedprox", 1.0), ("fedbn", 0.5), ("local", 1.0)]
)
def test_every_kind_of_method_equals_the_run_in_process(
    tmp_path: Path, packs: Path, made: Any, method: str, participation: float
) -> None:
    study = made_up_study(method, rounds=3, participation=participation)
    simulate(cohort_in(packs), study, tmp_path / "sim", jobs=1)
    server = Server(study, {name: made(study, name=name) for name in SITES}, tmp_path / "server")
    server.run()
    assert same_bits(
        read_tensors(tmp_path / "server" / "checkpoint.safetensors")[0],
        read_tensors(tmp_path / "sim" / "server" / "checkpoint.safetensors")[0],
    )
    for name in SITES:
        folder = tmp_path / "state" / name / "runs" / RUN
        assert same_bits(deployed(folder), deployed(tmp_path / "sim" / "sites" / name))


def test_a_restart_of_every_site_after_every_round_changes_nothing(tmp_path: Path, packs: Path, made: Any) -> None:
    study = made_up_study("fedbn", rounds=3)
    simulate(cohort_in(packs), study, tmp_path / "sim", jobs=1)
    for stop in (1, 2, None):
        members = {name: made(study, name=name) for name in SITES}
        server = Server(study, members, tmp_path / "server")
        server.coordinator.resume()
        server.run(until=stop)
        for member in members.values():
            member.close()
    for name in SITES:
        folder = tmp_path / "state" / name / "runs" / RUN
        assert same_bits(deployed(folder), deployed(tmp_path / "sim" / "sites" / name))


def test_a_second_question_is_answered_from_the_outbox_without_training(made: Any, training_calls: list[int]) -> None:
    study = made_up_study("fedbn")
    message = carried(addressed(study, 3, moved(start_of(study), 2)))
    member = made(study)
    first = member.answer(TRAIN, message)
    assert training_calls == [3]
    np.testing.assert_equal(member.answer(TRAIN, message), first)
    member.close()
    np.testing.assert_equal(made(study).answer(TRAIN, message), first)
    assert training_calls == [3]
    other = made(study)
    member.close()
    assert only_code(other.answer(JOIN, addressed(study, 3))) is Code.BUSY


def test_the_first_round_has_nothing_to_validate(made: Any) -> None:
    study = made_up_study()
    answer = made(study).answer(TRAIN, addressed(study, 1, start_of(study)))
    assert answer.keys() == {"code", "round", "model", "update", "tally"}
    assert (answer["code"], answer["round"]) == (OK, 1)
    assert answer["tally"]["n"].tolist() == [20.0]


def test_validation_counts_are_of_this_site_and_this_model(made: Any) -> None:
    study = made_up_study()
    answer = made(study).answer(EVALUATE, addressed(study, 2, moved(start_of(study), 2)))
    assert answer.keys() == {"code", "round", "validation"}
    assert answer["round"] == 2
    counts = {key: value.tolist() for key, value in answer["validation"].items()}
    assert counts["validation/n"] == [10.0]
    assert all(0 <= value[0] <= 10 for value in counts.values())


@pytest.mark.parametrize(
    ("policy", "published"),
    [({}, True), ({"minimum_cell": 10}, True), ({"minimum_cell": 11}, False), ({"publish_scores": False}, False)],
    ids=str,
)
def test_scores_leave_only_where_the_policy_lets_them(
    tmp_path: Path, made: Any, policy: dict[str, Any], published: bool
) -> None:
    study = made_up_study()
    member = made(study, **policy)
    member.answer(EVALUATE, addressed(study, 2, moved(start_of(study), 2)))
    answer = member.answer(FINISH, addressed(study, 2))
    assert (answer["code"], answer["round"]) == (OK, 2)
    assert ("scores" in answer) == published
    kept = read_json(tmp_path / "state" / ME / "runs" / RUN / "result.json")
    assert kept["n_test"] == 10
    assert kept["accuracy"] is not None
    if published:
        assert answer["scores"].keys() == set(SCORES)
        assert answer["scores"]["accuracy"] == kept["accuracy"]
        Declaration(study).rebuild(FINISH, answer)


def test_a_site_that_missed_the_best_model_takes_it_at_the_end(tmp_path: Path, made: Any) -> None:
    study = made_up_study("fedavg")
    best = moved(start_of(study), 2, best_round=2)
    member = made(study)
    member.answer(TRAIN, addressed(study, 4, moved(start_of(study), 3)))
    assert only_code(member.answer(FINISH, addressed(study, 2))) is Code.STORAGE
    assert member.answer(FINISH, carried(addressed(study, 2, best)))["code"] == OK
    vault = tmp_path / "state" / ME / "runs" / RUN / "vault"
    kept = read_tensors(vault / "model-0002.safetensors")[0]
    assert all(torch.equal(kept[name], tensor) for name, tensor in best.tensors.items())


def test_a_late_best_model_is_joined_with_tensors_that_this_site_has_trained(tmp_path: Path, made: Any) -> None:
    """Away when round 2's model was handed out, the site trained on; the local part must not be the untrained start."""
    study = made_up_study("fedbn", rounds=8)
    member, start = made(study), start_of(study)
    untrained = study.method.build(study.task).state_dict()
    for number in (1, 2, 4, 5, 6, 7, 8):
        best = 2 if number > 3 else None
        answer = member.answer(TRAIN, addressed(study, number, moved(start, number - 1, best_round=best)))
        assert answer["code"] == OK
    assert member.answer(FINISH, addressed(study, 2, moved(start, 2, best_round=2)))["code"] == OK
    kept = read_tensors(tmp_path / "state" / ME / "runs" / RUN / "vault" / "model-0002.safetensors")[0]
    local = [name for name, tensor in kept.items() if name not in start.tensors and tensor.is_floating_point()]
    assert local
    assert not all(torch.equal(kept[name], untrained[name]) for name in local)


def test_no_data_folder_a_missing_one_and_an_empty_one(tmp_path: Path, made: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for root in (None, tmp_path / "missing", tmp_path / "empty", tmp_path / "file"):
        member = made(data=root)
        assert only_code(member.answer(JOIN, addressed(made_up_study(), 0))) is Code.NO_DATA
        member.close()


def test_data_that_cannot_be_read(tmp_path: Path, own_packs: Path, made: Any) -> None:
    (own_packs / f"{ME}.npz").write_bytes(b"PK\x03\x04 damaged")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no images here")
    hospital = tmp_path / "hospital"
    write_hospitals(hospital, sites=1, patients=12)
    film = next(hospital.rglob("*.dcm"))
    film.write_bytes(film.read_bytes()[:400])
    study = replace(
        made_up_study(), task=replace(made_up_study().task, classes=PHANTOM_CLASSES), training=Training(batch_size=1)
    )
    for root, chosen in ((own_packs, made_up_study()), (tmp_path / "notes", made_up_study()), (hospital, study)):
        member = made(chosen, data=root)
        assert only_code(member.answer(JOIN, addressed(chosen, 0))) is Code.UNREADABLE_DATA
        member.close()


def test_labels_that_the_job_does_not_know_are_counted_in_the_sites_own_log(
    tmp_path: Path, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With jobs that name other classes each time, the counts would be a site's whole histogram."""
    data = write_packs(tmp_path / "data", (ME,), classes=("clear", "nodule", "mass", "cyst"), images=42)
    answer = made(data=data).answer(JOIN, addressed(made_up_study(), 0))
    assert only_code(answer) is Code.LABELS
    assert answer["numbers"] == {}
    assert "(10 of 42 images)" in caplog.text
    Declaration(made_up_study()).rebuild(JOIN, answer)


def test_too_few_images(tmp_path: Path, made: Any) -> None:
    data = write_packs(tmp_path / "data", (ME,), images=12)
    assert only_code(made(data=data).answer(JOIN, addressed(made_up_study(), 0))) is Code.TOO_FEW_IMAGES


def test_images_that_changed_during_a_run(own_packs: Path, made: Any) -> None:
    study = made_up_study()
    first = made(study, data=own_packs)
    assert first.answer(JOIN, addressed(study, 0)) == {"code": OK}
    first.close()
    write_packs(own_packs, (ME,), images=44)
    second = made(study, data=own_packs)
    assert only_code(second.answer(JOIN, addressed(study, 0))) is Code.DATA_CHANGED
    assert second.answer(JOIN, addressed(study, 0, run="run-2")) == {"code": OK}
    second.close()
    write_packs(own_packs, (ME,))
    assert made(study, data=own_packs).answer(JOIN, addressed(study, 0)) == {"code": OK}


def test_one_process_at_a_time_has_a_sites_state(made: Any) -> None:
    study = made_up_study()
    member = made(study)
    told, tell = os.pipe()
    wait, release = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, bytes([member.answer(JOIN, addressed(study, 0))["code"]]))
            os.read(wait, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(told, 1) == bytes([OK])
        answer = made(study).answer(TRAIN, addressed(study, 1, start_of(study), run="run-2"))
        assert only_code(answer) is Code.BUSY
    finally:
        os.write(release, b"x")
        os.waitpid(child, 0)
        for descriptor in (told, tell, wait, release):
            os.close(descriptor)
    assert made(study).answer(JOIN, addressed(study, 0)) == {"code": OK}


@pytest.mark.parametrize("task", [JOIN, TRAIN, EVALUATE, FINISH])
@pytest.mark.parametrize("change", [{"study": "0f" * 32}, {"version": "0.0"}, {"protocol": 2}], ids=str)
def test_another_study_or_version_is_refused_before_data_are_read(made: Any, task: str, change: Answer) -> None:
    study = made_up_study()
    answer = made(study, data=None).answer(task, addressed(study, 1, start_of(study), **change))
    assert only_code(answer) is Code.VERSION
    assert crossward.__version__ != "0.0"


@pytest.mark.parametrize("run", ["../x", "..", "", ".hidden", "a/b", "/etc", "a" * 65, "ä", "a\0b", None, 5, ["run"]])
def test_a_run_whose_name_could_lead_elsewhere_is_a_bad_task(tmp_path: Path, made: Any, run: Any) -> None:
    study = made_up_study()
    message = addressed(study, 1, start_of(study), run=run)
    assert only_code(made(study).answer(JOIN, message)) is Code.BAD_TASK
    assert not (tmp_path / "state" / ME / "runs").exists()


def test_a_task_without_a_run_is_a_bad_task(made: Any) -> None:
    message = addressed(made_up_study(), 1)
    del message["run"]
    assert only_code(made().answer(JOIN, message)) is Code.BAD_TASK


@pytest.mark.parametrize("task", ["", "Train", "secagg", "deploy", "__end_run__"])
def test_an_unknown_task_is_a_bad_task(made: Any, task: str) -> None:
    assert only_code(made().answer(task, addressed(made_up_study(), 1))) is Code.BAD_TASK


def no_tensors(message: Answer) -> None:
    del message["tensors"]


def one_tensor_less(message: Answer) -> None:
    message["tensors"].popitem()


def another_shape(message: Answer) -> None:
    name = next(iter(message["tensors"]))
    message["tensors"][name] = np.zeros((1, 2, 3), np.float32)


def a_local_tensor(message: Answer) -> None:
    study = made_up_study("fedbn")
    name = next(name for name in study.method.build(study.task).state_dict() if name not in message["tensors"])
    message["tensors"][name] = np.zeros(1, np.float32)


def words_for_numbers(message: Answer) -> None:
    name = next(iter(message["tensors"]))
    message["tensors"][name] = "text"


SPOILS = (one_tensor_less, another_shape, a_local_tensor, words_for_numbers)
SPOILT = [(task, spoil) for task in (TRAIN, EVALUATE, FINISH) for spoil in SPOILS]


@pytest.mark.parametrize(
    ("task", "spoil"),
    [*SPOILT, (TRAIN, no_tensors), (EVALUATE, no_tensors)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_model_that_is_not_what_the_study_declares_is_a_bad_task(made: Any, task: str, spoil: Any) -> None:
    study = made_up_study("fedbn")
    message = addressed(study, 2, moved(start_of(study), 2))
    spoil(message)
    assert only_code(made(study).answer(task, message)) is Code.BAD_TASK


@pytest.mark.parametrize("value", [None, "two", [2]])
def test_a_finish_that_names_no_round_is_a_bad_task(made: Any, value: Any) -> None:
    study = made_up_study()
    member = made(study)
    member.answer(EVALUATE, addressed(study, 2, moved(start_of(study), 2)))
    assert only_code(member.answer(FINISH, addressed(study, 2, round=value))) is Code.BAD_TASK
    message = addressed(study, 2)
    del message["round"]
    assert only_code(member.answer(FINISH, message)) is Code.BAD_TASK


def test_training_that_diverges(made: Any, tmp_path: Path) -> None:
    study = made_up_study(learning_rate=1e30)
    member = made(study)
    assert only_code(member.answer(TRAIN, addressed(study, 1, start_of(study)))) is Code.DIVERGED
    folder = tmp_path / "state" / ME / "runs" / RUN
    assert not list((folder / "outbox").iterdir())
    assert not list((folder / "vault").iterdir())


def test_a_study_that_cannot_be_built(made: Any, tmp_path: Path, packs: Path) -> None:
    options = {**made_up_study().options(), "method": "gone"}
    member = Member(ME, options, Policy(data_root=packs, state_root=tmp_path / "state"))
    assert only_code(member.answer(JOIN, addressed(made_up_study(), 0))) is Code.STUDY


def test_a_vault_of_another_version_is_left_as_it_is(made: Any, tmp_path: Path) -> None:
    study = made_up_study("fedbn")
    member = made(study)
    member.answer(TRAIN, addressed(study, 1, start_of(study)))
    member.close()
    path = tmp_path / "state" / ME / "runs" / RUN / "vault" / "local-0001.safetensors"
    tensors, metadata = read_tensors(path)
    assert metadata["format"] == "crossward.vault/1"
    write_tensors(path, tensors, {**metadata, "format": "crossward.vault/0"})
    before = path.read_bytes()
    again = made(study)
    assert only_code(again.answer(TRAIN, addressed(study, 2, moved(start_of(study), 1)))) is Code.OTHER_VAULT
    assert path.read_bytes() == before


def test_a_damaged_vault_is_a_matter_of_storage(made: Any, tmp_path: Path) -> None:
    study = made_up_study("fedbn")
    member = made(study)
    member.answer(TRAIN, addressed(study, 1, start_of(study)))
    path = tmp_path / "state" / ME / "runs" / RUN / "vault" / "local-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\x7f")
    assert only_code(member.answer(TRAIN, addressed(study, 2, moved(start_of(study), 1)))) is Code.STORAGE


SECRET = "patient 4711 of alder"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(SECRET), Code.INTERNAL),
        (KeyError(SECRET), Code.INTERNAL),
        (MemoryError(SECRET), Code.MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), Code.MEMORY),
        (torch.OutOfMemoryError(SECRET), Code.MEMORY),
        (PermissionError(13, SECRET), Code.STORAGE),
        (OSError(28, SECRET), Code.DISK_FULL),
        (OSError(122, SECRET), Code.DISK_FULL),
        (Refusal(Code.POLICY), Code.POLICY),
    ],
    ids=repr,
)
def test_whatever_happens_is_a_code_and_the_words_stay_in_the_sites_log(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, code: Code
) -> None:
    study = made_up_study()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(Participant, "train", fail)
    with caplog.at_level(logging.ERROR):
        answer = made(study).answer(TRAIN, addressed(study, 1, start_of(study)))
    assert only_code(answer) is code
    assert SECRET not in str(answer)
    assert f"{ME}, train of round 1: code {int(code)}: " in caplog.text
    assert ("the unexpected error" in caplog.text) == (code is Code.INTERNAL)


def test_the_cause_of_a_cause_is_looked_for() -> None:
    full = OSError(28, "No space left on device")
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("middle")
    outer.__cause__.__cause__ = full
    assert is_disk_full(outer)
    assert refusal_of(outer).code is Code.DISK_FULL
    assert not is_disk_full(OSError(5, "Input/output error"))
    assert not is_disk_full(None)


@pytest.mark.usefixtures("on_disk")
def test_a_full_disk_is_said_and_the_round_is_trained_when_there_is_room(
    small_disk: Path, made: Any, training_calls: list[int]
) -> None:
    study = made_up_study("fedbn")
    member, ballast = made(study, state_root=small_disk / "state"), small_disk / "ballast"
    first = member.answer(TRAIN, addressed(study, 1, start_of(study)))
    assert first["code"] == OK
    fill(ballast)
    message = addressed(study, 2, moved(start_of(study), 1))
    assert only_code(member.answer(TRAIN, message)) is Code.DISK_FULL
    vault = small_disk / "state" / "runs" / RUN / "vault"
    assert read_tensors(vault / "local-0001.safetensors")
    assert not list(small_disk.rglob("*.part"))
    ballast.unlink()
    answer = member.answer(TRAIN, message)
    assert (answer["code"], answer["round"]) == (OK, 2)


@pytest.mark.usefixtures("on_disk")
def test_a_full_disk_before_anything_is_there_is_said(small_disk: Path, made: Any) -> None:
    fill(small_disk / "ballast")
    member = made(state_root=small_disk / "state")
    assert only_code(member.answer(JOIN, addressed(made_up_study(), 0))) is Code.DISK_FULL


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("file", ["local-0002", "report-0002"])
def test_a_site_that_is_killed_while_it_writes_keeps_what_it_had_and_goes_on_to_the_same_bits(
    made: Any, packs: Path, tmp_path: Path, file: str
) -> None:
    study = made_up_study("fedbn")
    rounds = [addressed(study, 1, start_of(study)), addressed(study, 2, moved(start_of(study), 1))]
    undisturbed = made(study, state_root=tmp_path / "undisturbed")
    expected = [undisturbed.answer(TRAIN, message) for message in rounds]
    child = os.fork()
    if child == 0:
        try:
            original = os.fsync

            def fsync(descriptor: int) -> None:
                if file in os.readlink(f"/proc/self/fd/{descriptor}"):
                    die()
                original(descriptor)

            os.fsync = fsync
            member = made(study)
            for message in rounds:
                member.answer(TRAIN, message)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    folder = tmp_path / "state" / ME / "runs" / RUN
    assert len(list(folder.rglob(f".*{file}*.part"))) == 1
    kept = read_tensors(folder / "vault" / "local-0001.safetensors")[0]
    assert same_bits(kept, read_tensors(tmp_path / "undisturbed/runs" / RUN / "vault" / "local-0001.safetensors")[0])
    np.testing.assert_equal(made(study).answer(TRAIN, rounds[1]), expected[1])
    assert not list(folder.rglob("*.part"))


@pytest.fixture
def prepared_hospital(tmp_path: Path) -> Hospital:
    return Hospital(tmp_path / "hospital").films(40, labels=("clear", "nodule", "mass"))


def prepared_study() -> Study:
    study = made_up_study()
    return replace(study, task=replace(study.task, classes=("clear", "mass", "nodule"), channels=1))


def test_a_prepared_site_trains_from_its_cache_alone(
    prepared_hospital: Hospital, made: Any, training_calls: list[int]
) -> None:
    study = prepared_study()
    prepared_hospital.prepare(size=study.task.size)
    shutil.rmtree(prepared_hospital.folder / "images")
    member = made(study, data=prepared_hospital.folder)
    answer = member.answer(TRAIN, addressed(study, 1, start_of(study)))
    assert answer["code"] == OK
    assert training_calls == [1]
    Declaration(study).rebuild(TRAIN, answer)


def test_a_site_that_is_not_prepared_for_the_job(
    prepared_hospital: Hospital, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    study = prepared_study()
    size = study.task.size

    def answered() -> Code:
        member = made(study, data=prepared_hospital.folder)
        answer = member.answer(JOIN, addressed(study, 0))
        member.close()
        if answer == {"code": OK}:
            return Code.VERSION
        Declaration(study).rebuild(JOIN, answer)
        return only_code(answer)

    assert answered() is Code.NOT_PREPARED
    assert f"--size {size} --channels 1" in caplog.text
    prepared_hospital.prepare(size=size * 2)
    assert answered() is Code.NOT_PREPARED
    prepared_hospital.prepare(size=size)
    assert answered() is Code.VERSION
    prepared_hospital.film("late.dcm", "PLANTED-late", "cyst")
    assert answered() is Code.NOT_PREPARED
    prepared_hospital.prepare(size=size)
    assert answered() is Code.LABELS
    (prepared_hospital.folder / "site.yaml").write_text("version: 1\n")
    assert answered() is Code.UNREADABLE_DATA
    for word in ("PLANTED", "SECRET", "late.dcm"):
        assert word not in caplog.text


def test_a_picture_that_is_damaged_during_a_run_stops_it(prepared_hospital: Hospital, made: Any) -> None:
    study = prepared_study()
    manifest = prepared_hospital.prepare(size=study.task.size)
    member = made(study, data=prepared_hospital.folder)
    assert member.answer(JOIN, addressed(study, 0)) == {"code": OK}
    pixels = prepared_hospital.folder / "cache" / f"{study.task.size}x{study.task.size}x1" / manifest.pixels
    with pixels.open("r+b") as stream:
        stream.write(bytes(pixels.stat().st_size))
    assert only_code(member.answer(TRAIN, addressed(study, 1, start_of(study)))) is Code.NOT_PREPARED
