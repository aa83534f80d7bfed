"""A site that sends its update many times over: the round is rejected, in the open and under masks, and no honest one.

The bound is on what all updates come to together. There is no proof that each is within a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

from crossward.federation.contract import Payload, Report, State
from crossward.federation.errors import BadInput, RunFailure
from crossward.federation.outliers import ROUNDS, TIMES, OutlierRound, moved
from crossward.methods.registry import available
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.settings import Settings
from crossward.site.inprocess import simulate
from crossward.site.messages import CONTRIBUTE, Message
from crossward.site.participant import Participant
from crossward.site.study import Study
from crossward.site.troubles import Code
from tests.site.made_up_sites import cohort_of, made_up_site, made_up_study
from tests.site.masked import Federation, random_update
from tests.site.masked_runs import quick
from tests.standins import mean_algebra

HOSPITALS = ("alder", "birch", "cedar", "dogwood")
POISONER = "cedar"
ALGEBRA = mean_algebra({"conv.weight": (40, 40), "bias": (7,)})
both = pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])

Round = Callable[[], State]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def update_of(site: int, number: int) -> dict[str, Tensor]:
    """Few large values and many small ones, partly what all sites have in common; shorter from round to round."""
    common, own = random_update(ALGEBRA, number), random_update(ALGEBRA, 1000 * number + site)
    return {name: 0.7**number * (common[name] ** 3 + own[name] ** 3) for name in common}


def federation(folder: Path, sites: int, *, masked: bool, **options: Any) -> tuple[Federation, Round]:
    """Sites, and what runs a round of them."""
    made = Federation(folder, ALGEBRA, sites, agree=masked, **{"rounds": 6, "outlier": TIMES, **options})

    def in_the_open() -> State:
        for hospital in made.hospitals.values():
            made.coordinator.accept(hospital.train(made.coordinator.payload(hospital.name)))
        return made.coordinator.close_round({"round": made.coordinator.state.round_number + 1})

    return made, made.round if masked else in_the_open


def trained(made: Federation) -> None:
    """Let every site have an update for the open round."""
    number = made.coordinator.state.round_number + 1
    for place, hospital in enumerate(made.hospitals.values()):
        hospital.samples, hospital.update = 20.0, update_of(place, number)


def poisoned(made: Federation, *, masked: bool) -> None:
    """Let one site scale its update by 100; under masks, where its own software would not, by other software."""
    trained(made)
    if masked:
        tasks = made.releases["site-02"].tasks
        tasks[CONTRIBUTE] = hundredfold(tasks[CONTRIBUTE])
    else:
        hospital = made.hospitals["site-02"]
        hospital.update = {name: 100 * tensor for name, tensor in hospital.update.items()}


def hundredfold(contribute: Callable[[Any], Message]) -> Callable[[Any], Message]:
    """A site that adds its products a hundred times over, and cuts nothing off that is out of range."""
    encode = Ring.encode_into

    def lying(self: Ring, out: Any, *given: Any, **options: Any) -> int:
        encode(self, out, *given, **options)
        out *= np.uint32(100)
        return 0

    def answer(message: Any) -> Message:
        with patch.object(Ring, "encode_into", lying):
            return contribute(message)

    return answer


@both
@pytest.mark.parametrize("sites", [5, 10])
def test_poisoning(sites: int, masked: bool, tmp_path: Path) -> None:
    """One of many equal sites scales its update by 100: the round is rejected, and nothing of it is kept."""
    made, run_round = federation(tmp_path, sites, masked=masked)
    coordinator = made.coordinator
    for _ in range(ROUNDS):
        trained(made)
        good = run_round()
    checkpoint = coordinator.checkpoint_path.read_bytes()
    poisoned(made, masked=masked)
    with pytest.raises(
        OutlierRound, match=rf"round {ROUNDS + 1}: .* not used, the model stays at round {ROUNDS}"
    ) as no:
        run_round()
    assert no.value.site == (None if masked else "site-02")
    assert coordinator.state is good
    assert coordinator.checkpoint_path.read_bytes() == checkpoint
    assert len(coordinator.history) == ROUNDS


def test_poisoning_is_refused_by_a_sites_own_software(tmp_path: Path) -> None:
    """Under masks an update that is out of all range does not leave a site, and the others go on without it."""
    made, run_round = federation(tmp_path, 5, masked=True)
    for _ in range(ROUNDS):
        trained(made)
        run_round()
    trained(made)
    hospital = made.hospitals["site-02"]
    hospital.update = {name: 100 * tensor for name, tensor in hospital.update.items()}
    run_round()
    assert made.refused == [("site-02", CONTRIBUTE, Code.BAD_TASK)]
    assert made.coordinator.history[-1]["secagg"]["sites"] == [name for name in made.names if name != "site-02"]


def test_poisoning_by_one_of_three(tmp_path: Path) -> None:
    """Without the site there is no sum, so all are asked for new ranges, and a hundredfold update fits in: rejected."""
    made, run_round = federation(tmp_path, 3, masked=True)
    for _ in range(ROUNDS):
        trained(made)
        run_round()
    trained(made)
    hospital = made.hospitals["site-02"]
    hospital.update = {name: 100 * tensor for name, tensor in hospital.update.items()}
    with pytest.raises(OutlierRound):
        run_round()


@both
def test_poisoning_after_a_restart_of_the_server(masked: bool, tmp_path: Path) -> None:
    """What is usual is in the checkpoint: a server that begins anew knows it."""
    made, run_round = federation(tmp_path, 5, masked=masked)
    for _ in range(ROUNDS):
        trained(made)
        run_round()
    again, run_round = federation(tmp_path, 5, masked=masked, job="job-2")
    assert again.coordinator.resume()
    poisoned(again, masked=masked)
    with pytest.raises(OutlierRound):
        run_round()


@both
def test_poisoning_goes_through_where_the_bound_is_off(masked: bool, tmp_path: Path) -> None:
    """Which shows that it is the bound that stops it."""
    made, run_round = federation(tmp_path, 5, masked=masked, outlier=0.0)
    for number in range(ROUNDS + 1):
        before = made.coordinator.state
        trained(made)
        if number == ROUNDS:
            poisoned(made, masked=masked)
        after = run_round()
    assert moved(ALGEBRA.layout, before, after) > 100


def test_poisoning_is_not_seen_before_there_is_something_usual(tmp_path: Path) -> None:
    """The limit of it: the first rounds have nothing to be held against."""
    made, run_round = federation(tmp_path, 5, masked=False)
    for number in range(ROUNDS):
        trained(made)
        if number == ROUNDS - 1:
            poisoned(made, masked=False)
        run_round()


def test_no_site_that_comes_back_is_taken_for_poisoning(tmp_path: Path) -> None:
    """Under masks too it is known who is in a sum: with a large site it moves the model as far as with it before."""
    made, run_round = federation(tmp_path, 4, masked=True, rounds=9)
    *small, large = made.names
    for number in range(2 * ROUNDS + 1):
        trained(made)
        hospital = made.hospitals[large]
        hospital.samples, hospital.update = 800.0, {name: 20 * tensor for name, tensor in hospital.update.items()}
        away = ROUNDS <= number < 2 * ROUNDS
        made.round(small) if away else run_round()
    lengths = [entry["moved"] for entry in made.coordinator.history]
    assert lengths[-1] > TIMES * max(lengths[ROUNDS:-1])
    assert made.coordinator.history[ROUNDS]["moved_by"] == dict.fromkeys(small)
    trained(made)
    for hospital in made.hospitals.values():
        hospital.update = {name: 10000 * tensor for name, tensor in hospital.update.items()}
    with pytest.raises(OutlierRound):
        run_round()


def test_poisoning_by_all_sites_names_none(tmp_path: Path) -> None:
    made, run_round = federation(tmp_path, 5, masked=False)
    for _ in range(ROUNDS):
        trained(made)
        run_round()
    for hospital in made.hospitals.values():
        hospital.update = {name: 100 * tensor for name, tensor in hospital.update.items()}
    with pytest.raises(OutlierRound) as rejected:
        run_round()
    assert rejected.value.site is None


@pytest.mark.parametrize("times", [-1.0, 0.5, 1.5, float("nan"), float("inf")])
def test_a_bound_that_stops_usual_rounds_is_refused(times: float) -> None:
    with pytest.raises(BadInput, match="outlier"):
        replace(made_up_study(), outlier=times)


# Whole runs, with real training


def study_of(method: str, *, masked: bool = False, rounds: int = 5, **training: Any) -> Study:
    study = made_up_study(method, rounds=rounds, **training)
    return study.masked(Settings()) if masked else study


def run(study: Study, folder: Path, *, sites: int = len(HOSPITALS)) -> dict[str, Any]:
    made = {name: made_up_site(name, number=number) for number, name in enumerate(HOSPITALS[:sites])}
    return simulate(cohort_of(made), study, folder, jobs=1)


def poisoned_in(number: int) -> Callable[..., Report]:
    """Training as it should be, and in one round at one site a hundredfold of it."""
    train = Participant.train

    def training(self: Participant, payload: Payload, *given: Any) -> Report:
        report = train(self, payload, *given)
        if (self.name, report.round_number) != (POISONER, number):
            return report
        return replace(report, update={name: 100 * tensor for name, tensor in report.update.items()})

    return training


def test_poisoning_of_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with a plain error; the good rounds are what a resumed run finds."""
    monkeypatch.setattr(Participant, "train", poisoned_in(5))
    with pytest.raises(RunFailure, match=rf"^{POISONER}, round 5: .*stays at round 4. Find out .*start a new run"):
        run(study_of("fedavg"), tmp_path)
    kept = study_of("fedavg").coordinator(tmp_path / "server", sorted(HOSPITALS))
    assert kept.resume()
    assert kept.state.round_number == 4
    assert [entry["round"] for entry in kept.history] == [1, 2, 3, 4]


