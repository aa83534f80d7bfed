from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from crossward.federation.errors import StorageFailure
from crossward.privacy.secagg.memory import AlreadyUsed, Forgetful, Use, check_new, check_same_update, check_sum
from tests.privacy.federation import JOB, Federation, Lost, binding, names, run_round, secure_site

SITES = ("a", "b", "c", "d")


@lru_cache(maxsize=1)
def _real_use() -> Use:
    """What a site keeps of attempt 2 of round 2."""
    federation = Federation.of(SITES)
    about = binding(SITES, round_number=2, attempt=2)
    vectors = {name: np.ones(4, np.uint32) for name in SITES}
    run_round(federation, about, vectors)
    return next(use for use in federation.memories["a"].uses("study", about.model) if use.step == "masked")


def _use(**changes: Any) -> Use:
    return replace(_real_use(), **changes)


def _new(uses: Sequence[Use], *, job: str = JOB, cohort: Sequence[str] = SITES, **changes: Any) -> None:
    check_new(uses, binding(cohort, **{"round_number": 2, "attempt": 3, **changes}), job=job)


def test_a_memory_keeps_uses_by_run_and_model() -> None:
    memory = Forgetful()
    memory.keep("run", "model", _use())
    memory.keep("run", "model", _use(attempt=3))
    assert [use.attempt for use in memory.uses("run", "model")] == [2, 3]
    assert not memory.uses("run", "other model")
    assert not memory.uses("other run", "model")


def test_an_attempt_that_masked_is_not_made_again() -> None:
    with pytest.raises(AlreadyUsed):
        _new([_use()], attempt=2)
    with pytest.raises(AlreadyUsed):
        _new([_use()], attempt=1)
    _new([_use()])
    _new([_use()], attempt=1, round_number=3)


def test_another_job_has_other_keys() -> None:
    _new([_use()], job="another", attempt=2)


def test_an_opened_sum_allows_no_other_cohort() -> None:
    opened = [_use(), _use(step="opened")]
    _new(opened)
    for cohort in (SITES[:3], ("a", "b", "c", "e")):
        with pytest.raises(AlreadyUsed):
            _new(opened, cohort=cohort)
        with pytest.raises(AlreadyUsed):
            _new(opened, cohort=cohort, job="another", attempt=1, round_number=1)


def test_who_was_asked_beside_the_sites_of_an_opened_sum_is_asked_again_and_in_no_other_words() -> None:
    """Whose vectors are missing is known only when vectors are masked; it is looked at again then."""
    opened = [_use(), _use(step="opened")]
    _new(opened, cohort=(*SITES, "e"))
    check_sum(opened, cohort=SITES, about=opened[0].about)
    for refused in (
        lambda: _new(opened, cohort=(*SITES, "e"), layout="another"),
        lambda: check_sum(opened, cohort=(*SITES, "e"), about=opened[0].about),
    ):
        with pytest.raises(AlreadyUsed):
            refused()


def test_a_sum_that_was_not_opened_does() -> None:
    _new([_use()], cohort=SITES[:3])


def test_an_opened_sum_allows_no_other_update() -> None:
    check_same_update([_use(step="opened")], "update of a")
    with pytest.raises(AlreadyUsed):
        check_same_update([_use(step="opened")], "another update")


class Watching(Forgetful):
    """Notes what the site had when it was asked to keep a use; can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.words = np.zeros(4, np.uint32)
        self.seen: list[tuple[str, list[int]]] = []
        self.full = False

    def keep(self, run: str, model: str, use: Use) -> None:
        if self.full:
            raise StorageFailure("no room")
        self.seen.append((use.step, self.words.tolist()))
        super().keep(run, model, use)


def _watched() -> tuple[Federation, Watching]:
    federation = Federation.of(names(3))
    memory = Watching()
    federation.sites["site-00"]._memory = memory
    return federation, memory


def test_the_use_is_kept_before_the_first_mask_is_made() -> None:
    federation, memory = _watched()
    attempt = federation.server.attempt(binding(names(3)), words=4)
    for name in names(3):
        attempt.take_shares(name, federation.sites[name].begin(binding(names(3))))
    attempt.close_sharing()
    federation.sites["site-00"].contribute(attempt.inbox("site-00"), memory.words, update="update")
    assert memory.seen == [("masked", [0, 0, 0, 0])]
    assert memory.words.any()


def test_what_cannot_be_kept_is_not_masked() -> None:
    federation, memory = _watched()
    attempt = federation.server.attempt(binding(names(3)), words=4)
    for name in names(3):
        attempt.take_shares(name, federation.sites[name].begin(binding(names(3))))
    attempt.close_sharing()
    memory.full = True
    with pytest.raises(StorageFailure):
        federation.sites["site-00"].contribute(attempt.inbox("site-00"), memory.words, update="update")
    assert not memory.words.any()


def test_nothing_is_revealed_that_cannot_be_kept() -> None:
    federation, memory = _watched()
    attempt = federation.server.attempt(binding(names(3)), words=4)
    for name in names(3):
        attempt.take_shares(name, federation.sites[name].begin(binding(names(3))))
    attempt.close_sharing()
    for name in names(3):
        words = np.zeros(4, np.uint32)
        attempt.take_vector(name, federation.sites[name].contribute(attempt.inbox(name), words, update="update"), words)
    memory.full = True
    with pytest.raises(StorageFailure):
        federation.sites["site-00"].survivors(attempt.close_uploads())
    assert [use.step for use in memory.uses("study", binding(names(3)).model)] == ["masked"]


def test_uses_name_the_survivors_of_the_opened_sum() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    vectors = {name: np.ones(4, np.uint32) for name in sites}
    run_round(federation, binding(sites), vectors, lost=Lost(upload=[sites[4]]))
    uses = federation.memories[sites[0]].uses("study", binding(sites).model)
    assert [(use.step, use.cohort) for use in uses] == [("masked", tuple(sites)), ("opened", tuple(sites[:4]))]
    assert not federation.memories[sites[4]].uses("study", binding(sites).model)


def test_the_memory_outlives_the_job() -> None:
    """The same model again in another job, with one site fewer: every site that helped to open the first refuses."""
    sites = names(4)
    federation = Federation.of(sites)
    vectors = {name: np.ones(4, np.uint32) for name in sites}
    run_round(federation, binding(sites), vectors)
    again = Federation.of(sites[:3], job="job-2")
    again.sites = {
        name: secure_site(name, settings=again.server.settings, memory=federation.memories[name], job="job-2")
        for name in sites[:3]
    }
    again.agree()
    for site in again.sites.values():
        with pytest.raises(AlreadyUsed):
            site.begin(binding(sites[:3]))
