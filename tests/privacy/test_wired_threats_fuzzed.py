"""A server that lies to sites as they are wired: some runs of the fuzzer, and mutants that show that it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crossward.privacy.secagg.binding import Binding
from crossward.privacy.sums import Kind, MaskedAlgebra, Request
from crossward.site import release
from crossward.site.release import Release
from tests.privacy.lying import play
from tests.privacy.lying_server import STAGES
from tests.privacy.lying_wired import WiredRun

RUNS = 60
FEW = 6
"""Most runs have no use for what a mutant allows: the seeds are those from which it is not far to one that has."""


def test_no_property_breaks_under_a_server_that_lies_to_wired_sites() -> None:
    tally = play(RUNS, kind=WiredRun)
    assert not tally.broken
    assert sum(tally.stages.values()) == RUNS
    assert tally.stages["completed"] >= 0.8 * RUNS
    assert sum(tally.stages[stage] for stage in STAGES[STAGES.index("masked upload") :]) >= 0.9 * RUNS


def test_wired_runs_are_played_again_from_their_seed() -> None:
    for seed in range(3):
        runs = [WiredRun(seed), WiredRun(seed)]
        assert runs[0].go() == runs[1].go()
        assert (runs[0].stage, runs[0].told, runs[0].refused) == (runs[1].stage, runs[1].told, runs[1].refused)


def caught(what: str, *, seed: int) -> bool:
    """Whether one of a few runs from this seed on shows such a number of one site alone."""
    return any(found.startswith("P3") and what in found for _, found in play(FEW, seed=seed, kind=WiredRun).broken)


def test_the_observer_sees_counts_in_two_kinds_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MaskedAlgebra.__init__

    def init(self: MaskedAlgebra, *values: Any, **options: Any) -> None:
        made(self, *values, **options)
        self._remembered = {}

    monkeypatch.setattr(MaskedAlgebra, "__init__", init)
    assert caught("validation/correct", seed=50)


def test_the_observer_sees_test_images_that_are_summed_with_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MaskedAlgebra.binding

    def binding(self: MaskedAlgebra, request: Request, *, study: str, model: str) -> Binding:
        bound = real(self, request, study=study, model=model)
        return replace(bound, model=f"{bound.model} {model}") if request.kind is Kind.TEST else bound

    monkeypatch.setattr(MaskedAlgebra, "binding", binding)
    assert caught("test/correct", seed=35)


def test_the_observer_sees_tallies_that_are_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MaskedAlgebra.check
    monkeypatch.setattr(
        MaskedAlgebra, "check", lambda self, request: None if request.kind is Kind.TOTALS else real(self, request)
    )
    assert caught("train/loss", seed=54)


def test_the_observer_sees_models_that_are_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Release._hold

    def hold(self: Release, what: str, value: str, **options: Any) -> None:
        if not what.startswith("the model"):
            real(self, what, value, **options)

    monkeypatch.setattr(Release, "_hold", hold)
    # Made-up updates of nearly the same models are the same to the bit, which is a matter of this record.
    monkeypatch.setattr(release, "hold_to_one_sum", lambda *given, **options: None)
    assert caught("train/loss", seed=50)


def test_the_observer_sees_plans_for_more_sites_than_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "_demand_whole", staticmethod(lambda request, sites: None))
    assert caught("prototypes", seed=62)


def test_the_observer_sees_a_row_of_one_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskedAlgebra, "check_rows", staticmethod(lambda own, rows, *, fewest: None))
    assert caught("prototypes", seed=10)
