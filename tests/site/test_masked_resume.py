"""Masked runs that were stopped: they go on with the same updates in the same sums, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.site.made_up_sites import same_bits, tensors_on_disk, without_seconds
from tests.site.masked_runs import NAMES, Runs, cohort, masked_study, quick
from tests.standins import counted_trainings
from torch import Tensor

from crossward.federation.contract import Payload
from crossward.federation.coordinator import Coordinator
from crossward.privacy.sums import Kind
from crossward.site.inprocess import Event, simulate
from crossward.site.participant import Participant
from crossward.site.study import Study
from crossward.site.summing import Summing
from crossward.site.troubles import Code, Refusal


class Stopped(Exception):
    """The run's process ends here."""


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The (site, round) of every local training in this process."""
    return counted_trainings(monkeypatch)


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
    ran: Runs, trained: list[tuple[str, int]], tmp_path: Path, point: str
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
    [("fdse", "before the sum"), ("fdse", "before the checkpoint"), ("fedcode", POINTS[-1])],
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
    ran: Runs, trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    study = masked_study("fedavg")
    whole = ran(study)
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    trained.clear()
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
    assert caught.value.code is Code.MASKED_BEFORE
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
