"""What is usual for a round depends on whose updates are in it: sites come, go and differ, and none is at fault for it.

A site with more images takes more steps, and its update is as much longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.standins import mean_algebra, report_of

from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, Report, State
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.outliers import ROUNDS, TIMES, EndlessRound, OutlierRound

pytestmark = pytest.mark.usefixtures("without_fsync")

ALGEBRA = mean_algebra({"w": (8,)})
SMALL = ("alder", "birch", "cedar")
LARGE = "dogwood"
SITES = (*SMALL, LARGE)
LENGTHS = dict.fromkeys(SMALL, 0.31) | {LARGE: 3.17}
"""Of updates after a round of training on as many images."""
IMAGES = dict.fromkeys(SMALL, 40.0) | {LARGE: 800.0}
FAR = torch.finfo(torch.float32).max


def begun(folder: Path, *, at: float = 0.0, outlier: float = TIMES, participation: float = 1.0) -> Coordinator:
    start = State(0, {"w": torch.full((8,), at)})
    return Coordinator(
        folder, ALGEBRA, start, sites=SITES, rounds=40, seed=3, quorum=1, outlier=outlier, participation=participation
    )


def report(run: Coordinator, site: str, *, times: float = 1.0, equal: bool = False) -> Report:
    """An update as long as the site's are, partly of a direction that all have in common."""
    generator = torch.Generator().manual_seed(100 * run.state.round_number + SITES.index(site))
    update = 1.0 + 0.5 * torch.randn(8, generator=generator)
    update *= times * LENGTHS[site] / torch.linalg.vector_norm(update)
    return report_of(ALGEBRA, run.state, site, {"w": update}, samples=1.0 if equal else IMAGES[site])


def played(
    run: Coordinator, sites: Iterable[str], *, times: Mapping[str, float] | None = None, equal: bool = False
) -> None:
    """A round of these sites, some of which send a multiple of what they trained."""
    for site in sites:
        run.accept(report(run, site, times=(times or {}).get(site, 1.0), equal=equal))
    run.close_round({"round": run.state.round_number + 1})


def rounds(run: Coordinator, count: int, sites: Collection[str] = SITES) -> None:
    for _ in range(count):
        played(run, sites)


def test_a_large_site_that_was_away_comes_back(tmp_path: Path) -> None:
    """Without it rounds are a tenth as long, and its return is nobody's fault."""
    run = begun(tmp_path)
    rounds(run, ROUNDS)
    rounds(run, 2 * ROUNDS, SMALL)
    played(run, SITES)
    *before, last = [entry["moved"] for entry in run.history]
    assert last > TIMES * max(before[-ROUNDS:])


def test_a_large_site_that_comes_late(tmp_path: Path) -> None:
    """Nothing is usual yet for a round with it, until it has been in enough of them."""
    run = begun(tmp_path)
    rounds(run, ROUNDS, SMALL)
    rounds(run, ROUNDS)
    with pytest.raises(OutlierRound) as rejected:
        played(run, SITES, times={LARGE: 100.0})
    assert rejected.value.site == LARGE


def test_sites_of_different_sizes_by_turns(tmp_path: Path) -> None:
    """Each is held against its own rounds, whoever else is invited to others."""
    run = begun(tmp_path, participation=0.25)
    asked: list[str] = []
    while min(asked.count(site) for site in SITES) < ROUNDS:
        asked += run.cohort(run.state.round_number + 1)
        played(run, asked[-1:])
    (site,) = run.cohort(run.state.round_number + 1)
    with pytest.raises(OutlierRound) as rejected:
        played(run, [site], times={site: 100.0})
    assert rejected.value.site == site


def test_a_large_site_that_is_left_alone(tmp_path: Path) -> None:
    """Among four that count alike its update was a quarter of the round, and now it is all of it."""
    run = begun(tmp_path)
    for _ in range(ROUNDS):
        played(run, SITES, times=dict.fromkeys(SMALL, 0.0), equal=True)
    played(run, [LARGE], times={LARGE: 2.0}, equal=True)


def test_an_attack_after_a_return(tmp_path: Path) -> None:
    """A site that was away and is back does not open the door to another one."""
    run = begun(tmp_path)
    rounds(run, ROUNDS)
    rounds(run, ROUNDS, SMALL)
    with pytest.raises(OutlierRound):
        played(run, SITES, times={"birch": 1000.0})


def test_a_site_with_long_updates_is_not_named_for_another_ones(tmp_path: Path) -> None:
    """What counts is how much longer an update is than the same site's before, not than others'."""
    run = begun(tmp_path)
    rounds(run, ROUNDS, SMALL)
    for _ in range(ROUNDS):
        played(run, SITES, times={LARGE: 1000.0})
    with pytest.raises(OutlierRound) as rejected:
        played(run, SITES, times={LARGE: 1000.0, "birch": 900000.0})
    assert rejected.value.site == "birch"


def test_all_sites_together_are_nobodys_fault(tmp_path: Path) -> None:
    run = begun(tmp_path)
    rounds(run, ROUNDS)
    with pytest.raises(OutlierRound) as rejected:
        played(run, SITES, times=dict.fromkeys(SITES, 100.0))
    assert rejected.value.site is None


def test_what_is_usual_for_whom_outlives_a_restart(tmp_path: Path) -> None:
    run = begun(tmp_path)
    rounds(run, ROUNDS)
    rounds(run, ROUNDS, SMALL)
    again = begun(tmp_path)
    assert again.resume()
    played(again, SITES)
    with pytest.raises(OutlierRound) as rejected:
        played(again, SITES, times={LARGE: 100.0})
    assert rejected.value.site == LARGE


@pytest.mark.parametrize("outlier", [TIMES, 0.0])
@pytest.mark.parametrize("before", [0, ROUNDS])
def test_a_round_to_infinity(outlier: float, before: int, tmp_path: Path) -> None:
    """There is no model after it, whatever is usual and whatever is allowed."""
    run = begun(tmp_path, at=FAR, outlier=outlier)
    good = run.state
    for _ in range(before):
        played(run, SITES, times=dict.fromkeys(SITES, -1e33))
        good = run.state
    for site in SITES:
        run.accept(report_of(ALGEBRA, run.state, site, {"w": torch.full((8,), FAR)}))
    with pytest.raises(EndlessRound, match=rf"^round {before + 1}: .* not be finite .* stays at round {before}"):
        run.close_round({"round": before + 1})
    assert run.state is good
    assert len(run.history) == before


@pytest.mark.parametrize("count", [1e308, 1e9, -1.0, 0.5])
@pytest.mark.parametrize("key", [SAMPLES, SEEN, CORRECT])
def test_a_count_of_images_that_cannot_be_one(key: str, count: float, tmp_path: Path) -> None:
    """Such as one with which the sum over sites, or a share of it, is no number any more."""
    run = begun(tmp_path)
    good = report(run, "birch")
    counts = dict.fromkeys((SEEN, CORRECT, LOSS), np.array([40.0]))
    spoiled = Report(
        good.site, good.round_number, good.model, good.update, {**good.tally, **counts, key: np.array([count])}
    )
    with pytest.raises(PrivacyRefusal, match=rf"^birch, round 1: '{key}' is .*, which is no number of images"):
        run.accept(spoiled)
    assert run.reported == ()
    run.accept(report(run, "birch"))
    assert math.isfinite(run.totals()[SAMPLES].item())
