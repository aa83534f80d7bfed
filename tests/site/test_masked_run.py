"""Whole runs under secure aggregation, with real training: the open run's model, and no number of a single site."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.site.made_up_sites import cohort_of, made_up_site, made_up_study, same_bits, tensors_on_disk, without_seconds
from torch import Tensor

from crossward.federation.contract import Payload, Report
from crossward.federation.coordinator import Coordinator
from crossward.federation.scopes import Scope, names_in, tensors_digest
from crossward.federation.storage import read_tensors
from crossward.imaging.data import Cohort
from crossward.privacy.secagg import sketch
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind
from crossward.site import participant
from crossward.site.inprocess import Event, simulate
from crossward.site.outbox import Outbox
from crossward.site.participant import Participant
from crossward.site.study import Study
from crossward.site.summing import Summing
from crossward.site.troubles import Code, Refusal

NAMES = ("alder", "birch", "cedar", "dogwood")
PLAIN = ("fedavg", "fedprox", "fedbn", "f2dc", "rfeddis")
STYLE, SEMANTIC = "style", "prototypes"


class Stopped(Exception):
    """The run's process ends here."""


def cohort() -> Cohort:
    return cohort_of({name: made_up_site(name, number=number) for number, name in enumerate(NAMES)})


def masked_study(method: str, *, rounds: int = 1, **settings: Any) -> Study:
    return made_up_study(method, rounds=rounds).masked(Settings(**settings))


@dataclass
class Seen:
    """What sites trained and received, noted at the sites themselves."""

    reports: dict[tuple[str, int], Report] = field(default_factory=dict)
    payloads: dict[tuple[str, int], Payload] = field(default_factory=dict)


@dataclass
class Ended:
    result: dict[str, Any]
    folder: Path
    seen: Seen

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / "server" / "checkpoint.safetensors")[0]


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """All sites draw the same numbers for a sketch: in one process they need not be drawn by each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr(sketch, "gaussian", lru_cache(maxsize=4)(sketch.gaussian))
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Study], Ended]:
    """Studies that were run once, with what their sites saw."""
    known: dict[str, Ended] = {}

    def run(study: Study) -> Ended:
        if study.digest() not in known:
            folder = tmp_path_factory.mktemp(study.method.name) / "run"
            with pytest.MonkeyPatch.context() as patch:
                seen = watched(patch)
                known[study.digest()] = Ended(simulate(cohort(), study, folder, jobs=1), folder, seen)
        return known[study.digest()]

    return run


def watched(patch: pytest.MonkeyPatch) -> Seen:
    seen, put, receive = Seen(), Outbox.put, Participant.receive

    def noted(self: Outbox, report: Report) -> None:
        put(self, report)
        seen.reports[report.site, report.round_number] = report

    def received(self: Participant, payload: Payload) -> Any:
        seen.payloads[self.name, payload.round_number] = payload
        return receive(self, payload)

    patch.setattr(Outbox, "put", noted)
    patch.setattr(Participant, "receive", received)
    return seen


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The (site, round) of every local training in this process."""
    calls: list[tuple[str, int]] = []
    original = participant.train_round

    def counted(model: Any, method: Any, split: Any, context: Any, **options: Any) -> Any:
        calls.append((context.site, context.round_number))
        return original(model, method, split, context, **options)

    monkeypatch.setattr(participant, "train_round", counted)
    return calls


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], *, within: float = 1e-6) -> None:
    """Every tensor off by no more than this part of its largest value."""
    assert found.keys() == expected.keys()
    for name in expected:
        one, other = (np.asarray(each[name], dtype=np.float64) for each in (found, expected))
        largest = np.abs(other).max(initial=0.0)
        assert np.abs(one - other).max(initial=0.0) <= within * largest, name


# the same model


@pytest.mark.parametrize("method", PLAIN)
def test_one_round_gives_the_open_runs_model(ran: Any, method: str) -> None:
    study = masked_study(method)
    masked, plain = ran(study), ran(replace(study, masking=None))
    assert_close(masked.checkpoint, plain.checkpoint)
    start = study.coordinator(masked.folder / "unused", NAMES).state.tensors
    moved = [name for name in start if not torch.equal(plain.checkpoint[f"*/{name}"], start[name])]
    assert moved, "training changed nothing, so that any sum would do"
    # The same reports: what differs is only how they were added up.
    for key, report in plain.seen.reports.items():
        assert same_bits(dict(masked.seen.reports[key].update), dict(report.update))


