from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_sites import CPU, made_up_participant, made_up_site, made_up_task, made_up_training, same_bits

from crossward.federation.contract import Payload, Report
from crossward.federation.errors import BadInput, CrosswardError, StorageFailure
from crossward.federation.storage import read_tensors
from crossward.methods.registry import create
from crossward.site import participant as participants
from crossward.site.outbox import Outbox
from crossward.site.participant import Participant, Plugs
from crossward.site.vault import Vault

TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(7)}


def start_payload(method: str = "fedavg", round_number: int = 0) -> Payload:
    chosen = create(method)
    task = made_up_task()
    return Payload(round_number, chosen.start(task, chosen.build(task)).tensors)


def moved(payload: Payload, round_number: int, by: float = 0.01) -> Payload:
    return Payload(round_number, {name: tensor + by for name, tensor in payload.tensors.items()})


def same_report(one: Report, other: Report) -> bool:
    return (
        (one.site, one.round_number, one.model) == (other.site, other.round_number, other.model)
        and one.tally.keys() == other.tally.keys()
        and all(np.array_equal(one.tally[key], other.tally[key]) for key in one.tally)
        and same_bits(dict(one.update), dict(other.update))
    )


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def training_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls = []
    original = participants.train_round

    def counted(model: Any, method: Any, split: Any, context: Any, **options: Any) -> Any:
        calls.append(context.round_number)
        return original(model, method, split, context, **options)

    monkeypatch.setattr(participants, "train_round", counted)
    return calls


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    tally = {"n": np.array([0.1 + 0.2]), "norms": np.array([1e-300, 1e300, 1 / 3])}
    report = Report("alder", 12, "ab" * 32, {"weight": torch.randn(3, 4), "none": torch.zeros(0, 2)}, tally)
    Outbox(tmp_path / "outbox").put(report)
    back = Outbox(tmp_path / "outbox").get(12, "ab" * 32)
    assert back is not None
    assert same_report(back, report)


