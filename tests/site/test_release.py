"""What a site does not do under secure aggregation, whatever the server asks for."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.site.made_up_sites import made_up_study
from tests.site.masked import RUN, Federation
from tests.standins import mean_algebra

from crossward.federation.algebra import Algebra
from crossward.federation.contract import Plan
from crossward.federation.scopes import tensors_digest
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind, Request
from crossward.site import messages
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    JOIN,
    KEYS,
    REVEAL,
    ROSTER,
    SURVIVORS,
    TRAIN,
    Message,
)
from crossward.site.release import _digest_of
from crossward.site.troubles import Code

ALGEBRA = mean_algebra({"conv.weight": (3, 5), "bias": (7,)})
VICTIM = "site-01"
STYLE = "style"


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _small_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quicker, and less like the cosines that they stand for: nothing here is about those."""
    monkeypatch.setattr("crossward.privacy.secagg.sketch._BUCKETS", 128)


@lru_cache(maxsize=2)
def algebra_of(method: str) -> Algebra:
    study = made_up_study(method).masked(Settings())
    return study.method.algebra(study.task, study.model())


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Federation]:
    def make(algebra: Algebra = ALGEBRA, count: int = 4, **options: Any) -> Federation:
        return Federation(tmp_path / "run", algebra, count, **options)

    return make


@pytest.fixture
def trained(made: Any) -> Federation:
    """Four sites with a report of the first round."""
    federation: Federation = made()
    federation.train()
    return federation


def uses(federation: Federation, site: str) -> list[dict[str, Any]]:
    """What a site wrote down about attempts at sums."""
    lines = [path.read_text().splitlines() for path in sorted((federation.folder / site / "masks").iterdir())]
    found = [json.loads(line.partition(" ")[2]) for each in lines for line in each]
    return [use for use in found if use["attempt"]]


# requests that are none of this site's


STRANGERS: dict[str, tuple[dict[str, Any], Code]] = {
    "a cohort with a stranger": ({"cohort": ("site-00", VICTIM, "site-02", "stranger")}, Code.NOT_MASKED),
    "a cohort without this site": ({"cohort": ("site-00", "site-02", "site-03")}, Code.NOT_MASKED),
    "a cohort of two": ({"cohort": ("site-00", VICTIM)}, Code.BAD_TASK),
    "a cohort of this site": ({"cohort": (VICTIM,)}, Code.BAD_TASK),
    "a site twice": ({"cohort": ("site-00", VICTIM, VICTIM, "site-02")}, Code.NOT_MASKED),
    "another order": ({"cohort": (VICTIM, "site-00", "site-02")}, Code.NOT_MASKED),
    "a round that is over": ({"round_number": 0}, Code.NOT_MASKED),
    "the round after": ({"round_number": 2}, Code.NOT_MASKED),
    "attempt 0": ({"attempt": 0}, Code.NOT_MASKED),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_cohort_or_a_round_that_is_not_this_sites_is_refused(trained: Federation, what: str) -> None:
    changes, code = STRANGERS[what]
    request = trained.request(**changes)
    plan = Plan(request.round_number, request.cohort)
    assert trained.refusal(VICTIM, BEGIN, trained.asking(replace(request, plan=plan))) is code
    assert uses(trained, VICTIM) == []


PLANS: dict[str, Plan | None] = {
    "no plan": None,
    "of another round": Plan(2, ("site-00", VICTIM, "site-02", "site-03")),
    "for fewer sites": Plan(1, ("site-00", VICTIM, "site-02")),
    "in another order": Plan(1, (VICTIM, "site-00", "site-02", "site-03")),
    "about something else": Plan(1, ("site-00", VICTIM, "site-02", "site-03"), {"personal": {"x": np.ones(1)}}),
    "with numbers of its own": Plan(1, ("site-00", VICTIM, "site-02", "site-03"), {"shared": {"w": np.ones(4)}}),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_that_the_rules_never_make_for_these_sites_is_refused(trained: Federation, what: str) -> None:
    request = trained.request(plan=PLANS[what])
    assert trained.refusal(VICTIM, BEGIN, trained.asking(request)) is Code.BAD_TASK


def test_a_plan_where_none_belongs_is_refused(trained: Federation) -> None:
    plan = trained.request().plan
    for kind in (Kind.TOTALS, Kind.VALIDATION, Kind.TEST):
        asked = trained.asking(trained.request(kind, plan=plan))
        assert trained.refusal(VICTIM, BEGIN, asked) is Code.BAD_TASK


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"bias": 1.0},
        {"bias": 1.0, "conv.weight": 1.0, "other": 1.0},
        {"bias": 0.0, "conv.weight": 1.0},
        {"bias": -1.0, "conv.weight": 1.0},
        {"bias": float("inf"), "conv.weight": 1.0},
        {"bias": float("nan"), "conv.weight": 1.0},
    ],
    ids=str,
)
def test_products_need_a_range_with_an_end_for_every_tensor(trained: Federation, limits: dict[str, float]) -> None:
    message = trained.request().message() | {"limits": json.dumps(limits)}
    assert trained.refusal(VICTIM, BEGIN, {**trained.address(1), "sum": message}) is Code.BAD_TASK


