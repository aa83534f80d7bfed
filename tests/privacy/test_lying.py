"""A lying server in CI: some runs of the fuzzer, and mutants of the package that show that its observer sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from crossward.privacy.secagg import memory
from crossward.privacy.secagg import site as site_module
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import digest
from crossward.privacy.secagg.keys import PairRoots, derive, sign
from crossward.privacy.secagg.messages import REVEAL
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import SecureSite
from tests.privacy.federation import Federation, names
from tests.privacy.lying import play
from tests.privacy.lying_server import STAGES, Run
from tests.privacy.lying_sites import HonestServer

RUNS = 150
ENOUGH = 400
"""Runs in which a mutant is caught for certain: most are within ten."""


def test_no_property_breaks_under_a_lying_server() -> None:
    tally = play(RUNS)
    assert not tally.broken
    reached = [sum(tally.stages[stage] for stage in STAGES[STAGES.index(first) :]) for first in STAGES]
    assert reached[STAGES.index("masked upload")] >= 0.3 * RUNS
    assert reached[STAGES.index("completed")] >= 0.1 * RUNS
    assert reached[0] == RUNS


def test_runs_are_played_again_from_their_seed() -> None:
    for seed in range(5):
        runs = [Run(seed), Run(seed)]
        assert runs[0].go() == runs[1].go()
        assert (runs[0].stage, runs[0].told, runs[0].refused) == (runs[1].stage, runs[1].told, runs[1].refused)


def test_an_honest_server_among_lying_sites() -> None:
    """It crashes at nothing, blames nobody who is honest, and never gives a wrong sum."""
    ends: Counter[str] = Counter()
    for seed in range(40):
        federation = Federation.of(names(5))
        for attempt in (1, 2):
            ends[HonestServer(federation, names(5)[seed % 5 : seed % 5 + 1], seed=seed * 2 + attempt).go(attempt)] += 1
    assert ends["opened"] >= 10
    assert ends["opened"] < 80


# Mutants


def _caught(property_name: str) -> bool:
    return property_name in play(ENOUGH, until=property_name).properties()


def _without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(memory):
        if name.startswith("check_") and hasattr(site_module, name):
            monkeypatch.setattr(site_module, name, lambda *values, **options: None)


def test_the_observer_sees_both_secrets_revealed(monkeypatch: pytest.MonkeyPatch) -> None:
    def reveal(self: SecureSite, attempt: Any) -> bytes:
        self._note(attempt, attempt.survivors, "opened")
        self._state = "opened"
        body = {
            "self": {name: held.self_share for name, held in attempt.held.items()},
            "wrap": {name: held.wrap_share for name, held in attempt.held.items()},
        }
        return sign(REVEAL, body, sender=self.name, context=attempt.context, keys=self._keys)

    monkeypatch.setattr(SecureSite, "_reveal", reveal)
    assert _caught("P1")


def test_the_observer_sees_a_lower_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "threshold", lambda self, sharers: max(2, sharers // 2))
    assert _caught("P1")


def test_the_observer_sees_a_site_that_answers_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shares kept, and without order of states, agreement and memory: one answer for each set of survivors."""
    real = SecureSite._reveal

    def reveal(self: SecureSite, attempt: Any) -> bytes:
        held = dict(attempt.held)
        message = real(self, attempt)
        attempt.held = held
        return message

    _without_memory(monkeypatch)
    monkeypatch.setattr(SecureSite, "_reveal", reveal)
    monkeypatch.setattr(SecureSite, "_expect", lambda self, state: None)
    monkeypatch.setattr(SecureSite, "_check_agreements", lambda self, attempt, agreements: None)
    assert _caught("P1")


def test_the_observer_sees_small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "fewest", 1)
    monkeypatch.setattr(Settings, "threshold", lambda self, sharers: 1)
    assert _caught("P2")


def test_the_observer_sees_sums_that_differ_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the memory of what was opened."""
    _without_memory(monkeypatch)
    assert _caught("P3")


def test_the_observer_sees_a_mask_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys that do not depend on the attempt."""
    monkeypatch.setattr(
        PairRoots, "key", lambda self, other, purpose, **options: derive(self._roots[other], purpose, context=b"same")
    )
    assert _caught("P4")


@pytest.mark.parametrize("blind_to", ["model", "plan", "layout"])
def test_the_observer_sees_sites_with_different_things_in_mind(monkeypatch: pytest.MonkeyPatch, blind_to: str) -> None:
    def context(self: Binding, **known: Any) -> bytes:
        message = {name: value for name, value in self.message().items() if name != blind_to}
        return digest("context", *known.values(), message)

    monkeypatch.setattr(Binding, "context", context)
    assert _caught("P5")
