"""A site's keys and its update under secure aggregation: how long they last, and what they may be used for again."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.site.made_up_sites import made_up_study
from tests.site.masked import ALGEBRA, Federation, algebra_of, uses

from crossward.federation.scopes import tensors_digest
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    JOIN,
    KEYS,
    REVEAL,
    ROSTER,
    SURVIVORS,
    TRAIN,
)
from crossward.site.release import _digest_of
from crossward.site.troubles import Code

pytestmark = pytest.mark.usefixtures("without_fsync", "small_sketches")

VICTIM = "site-01"
STYLE = "style"


def test_a_process_that_begins_anew_has_no_keys_and_says_so(trained: Federation) -> None:
    tasks = trained.begun(trained.request())
    trained.restart(VICTIM)
    for task, message in (
        (TRAIN, trained.run.with_model(VICTIM, 1)),
        (ROSTER, {**trained.address(1), "hellos": []}),
        (KEYS, {**trained.address(1), "joined": {}}),
        (REVEAL, {**trained.address(1), "agreements": {}}),
    ):
        assert trained.refusal(VICTIM, task, message) is Code.NO_KEYS
    # Of a sum it knows nothing at all.
    for task, message in ((CONTRIBUTE, tasks[VICTIM]), (SURVIVORS, {**trained.address(1), "uploads": {}})):
        assert trained.refusal(VICTIM, task, message) is Code.NOT_MASKED


def test_new_keys_in_the_middle_of_a_sum_end_it(trained: Federation) -> None:
    tasks = trained.begun(trained.request())
    answers = {site: trained.ask(site, CONTRIBUTE, task) for site, task in tasks.items()}
    uploads = {site: answer["upload"] for site, answer in answers.items() if answer}
    assert trained.ask(VICTIM, JOIN, {**trained.address(1), "agreement": 2}) is not None
    assert trained.refusal(VICTIM, SURVIVORS, {**trained.address(1), "uploads": uploads}) is Code.NOT_MASKED
    assert {use["step"] for use in uses(trained, VICTIM)} == {"masked"}


def test_keys_under_a_number_that_was_there_mask_no_attempt_a_second_time(trained: Federation) -> None:
    """Whoever makes a site draw keys again for the same job and attempt gets no second mask of the same vector."""
    tasks = trained.begun(trained.request())
    assert trained.ask(VICTIM, CONTRIBUTE, tasks[VICTIM]) is not None
    trained.summing._agreements = 0
    trained.agree()
    trained.train()
    assert trained.refusal(VICTIM, BEGIN, trained.asking(trained.request())) is Code.MASKED_BEFORE
    assert trained.ask("site-00", BEGIN, trained.asking(trained.request())) is not None, "it never masked"


def keys_file(federation: Federation, number: int, site: str = VICTIM) -> Path:
    return federation.folder / site / "vault" / f"keys-{number:04d}.json"


@pytest.mark.parametrize("method", ["fdse", "fedcode"])
def test_what_opens_a_result_is_for_the_sites_eyes_only_and_goes_when_it_has_served(made: Any, method: str) -> None:
    federation = made(algebra_of(method))
    federation.train()
    assert not keys_file(federation, 1).exists()
    federation.round()
    path = keys_file(federation, 1)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept = json.loads(path.read_text())
    pads = kept.get("pads", [])
    assert (len(pads), set(kept["rotations"])) == ((3, set()) if method == "fdse" else (0, {STYLE}))
    federation.train()
    assert not path.exists(), "the result has been received, and opened"
    federation.close(federation.train())
    assert keys_file(federation, 2).exists()


def test_keys_of_a_best_round_stay_while_its_model_has_not_arrived(made: Any) -> None:
    federation = made(algebra_of("fdse"), count=5)
    federation.round()
    federation.coordinator.assess([federation.hospitals[VICTIM].validation])
    federation.coordinator.keep_best()
    others = [name for name in federation.names if name != VICTIM]
    payload = federation.coordinator.payload(VICTIM)
    federation.round(others)
    federation.ask(VICTIM, TRAIN, federation.run.with_model(VICTIM, 3))
    assert federation.hospitals[VICTIM].received[-1].round_number == 2
    assert keys_file(federation, 1).exists()
    restored = federation.releases[VICTIM].restore(payload)
    assert restored.sealed is None
    assert set(restored.tensors) >= set(federation.summing.masked.personal)


def test_a_secret_of_small_rings_is_drawn_once(made: Any, tmp_path: Path) -> None:
    federation = made(masking=Settings(bits=16, rounds=4))
    federation.train()
    release = federation.releases[VICTIM]
    request = federation.request()
    first = release._chances(request)
    assert first == release._chances(replace(request, attempt=2))
    assert first != release._chances(federation.request(Kind.RANGES))
    assert first != release._chances(replace(request, round_number=2))
    assert first != federation.releases["site-00"]._chances(request)
    federation.restart(VICTIM)
    federation.agree()
    federation.train()
    assert federation.releases[VICTIM]._chances(request) == first
    secret = federation.folder / VICTIM / "vault" / "secret"
    assert (len(secret.read_bytes()), stat.S_IMODE(secret.parent.stat().st_mode)) == (32, 0o700)
    release._model = "another model"
    assert release._chances(request) != first
    plain = Federation(tmp_path / "plain", ALGEBRA, 3)
    assert plain.releases[VICTIM]._chances(plain.request()) is None


# the update


def test_the_same_update_may_be_turned_by_another_key_in_another_job(made: Any) -> None:
    federation = made(algebra_of("fedcode"))
    cosines = federation.train()
    federation.run.close(list(cosines), cosines)  # opened, and lost before it was written down
    first = federation.said[-1]
    federation.open_job("job-2")
    federation.agree()
    again = federation.train()
    assert not np.allclose(again[VICTIM]["style/style"], cosines[VICTIM]["style/style"])
    federation.close(again)
    assert first.task == SURVIVORS
    found = uses(federation, VICTIM)
    report = federation.hospitals[VICTIM].train(replace(federation.coordinator.payload(VICTIM), round_number=0))
    start = replace(report, round_number=1, model="")
    assert {use["update"] for use in found} == {_digest_of(start)}
    assert {use["job"] for use in found} == {"job-1/1", "job-2/1"}


def test_another_update_of_the_same_model_is_refused(made: Any) -> None:
    """A site that lost its outbox, and whose training does not give the same bits, stays out of the sum."""
    federation = made(count=5)
    cosines = federation.train()
    federation.run.close(list(cosines), cosines)
    federation.open_job("job-2")
    federation.agree()
    federation.hospitals[VICTIM].update["bias"][0] += 1e-3
    with pytest.raises(Exception, match="masked something else for this model before"):
        federation.round()
    assert (VICTIM, CONTRIBUTE, Code.MASKED_BEFORE) in federation.refused
    assert federation.coordinator.state.round_number == 0


def test_the_digest_is_of_every_number_of_the_report() -> None:
    study = made_up_study("fedcode").masked(Settings())
    algebra = study.method.algebra(study.task, study.model())
    update = {name: torch.ones(spec.shape) for name, spec in algebra.sent.items()}
    from crossward.federation.contract import Report

    report = Report("a", 1, "m", update, {"n": np.array([3.0])}, {"validation/n": np.array([2.0])})
    others = [
        replace(report, tally={"n": np.array([4.0])}),
        replace(report, validation={"validation/n": np.array([1.0])}),
        replace(report, update={**update, "style": update["style"] * 2}),
    ]
    digests = {_digest_of(each) for each in (report, *others)}
    assert len(digests) == 4
    assert tensors_digest(update) == tensors_digest(dict(update))


# a result that was made without this site


def test_a_site_that_was_not_in_the_sum_gets_no_extras_that_it_cannot_turn_back(made: Any) -> None:
    """Prototypes and styles belong together: a method looks for both, or for neither."""
    federation = made(algebra_of("fedcode"), count=5)
    federation.deaf = lambda task, site: (task, site) == (CONTRIBUTE, VICTIM)
    federation.round()
    federation.deaf = lambda task, site: False
    federation.train()
    received = {name: hospital.received[-1].tensors for name, hospital in federation.hospitals.items()}
    extras = set(federation.algebra.extras)
    assert extras <= set(received["site-00"])
    assert not extras & set(received[VICTIM])
    shared = [name for name in received[VICTIM] if name not in extras]
    assert all(torch.equal(received[VICTIM][name], received["site-00"][name]) for name in shared)


def test_keys_of_an_attempt_that_failed_do_not_open_the_next_one(made: Any) -> None:
    """Too few shares arrive at first; then a site's vector is in the sum, but it never hears that it was opened."""
    federation = made(algebra_of("fdse"), count=5)
    federation.round()
    federation.train()
    before = {name: dict(hospital.received[-1].tensors) for name, hospital in federation.hospitals.items()}
    cosines = federation.train()

    def opening(task: str, site: str) -> int:
        """Which attempt at the updates a site is asked to open."""
        request = federation.releases[site]._request
        asked = task == SURVIVORS and request is not None and request.kind is Kind.UPDATES
        return request.attempt if asked and request else 0

    federation.lost = lambda task, site: opening(task, site) == 1 and site in federation.names[3:]
    federation.deaf = lambda task, site: opening(task, site) == 2 and site == VICTIM
    federation.close(cosines)
    federation.lost = federation.deaf = lambda task, site: False
    assert federation.coordinator.history[-1]["secagg"]["attempt"] == 2
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names)
    federation.train()
    personal = federation.summing.masked.personal
    after = {name: hospital.received[-1].tensors for name, hospital in federation.hospitals.items()}
    # It keeps the erasers that it had; the others have new ones.
    assert all(torch.equal(after[VICTIM][name], before[VICTIM][name]) for name in personal)
    assert not any(torch.equal(after["site-00"][name], before["site-00"][name]) for name in personal)
    largest = max(float(after[VICTIM][name].abs().max()) for name in personal)
    assert largest < 10
