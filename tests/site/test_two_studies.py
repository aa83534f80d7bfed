"""Two studies that train the same: what a site trained enters one sum, whatever the study, the run or the job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.site.masked import ALGEBRA, Federation, Hospital, algebra_of
from tests.site.masked_runs import NAMES, Runs, cohort, masked_study, quick
from tests.standins import mean_algebra

from crossward.federation.contract import Payload, Report, Tally
from crossward.federation.scopes import tensors_digest
from crossward.imaging.data import Cohort
from crossward.methods.f2dc import F2DC
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind
from crossward.site.inprocess import Event, simulate
from crossward.site.messages import CONTRIBUTE, SURVIVORS, TRAIN
from crossward.site.release import MOST_SKETCHES
from crossward.site.study import Study
from crossward.site.troubles import Code, Refusal

pytestmark = pytest.mark.usefixtures("small_sketches")

VICTIM = "site-01"


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


# studies as they are


def run_after(first: Path, study: Study, folder: Path, sites: Cohort) -> tuple[dict[str, Any] | Refusal, list[Event]]:
    """Run a study at sites that remember another run; gives its result, or why it has ended without one."""
    for name in sites.sites:
        shutil.copytree(first / "sites" / name / "masks", folder / "sites" / name / "masks")
    events: list[Event] = []
    try:
        return simulate(sites, study, folder, jobs=1, listen=events.append), events
    except Refusal as refusal:
        return refusal, events


def seeded(study: Study, seed: int) -> Study:
    return replace(study, task=replace(study.task, seed=seed), training=replace(study.training, seed=seed))


def without_the_last() -> Cohort:
    whole = cohort()
    return replace(whole, sites={name: site for name, site in whole.sites.items() if name != NAMES[-1]})


ONE_ROUND_MORE = masked_study("fedavg", rounds=2)
ANOTHER_METHOD = masked_study("fedbn")


@pytest.mark.parametrize("other", [ONE_ROUND_MORE, ANOTHER_METHOD], ids=["one round more", "another method"])
def test_the_same_first_update_is_in_no_sum_over_fewer_sites_of_another_study(
    ran: Runs, tmp_path: Path, other: Study
) -> None:
    """The difference of the two sums would be the update of the site that was left out."""
    study = masked_study("fedavg")
    assert other.trained_digest() != study.trained_digest()
    before = ran(study)
    ended, events = run_after(before.folder, other, tmp_path / "run", without_the_last())
    assert isinstance(ended, Refusal)
    assert ended.code is Code.MASKED_BEFORE
    reasons = [(event.figures or {})["reason"] for event in events if event.kind == "failed"]
    assert any("another study" in reason for reason in reasons)


def test_studies_that_train_the_same_are_run_one_after_the_other_over_the_same_sites(ran: Runs, tmp_path: Path) -> None:
    before = ran(masked_study("fedavg"))
    first = [tensors_digest(run.seen.reports[NAMES[0], 1].update) for run in (before, ran(ONE_ROUND_MORE))]
    assert first[0] == first[1], "what all of this is about"
    for number, other in enumerate((ONE_ROUND_MORE, ANOTHER_METHOD)):
        ended, events = run_after(before.folder, other, tmp_path / str(number), cohort())
        assert not isinstance(ended, Refusal)
        assert [event for event in events if event.kind == "failed"] == []


def test_the_same_updates_are_weighted_once(ran: Runs, tmp_path: Path) -> None:
    """As many values of alpha as there are sites are as many equations as unknowns."""
    one, other = (replace(masked_study("f2dc"), method=F2DC(alpha=alpha)).masked(Settings()) for alpha in (1.0, 1.5))
    before = ran(one)
    ended, _ = run_after(before.folder, other, tmp_path / "run", cohort())
    assert isinstance(ended, Refusal)
    assert ended.code is Code.MASKED_BEFORE


def test_a_second_study_of_fdse_over_the_same_sites_ends_with_the_remedy_that_helps(ran: Runs, tmp_path: Path) -> None:
    """Its weights are made of sketches under the keys of a job, so that they are others in every study."""
    before = ran(masked_study("fdse"))
    more = masked_study("fdse", rounds=2)
    ended, _ = run_after(before.folder, more, tmp_path / "run", cohort())
    assert isinstance(ended, Refusal)
    assert (ended.code, ended.site) == (Code.MASKED_BEFORE, " and ".join(NAMES))
    assert "with another --seed" in str(ended)
    again, _ = run_after(before.folder, seeded(more, 1), tmp_path / "again", cohort())
    assert not isinstance(again, Refusal)


# the record


@pytest.fixture
def two(tmp_path: Path) -> Callable[..., Federation]:
    """Makes federations of one study after the other at the same sites, of which some may be left out."""

    def make(study: str, algebra: Any = ALGEBRA, count: int = 5, **options: Any) -> Federation:
        return Federation(tmp_path / "run", algebra, count, study=study, job=f"job of {study}", **options)

    return make


def refusals(federation: Federation) -> set[tuple[str, Code]]:
    return {(task, code) for _, task, code in federation.refused}


def test_what_was_masked_and_never_opened_is_in_no_other_sum_of_another_study(two: Any) -> None:
    first = two("one")
    first.train()
    tasks = first.begun(first.request())
    assert first.ask(VICTIM, CONTRIBUTE, tasks[VICTIM]) is not None
    second = two("another", count=4)
    second.train()
    tasks = second.begun(second.request())
    assert second.refusal(VICTIM, CONTRIBUTE, tasks[VICTIM]) is Code.MASKED_BEFORE
    # The others never masked in the first study.
    assert second.ask("site-00", CONTRIBUTE, tasks["site-00"]) is not None


@pytest.mark.parametrize("silent", [False, True], ids=["all refuse", "one says nothing"])
def test_a_sum_ends_with_the_word_of_its_sites_where_all_say_the_same(two: Any, silent: bool) -> None:
    two("one").round()
    second = two("another", count=4)
    second.deaf = lambda task, site: silent and (task, site) == (CONTRIBUTE, VICTIM)
    with pytest.raises(Refusal) as ended:
        second.round()
    if silent:
        assert (ended.value.code, ended.value.numbers) == (Code.NO_SUM, {"sites": 0, "needed": 3})
    else:
        assert (ended.value.code, ended.value.site) == (Code.MASKED_BEFORE, " and ".join(second.names))


def test_it_is_on_disk_before_anything_is_masked(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = two("one")
    first.train()
    tasks = first.begun(first.request())

    class Killed(BaseException):
        """The process ends here."""

    def killed(*given: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("crossward.privacy.secagg.site.apply_masks", killed)
        with pytest.raises(Killed):
            first.ask(VICTIM, CONTRIBUTE, tasks[VICTIM])
    second = two("another", count=4)
    second.train()
    assert second.refusal(VICTIM, CONTRIBUTE, second.begun(second.request())[VICTIM]) is Code.MASKED_BEFORE


def test_a_sum_of_another_study_is_not_opened_without_one_of_its_sites(two: Any) -> None:
    """Both are masked for the same sites; one of them is said to be lost where the second is opened."""
    uploads = {}
    for study in ("one", "another"):
        second = two(study)
        second.train()
        for site, task in second.begun(second.request()).items():
            answer = second.ask(site, CONTRIBUTE, task)
            assert answer is not None, "it is the same sum so far"
            uploads[site] = answer["upload"]
    fewer = {site: uploads[site] for site in second.names[:-1]}
    assert second.refusal(VICTIM, SURVIVORS, {**second.address(1), "uploads": fewer}) is Code.MASKED_BEFORE


def test_other_ranges_make_another_sum(two: Any) -> None:
    first = two("one")
    first.train()
    tasks = first.begun(first.request())
    assert first.ask(VICTIM, CONTRIBUTE, tasks[VICTIM]) is not None
    for study, limit, taken in (("same", 1000.0, True), ("narrow", 0.001, False)):
        other = two(study)
        other.train()
        request = other.request(limits=dict.fromkeys(ALGEBRA.sent, limit))
        answer = other.ask(VICTIM, CONTRIBUTE, other.begun(request)[VICTIM])
        assert (answer is not None) is taken


@pytest.mark.parametrize("first", ["all of it", "a part"])
def test_a_part_of_an_update_counts_like_all_of_it(two: Any, first: str) -> None:
    """Methods send different parts of one training, such as all but the normalisation."""
    whole, part = mean_algebra({"conv.weight": (3, 5), "bias": (7,)}), mean_algebra({"conv.weight": (3, 5)})
    order = [whole, part] if first == "all of it" else [part, whole]
    two("one", order[0]).round()
    second = two("another", order[1], count=4)
    for name, hospital in second.hospitals.items():
        hospital.update |= {"conv.weight": two("one", whole).hospitals[name].update["conv.weight"]}
    with pytest.raises(Refusal):
        second.round()
    assert (CONTRIBUTE, Code.MASKED_BEFORE) in refusals(second)


def test_tallies_of_one_training_are_summed_over_the_same_sites_only(two: Any) -> None:
    """Where tallies have a sum of their own it comes first, and holds losses."""
    algebra = algebra_of("fedcode")
    two("one", algebra).round()
    second = two("another", algebra, count=4)
    second.train()
    tasks = second.begun(second.request(Kind.TOTALS))
    assert second.refusal(VICTIM, CONTRIBUTE, tasks[VICTIM]) is Code.MASKED_BEFORE


def test_updates_that_differ_in_a_bit_are_two(two: Any) -> None:
    """So are those under differential privacy: noise is drawn anew in every study."""
    two("one").round()
    second = two("another", count=4)
    for hospital in second.hospitals.values():
        hospital.update = {name: value * (1 + 2.0**-20) for name, value in hospital.update.items()}
    second.round()
    assert second.coordinator.state.round_number == 1


def test_tensors_that_are_one_number_throughout_are_nobodys(two: Any) -> None:
    """A layer that does not learn has the same update of zeros in every round."""
    still = {"bias": torch.zeros(7)}
    first = two("one")
    for hospital in first.hospitals.values():
        hospital.update |= still
    for _ in range(2):
        first.round()
    assert first.refused == []


def test_the_same_update_of_another_model_of_the_study_is_in_no_other_sum(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training without chances gives it again where the server changes what nothing depends on."""
    federation = two("one")
    train = Hospital.train

    def trained_again(self: Hospital, payload: Payload, validation: Tally | None = None) -> Report:
        return replace(train(self, payload, validation), update=dict(self.update))

    monkeypatch.setattr(Hospital, "train", trained_again)
    federation.round()
    with pytest.raises(Refusal):
        federation.round(federation.names[:-1])
    assert (CONTRIBUTE, Code.MASKED_BEFORE) in refusals(federation)


