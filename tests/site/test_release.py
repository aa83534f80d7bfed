"""What a site does not do under secure aggregation, whatever the server asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.site.masked import ALGEBRA, STUDY, Federation, uses

from crossward.federation.contract import Plan
from crossward.federation.scopes import tensors_digest
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
from crossward.site.troubles import Code

pytestmark = pytest.mark.usefixtures("without_fsync")

VICTIM = "site-01"


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
    assert codes == [Code.NOT_MASKED] * 3 + [Code.LEFT_JOB]
    again = trained.asking(trained.request(attempt=2))
    assert trained.refusal(VICTIM, BEGIN, again) is Code.LEFT_JOB
    assert trained.refusal(VICTIM, JOIN, {**trained.address(1), "agreement": 2}) is Code.LEFT_JOB


def test_new_keys_do_not_begin_to_count_anew(made: Any) -> None:
    """A server that breaks the protocol could otherwise go on for ever, with two messages for each set of keys."""
    federation = made()
    for _ in range(3):
        assert VICTIM in federation.agree()
        federation.train()
        federation.begun(federation.request(attempt=federation.summing._agreements))
        message = {**federation.address(1), "uploads": {}}
        assert federation.refusal(VICTIM, SURVIVORS, message) is Code.NOT_MASKED
    assert federation.refusal(VICTIM, JOIN, {**federation.address(1), "agreement": 9}) is Code.LEFT_JOB
    # Another job, or a process that begins anew, is not told on.
    federation.open_job("job-2")
    assert federation.agree() == federation.names


def test_a_server_that_is_started_anew_asks_for_keys_as_often_as_it_likes(made: Any) -> None:
    federation = made()
    for _ in range(5):
        federation.agree()
    federation.round()
    assert federation.refused == []


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


def test_a_study_is_in_every_key(made: Any) -> None:
    federation = made()
    federation.train()
    request = federation.request()
    masked = federation.summing.masked
    model = tensors_digest(federation.coordinator.state.tensors)
    bindings = [
        masked.binding(request, study=STUDY, model=model),
        masked.binding(request, study="another", model=model),
        masked.binding(federation.request(Kind.RANGES), study=STUDY, model=model),
        masked.binding(replace(request, limits=dict.fromkeys(ALGEBRA.sent, 5.0)), study=STUDY, model=model),
    ]
    contexts = {each.context(job="job", roster=b"r", settings=b"s", group=b"g") for each in bindings}
    assert len(contexts) == 4
    assert messages.unpack_payload(federation.run.with_model(VICTIM, 1)).round_number == 0
