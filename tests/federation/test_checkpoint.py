from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.standins import Shapes, assert_identical, mean_algebra, random_report, random_start, run_round

from crossward.federation.algebra import Algebra
from crossward.federation.contract import VALIDATION_CORRECT, VALIDATION_COUNT, Plan, State
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import StorageFailure
from crossward.federation.storage import read_tensors, write_tensors

SITES = ("a", "b", "c")


def streamed() -> Algebra:
    return mean_algebra({"w": (2,), "v": (3, 1)})


def spooled() -> Algebra:
    return Shapes(2, 1, 1, 2, 3).algebra()


both_ways = pytest.mark.parametrize("make", [streamed, spooled])


def fresh(folder: Path, algebra: Algebra) -> Coordinator:
    start = random_start(algebra, np.random.default_rng(0))
    return Coordinator(folder, algebra, start, sites=SITES, rounds=6, seed=4, participation=0.6, quorum=1)


def play(coordinator: Coordinator, *, until: int) -> None:
    """Rounds whose reports depend on the round alone, so that a resumed run gets the same ones."""
    while coordinator.state.round_number < until:
        number = coordinator.state.round_number + 1
        rng = np.random.default_rng(number)
        reports = [
            random_report(coordinator.algebra, coordinator.state, site, rng) for site in coordinator.cohort(number)
        ]
        for report in reports:
            coordinator.accept(report)
        coordinator.close_round({"round": number, "loss": 0.1 * number, "sites": {"a": None}})
        correct = np.array([float(rng.integers(0, 10))])
        coordinator.assess([{VALIDATION_COUNT: np.array([10.0]), VALIDATION_CORRECT: correct}])


@both_ways
def test_a_resumed_run_ends_with_the_same_bits(make: Callable[[], Algebra], tmp_path: Path) -> None:
    whole = fresh(tmp_path / "whole", make())
    play(whole, until=6)
    for stop in (1, 3, 5):
        folder = tmp_path / f"stopped-{stop}"
        play(fresh(folder, make()), until=stop)
        resumed = fresh(folder, make())
        assert resumed.resume()
        assert resumed.state.round_number == stop
        assert not resumed.finished
        assert resumed.history == whole.history[:stop]
        # The last round is assessed after its checkpoint; whoever resumes assesses the model again.
        assert resumed.scores == {number: whole.scores[number] for number in range(1, stop)}
        resumed.assess([{VALIDATION_COUNT: np.array([10.0]), VALIDATION_CORRECT: np.array([10 * whole.scores[stop]])}])
        play(resumed, until=6)
        assert_identical(resumed.state, whole.state)
        assert resumed.scores == whole.scores
        assert resumed.best_round == whole.best_round
        assert resumed.history == whole.history
        assert resumed.finished


@both_ways
def test_what_is_resumed_is_what_was_stored(make: Callable[[], Algebra], tmp_path: Path) -> None:
    first = fresh(tmp_path, make())
    play(first, until=3)
    second = fresh(tmp_path, make())
    assert second.resume()
    assert_identical(second.state, first.state)
    for site in SITES:
        before, after = first.payload(site).tensors, second.payload(site).tensors
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert second.cohort(4) == first.cohort(4)


def test_a_report_of_before_the_crash_is_taken_after_it(tmp_path: Path) -> None:
    first, undisturbed = fresh(tmp_path / "crashed", spooled()), fresh(tmp_path / "undisturbed", spooled())
    play(first, until=2)
    play(undisturbed, until=2)
    rng = np.random.default_rng(0)
    reports = [random_report(first.algebra, first.state, site, rng) for site in first.cohort(3)]
    first.accept(reports[0])
    second = fresh(tmp_path / "crashed", spooled())
    assert second.resume()
    assert second.reported == ()
    assert_identical(run_round(second, reports), run_round(undisturbed, reports))


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    coordinator = fresh(tmp_path, streamed())
    before = coordinator.state
    assert not coordinator.resume()
    assert coordinator.state is before


def test_the_spool_is_gone_after_the_round(tmp_path: Path) -> None:
    coordinator = fresh(tmp_path, spooled())
    play(coordinator, until=2)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint.safetensors"]


def other_layouts() -> dict[str, Algebra]:
    return {
        "another shape": mean_algebra({"w": (2,), "v": (1, 3)}),
        "another name": mean_algebra({"w": (2,), "u": (3, 1)}),
        "one tensor more": mean_algebra({"w": (2,), "v": (3, 1), "x": (1,)}),
    }


@pytest.mark.parametrize("kind", other_layouts())
def test_a_checkpoint_of_another_layout_is_refused(kind: str, tmp_path: Path) -> None:
    play(fresh(tmp_path, streamed()), until=1)
    other = fresh(tmp_path, other_layouts()[kind])
    before = other.state
    with pytest.raises(StorageFailure, match="another study or version"):
        other.resume()
    assert other.state is before


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: cut(path, 0),
    "cut in the length": lambda path: cut(path, 5),
    "cut in the header": lambda path: cut(path, 60),
    "cut before the last byte": lambda path: cut(path, path.stat().st_size - 1),
    "not a tensor file": lambda path: path.write_text("hello\n") and None,
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "a header that is not JSON": lambda path: flip(path, 8),
    "another format": lambda path: write_tensors(path, read_tensors(path)[0], {}),
    "a changed value": lambda path: flip(path, path.stat().st_size - 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_not_touched(damage: str, tmp_path: Path) -> None:
    play(fresh(tmp_path, streamed()), until=2)
    coordinator = fresh(tmp_path, streamed())
    before = coordinator.state
    DAMAGE[damage](coordinator.checkpoint_path)
    left = coordinator.checkpoint_path.read_bytes()
    with pytest.raises(StorageFailure):
        coordinator.resume()
    assert coordinator.state is before
    assert coordinator.history == []
    assert coordinator.scores == {}
    assert coordinator.checkpoint_path.read_bytes() == left


def test_a_run_in_which_nothing_is_sent_is_stored_and_resumed(tmp_path: Path) -> None:
    algebra = Algebra({}, {})
    first = Coordinator(tmp_path, algebra, State(0, {}), sites=SITES, rounds=2, seed=0)
    rng = np.random.default_rng(0)
    run_round(first, [random_report(algebra, first.state, site, rng) for site in SITES])
    second = Coordinator(tmp_path, algebra, State(0, {}), sites=SITES, rounds=2, seed=0)
    assert second.resume()
    assert second.state == State(1, {}, plan=Plan(1, SITES))