def test_poisoning_of_a_whole_masked_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of three sites; whose update it was the server cannot know, and does not say."""
    monkeypatch.setattr(Participant, "train", poisoned_in(5))
    with pytest.raises(RunFailure, match=r"^round 5: .*stays at round 4. Find out what each site trained on"):
        run(study_of("fedavg", masked=True), tmp_path, sites=3)
    kept = study_of("fedavg", masked=True).coordinator(tmp_path / "server", sorted(HOSPITALS[:3]))
    assert kept.resume()
    assert [entry["round"] for entry in kept.history] == [1, 2, 3, 4]


METHODS = sorted(set(available()) - {"local"})


@pytest.mark.parametrize(
    ("method", "masked"), [*((method, False) for method in METHODS), ("fedcode", True), ("fdse", True)]
)
def test_no_honest_run_is_taken_for_poisoning(method: str, masked: bool, tmp_path: Path) -> None:
    lengths = lengths_of(run(study_of(method, masked=masked), tmp_path))
    assert worst(lengths) < TIMES / 2, lengths


def test_no_private_run_is_taken_for_poisoning(tmp_path: Path) -> None:
    """Most of an update is noise then, in every round as much."""
    lengths = lengths_of(run(study_of("f2dc", steps=1).private(Privacy(epsilon=8.0)), tmp_path, sites=2))
    assert worst(lengths) < TIMES / 2, lengths


def test_no_run_with_one_site_a_round_is_taken_for_poisoning(tmp_path: Path) -> None:
    """Each has another scanner, and the learning rate stays as it is."""
    study = made_up_study("fedavg", rounds=12, participation=0.25, schedule="constant")
    lengths = lengths_of(run(study, tmp_path))
    assert worst(lengths) < TIMES / 2, lengths


def lengths_of(result: Mapping[str, Any]) -> list[float]:
    return [entry["moved"] for entry in result["rounds"]]


def worst(lengths: list[float]) -> float:
    """How long a round is at most, beside the median of the three before it."""
    return max(length / sorted(lengths[at : at + ROUNDS])[1] for at, length in enumerate(lengths[ROUNDS:]))