def test_a_report_for_another_model_or_round_is_not_answered(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    outbox.put(Report("alder", 2, "ab" * 32, TENSORS, {}))
    assert outbox.get(2, "cd" * 32) is None
    assert outbox.get(1, "ab" * 32) is None


def test_digests_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    outbox.put(Report("alder", 2, "ab" * 32, TENSORS, {}))
    with pytest.raises(StorageFailure, match="not a report for this study and model"):
        outbox.get(2, "ab" * 31 + "cd")


def test_a_damaged_report_is_named_and_left_in_place(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    outbox.put(Report("alder", 2, "ab" * 32, TENSORS, {}))
    (path,) = (tmp_path / "outbox").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(StorageFailure, match=path.name):
        outbox.get(2, "ab" * 32)
    assert path.exists()


def test_the_outbox_forgets_rounds_whose_result_has_come(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    for number in (1, 2, 3, 10_000):
        outbox.put(Report("alder", number, "ab" * 32, TENSORS, {}))
    outbox.tidy(received=2)
    assert [outbox.get(number, "ab" * 32) is not None for number in (1, 2, 3, 10_000)] == [False, False, True, True]


def test_a_strange_file_in_the_outbox_does_not_stop_the_site(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    (tmp_path / "outbox" / "report-copy-of-mine.safetensors").write_bytes(b"")
    outbox.tidy(received=5)


def test_the_report_is_on_disk_before_train_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the file and its name are flushed to the disk, in this order, and before the site answers."""
    flushed = []
    original = os.fsync

    def spy(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    site = made_up_participant(tmp_path)
    report = site.train(start_payload())
    monkeypatch.undo()
    (path,) = (tmp_path / "outbox").iterdir()
    assert flushed[-2].parent == tmp_path / "outbox"
    assert path.name in flushed[-2].name
    assert flushed[-1] == tmp_path / "outbox"
    back = made_up_participant(tmp_path).outbox.get(1, report.model)
    assert back is not None
    assert same_report(back, report)


def test_a_report_is_answered_again_by_a_new_process_and_not_trained_again(
    tmp_path: Path, training_calls: list[int]
) -> None:
    first = made_up_participant(tmp_path, "fedbn").train(start_payload("fedbn"))
    again = made_up_participant(tmp_path, "fedbn").train(start_payload("fedbn"))
    assert training_calls == [1]
    assert same_report(first, again)


def test_a_report_for_another_model_is_trained(tmp_path: Path, training_calls: list[int]) -> None:
    site = made_up_participant(tmp_path)
    first = site.train(start_payload())
    other = site.train(moved(start_payload(), 0))
    assert training_calls == [1, 1]
    assert first.model != other.model
    assert not same_bits(dict(first.update), dict(other.update))


@pytest.mark.parametrize("folder", ["vault", "outbox"])
def test_vault_and_outbox_are_for_their_owner_only(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder).chmod(0o777)
    before = os.umask(0)
    try:
        made_up_participant(tmp_path)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / folder) == 0o700


@pytest.mark.parametrize("folder", ["vault", "outbox"])
def test_a_vault_or_outbox_that_cannot_be_made_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).write_text("a file where a folder belongs")
    with pytest.raises(StorageFailure, match=f"{folder} cannot be used"):
        made_up_participant(tmp_path)


def test_the_vault_gives_the_last_local_tensors_before_a_round(tmp_path: Path) -> None:
    vault = Vault(tmp_path, study="one")
    assert vault.local(before=100) == {}
    for number in (1, 3, 4):
        vault.keep_local(number, {"x": torch.tensor([float(number)])})
    vault.keep_model(2, TENSORS)
    assert vault.local(before=1) == {}
    found = [vault.local(before=before)["x"].item() for before in (2, 3, 4, 5, 50)]
    assert found == [1.0, 1.0, 3.0, 4.0, 4.0]


def test_the_vault_counts_rounds_beyond_four_digits(tmp_path: Path) -> None:
    vault = Vault(tmp_path, study="one")
    for number in (9_999, 10_000):
        vault.keep_local(number, {"x": torch.tensor([float(number)])})
    assert vault.local(before=10_001)["x"].item() == 10_000


def test_files_of_another_layout_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    Vault(tmp_path, study="one").keep_local(1, TENSORS)
    Vault(tmp_path, study="one").keep_model(1, TENSORS)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = Vault(tmp_path, study="two")
    with pytest.raises(StorageFailure, match=r"local-0001\.safetensors was written for another study"):
        other.local(before=2)
    with pytest.raises(StorageFailure, match=r"model-0001\.safetensors was written for another study"):
        other.model(1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_participant_of_another_model_does_not_touch_the_vault(tmp_path: Path) -> None:
    made_up_participant(tmp_path, "fedbn").train(start_payload("fedbn"))
    wider = Participant(
        made_up_site("alder"),
        create("fedbn"),
        made_up_task(width=0.125),
        training=made_up_training(),
        folder=tmp_path,
        device=CPU,
        plugs=Plugs(),
    )
    task = made_up_task(width=0.125)
    payload = Payload(1, create("fedbn").start(task, create("fedbn").build(task)).tensors)
    before = {path: path.read_bytes() for path in (tmp_path / "vault").iterdir()}
    with pytest.raises(StorageFailure, match="another study"):
        wider.train(payload)
    assert {path: path.read_bytes() for path in (tmp_path / "vault").iterdir()} == before


def test_tidy_keeps_the_received_and_the_best_model_and_two_rounds_of_local_tensors(tmp_path: Path) -> None:
    vault = Vault(tmp_path, study="one")
    for number in range(1, 7):
        vault.keep_local(number, TENSORS)
        vault.keep_model(number, TENSORS)
    vault.promote(TENSORS)
    vault.tidy(received=5, best=2)
    kept = ["local-0004", "local-0005", "local-0006", "model-0002", "model-0005", "deployed"]
    assert files(tmp_path) == {f"{name}.safetensors" for name in kept}


def test_a_site_that_trained_a_round_twice_uses_the_local_tensors_from_before_it(
    tmp_path: Path, training_calls: list[int]
) -> None:
    """The server crashes after the site trained round 3; the report is lost; the server sends round 2 again."""
    start = start_payload("fedbn")
    site = made_up_participant(tmp_path, "fedbn")
    for number in range(2):
        site.train(moved(start, number, by=0.01 * number))
        site.receive(moved(start, number + 1, by=0.01 * (number + 1)))
    second = moved(start, 2, by=0.02)
    first_report = site.train(second)
    first_local = read_tensors(tmp_path / "vault" / "local-0003.safetensors")[0]
    for path in (tmp_path / "outbox").iterdir():
        path.unlink()

    restarted = made_up_participant(tmp_path, "fedbn")
    restarted.receive(second)
    installed = read_tensors(tmp_path / "vault" / "model-0002.safetensors")[0]
    of_round_2 = read_tensors(tmp_path / "vault" / "local-0002.safetensors")[0]
    assert all(torch.equal(installed[name], tensor) for name, tensor in of_round_2.items())
    assert not same_bits(of_round_2, first_local)

    again = restarted.train(second)
    assert training_calls == [1, 2, 3, 3]
    assert same_report(first_report, again)
    assert same_bits(read_tensors(tmp_path / "vault" / "local-0003.safetensors")[0], first_local)


def test_local_tensors_survive_a_new_participant(tmp_path: Path) -> None:
    start = start_payload("fedbn")
    made_up_participant(tmp_path, "fedbn").train(start)
    trained = read_tensors(tmp_path / "vault" / "local-0001.safetensors")[0]
    made_up_participant(tmp_path, "fedbn").receive(moved(start, 1))
    received = read_tensors(tmp_path / "vault" / "model-0001.safetensors")[0]
    assert trained
    assert all(torch.equal(received[name], tensor) for name, tensor in trained.items())
    fresh = create("fedbn").build(made_up_task()).state_dict()
    assert not all(torch.equal(fresh[name], tensor) for name, tensor in trained.items())


def test_a_failed_round_leaves_vault_and_outbox_as_they_were(tmp_path: Path) -> None:
    data = made_up_site("alder")
    site = made_up_participant(tmp_path, "fedbn", data=data)
    start = start_payload("fedbn")
    site.train(start)
    site.receive(moved(start, 1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    data.train.images[:] = torch.nan
    with pytest.raises(Exception, match="alder, round 2"):
        site.train(moved(start, 1))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before


@pytest.mark.parametrize("method", ["fedavg", "local", "fedbn"])
def test_weights_that_overflowed_are_never_kept(tmp_path: Path, method: str) -> None:
    """A site's own tensors are not in the report, so checking the report alone would let them into the vault."""
    site = made_up_participant(tmp_path, method, steps=1, learning_rate=1e38, weight_decay=1e3)
    with pytest.raises(Exception, match="alder, round 1"):
        site.train(start_payload(method))
    assert files(tmp_path / "vault") == set()
    assert files(tmp_path / "outbox") == set()


def test_a_payload_cannot_replace_what_is_local(tmp_path: Path) -> None:
    """A server that sends a tensor of scope local is refused, or the tensor is left out; it never takes its place."""
    site = made_up_participant(tmp_path, "fedbn")
    start = start_payload("fedbn")
    site.train(start)
    own = read_tensors(tmp_path / "vault" / "local-0001.safetensors")[0]
    intruder = next(name for name, tensor in own.items() if tensor.is_floating_point())
    payload = replace(start, round_number=1, tensors={**start.tensors, intruder: torch.full_like(own[intruder], 9.0)})
    with suppress(CrosswardError):
        site.receive(payload)
    stored = tmp_path / "vault" / "model-0001.safetensors"
    assert not stored.exists() or torch.equal(read_tensors(stored)[0][intruder], own[intruder])


def test_a_report_of_another_study_is_not_answered(tmp_path: Path) -> None:
    first = made_up_participant(tmp_path, learning_rate=0.05)
    report = first.train(start_payload())
    other = made_up_participant(tmp_path, learning_rate=0.5)
    with pytest.raises(StorageFailure, match="not a report for this study"):
        other.train(start_payload())
    assert first.outbox.get(1, report.model) is not None


def test_a_site_with_other_classes_than_the_study_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = replace(made_up_site("alder"), classes=("mass", "clear", "nodule"))
    with pytest.raises(BadInput, match=r"alder.*mass"):
        made_up_participant(tmp_path / "site", data=data)
    assert not (tmp_path / "site").exists()