def test_limits_where_none_belong_are_refused(trained: Federation) -> None:
    asked = trained.asking(trained.request(Kind.RANGES, limits=dict.fromkeys(ALGEBRA.sent, 1.0)))
    assert trained.refusal(VICTIM, BEGIN, asked) is Code.BAD_TASK


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "updates"},
        {"kind": "everything"},
        {"plan": "["},
        {"plan": "[1, 2, 3]"},
        {"limits": "none"},
        {"limits": "[1]"},
        {"limits": '{"bias": "much"}'},
        {"cohort": 5},
        {"round": "one"},
        {"attempt": None},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_understood_is_refused(trained: Federation, message: dict[str, Any]) -> None:
    whole = message if len(message) != 1 or "kind" in message else trained.request().message() | message
    assert trained.refusal(VICTIM, BEGIN, {**trained.address(1), "sum": whole}) is Code.NOT_MASKED


# what was trained decides which sums there are


@pytest.mark.parametrize("kind", [Kind.VALIDATION, Kind.TEST])
def test_after_training_only_sums_of_training_are_there(trained: Federation, kind: Kind) -> None:
    for number in (1, 2):
        asked = trained.asking(trained.request(kind, round_number=number))
        assert trained.refusal(VICTIM, BEGIN, asked) is Code.NOT_MASKED


def test_after_an_evaluation_there_are_only_counts(made: Any) -> None:
    federation = made()
    federation.round()
    federation.ask(VICTIM, EVALUATE, federation.run.with_model(VICTIM, 1))
    for kind in (Kind.RANGES, Kind.UPDATES, Kind.TEST):
        assert federation.refusal(VICTIM, BEGIN, federation.asking(federation.request(kind))) is Code.NOT_MASKED
    counted = federation.request(Kind.VALIDATION)
    assert counted.round_number == 2
    # Attempts of this round were made for another kind of sum: each has its own record.
    assert federation.ask(VICTIM, BEGIN, federation.asking(counted)) is not None


def test_nothing_is_summed_before_there_is_anything(made: Any) -> None:
    federation = made()
    for kind in set(Kind) - {Kind.TOTALS}:
        assert federation.refusal(VICTIM, BEGIN, federation.asking(federation.request(kind))) is Code.NOT_MASKED


def test_totals_are_no_sum_of_a_method_whose_tallies_go_with_its_updates(trained: Federation) -> None:
    """The same numbers in two sums, over other sites each, would show those of the sites in between."""
    assert trained.refusal(VICTIM, BEGIN, trained.asking(trained.request(Kind.TOTALS))) is Code.BAD_TASK


# one request, from begin to end


def test_what_was_begun_is_what_is_contributed_to(trained: Federation) -> None:
    request = trained.request()
    others: dict[str, Request] = {
        "attempt": replace(request, attempt=2),
        "limits": replace(request, limits=dict.fromkeys(ALGEBRA.sent, 0.001)),
        "kind": trained.request(Kind.RANGES),
        "cohort": trained.request(cohort=trained.names[:3], plan=Plan(1, trained.names[:3])),
    }
    tasks = trained.begun(request)
    for other in others.values():
        asked = tasks[VICTIM] | {"sum": other.message()}
        assert trained.refusal(VICTIM, CONTRIBUTE, asked) is Code.NOT_MASKED
    assert uses(trained, VICTIM) == []
    answer = trained.ask(VICTIM, CONTRIBUTE, tasks[VICTIM])
    assert answer is not None
    # Once: the keys of an attempt make one mask.
    assert trained.refusal(VICTIM, CONTRIBUTE, tasks[VICTIM]) is Code.NOT_MASKED