@pytest.mark.parametrize("method", ["fedavg", "rfeddis"])
def test_the_record_says_of_all_sites_together_what_the_open_one_says_of_each(ran: Any, method: str) -> None:
    study = masked_study(method)
    masked, plain = ran(study).result, ran(replace(study, masking=None)).result
    (entry,), (each,) = masked["rounds"], plain["rounds"]
    assert {name: {"status", "received"} >= set(facts) for name, facts in entry["sites"].items()} == dict.fromkeys(
        NAMES, True
    )
    # Every site saw as many images, and has as many to validate and to test on.
    for figure in ("loss", "train_accuracy", "val_accuracy", "val_accuracy_as_received"):
        mean = np.mean([each["sites"][name][figure] for name in NAMES])
        assert entry["sums"][figure] == pytest.approx(mean, rel=1e-6), figure
    assert (entry["secagg"]["sites"], entry["secagg"]["cut_off"]) == (list(NAMES), 0.0)
    tested = masked["privacy"]["test"]
    assert masked["privacy"]["secagg"] is True
    assert tested["n"] == sum(plain["sites"][name]["n_test"] for name in NAMES)
    right = sum(plain["sites"][name]["accuracy"] * plain["sites"][name]["n_test"] for name in NAMES)
    assert tested["accuracy"] == pytest.approx(right / tested["n"])
    assert masked["best_round"] == plain["best_round"] == 1


def test_fedcode_gives_the_same_prototypes_and_a_style_that_only_sites_can_read(ran: Any) -> None:
    study = masked_study("fedcode")
    masked, plain = ran(study), ran(replace(study, masking=None))
    ours, theirs = masked.checkpoint, plain.checkpoint
    style = f"*/{STYLE}"
    assert_close({name: ours[name] for name in ours if name != style}, {n: theirs[n] for n in theirs if n != style})
    assert float(ours[f"*/{SEMANTIC}"].abs().sum()) > 0
    # The server's is turned: as long, and elsewhere.
    assert ours[style].norm(dim=1).tolist() == pytest.approx(theirs[style].norm(dim=1).tolist(), rel=1e-6)
    assert not np.allclose(ours[style], theirs[style], atol=0.05 * float(theirs[style].abs().max()))
    for name in NAMES:
        read = masked.seen.payloads[name, 1]
        assert_close({STYLE: read.tensors[STYLE]}, {STYLE: theirs[style]})
        assert read.plan is not None
        group = plain.seen.payloads[name, 1].plan.values[STYLE]["group"]
        assert np.array_equal(read.plan.values[STYLE]["group"], group)


# FDSE: its plan is made of sketches, so the open computation is given the same one


@pytest.fixture(scope="module")
def fdse(ran: Any) -> Ended:
    return ran(masked_study("fdse", rounds=2))  # type: ignore[no-any-return]


