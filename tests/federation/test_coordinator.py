from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.standins import Shapes, assert_identical, mean_algebra, random_report, random_start, report_of, run_round

from crossward.federation import coordinator as module
from crossward.federation.algebra import Algebra
from crossward.federation.contract import VALIDATION_CORRECT, VALIDATION_COUNT, Contribution, Plan, Report, State
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import BadInput, CrosswardError, RunFailure, StorageFailure

pytestmark = pytest.mark.usefixtures("without_fsync")

SITES = ("a", "b", "c")


def streamed() -> Algebra:
    return mean_algebra({"w": (2,)})


def spooled() -> Algebra:
    return Shapes(2, 1, 1, 2, 3).algebra()


both_ways = pytest.mark.parametrize("make", [streamed, spooled])


def begun(
    folder: Path, algebra: Algebra, *, quorum: int | None = None, rounds: int = 3
) -> tuple[Coordinator, list[Report]]:
    """A coordinator with an open first round, and a report of every site for it."""
    rng = np.random.default_rng(11)
    start = random_start(algebra, rng)
    coordinator = Coordinator(folder, algebra, start, sites=SITES, rounds=rounds, seed=0, quorum=quorum)
    return coordinator, [random_report(algebra, start, site, rng) for site in SITES]


@both_ways
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda report: dataclasses.replace(report, round_number=2), "the open round is 1"),
        (lambda report: dataclasses.replace(report, round_number=0), "the open round is 1"),
        (lambda report: dataclasses.replace(report, site="stranger"), "expects a, b, c"),
        (lambda report: dataclasses.replace(report, model="0" * 64), "another model"),
    ],
)
def test_a_report_that_does_not_belong_here_is_refused(
    make: Callable[[], Algebra], spoil: Callable[[Report], Report], words: str, tmp_path: Path
) -> None:
    coordinator, reports = begun(tmp_path, make())
    before = coordinator.state
    with pytest.raises(RunFailure, match=words):
        coordinator.accept(spoil(reports[0]))
    assert coordinator.reported == ()
    assert coordinator.state is before
    undisturbed, _ = begun(tmp_path / "undisturbed", make())
    assert_identical(run_round(coordinator, reports), run_round(undisturbed, reports))


@both_ways
def test_a_second_report_is_refused_and_not_counted(make: Callable[[], Algebra], tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, make())
    coordinator.accept(reports[0])
    with pytest.raises(RunFailure, match="a, round 1: the site has reported already"):
        coordinator.accept(reports[0])
    for report in reports[1:]:
        coordinator.accept(report)
    undisturbed, _ = begun(tmp_path / "undisturbed", make())
    assert_identical(coordinator.close_round({}), run_round(undisturbed, reports))


def test_only_one_of_two_simultaneous_reports_of_a_site_counts(tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, streamed())
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def send() -> None:
        barrier.wait(timeout=30)
        try:
            coordinator.accept(reports[0])
            outcomes.append("taken")
        except RunFailure:
            outcomes.append("refused")

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["taken"]


def test_an_uninvited_site_is_refused(tmp_path: Path) -> None:
    algebra = streamed()
    start = State(0, {"w": torch.zeros(2)})
    coordinator = Coordinator(tmp_path, algebra, start, sites=SITES, rounds=3, seed=0, participation=1 / 3)
    (invited,) = coordinator.cohort(1)
    for site in SITES:
        report = report_of(algebra, start, site, {"w": torch.ones(2)})
        if site == invited:
            coordinator.accept(report)
        else:
            with pytest.raises(RunFailure, match=f"{site}, round 1.*expects {invited}$"):
                coordinator.accept(report)
    assert coordinator.reported == (invited,)


def test_a_site_may_not_report_another_sites_model(tmp_path: Path) -> None:
    # Personal tensors make each site's model its own: b's digest is not a's.
    coordinator, reports = begun(tmp_path, spooled())
    after = run_round(coordinator, reports)
    rng = np.random.default_rng(1)
    own, others = (random_report(coordinator.algebra, after, site, rng) for site in ("a", "b"))
    assert own.model != others.model
    with pytest.raises(RunFailure, match="another model"):
        coordinator.accept(dataclasses.replace(own, model=others.model))
    coordinator.accept(own)


@both_ways
def test_below_the_quorum_nothing_happens_and_the_round_stays_open(make: Callable[[], Algebra], tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, make(), quorum=2)
    before = coordinator.state
    values = {name: tensor.clone() for name, tensor in before.tensors.items()}
    coordinator.accept(reports[2])
    with pytest.raises(RunFailure, match=r"round 1 has 1 of 2 .*missing: a, b.*stays at round 0"):
        coordinator.close_round({})
    assert coordinator.state is before
    assert all(torch.equal(before.tensors[name], value) for name, value in values.items())
    assert coordinator.history == []
    assert not coordinator.checkpoint_path.exists()
    coordinator.accept(reports[0])
    after = coordinator.close_round({"round": 1})
    complete, _ = begun(tmp_path / "complete", make(), quorum=2)
    assert_identical(after, run_round(complete, [reports[0], reports[2]]))
    assert coordinator.checkpoint_path.exists()