def test_a_contribution_needs_a_beginning(trained: Federation) -> None:
    tasks = trained.begun(trained.request())
    trained.restart(VICTIM)
    trained.agree()
    trained.train([VICTIM])
    assert trained.refusal(VICTIM, CONTRIBUTE, tasks[VICTIM]) is Code.NOT_MASKED


def test_an_attempt_is_not_begun_twice(trained: Federation) -> None:
    request = trained.request()
    trained.begun(request)
    assert trained.refusal(VICTIM, BEGIN, trained.asking(request)) is Code.MASKED_BEFORE
    assert trained.ask(VICTIM, BEGIN, trained.asking(replace(request, attempt=2))) is not None


def test_a_new_model_ends_the_attempt_of_the_last_one(trained: Federation) -> None:
    tasks = trained.begun(trained.request())
    trained.ask(VICTIM, TRAIN, trained.run.with_model(VICTIM, 1))
    assert trained.refusal(VICTIM, CONTRIBUTE, tasks[VICTIM]) is Code.NOT_MASKED


@pytest.mark.parametrize("task", [SURVIVORS, REVEAL])
def test_the_third_message_out_of_turn_ends_the_job_for_this_site(trained: Federation, task: str) -> None:
    parts = {SURVIVORS: {"uploads": {}}, REVEAL: {"agreements": {}}}
    message = {**trained.address(1), **parts[task]}
    trained.begun(trained.request())
    codes = [trained.refusal(VICTIM, task, message) for _ in range(4)]
    assert codes == [Code.NOT_MASKED] * 3 + [Code.NO_KEYS]
    again = trained.asking(trained.request(attempt=2))
    assert trained.refusal(VICTIM, BEGIN, again) is Code.NO_KEYS


def test_keys_out_of_turn_are_refused(made: Any) -> None:
    federation = made(agree=False)
    site = federation.names[0]
    for task, part in ((ROSTER, {"hellos": []}), (KEYS, {"joined": {}})):
        assert federation.refusal(site, task, {**federation.address(0), **part}) is Code.NO_KEYS
    federation.ask(site, JOIN, {**federation.address(0), "agreement": 1})
    assert federation.refusal(site, KEYS, {**federation.address(0), "joined": {}}) is Code.NOT_MASKED
    assert federation.refusal(site, ROSTER, {**federation.address(0), "hellos": []}) is not None


@pytest.mark.parametrize(
    ("task", "part"),
    [
        (JOIN, {}),
        (JOIN, {"agreement": "1"}),
        (JOIN, {"agreement": 1.0}),
        (ROSTER, {"hellos": {}}),
        (KEYS, {"joined": []}),
        (BEGIN, {"sum": "updates"}),
        (CONTRIBUTE, {}),
        (SURVIVORS, {"uploads": []}),
        (REVEAL, {}),
    ],
    ids=str,
)
def test_a_task_without_its_part_is_a_bad_one(trained: Federation, task: str, part: dict[str, Any]) -> None:
    assert trained.refusal(VICTIM, task, {**trained.address(1), **part}) is Code.BAD_TASK


def test_a_survivor_set_without_this_site_is_not_opened_by_it(made: Any) -> None:
    federation = made(count=5)
    federation.train()
    tasks = federation.begun(federation.request())
    uploads = {}
    for site, task in tasks.items():
        answer = federation.ask(site, CONTRIBUTE, task)
        assert answer is not None
        uploads[site] = answer["upload"]
    without = {site: upload for site, upload in uploads.items() if site != VICTIM}
    assert federation.refusal(VICTIM, SURVIVORS, {**federation.address(1), "uploads": without}) is Code.BAD_TASK
    few = {site: uploads[site] for site in federation.names[:3]}
    assert federation.refusal("site-00", SURVIVORS, {**federation.address(1), "uploads": few}) is Code.BAD_TASK
    assert {use["step"] for site in federation.names for use in uses(federation, site)} == {"masked"}


# the model


def test_a_site_that_was_given_another_model_is_in_no_sum_with_the_others(made: Any) -> None:
    """What it trained from is in every key: the others cannot read its shares, nor it theirs."""
    federation = made(count=5)

    def other_model(task: str, site: str, message: Message) -> Message:
        if (task, site) != (TRAIN, VICTIM):
            return message
        return {**message, "tensors": {name: value + 1 for name, value in message["tensors"].items()}}

    federation.amend = other_model
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["sites"] == [
        name for name in federation.names if name != VICTIM
    ]
    assert uses(federation, VICTIM) == []


