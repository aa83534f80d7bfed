from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crossward.privacy.secagg import roster
from crossward.privacy.secagg.masks import remove_pads
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.server import TooFew
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import OutOfTurn
from tests.privacy.federation import Federation, Lost, binding, names, run_round, secure_site


@pytest.fixture(autouse=True)
def check_every_certificate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites check the same certificates in the same way; fifty sites would do so 2500 times."""
    monkeypatch.setattr(roster, "check_signed", lru_cache(maxsize=256)(roster.check_signed))


def _powers(sites: Collection[str], words: int = 4) -> dict[str, NDArray[np.uint32]]:
    """Site k writes 2^k, so that a sum says who is in it."""
    return {name: np.full(words, 2**number, np.uint32) for number, name in enumerate(sites)}


def _who(sites: Sequence[str], total: NDArray[np.uint32]) -> list[str]:
    assert len(set(total.tolist())) == 1
    return [name for number, name in enumerate(sites) if int(total[0]) >> number & 1]


@pytest.mark.parametrize("count", [3, 5, 10, 20])
@pytest.mark.parametrize("cipher", ["aes-256-ctr", "chacha20"])
def test_the_sum_is_exact(count: int, cipher: Any) -> None:
    sites = names(count)
    federation = Federation.of(sites, Settings(cipher=cipher))
    rng = np.random.default_rng(count)
    vectors = {name: rng.integers(0, 2**32, 1000, dtype=np.uint32) for name in sites}
    attempt = run_round(federation, binding(sites), vectors)
    expected = sum(vector.astype(object) for vector in vectors.values()) % 2**32
    np.testing.assert_array_equal(attempt.sum, expected.astype(np.uint32))


def test_fifty_sites_of_which_twenty_drop_out() -> None:
    sites = names(50)  # threshold 26
    federation = Federation.of(sites)
    vectors = {name: np.full(64, number, np.uint32) for number, name in enumerate(sites)}
    attempt = run_round(federation, binding(sites), vectors, lost=Lost(upload=sites[5:25], survivors=sites[46:]))
    assert attempt.sum.tolist() == [sum(range(5)) + sum(range(25, 50))] * 64


@pytest.mark.parametrize(
    "order", [["c", "a", "b", "d"], ["Site-1", "site-1", "SITE-1"], ["site-10", "site-9", "site-1", "site-02", "0"]]
)
def test_names_in_any_order(order: list[str]) -> None:
    federation = Federation.of(order)
    gone = order[:1] if len(order) > 4 else []
    attempt = run_round(federation, binding(order), _powers(order), lost=Lost(upload=gone))
    assert _who(order, attempt.sum) == order[len(gone) :]


STEPS = ["share", "upload", "survivors", "reveal"]
SEVEN = names(7)  # threshold 5: two may go


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("gone", [SEVEN[:1], SEVEN[2:4], [SEVEN[0], SEVEN[6]]])
def test_drop_outs_up_to_the_threshold(step: str, gone: list[str]) -> None:
    federation = Federation.of(SEVEN)
    lost = Lost(**{step: gone})
    if step == "reveal":
        # There is a step to reveal only when somebody dropped out before it.
        lost = Lost(upload=[SEVEN[5]], reveal=gone[:1])
    attempt = run_round(federation, binding(SEVEN), _powers(SEVEN), lost=lost)
    left_out = {"share": gone, "upload": gone, "survivors": [], "reveal": [SEVEN[5]]}[step]
    assert _who(SEVEN, attempt.sum) == [name for name in SEVEN if name not in left_out]


@pytest.mark.parametrize("step", STEPS)
def test_one_drop_out_more_and_there_is_no_sum(step: str) -> None:
    federation = Federation.of(SEVEN)
    lost = Lost(upload=[SEVEN[6]], reveal=SEVEN[:2]) if step == "reveal" else Lost(**{step: SEVEN[:3]})
    with pytest.raises(TooFew):
        run_round(federation, binding(SEVEN), _powers(SEVEN), lost=lost)


def test_drop_outs_at_all_steps_together() -> None:
    sites = names(10)  # threshold 6: four may go
    federation = Federation.of(sites)
    lost = Lost(share=sites[:1], upload=sites[1:2], survivors=sites[2:3], reveal=sites[3:4])
    attempt = run_round(federation, binding(sites), _powers(sites), lost=lost)
    assert _who(sites, attempt.sum) == sites[2:]


def test_a_site_that_dropped_out_is_back_in_the_next_round_with_the_same_keys() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    for round_number, gone in enumerate([[sites[1]], [], [sites[4]], [sites[1]], []], start=1):
        about = binding(sites, round_number=round_number, model=f"model {round_number}")
        attempt = run_round(federation, about, _powers(sites), lost=Lost(upload=gone))
        assert _who(sites, attempt.sum) == [name for name in sites if name not in gone]


def test_rounds_may_be_skipped_but_not_gone_back_to() -> None:
    sites = names(3)
    federation = Federation.of(sites, Settings(rounds=9))
    for round_number in (2, 5, 9):
        about = binding(sites, round_number=round_number, model=f"model {round_number}")
        assert _who(sites, run_round(federation, about, _powers(sites)).sum) == sites
    for round_number in (8, 10):
        with pytest.raises(Exception, match="round"):
            federation.sites[sites[0]].begin(binding(sites, round_number=round_number, model="another"))


def test_a_site_that_missed_rounds_keeps_step() -> None:
    sites = names(4)
    federation = Federation.of(sites)
    for round_number in (1, 2, 3):
        some = sites[:3]
        run_round(federation, binding(some, round_number=round_number, model=str(round_number)), _powers(some))
    attempt = run_round(federation, binding(sites, round_number=4, model="4"), _powers(sites))
    assert _who(sites, attempt.sum) == sites


def test_a_failed_attempt_is_made_again_over_the_same_updates() -> None:
    """The second time with the sites that are left; what travelled the first time is unrelated to the second."""
    sites = names(5)  # threshold 4
    federation = Federation.of(sites)
    vectors = _powers(sites, 256)
    masked: dict[str, list[NDArray[np.uint32]]] = {name: [] for name in sites}

    def see(name: str, words: NDArray[np.uint32]) -> None:
        masked[name].append(words.copy())

    with pytest.raises(TooFew):
        run_round(federation, binding(sites), vectors, lost=Lost(upload=sites[3:]), seen=see)
    left = sites[:4]
    attempt = run_round(federation, binding(left, attempt=2), {name: vectors[name] for name in left}, seen=see)
    assert _who(sites, attempt.sum) == left
    for name in left[:3]:
        first, second = masked[name]
        # 256 words of 32 random bits: any that agree do so by a chance of 256 / 2^32.
        assert not (first == second).any()
        assert not (first - second == 0).any()


def test_a_cohort_of_some_sites_of_the_roster() -> None:
    sites = names(7)
    federation = Federation.of(sites)
    some = [sites[number] for number in (1, 3, 4, 6)]
    assert _who(sites, run_round(federation, binding(some), _powers(sites)).sum) == some


def test_a_crashed_site_has_no_place_in_the_job_any_more() -> None:
    """It comes back with other keys than the roster has; the others go on without it."""
    sites = names(5)
    federation = Federation.of(sites)
    settings = federation.server.settings
    federation.sites[sites[2]] = secure_site(sites[2], settings=settings, memory=federation.memories[sites[2]])
    with pytest.raises(OutOfTurn):
        federation.sites[sites[2]].begin(binding(sites))
    attempt = run_round(federation, binding(sites), _powers(sites), lost=Lost(share=[sites[2]]))
    assert _who(sites, attempt.sum) == [name for name in sites if name != sites[2]]


@pytest.mark.parametrize("gone", [[], ["site-04"], ["site-01"]])
def test_a_personal_slot_is_read_by_its_site_only(gone: list[str]) -> None:
    sites = names(5)
    federation = Federation.of(sites)
    slots = {name: slice(100 * (number + 1), 100 * (number + 2)) for number, name in enumerate(sites)}
    attempt = run_round(federation, binding(sites), _powers(sites, 600), lost=Lost(upload=gone), slots=slots)
    left = [name for name in sites if name not in gone]
    assert _who(sites, attempt.sum[:100]) == left
    for name in left:
        slot = attempt.sum[slots[name]].copy()
        # To the server it is noise: 100 words of which none is the sum, nor any other twice.
        assert len(set(slot.tolist())) == 100
        remove_pads(slot, federation.sites[name].take_pads())
        assert _who(sites, slot) == left


def test_another_site_cannot_read_a_personal_slot() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    slots = {sites[0]: slice(0, 50), sites[1]: slice(50, 100)}
    attempt = run_round(federation, binding(sites), _powers(sites, 100), slots=slots)
    slot = attempt.sum[slots[sites[0]]].copy()
    remove_pads(slot, federation.sites[sites[1]].take_pads())
    assert len(set(slot.tolist())) == 50


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("gone", [[], ["site-03"]])
def test_weighted_averages_in_every_ring(bits: Any, gone: list[str]) -> None:
    sites = names(5)
    federation = Federation.of(sites, Settings(bits=bits))
    ring = Ring(bits, len(sites))
    rng = np.random.default_rng(bits)
    values = {name: rng.normal(0, 0.3, 200).astype(np.float32) for name in sites}
    vectors = {}
    for name in sites:
        vectors[name] = np.zeros(200, np.uint32)
        ring.encode_into(vectors[name], values[name], weight=1 / 5, limit=2.0)
    attempt = run_round(federation, binding(sites), vectors, lost=Lost(upload=gone))
    expected = sum(values[name].astype(np.float64) / 5 for name in sites if name not in gone)
    steps = np.abs(ring.decode(attempt.sum, limit=2.0) - expected) * ring.levels / 2.0
    # Half a step of every site; in the widest ring float32 itself is coarser than a step.
    assert steps.max() <= (2.5 if bits < 32 else 2.5 * 2**7)