def test_an_update_is_sketched_under_few_keys_in_all_studies_together(two: Any) -> None:
    algebra = algebra_of("fdse")
    for number in range(MOST_SKETCHES):
        assert two(f"study {number}", algebra, count=4).train()
    last = two("one too many", algebra, count=4)
    assert last.refusal(VICTIM, TRAIN, last.run.with_model(VICTIM, 1)) is Code.MASKED_BEFORE


def test_updates_of_which_nothing_moves_are_nobodys_and_sketched_in_any_number_of_studies(two: Any) -> None:
    """Where the learning rate is 0: they are the same zeros, whatever was trained."""
    algebra = algebra_of("fdse")
    for number in range(MOST_SKETCHES + 1):
        still = two(f"study {number}", algebra, count=4)
        for hospital in still.hospitals.values():
            hospital.update = {name: torch.zeros_like(value) for name, value in hospital.update.items()}
        assert still.train().keys() == set(still.names), still.refused


def test_the_record_grows_by_a_line_for_a_sum_however_often_it_is_tried(two: Any) -> None:
    federation = two("one")
    federation.round()
    size = record(federation).stat().st_size
    for number in range(3):
        federation.open_job(f"job-{number}")
        federation.agree()
        federation.train()
        tasks = federation.begun(federation.request(round_number=2))
        assert federation.ask(VICTIM, CONTRIBUTE, tasks[VICTIM]) is not None
    lines = record(federation).read_bytes().splitlines()
    assert len(lines) == 3, "ranges, updates; updates of the second round"
    assert record(federation).stat().st_size - size == pytest.approx(size / 2, rel=0.1)


def record(federation: Federation) -> Path:
    """The file in which a site keeps what it masked in all studies."""
    found = [
        path
        for path in (federation.folder / VICTIM / "masks").iterdir()
        if (use := json.loads(path.read_text().splitlines()[0].partition(" ")[2]))["cohort"] and not use["attempt"]
    ]
    (path,) = found
    return path