def mixed(fdse: Ended, number: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Shared tensors and everybody's erasers after a round, from reports and plan by plain arithmetic (Eq. 8-9)."""
    study = masked_study("fdse", rounds=2)
    algebra = study.method.algebra(study.task, study.model())
    plan = fdse.seen.payloads[NAMES[0], number].plan
    assert plan is not None
    assert plan.cohort == NAMES
    reports = [fdse.seen.reports[name, number] for name in NAMES]
    before = study.coordinator(fdse.folder / "unused", NAMES).state.tensors
    if number > 1:
        before = dict(fdse.seen.payloads[NAMES[0], number - 1].tensors)
    shared: dict[str, Tensor] = {}
    own: dict[str, dict[str, Tensor]] = {name: {} for name in NAMES}
    blocks = {scope: [] for scope in ("shared", "personal")}
    for block, names in algebra.blocks().items():
        blocks[block.partition("/")[0]].append(names)
    for row, names in enumerate(blocks["shared"]):
        weights, length = plan.values["shared"]["weights"][row], plan.values["shared"]["length"][row]
        assert length == pytest.approx(np.mean([norm_of(report, names) for report in reports]), rel=1e-6)
        for name in names:
            units = [report.update[name].double() / norm_of(report, names) for report in reports]
            shared[name] = before[name] + length * sum(w * unit for w, unit in zip(weights, units, strict=True))
    for name in names_in(algebra.layout, Scope.BUFFER):
        shared[name] = before[name] + torch.stack([report.update[name].double() for report in reports]).mean(dim=0)
    for row, names in enumerate(blocks["personal"]):
        attention = plan.values["personal"]["attention"][row]
        for name in names:
            parts = torch.stack([report.update[name].double() for report in reports])
            for place, site in enumerate(NAMES):
                own[site][name] = torch.tensordot(torch.from_numpy(attention[place]), parts, dims=1)
    return shared, own


def norm_of(report: Report, names: tuple[str, ...]) -> float:
    return float(np.sqrt(sum(float(report.update[name].double().square().sum()) for name in names)))


@pytest.mark.parametrize("number", [1, 2])
def test_fdse_gives_what_an_open_computation_gives_with_the_same_plan(fdse: Ended, number: int) -> None:
    shared, own = mixed(fdse, number)
    for site in NAMES:
        read = fdse.seen.payloads[site, number].tensors
        assert_close({name: read[name] for name in shared}, shared)
        assert_close({name: read[name] for name in own[site]}, own[site])


def test_every_site_has_erasers_of_its_own_and_the_server_can_read_none_of_them(fdse: Ended) -> None:
    _, own = mixed(fdse, 2)
    tensors, metadata = read_tensors(fdse.folder / "server" / "checkpoint.safetensors")
    assert len({tensors_digest({name: value.float() for name, value in own[site].items()}) for site in NAMES}) == 4
    slots = {key.partition("/")[0] for key in tensors}
    assert slots == {"*", "*mean", "*sealed"}
    for site in NAMES:
        limits, _, parties, bits = json.loads(json.loads(metadata["sealed"])[site])
        words = tensors[f"*sealed/{site}"].numpy().view(np.uint32)
        flat = np.concatenate([own[site][name].numpy().reshape(-1) for name in own[site]])
        scale = np.concatenate([np.full(own[site][name].numel(), limits[name] * parties) for name in own[site]])
        size = len(flat)
        # As if there were no pads: what is found has nothing to do with the erasers of this or of any site.
        read = Ring(bits, parties).decode(words[:size], limit=1.0) * scale
        for other in NAMES:
            hers = np.concatenate([own[other][name].numpy().reshape(-1) for name in own[other]])
            assert abs(np.corrcoef(read / scale, hers / scale)[0, 1]) < 5 / np.sqrt(size)
        near = np.abs(read - flat) < 0.01 * scale
        assert near.mean() < 0.05
    # All that it knows of them is their mean.
    mean = {name: torch.stack([own[site][name] for site in NAMES]).mean(dim=0) for name in own[NAMES[0]]}
    assert_close({name: tensors[f"*mean/{name}"] for name in mean}, mean)


def test_what_the_server_says_it_sent_is_not_what_a_site_has(fdse: Ended) -> None:
    result = fdse.result
    assert set(result["personal"]) == set(NAMES)
    assert all(result["personal"][name] != result["sites"][name]["personal"] for name in NAMES)
    assert len({result["sites"][name]["personal"] for name in NAMES}) == 4


def test_a_method_that_sends_nothing_has_its_counts_summed(ran: Any) -> None:
    ended = ran(masked_study("local"))
    assert ended.result["rounds"][0]["sums"]["loss"] > 0
    assert ended.result["privacy"]["test"]["n"] == 4 * 9


# stopped and resumed


def stop_at(kind: str, *, number: int, site: str | None = None) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if (event.kind, event.round_number, event.site) == (kind, number, site):
            raise Stopped

    return listen


def stop_before_the_checkpoint(patch: pytest.MonkeyPatch, number: int) -> None:
    close = Coordinator.close_round

    def closing(self: Coordinator, record: Mapping[str, Any], combined: Any = None) -> Any:
        if record["round"] == number:
            raise Stopped
        return close(self, record, combined)

    patch.setattr(Coordinator, "close_round", closing)


def stop_before_the_sum(patch: pytest.MonkeyPatch, number: int) -> None:
    sums = Summing.sum

    def asked(self: Summing, kind: Kind, address: Any, **options: Any) -> Any:
        if (kind, options["round_number"]) == (Kind.UPDATES, number):
            raise Stopped
        return sums(self, kind, address, **options)

    patch.setattr(Summing, "sum", asked)


POINTS = ("between rounds", "trained", "before the sum", "before the checkpoint")


def run_until(point: str, study: Study, folder: Path, *, number: int) -> None:
    """Run until a point of a round, where the process ends."""
    listeners = {
        "between rounds": stop_at("round", number=number),
        "trained": stop_at("trained", number=number, site=NAMES[-1]),
    }
    patches = {"before the sum": stop_before_the_sum, "before the checkpoint": stop_before_the_checkpoint}
    with pytest.MonkeyPatch.context() as patch:
        patches.get(point, lambda *nothing: None)(patch, number)
        with pytest.raises(Stopped):
            simulate(cohort(), study, folder, jobs=1, listen=listeners.get(point, lambda event: None))


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits_and_trains_nothing_again(
    ran: Any, trained: list[tuple[str, int]], tmp_path: Path, point: str
) -> None:
    study = masked_study("fedavg", rounds=2)
    whole = ran(study)
    folder = tmp_path / "run"
    run_until(point, study, folder, number=2)
    trained.clear()
    result = simulate(cohort(), study, folder, resume=True, jobs=1)
    assert trained == ([(name, 2) for name in NAMES] if point == "between rounds" else [])
    assert same_bits(tensors_on_disk(folder), tensors_on_disk(whole.folder))
    assert without_seconds(result["sites"]) == without_seconds(whole.result["sites"])
    assert [entry["sums"] for entry in result["rounds"]] == [entry["sums"] for entry in whole.result["rounds"]]


@pytest.mark.parametrize(
    ("method", "point"),
    [("fdse", "trained"), ("fdse", "before the sum"), ("fdse", "before the checkpoint"), ("fedcode", POINTS[-1])],
)
def test_a_first_round_whose_sums_were_opened_is_not_lost(
    trained: list[tuple[str, int]], tmp_path: Path, method: str, point: str
) -> None:
    """Sketches and rotations of the next job have other keys: sites take part again in the same sum only."""
    study = masked_study(method)
    run_until(point, study, tmp_path / "run", number=1)
    trained.clear()
    events: list[Event] = []
    result = simulate(cohort(), study, tmp_path / "run", resume=True, jobs=1, listen=events.append)
    assert trained == []
    assert [event for event in events if event.kind == "failed"] == []
    assert result["rounds"][0]["secagg"]["sites"] == list(NAMES)


def test_a_finished_run_that_is_resumed_trains_and_changes_nothing(
    ran: Any, trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    study = masked_study("fedavg")
    whole = ran(study)
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    result = simulate(cohort(), study, folder, resume=True, jobs=1)
    assert trained == []
    assert same_bits(tensors_on_disk(folder), tensors_on_disk(whole.folder))
    assert result["privacy"]["test"] == whole.result["privacy"]["test"]


def test_a_site_that_lost_its_outbox_trains_the_same_again(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    study = masked_study("fedavg")
    folder = tmp_path / "run"
    run_until("before the checkpoint", study, folder, number=1)
    shutil.rmtree(folder / "sites" / "birch" / "outbox")
    trained.clear()
    simulate(cohort(), study, folder, resume=True, jobs=1)
    assert trained == [("birch", 1)]


def test_a_site_that_lost_its_outbox_and_trained_to_something_else_is_in_no_second_sum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = masked_study("fedavg")
    folder = tmp_path / "run"
    run_until("before the checkpoint", study, folder, number=1)
    shutil.rmtree(folder / "sites" / "birch" / "outbox")
    extras = Participant._update

    def other(self: Participant, payload: Payload) -> dict[str, Tensor]:
        return {name: value * (1 + 1e-6) for name, value in extras(self, payload).items()}

    monkeypatch.setattr(Participant, "_update", other)
    events: list[Event] = []
    with pytest.raises(Refusal) as caught:
        simulate(cohort(), study, folder, resume=True, jobs=1, listen=events.append)
    assert caught.value.code is Code.NO_SUM
    first = next(event for event in events if event.kind == "failed")
    assert first.site == "birch"
    assert "another update of the same model was masked before" in (first.figures or {})["reason"]
    # It heals when the site has its report back, or trains to the same bits.
    monkeypatch.undo()
    shutil.rmtree(folder / "sites" / "birch" / "outbox")
    assert simulate(cohort(), study, folder, resume=True, jobs=1)["best_round"] == 1


def test_a_run_in_the_open_is_not_resumed_under_masks(tmp_path: Path) -> None:
    study = masked_study("fedavg")
    run_until("between rounds", replace(study, masking=None), tmp_path / "run", number=1)
    with pytest.raises(Exception, match="run"):
        simulate(cohort(), study, tmp_path / "run", resume=True, jobs=1)
