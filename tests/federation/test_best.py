from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.standins import Shapes, mean_algebra, random_report, random_start

from crossward.federation.algebra import Algebra
from crossward.federation.contract import VALIDATION_CORRECT, VALIDATION_COUNT, Payload
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import StorageFailure
from crossward.federation.storage import read_tensors

SITES = ("a", "b", "c")


def fresh(folder: Path, algebra: Algebra | None = None, **options: object) -> Coordinator:
    algebra = algebra or mean_algebra({"w": (2,), "v": (3, 1)})
    start = random_start(algebra, np.random.default_rng(0))
    return Coordinator(folder, algebra, start, sites=SITES, rounds=6, seed=4, **options)  # type: ignore[arg-type]


def close(coordinator: Coordinator) -> None:
    number = coordinator.state.round_number + 1
    for site in coordinator.cohort(number):
        coordinator.accept(
            random_report(coordinator.algebra, coordinator.state, site, np.random.default_rng([number, ord(site)]))
        )
    coordinator.close_round({"round": number})


def assess(coordinator: Coordinator, correct: int) -> None:
    """As the conductor does: score the current model of 100 images, and keep it while it is the best."""
    coordinator.assess([{VALIDATION_COUNT: np.array([100.0]), VALIDATION_CORRECT: np.array([float(correct)])}])
    coordinator.keep_best()


def play(coordinator: Coordinator, corrects: list[int]) -> dict[int, dict[str, Payload]]:
    """Rounds with these scores; what every site received after each of them."""
    received = {}
    for correct in corrects:
        close(coordinator)
        received[coordinator.state.round_number] = {site: coordinator.payload(site) for site in SITES}
        assess(coordinator, correct)
    return received


def same(one: Payload, other: Payload) -> bool:
    return (
        one.round_number == other.round_number
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    )


@pytest.mark.parametrize("make", [lambda: mean_algebra({"w": (2,)}), lambda: Shapes(2, 1, 1, 2, 3).algebra()])
@pytest.mark.parametrize(("corrects", "best"), [([10, 90, 20, 30], 2), ([10, 20, 30, 90], 4), ([90, 20, 30, 40], 1)])
def test_a_site_that_was_away_gets_what_it_would_have_received(
    tmp_path: Path, make: object, corrects: list[int], best: int
) -> None:
    coordinator = fresh(tmp_path, make())  # type: ignore[operator]
    received = play(coordinator, corrects)
    assert coordinator.best_round == best
    for site in SITES:
        payload = coordinator.best_payload(site)
        assert same(payload, received[best][site])
        assert payload.best_round == best
        plan, expected = payload.plan, received[best][site].plan
        assert (plan and plan.digest()) == (expected and expected.digest())


def test_personal_tensors_are_the_sites_own(tmp_path: Path) -> None:
    coordinator = fresh(tmp_path, Shapes(2, 1, 1, 2, 3).algebra())
    play(coordinator, [10, 90, 20])
    heads = {site: coordinator.best_payload(site).tensors["dse.weight"] for site in SITES}
    assert not torch.equal(heads["a"], heads["b"])
    assert not torch.equal(heads["b"], heads["c"])


def test_a_worse_round_does_not_write_the_kept_model_again(tmp_path: Path) -> None:
    coordinator = fresh(tmp_path)
    play(coordinator, [90])
    (kept,) = tmp_path.glob("best*")
    before = kept.read_bytes(), kept.stat().st_ino
    play(coordinator, [20, 30])
    assert list(tmp_path.glob("best*")) == [kept]
    assert (kept.read_bytes(), kept.stat().st_ino) == before


def test_before_any_score_the_best_is_the_current_model(tmp_path: Path) -> None:
    coordinator = fresh(tmp_path)
    coordinator.keep_best()
    assert same(coordinator.best_payload("a"), coordinator.payload("a"))
    close(coordinator)
    assert coordinator.best_round is None
    assert coordinator.best_payload("a").round_number == 1
    assert not list(tmp_path.glob("best*"))


def test_the_best_model_survives_a_restart(tmp_path: Path) -> None:
    received = play(fresh(tmp_path), [10, 90, 20, 30])
    again = fresh(tmp_path)
    assert again.resume()
    # The last score is not in the checkpoint: its round is assessed anew.
    assert again.best_round == 2
    assert same(again.best_payload("b"), received[2]["b"])


def test_a_kept_model_that_is_gone_or_damaged_is_said(tmp_path: Path) -> None:
    coordinator = fresh(tmp_path)
    play(coordinator, [90, 20])
    (kept,) = tmp_path.glob("best*")
    kept.write_bytes(kept.read_bytes()[:-3])
    with pytest.raises(StorageFailure):
        coordinator.best_payload("a")
    kept.unlink()
    with pytest.raises(StorageFailure):
        coordinator.best_payload("a")


def test_a_score_that_a_stopped_job_did_not_keep_does_not_cost_the_best_model(tmp_path: Path) -> None:
    """Round 3 looks best to the few sites that answered before the job stopped, and not to all when it is resumed."""
    coordinator = fresh(tmp_path)
    received = play(coordinator, [10, 80])
    close(coordinator)
    assess(coordinator, 100)
    assert int(read_tensors(tmp_path / "checkpoint.safetensors")[1]["round"]) == 3

    again = fresh(tmp_path)
    assert again.resume()
    assert (again.state.round_number, again.best_round) == (3, 2)
    assess(again, 50)
    close(again)
    assess(again, 40)
    assert again.best_round == 2
    assert again.best_payload("a").round_number == 2
    assert same(again.best_payload("a"), received[2]["a"])