@pytest.mark.parametrize("part", ["kind", "round", "attempt", "limits"])
def test_a_site_that_was_asked_for_something_else_is_in_no_sum_with_the_others(made: Any, part: str) -> None:
    federation = made(count=5)
    federation.round()
    others = {
        "kind": lambda asked: asked | {"kind": "ranges", "limits": "{}"},
        "round": lambda asked: asked | {"round": 3},
        "attempt": lambda asked: asked | {"attempt": 7},
        "limits": lambda asked: asked | {"limits": json.dumps(dict.fromkeys(ALGEBRA.sent, 5.0))},
    }

    def amend(task: str, site: str, message: Message) -> Message:
        if site != VICTIM or message.get("sum", {}).get("kind") != "updates":
            return message
        return {**message, "sum": others[part](message["sum"])}

    federation.amend = amend
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["sites"] == [
        name for name in federation.names if name != VICTIM
    ]
    assert len([use for use in uses(federation, VICTIM) if use["round_number"] == 2]) == 0


# FDSE's plans


def fdse_request(made: Any, change: Callable[[dict[str, dict[str, Any]]], None]) -> tuple[Federation, Code]:
    """What a site says to a real request of FDSE's whose plan was changed."""
    federation: Federation = made(algebra_of("fdse"))
    codes: list[Code] = []

    def amend(task: str, site: str, message: Message) -> Message:
        if (task, site) != (BEGIN, VICTIM) or not message["sum"]["plan"]:
            return message
        plan = Plan.from_json(message["sum"]["plan"])
        values: dict[str, dict[str, Any]] = {group: dict(each) for group, each in plan.values.items()}
        change(values)
        changed = {**message, "sum": message["sum"] | {"plan": replace(plan, values=values).to_json()}}
        codes.append(federation.refusal(VICTIM, BEGIN, changed))
        return message

    federation.amend = amend
    federation.round()
    return federation, codes[0]


def one_site_alone(values: dict[str, dict[str, Any]]) -> None:
    weights = np.zeros_like(values["shared"]["weights"])
    weights[:, 1] = 1.0
    values["shared"]["weights"] = weights


def two_sites(values: dict[str, dict[str, Any]]) -> None:
    weights = np.zeros_like(values["shared"]["weights"])
    weights[:, 1:3] = 0.5
    values["shared"]["weights"] = weights


def only_the_victims_eraser(values: dict[str, dict[str, Any]]) -> None:
    attention = np.zeros_like(values["personal"]["attention"])
    attention[:, :, 1] = 1.0
    values["personal"]["attention"] = attention


def weights_below_zero(values: dict[str, dict[str, Any]]) -> None:
    values["shared"]["weights"] = values["shared"]["weights"] * 0 + np.array([2.0, -1.0, 0.0, 0.0])


def no_weights(values: dict[str, dict[str, Any]]) -> None:
    del values["shared"]


@pytest.mark.parametrize("change", [one_site_alone, two_sites, only_the_victims_eraser, weights_below_zero, no_weights])
def test_a_plan_that_would_show_one_sites_part_is_refused(made: Any, change: Any) -> None:
    federation, code = fdse_request(made, change)
    assert code is Code.BAD_TASK
    # The plan that the rules make is taken by the same site.
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names)


# keys


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
    report = federation.hospitals[VICTIM].train(federation.coordinator.payload(VICTIM))
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
    with pytest.raises(Exception, match="only 0 sites were left"):
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


def test_a_run_is_in_every_key(made: Any) -> None:
    federation = made()
    federation.train()
    request = federation.request()
    masked = federation.summing.masked
    model = tensors_digest(federation.coordinator.state.tensors)
    bindings = [
        masked.binding(request, run=RUN, model=model),
        masked.binding(request, run="run-2", model=model),
        masked.binding(federation.request(Kind.RANGES), run=RUN, model=model),
        masked.binding(replace(request, limits=dict.fromkeys(ALGEBRA.sent, 5.0)), run=RUN, model=model),
    ]
    contexts = {each.context(job="job", roster=b"r", settings=b"s", group=b"g") for each in bindings}
    assert len(contexts) == 4
    assert messages.unpack_payload(federation.run.with_model(VICTIM, 1)).round_number == 0