@both_ways
def test_below_the_quorum_a_later_round_keeps_the_checkpoint(make: Callable[[], Algebra], tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, make())
    run_round(coordinator, reports)
    written = coordinator.checkpoint_path.read_bytes()
    with pytest.raises(RunFailure, match="round 2 has 0 of 3"):
        coordinator.close_round({})
    assert coordinator.checkpoint_path.read_bytes() == written


@both_ways
def test_a_round_whose_checkpoint_could_not_be_written_can_be_closed_again(
    make: Callable[[], Algebra], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # "StorageFailure: the checkpoint could not be written; the run stays at the round before." No report may be lost.
    coordinator, reports = begun(tmp_path, make())
    before = coordinator.state
    for report in reports:
        coordinator.accept(report)

    def full(*args: object, **options: object) -> None:
        raise StorageFailure("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tensors", full)
        with pytest.raises(StorageFailure, match="disk full"):
            coordinator.close_round({})
    assert coordinator.state is before
    assert coordinator.history == []
    undisturbed, _ = begun(tmp_path / "undisturbed", make())
    expected = run_round(undisturbed, reports)
    if not coordinator.reported:
        for report in reports:
            coordinator.accept(report)
    assert_identical(coordinator.close_round({}), expected)


@both_ways
def test_a_record_that_is_not_json_does_not_cost_the_round(make: Callable[[], Algebra], tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, make())
    for report in reports:
        coordinator.accept(report)
    with pytest.raises(ValueError, match="not JSON compliant"):
        coordinator.close_round({"loss": float("nan")})
    undisturbed, _ = begun(tmp_path / "undisturbed", make())
    expected = run_round(undisturbed, reports)
    if not coordinator.reported:
        for report in reports:
            coordinator.accept(report)
    assert_identical(coordinator.close_round({}), expected)


def test_a_report_that_could_not_be_spooled_has_not_been_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, reports = begun(tmp_path, spooled(), quorum=2)
    real = module.spool
    failures = iter([True])

    def full_once(folder: Path, report: Report) -> module.Spooled:
        if next(failures, False):
            raise StorageFailure("disk full")
        return real(folder, report)

    monkeypatch.setattr(module, "spool", full_once)
    with pytest.raises(StorageFailure, match="disk full"):
        coordinator.accept(reports[0])
    assert coordinator.reported == ()
    undisturbed, _ = begun(tmp_path / "undisturbed", spooled(), quorum=2)
    assert_identical(run_round(coordinator, reports), run_round(undisturbed, reports))


def test_a_report_counts_for_the_quorum_only_once_it_is_added(tmp_path: Path) -> None:
    # Another thread may close the round at any moment: a site that is named as reported must be in the sums.
    coordinator, reports = begun(tmp_path, streamed(), quorum=1)
    working, go_on = threading.Event(), threading.Event()
    real = coordinator.algebra.contribute

    def slow(report: Report, plan: Plan, me: int) -> Contribution:
        working.set()
        go_on.wait(timeout=30)
        return real(report, plan, me)

    coordinator.algebra.contribute = slow  # type: ignore[method-assign]
    reporting = threading.Thread(target=coordinator.accept, args=(reports[0],))
    reporting.start()
    assert working.wait(timeout=30)
    seen: list[tuple[str, ...]] = []
    asking = threading.Thread(target=lambda: seen.append(coordinator.reported))
    asking.start()
    # Either the answer comes while the report is being added, or it waits until it has been added.
    asking.join(timeout=1)
    answered_at_once = list(seen)
    go_on.set()
    reporting.join()
    asking.join()
    assert answered_at_once in ([], [()])
    assert coordinator.reported == ("a",)


@both_ways
def test_a_report_that_arrives_while_its_round_is_closed_does_not_count_for_the_next(
    make: Callable[[], Algebra], tmp_path: Path
) -> None:
    coordinator, reports = begun(tmp_path, make(), quorum=2)
    coordinator.accept(reports[0])
    coordinator.accept(reports[1])
    closing = threading.Thread(target=coordinator.close_round, args=({},))
    real = coordinator._digest

    def close_meanwhile(site: str) -> str:
        digest = real(site)
        closing.start()
        # Where `accept` holds a lock, the round is closed after it, with the report in it.
        closing.join(timeout=1)
        return digest

    coordinator._digest = close_meanwhile  # type: ignore[method-assign]
    with contextlib.suppress(RunFailure):
        coordinator.accept(reports[2])
    closing.join()
    assert coordinator.state.round_number == 1
    assert coordinator.reported == ()


@given(count=st.integers(1, 12), percent=st.integers(1, 100), seed=st.integers(0, 2**31))
def test_cohorts_have_the_stated_size_and_repeat(count: int, percent: int, seed: int) -> None:
    sites = [f"s{number}" for number in range(count)]

    def fresh() -> Coordinator:
        start = State(0, {"w": torch.zeros(2)})
        return Coordinator(
            Path("unused"), streamed(), start, sites=sites, rounds=9, seed=seed, participation=percent / 100
        )

    coordinator, again = fresh(), fresh()
    expected = -(-count * percent // 100)
    for number in range(1, 6):
        cohort = coordinator.cohort(number)
        assert len(cohort) == len(set(cohort)) == expected
        assert list(cohort) == [site for site in sites if site in cohort]
        assert again.cohort(number) == cohort
    assert coordinator.quorum == expected


def test_everybody_is_invited_sooner_or_later_and_seeds_differ() -> None:
    sites = [f"s{number}" for number in range(8)]
    start = State(0, {"w": torch.zeros(2)})

    def cohorts(seed: int) -> list[tuple[str, ...]]:
        coordinator = Coordinator(
            Path("unused"), streamed(), start, sites=sites, rounds=60, seed=seed, participation=0.25
        )
        return [coordinator.cohort(number) for number in range(1, 61)]

    first, second = cohorts(1), cohorts(2)
    assert first != second
    assert len(set(first)) > 10
    counts = [sum(site in cohort for cohort in first) for site in sites]
    assert min(counts) >= 5
    assert sum(counts) == 120


@pytest.mark.parametrize(
    "options",
    [
        {"sites": ["../up"]},
        {"sites": ["*"]},
        {"sites": [""]},
        {"sites": ["a b"]},
        {"sites": ["a\n"]},
        {"sites": ["x" * 65]},
        {"participation": 0.0},
        {"participation": 1.01},
        {"participation": float("nan")},
        {"sites": ["a", "a"]},
        {"sites": []},
        {"quorum": -1},
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_at_once(options: dict[str, object], tmp_path: Path) -> None:
    given_options = {"sites": ["a", "b"], "rounds": 1, "seed": 0, **options}
    with pytest.raises(BadInput):
        Coordinator(tmp_path, streamed(), State(0, {"w": torch.zeros(2)}), **given_options)  # type: ignore[arg-type]


def scored(coordinator: Coordinator, correct: float, count: float) -> float | None:
    # Spread over two sites, to show that counts are pooled and accuracies not averaged.
    tallies = [
        {VALIDATION_COUNT: np.array([count - 1]), VALIDATION_CORRECT: np.array([correct])},
        {VALIDATION_COUNT: np.array([1.0]), VALIDATION_CORRECT: np.array([0.0])},
    ]
    return coordinator.assess(tallies)


def test_the_best_round_has_the_highest_pooled_accuracy_and_the_latest_wins_a_tie(tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, streamed(), rounds=5)
    assert scored(coordinator, 9, 10) is None
    assert coordinator.best_round is None
    seen = []
    for correct in (3, 7, 7, 5, 7):
        state = coordinator.state
        run_round(coordinator, [report_of(coordinator.algebra, state, site, reports[0].update) for site in SITES])
        assert scored(coordinator, correct, 10) == correct / 10
        seen.append(coordinator.best_round)
    assert seen == [1, 2, 3, 3, 5]
    assert coordinator.scores == {1: 0.3, 2: 0.7, 3: 0.7, 4: 0.5, 5: 0.7}
    assert coordinator.payload("a").best_round == 5
    assert coordinator.finished


def test_a_model_without_validation_images_has_no_score(tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, streamed())
    run_round(coordinator, reports)
    assert coordinator.assess([]) is None
    assert coordinator.assess([{VALIDATION_COUNT: np.zeros(1), VALIDATION_CORRECT: np.zeros(1)}]) is None
    assert coordinator.best_round is None


def test_a_count_that_is_not_a_number_does_not_become_a_score(tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, streamed())
    run_round(coordinator, reports)
    tally = {VALIDATION_COUNT: np.array([4.0]), VALIDATION_CORRECT: np.array([np.nan])}
    try:
        score = coordinator.assess([tally])
    except CrosswardError:
        score = None
    assert score is None
    assert coordinator.scores == {}


def test_personal_tensors_go_to_their_owner_only(tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, spooled(), quorum=2)
    common = coordinator.state.tensors["dse.weight"].clone()
    after = run_round(coordinator, reports[:2])
    payloads = {site: coordinator.payload(site).tensors for site in SITES}
    for site in ("a", "b"):
        assert torch.equal(payloads[site]["dse.weight"], after.personal[site]["dse.weight"])
    assert torch.equal(payloads["c"]["dse.weight"], common)
    for one, other in itertools.permutations(SITES, 2):
        assert not torch.equal(payloads[one]["dse.weight"], payloads[other]["dse.weight"])
        assert torch.equal(payloads[one]["conv.weight"], payloads[other]["conv.weight"])
        assert set(payloads[one]) == set(coordinator.algebra.sent)


def test_totals_are_those_of_the_open_round(tmp_path: Path) -> None:
    coordinator, reports = begun(tmp_path, streamed())
    coordinator.accept(reports[1])
    coordinator.accept(reports[0])
    assert coordinator.reported == ("a", "b")
    assert coordinator.totals()["n"].item() == reports[0].tally["n"].item() + reports[1].tally["n"].item()
    coordinator.accept(reports[2])
    coordinator.close_round({})
    assert coordinator.totals() == {}
