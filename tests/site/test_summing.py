"""Sums that lose sites on the way: they are opened over whoever is left, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.site.masked import Federation, mean_of, uses
from tests.standins import mean_algebra

from crossward.federation.contract import State
from crossward.privacy.secagg.canonical import decode
from crossward.privacy.secagg.keys import GROUP
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind
from crossward.site.messages import BEGIN, CONTRIBUTE, JOIN, REVEAL, ROSTER, SURVIVORS, TRAIN
from crossward.site.summing import MOST_ATTEMPTS
from crossward.site.troubles import Code, Refusal

pytestmark = pytest.mark.usefixtures("without_fsync")

ALGEBRA = mean_algebra({"conv.weight": (3, 5), "bias": (7,)})


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Federation]:
    def make(count: int, **options: Any) -> Federation:
        return Federation(tmp_path / "run", ALGEBRA, count, **options)

    return make


def only(step: str, gone: Collection[str], *, times: int | None = None) -> Callable[[str, str], bool]:
    """Sites that are away at one step; a number of times each, or for good."""
    left = dict.fromkeys(gone, times)

    def away(task: str, site: str) -> bool:
        if task != step or site not in left or left[site] == 0:
            return False
        left[site] = None if left[site] is None else left[site] - 1
        return True

    return away


def assert_mean(federation: Federation, survivors: Collection[str]) -> None:
    """The model is the plain weighted mean over these sites."""
    hospitals = [federation.hospitals[name] for name in sorted(survivors)]
    for name in ALGEBRA.sent:
        expected = mean_of(hospitals, name)
        found = federation.coordinator.state.tensors[name].double().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert federation.coordinator.history[-1]["secagg"]["sites"] == sorted(survivors)
    seen = sum(hospital.samples for hospital in hospitals)
    right = len(hospitals) / seen
    assert federation.coordinator.history[-1]["sums"]["train_accuracy"] == pytest.approx(right, rel=1e-12)


def opened_by(federation: Federation) -> set[str]:
    """Sites that gave shares away that open a sum, by their own records."""
    folders = {name: federation.folder / name / "masks" for name in federation.names}
    return {name for name, folder in folders.items() for path in folder.iterdir() if '"opened"' in path.read_text()}


def helpers(federation: Federation, *, round_number: int) -> set[str]:
    """Those of them in one round."""
    opened = (round_number, "opened")
    return {
        name
        for name in federation.names
        if opened in {(use["round_number"], use["step"]) for use in uses(federation, name)}
    }


def assert_added(federation: Federation, before: State, survivors: Collection[str]) -> None:
    """The last round has added the plain weighted mean over these sites."""
    hospitals = [federation.hospitals[name] for name in sorted(survivors)]
    for name in ALGEBRA.sent:
        expected = mean_of(hospitals, name)
        found = (federation.coordinator.state.tensors[name] - before.tensors[name]).double().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert federation.coordinator.history[-1]["secagg"]["sites"] == sorted(survivors)


# The threshold of 5 is 4, of 10 it is 6.
@pytest.mark.parametrize(("count", "lost"), [(5, 1), (10, 4)])
@pytest.mark.parametrize("how", ["deaf", "lost"])
@pytest.mark.parametrize("step", [BEGIN, CONTRIBUTE, SURVIVORS])
def test_a_sum_is_opened_without_as_many_as_the_threshold_spares(
    made: Any, step: str, how: str, count: int, lost: int
) -> None:
    federation = made(count)
    gone = federation.names[1 : 1 + lost]
    setattr(federation, how, only(step, gone))
    federation.round()
    # Who is gone after its vector has arrived is in the sum all the same.
    survivors = set(federation.names) - (set(gone) if step in (BEGIN, CONTRIBUTE) else set())
    assert_mean(federation, survivors)
    assert federation.summing.attempts == 2  # one of the ranges, one of the updates
    assert all(hospital.trained == 1 for hospital in federation.hospitals.values())


@pytest.mark.parametrize(("count", "dropped", "lost"), [(10, 1, 3), (10, 3, 1), (6, 1, 1)])
def test_sites_drop_out_of_the_reveal_after_others_dropped_out_of_the_sum(
    made: Any, count: int, dropped: int, lost: int
) -> None:
    federation = made(count)
    unheard, gone = federation.names[:dropped], federation.names[dropped : dropped + lost]
    first, second = only(CONTRIBUTE, unheard), only(REVEAL, gone)
    federation.lost = lambda task, site: first(task, site) or second(task, site)
    federation.round()
    assert_mean(federation, set(federation.names) - set(unheard))
    reveals = {each.site for each in federation.said if each.task == REVEAL}
    assert set(gone) < reveals


@pytest.mark.parametrize("step", [BEGIN, CONTRIBUTE])
def test_more_than_the_threshold_spares_is_another_attempt_with_the_rest(made: Any, step: str) -> None:
    federation = made(6)
    gone = federation.names[:3]
    federation.round()  # ranges are known from here on
    before = federation.summing.attempts
    federation.deaf = only(step, gone)
    cosines = federation.train()
    federation.close(cosines)
    assert federation.coordinator.history[-1]["secagg"]["attempt"] == 2
    assert federation.summing.attempts == before + 2
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names[3:])
    assert all(hospital.trained == 2 for hospital in federation.hospitals.values())


def test_an_attempt_that_too_few_agreed_to_is_made_again_with_those_that_did(made: Any) -> None:
    """Nobody has given a share away then, so the same updates may go into a smaller sum."""
    federation = made(6)
    federation.round()
    first, second = only(CONTRIBUTE, federation.names[:1], times=1), only(SURVIVORS, federation.names[1:3], times=1)
    federation.lost = lambda task, site: first(task, site) or second(task, site)
    federation.round()
    entry = federation.coordinator.history[-1]
    assert (entry["secagg"]["attempt"], entry["secagg"]["sites"]) == (2, list(federation.names[3:]))


def test_shares_that_got_lost_are_asked_for_again_by_the_same_sum(made: Any) -> None:
    """Who has helped to open a sum helps with the same one again, and with no other."""
    federation = made(5)
    federation.round()
    federation.lost = only(SURVIVORS, federation.names[:2], times=1)
    federation.round()
    entry = federation.coordinator.history[-1]
    assert (entry["secagg"]["attempt"], entry["secagg"]["sites"]) == (2, list(federation.names))
    assert federation.refused == []


def test_shares_that_got_lost_after_a_drop_out_are_asked_for_again_by_the_same_sum(made: Any) -> None:
    federation = made(5)
    federation.round()
    before = federation.coordinator.state
    dropped, *others = federation.names
    first, second = only(CONTRIBUTE, [dropped], times=1), only(REVEAL, others[:2], times=1)
    federation.lost = lambda task, site: first(task, site) or second(task, site)
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["attempt"] == 2
    assert_added(federation, before, others)
    assert federation.refused == []


class Ended(Exception):
    """The job is over."""


@pytest.mark.parametrize(("missing", "opening"), [(TRAIN, SURVIVORS), (CONTRIBUTE, REVEAL)])
def test_an_opening_that_a_job_did_not_live_to_see_is_gone_on_with_in_the_next(
    made: Any, missing: str, opening: str
) -> None:
    """A site that was not in the sum is back by then: those who have helped to open it would be in no other."""
    federation = made(5)
    federation.round()
    before = federation.coordinator.state
    gone, *others = federation.names

    def lost(task: str, site: str) -> bool:
        if (task, site) == (opening, others[-1]):
            raise Ended
        return (task, site) == (missing, gone)

    federation.lost = lost
    with pytest.raises(Ended):
        federation.round()
    assert helpers(federation, round_number=2) >= set(others[:-1])

    federation.lost = lambda task, site: False
    federation.open_job("job-2")
    federation.agree()
    federation.said.clear()
    federation.round()
    assert_added(federation, before, others)
    assert federation.refused == []
    assert {each.site for each in federation.said if each.task == BEGIN} == set(others)
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names)


def test_an_opening_that_nobody_has_helped_with_holds_nobody_to_it(made: Any) -> None:
    """The server cannot know who helped: it asks for the same sum while all sites for it are there."""
    federation = made(5)
    federation.round()
    before = federation.coordinator.state

    def deaf(task: str, site: str) -> bool:
        if task == SURVIVORS:
            raise Ended
        return False

    federation.deaf = deaf
    with pytest.raises(Ended):
        federation.round()
    assert helpers(federation, round_number=2) == set()

    federation.deaf = lambda task, site: False
    federation.open_job("job-2")
    present = federation.agree(federation.names[1:])
    federation.round(present)
    assert_added(federation, before, present)


def test_after_shares_were_given_away_no_smaller_sum_is_opened(made: Any) -> None:
    federation = made(5)
    federation.round()
    before = federation.summing.attempts
    model = {name: tensor.clone() for name, tensor in federation.coordinator.state.tensors.items()}
    federation.lost = only(SURVIVORS, federation.names[:2])
    gone = only(BEGIN, federation.names[:2])
    federation.deaf = lambda task, site: gone(task, site) and federation.summing.attempts > before + 1
    with pytest.raises(Refusal) as caught:
        federation.round()
    assert caught.value.code is Code.NO_SUM
    assert {code for _, _, code in federation.refused} == {Code.MASKED_BEFORE}
    assert all(torch.equal(federation.coordinator.state.tensors[name], model[name]) for name in model)


@pytest.mark.parametrize("step", [BEGIN, CONTRIBUTE])
@pytest.mark.parametrize(("count", "lost"), [(5, 3), (4, 2), (3, 1)])
def test_too_few_sites_are_no_sum_and_nothing_is_opened(made: Any, step: str, count: int, lost: int) -> None:
    federation = made(count)
    federation.deaf = only(step, federation.names[:lost])
    with pytest.raises(Refusal) as caught:
        federation.round()
    assert (caught.value.code, caught.value.numbers) == (Code.NO_SUM, {"sites": count - lost, "needed": 3})
    assert opened_by(federation) == set()
    assert federation.coordinator.state.round_number == 0
    # They come back, in another job, with the same updates.
    federation.deaf = lambda task, site: False
    federation.open_job("job-2")
    federation.agree()
    federation.round()
    assert_mean(federation, federation.names)


def test_a_site_that_refuses_every_attempt_does_not_hold_the_others_up_for_ever(made: Any) -> None:
    """It answers its first task of every attempt well, so that each attempt begins with it."""
    federation = made(4)
    federation.deaf = only(CONTRIBUTE, federation.names[:1])
    federation.round()
    assert_mean(federation, federation.names[1:])
    assert federation.summing.attempts <= 2 * MOST_ATTEMPTS


def test_a_site_that_misses_a_round_is_back_in_the_next(made: Any) -> None:
    federation = made(5)
    away = federation.names[2]
    federation.round()
    assert_mean(federation, federation.names)
    federation.deaf = lambda task, site: site == away
    federation.round()
    entry = federation.coordinator.history[-1]
    assert entry["secagg"]["sites"] == [name for name in federation.names if name != away]
    assert {entry["sites"][name]["status"] for name in federation.names} == {"summed", "absent"}
    federation.deaf = lambda task, site: False
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names)
    # Without new keys: everybody joined once.
    assert [each.task for each in federation.said].count(JOIN) == 5


def test_a_site_that_drops_out_of_the_sum_is_told_from_one_that_was_never_there(made: Any) -> None:
    federation = made(6)
    absent, dropped = federation.names[:2]
    federation.deaf = lambda task, site: (task, site) in {(TRAIN, absent), (CONTRIBUTE, dropped)}
    federation.round()
    statuses = federation.coordinator.history[-1]["sites"]
    assert (statuses[absent], statuses[dropped]) == ({"status": "absent"}, {"status": "dropped"})
    assert all(statuses[name] == {"status": "summed"} for name in federation.names[2:])


def test_no_number_of_a_single_site_is_in_the_record_of_a_round(made: Any) -> None:
    federation = made(4)
    federation.round()
    (entry,) = federation.coordinator.history
    assert all(site == {"status": "summed"} for site in entry["sites"].values())
    samples = sum(hospital.samples for hospital in federation.hospitals.values())
    assert entry["sums"] == {"loss": 0.5, "train_accuracy": pytest.approx(4 / samples)}


@pytest.mark.parametrize("change", ["vector", "upload", "shares", "opening"])
def test_an_answer_that_was_changed_on_its_way_is_no_answer(made: Any, change: str) -> None:
    """A bit that falls over is found at the server, and the sum is right without that site's part."""
    federation = made(5)
    liar = federation.names[0]
    release = federation.releases[liar]

    def flipped(task: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def answer(message: Any) -> Any:
            found = task(message)
            if change in found:
                raw = bytearray(found[change].tobytes() if change == "vector" else found[change])
                raw[len(raw) // 2] ^= 4
                found[change] = np.frombuffer(bytes(raw), np.uint8) if change == "vector" else bytes(raw)
            return found

        return answer

    release.tasks = {name: flipped(task) for name, task in release.tasks.items()}
    federation.round()
    survivors = set(federation.names) - ({liar} if change != "opening" else set())
    assert_mean(federation, survivors)


# agreement on keys


def test_all_sites_agree_and_share_a_group_key_that_no_message_holds(made: Any) -> None:
    federation = made(4)
    assert federation.summing.sites == federation.names
    secure = federation.releases[federation.names[0]]._secure
    drawn = secure._pairs._roots[GROUP]
    keys = {release._secure.group_key("x", round_number=1) for release in federation.releases.values()}
    assert len(keys) == 1
    raw = b"".join(value for each in federation.said for value in each.answer.values() if isinstance(value, bytes))
    assert drawn not in raw
    assert keys.pop() not in raw


@pytest.mark.parametrize("step", [JOIN, ROSTER])
def test_sites_that_do_not_answer_are_left_out_of_the_agreement(made: Any, step: str) -> None:
    federation = made(5, agree=False)
    gone = federation.names[3]
    federation.deaf = only(step, [gone])
    agreed = federation.summing.agree(
        {name: federation.address(0) for name in federation.names}, round_number=0, enough=3
    )
    assert agreed == tuple(name for name in federation.names if name != gone)
    federation.round(agreed)
    assert_mean(federation, agreed)


@pytest.mark.parametrize("step", [JOIN, ROSTER])
def test_too_few_that_agree_are_counted(made: Any, step: str) -> None:
    federation = made(5, agree=False)
    federation.deaf = only(step, federation.names[:3])
    address = {name: federation.address(0) for name in federation.names}
    with pytest.raises(Refusal) as caught:
        federation.summing.agree(address, round_number=0, enough=3)
    assert (caught.value.code, caught.value.numbers) == (Code.NO_SUM, {"sites": 2, "needed": 3})


def test_a_site_that_lost_its_keys_gets_new_ones_with_all_the_others(made: Any) -> None:
    federation = made(4)
    federation.round()
    lost = federation.names[1]
    federation.restart(lost)
    assert federation.refusal(lost, TRAIN, federation.run.with_model(lost, 2)) is Code.NO_KEYS
    old = federation.releases[federation.names[0]]._secure.group_key("x", round_number=2)
    federation.agree()
    assert federation.releases[federation.names[0]]._secure.group_key("x", round_number=2) != old
    federation.round()
    assert federation.coordinator.history[-1]["secagg"]["sites"] == list(federation.names)


def test_keys_of_one_agreement_do_not_fit_another(made: Any) -> None:
    """A site that missed a later agreement is not asked by it; it would refuse, and the others refuse it."""
    federation = made(5)
    behind = federation.names[4]
    federation.deaf = lambda task, site: site == behind
    federation.summing.agree({name: federation.address(0) for name in federation.names}, round_number=0, enough=4)
    federation.deaf = lambda task, site: False
    assert federation.summing.sites == federation.names[:4]
    federation.round(federation.summing.sites)
    assert_mean(federation, federation.names[:4])
    federation.ask(behind, TRAIN, federation.run.with_model(behind, 2))
    federation.train(federation.summing.sites)
    asked = federation.asking(federation.request())
    assert federation.refusal(federation.names[0], BEGIN, asked) is Code.NOT_MASKED
    shares = federation.ask(behind, BEGIN, asked)
    assert shares is not None
    others = {each.site: each.answer["shares"] for each in federation.said if each.task == BEGIN}
    inbox = {name: decode(others[name])["boxes"].get(behind, b"") for name in federation.names[:4]}
    contribute = federation.asking(federation.request(), inbox=inbox)
    assert federation.refusal(behind, CONTRIBUTE, contribute) is Code.NOT_MASKED


def test_a_kind_of_sum_without_products(made: Any) -> None:
    federation = made(4)
    federation.round()
    for name in federation.names:
        federation.ask(name, "evaluate", federation.run.with_model(name, 1))
    tallies = federation.run.validation(federation.names)
    expected = [sum(hospital.samples + place for hospital in federation.hospitals.values()) for place in range(3)]
    assert [float(value.item()) for value in tallies.values()] == expected
    assert Kind.VALIDATION in {each.message["sum"]["kind"] for each in federation.said if "sum" in each.message}


@pytest.mark.parametrize("colluders", [0, 2, 3])
@pytest.mark.parametrize(("more", "attempts"), [(0, 2), (1, 3)])
def test_the_threshold_counts_those_who_may_collude(made: Any, colluders: int, more: int, attempts: int) -> None:
    """Of ten, floor((10 + c) / 2) + 1 are needed: so many may be lost, and with one more a sum is begun anew."""
    spared = 10 - ((10 + colluders) // 2 + 1)
    federation = made(10, masking=Settings(colluders=colluders, rounds=4))
    federation.deaf = only(CONTRIBUTE, federation.names[: spared + more])
    federation.round()
    assert federation.summing.attempts == attempts
    assert_mean(federation, federation.names[spared + more :])
