"""Faults that were found in how secure aggregation is wired: each is tried again here, by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from crossward.federation.blocks import SKETCH_WIDTH, smallest_block
from crossward.federation.contract import ALL, Plan, Sealed, Share
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.memory import AlreadyUsed
from crossward.privacy.secagg.messages import Shares
from crossward.privacy.secagg.ring import Bits
from crossward.privacy.secagg.server import TooFew
from crossward.privacy.secagg.vector import VectorLayout, checked
from crossward.privacy.sums import Kind, received_digest, without
from crossward.site import messages
from crossward.site.messages import BEGIN, CONTRIBUTE, SURVIVORS, TRAIN
from crossward.site.release import MOST_SKETCHES
from crossward.site.troubles import Refusal
from tests.privacy.lying_table import Table
from tests.privacy.lying_watch import averaging, by_domain, mixtures, prototypes

TOTAL = {"shared": {"total": np.array([500.0])}}


def held(*classes: int) -> dict[str, dict[str, Any]]:
    """A plan by which the server has these classes' prototypes summed, and one style group."""
    return {"prototypes": {"held": np.array([float(row in classes) for row in range(3)])}}


def whole_plan(cohort: int, weights: list[float], *, mixed: Any = None) -> dict[str, dict[str, Any]]:
    attention = np.full((cohort, cohort), 1 / cohort) if mixed is None else mixed
    return {
        "shared": {"weights": np.array([weights]), "length": np.ones(1), "capped": np.zeros(1)},
        "personal": {"attention": attention[None], "capped": np.zeros(1)},
    }


# One number in two kinds of sums


@pytest.mark.parametrize("first", [Kind.UPDATES, Kind.VALIDATION])
def test_counts_of_a_model_are_summed_with_the_updates_or_by_themselves(first: Kind) -> None:
    """Over all sites with the updates, and over all but one by themselves: the difference was one site's counts."""
    table = Table(averaging, 4)

    def with_updates(cohort: tuple[str, ...]) -> None:
        table.train(7, after=1)
        table.sum(table.request(Kind.UPDATES, cohort, round_number=2))

    def alone(cohort: tuple[str, ...]) -> None:
        table.evaluate(7, after=1)
        table.sum(table.request(Kind.VALIDATION, cohort, round_number=2))

    steps = [with_updates, alone] if first is Kind.UPDATES else [alone, with_updates]
    steps[0](table.names)
    with pytest.raises(AlreadyUsed):
        steps[1](table.names[:3])


def test_counts_of_a_model_are_summed_with_the_totals_or_by_themselves() -> None:
    table = Table(by_domain, 4)
    table.train(7, after=1)
    opened = table.sum(table.request(Kind.TOTALS, round_number=2))
    assert opened.tallies["validation/n"] == 4 * 9
    table.evaluate(7, after=1)
    with pytest.raises(AlreadyUsed):
        table.sum(table.request(Kind.VALIDATION, table.names[:3], round_number=2))


def test_tallies_that_go_with_the_updates_are_not_summed_before_them() -> None:
    """Where no plan needs them, sites gave them to a sum of totals as well, over other sites."""
    table = Table(averaging, 4)
    table.train(7)
    with pytest.raises(PrivacyRefusal, match="twice"):
        table.sum(table.request(Kind.TOTALS))


def test_test_images_are_summed_once_in_a_run() -> None:
    """What was remembered of them was kept under the last model that came, and a new model made them new."""
    table = Table(averaging, 4)
    table.evaluate(7, after=1)
    table.tested(5)
    assert table.sum(table.request(Kind.TEST, round_number=2)).tallies["test/correct"] == 20
    table.evaluate(8, after=2)
    table.tested(5)
    with pytest.raises(AlreadyUsed):
        table.sum(table.request(Kind.TEST, table.names[:3], round_number=3))
    table.tested(6)
    with pytest.raises(AlreadyUsed):
        table.sum(table.request(Kind.TEST, round_number=3))
    table.tested(5)
    assert table.sum(table.request(Kind.TEST, round_number=3)).tallies["test/correct"] == 20


# One round, one model


@pytest.mark.parametrize("again", ["train", "evaluate", "another job"])
def test_a_round_has_one_model_and_not_another_that_is_nearly_the_same(again: str) -> None:
    """Chances are seeded by the round: nearly the same model gives the same update, and had a memory of its own."""
    table = Table(averaging, 4)
    table.train(7, after=1)
    table.sum(table.request(Kind.UPDATES, round_number=2))
    if again == "another job":
        table.job("job-2", table.names[:3])
    with pytest.raises(AlreadyUsed, match="round 1"):
        (table.evaluate if again == "evaluate" else table.train)(7, after=1, near=1e-6)
    table.train(8, after=2)
    table.sum(table.request(Kind.UPDATES, round_number=3))


def test_what_sites_receive_beside_the_model_is_bound_as_well() -> None:
    """A method reads from the plan of the round before; only the tensors were in the digest that keys are bound to."""
    tensors = {"w": torch.zeros(2)}
    plans = [None, Plan(1, ("a", "b"), {}), Plan(1, ("a", "b"), {"style": {"group": np.zeros(2)}})]
    assert len({received_digest(tensors, plan) for plan in plans}) == 3
    table = Table(averaging, 3)
    for number, name in enumerate(table.names):
        table.all(TRAIN, {name: table.model(7, after=1, plan=Plan(1, table.names[:number], {}))})
    request = table.request(Kind.UPDATES, round_number=2)
    with pytest.raises(TooFew):
        table.sum(request)


# Plans


def test_a_planned_sum_is_over_all_sites_of_its_plan() -> None:
    """Two of five weigh nothing; with one of the others said to be late, two were left, and one may be the server's."""
    table = Table(mixtures, 5, fewest=4)
    table.train(7)
    few = whole_plan(5, [1 / 3, 1 / 3, 1 / 3, 0.0, 0.0])
    with pytest.raises(Refusal):
        table.sum(table.request(Kind.UPDATES, values=few), late=[table.names[2]])
    with pytest.raises(Refusal):
        table.sum(table.request(Kind.UPDATES, values=few), mute=[table.names[2]])
    opened = table.sum(table.request(Kind.UPDATES, values=few))
    assert opened.survivors == table.names


def test_a_sum_without_weights_can_do_without_a_site() -> None:
    table = Table(averaging, 5)
    table.train(7)
    assert table.sum(table.request(Kind.UPDATES), late=[table.names[2]]).survivors == (
        *table.names[:2],
        *table.names[3:],
    )


def test_a_class_that_few_sites_have_is_not_summed_whatever_the_server_says() -> None:
    """How many have a class only the server sees; a lie about it gave it the prototype of a single site."""
    table = Table(prototypes, 4, classes={"site-00": {0, 1, 2}, "site-01": {0, 1}, "site-02": {0, 1}, "site-03": {0}})
    table.train(7)
    style = {"style": {"group": np.zeros(4)}}
    with pytest.raises(PrivacyRefusal, match="a row of a sum"):
        table.sum(table.request(Kind.UPDATES, values={**held(2), **style}))
    opened = table.sum(table.request(Kind.UPDATES, values={**held(0, 1), **style}))
    np.testing.assert_array_equal(opened.numbers["coefficient", ALL, "prototypes"], [4, 3, 0])


def test_a_colluding_site_counts_once_among_those_that_have_a_class() -> None:
    """It may say that it has every class; with it and one honest site there are still not three."""
    bits = {"honest": np.packbits([1, 1, 0]).tobytes(), "another": np.packbits([1, 0, 0]).tobytes()}
    lie = {"colluding": b"\xff"}
    check = Table(prototypes, 3).masked.check_rows
    check("another", bits | lie, fewest=3)
    with pytest.raises(PrivacyRefusal):
        check("honest", bits | lie, fewest=3)


def test_a_colluding_site_that_tells_sites_different_things_gets_nothing() -> None:
    """One honest site hears that three have the class, and masks; the other hears otherwise, and ends the attempt."""
    table = Table(prototypes, 3, classes={"site-00": {0}, "site-01": {0}, "site-02": {1}})
    table.train(7)
    request = table.request(Kind.UPDATES, values={**held(0), "style": {"group": np.zeros(3)}})
    asked = {"sum": request.message()}
    attempt = table.server.attempt(
        table.masked.binding(request, study="run", model=""), words=table.masked.layout(request).words
    )
    said = iter([b"\xff", b"\x10"])
    for name in table.names:
        packed = (
            (lambda shares, note: shares.self_share + shares.wrap_share + next(said)) if name == "site-02" else None
        )
        with patch.object(Shares, "packed", packed or Shares.packed):
            attempt.take_shares(name, table.all(BEGIN, {name: asked})[name]["shares"])
    attempt.close_sharing()
    masked = table.all(CONTRIBUTE, {"site-00": {**asked, "inbox": attempt.inbox("site-00")}})["site-00"]
    with pytest.raises(PrivacyRefusal, match="a row of a sum"):
        table.all(CONTRIBUTE, {"site-01": {**asked, "inbox": attempt.inbox("site-01")}})
    with pytest.raises(Refusal):
        table.all(SURVIVORS, {"site-00": {"uploads": {"site-00": masked["upload"]}}})


def test_a_plan_for_fewer_sites_counts_nobody_who_is_gone() -> None:
    """Totals of five with three that have a class, and one of the five gone: it may be one of the three."""
    totals = {"prototypes/present": np.array([5.0, 3.0, 0.0]), "n": np.array([50.0])}
    left = without(totals, 1)
    np.testing.assert_array_equal(left["prototypes/present"], [4, 2, 0])
    assert left["n"] == 50
    np.testing.assert_array_equal(without(totals, 0)["prototypes/present"], totals["prototypes/present"])


# Personal tensors under pads


def sealed_for(table: Table, site: str) -> Sealed:
    """What the server holds for a site after a round."""
    count = len(table.names)
    opened = table.sum(table.request(Kind.UPDATES, values=whole_plan(count, [1 / count] * count)))
    return Sealed(opened.words[opened.layout.slots[site]].copy(), {"own": 100.0}, {"own": 1.0}, count, 32)


def test_personal_tensors_are_taken_only_as_the_sites_summed_them() -> None:
    """With numbers of its choice at all sites but one, a server makes the others' updates vanish from the sum."""
    table = Table(mixtures, 4, fewest=4)
    table.train(7)
    updates = [
        table.hospitals[name].train(messages.unpack_payload(table.model(7))).update["own"] for name in table.names
    ]
    sealed = sealed_for(table, "site-01")
    site = table.sites["site-01"]

    def opened(changed: Sealed) -> torch.Tensor:
        return site.restore(messages.unpack_payload(table.model(8, after=1, sealed=changed))).tensors["own"]

    torch.testing.assert_close(opened(sealed), torch.stack(updates).mean(dim=0), atol=1e-5, rtol=0)
    for place in range(len(sealed.words)):
        words = sealed.words.copy()
        words[place] ^= np.uint32(1 << 31)
        with pytest.raises(PrivacyRefusal, match="not what the sites summed"):
            opened(replace(sealed, words=words))
    with pytest.raises(PrivacyRefusal, match="not what the sites summed"):
        opened(replace(sealed, words=np.zeros_like(sealed.words)))


def test_a_site_knows_by_itself_how_its_personal_tensors_are_scaled() -> None:
    """A divisor from the server could make all of them nothing, or anything."""
    table = Table(mixtures, 4, fewest=4)
    table.train(7)
    sealed = sealed_for(table, "site-01")
    lie = replace(sealed, limits={"own": 1e-30}, coefficients={"own": 1e30}, parties=200, bits=16)
    payloads = [messages.unpack_payload(table.model(8, after=1, sealed=each)) for each in (sealed, lie)]
    first, second = (table.sites["site-01"].restore(payload).tensors["own"] for payload in payloads)
    assert torch.equal(first, second)
    assert first.abs().max() > 0.01


def test_a_request_that_the_site_refuses_costs_it_no_keys() -> None:
    """What opens its personal tensors was forgotten with every request for the round's sum, also with a refused one."""
    table = Table(mixtures, 5, fewest=4)
    table.train(7)
    sealed = sealed_for(table, "site-01")
    fewer = table.request(Kind.UPDATES, table.names[:4], values=whole_plan(4, [0.25] * 4))
    with pytest.raises(AlreadyUsed):
        table.sum(fewer)
    payload = messages.unpack_payload(table.model(8, after=1, sealed=sealed))
    assert "own" in table.sites["site-01"].restore(payload).tensors
    assert table.sites["site-01"]._participant.vault.keys(1)["pads"]


def test_another_site_s_or_another_round_s_personal_tensors_are_refused() -> None:
    table = Table(mixtures, 4, fewest=4)
    table.train(7)
    sealed = sealed_for(table, "site-02")
    with pytest.raises(PrivacyRefusal, match="not what the sites summed"):
        table.sites["site-01"].restore(messages.unpack_payload(table.model(8, after=1, sealed=sealed)))


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_check_words_add_up_with_the_words_they_are_of(bits: Bits) -> None:
    """In every ring, over sites whose pads and masks left only the lower bits."""
    key, rng = bytes(range(32)), np.random.default_rng(bits)
    shares = [
        {"a": {"own": Share(0.5, torch.from_numpy(rng.normal(size=40_000).astype(np.float32)))}} for _ in range(3)
    ]
    layout = VectorLayout(shares[0], {}, parties=3, bits=bits)
    total = np.zeros(layout.words, np.uint32)
    for share in shares:
        words = layout.encode(share, {}, {"own": 8.0}, checks_key=key)
        layout.ring.narrow(words)
        total += words
    own = total[layout.slots["a"]] + np.uint32((1 << 32) - (1 << bits) if bits < 32 else 0)
    assert len(checked(own, key, bits=bits)) == 40_000
    for change in (1, 1 << (bits - 1)):
        other = own.copy()
        other[39_999] ^= np.uint32(change)
        with pytest.raises(PrivacyRefusal):
            checked(other, key, bits=bits)
    with pytest.raises(PrivacyRefusal):
        checked(own, bytes(32), bits=bits)


# Keys and sketches


def test_new_keys_forget_what_was_turned_by_the_old_ones() -> None:
    """Turned by one key and turned back by another, prototypes would be noise, and nobody would notice."""
    table = Table(prototypes, 3)
    table.train(7)
    table.agree(2)
    request = table.request(Kind.UPDATES, values={**held(0), "style": {"group": np.zeros(3)}})
    with pytest.raises(Refusal):
        table.sum(request)
    table.train(7)
    assert table.sum(replace(request, attempt=request.attempt + 1)).survivors == table.names


def test_an_update_is_sketched_under_few_keys() -> None:
    """With a site that tells the keys, eight sketches would have been the whole of a block of 4096 values."""
    table = Table(mixtures, 4, fewest=4)
    for number in range(MOST_SKETCHES):
        table.agree(number + 1)
        first, again = table.train(7), table.train(7)
        assert all(np.array_equal(first[name][block], again[name][block]) for name in first for block in first[name])
    table.job("job-2")
    with pytest.raises(AlreadyUsed, match="sketches"):
        table.train(7)
    assert smallest_block() >= 2 * MOST_SKETCHES * SKETCH_WIDTH


# Ranges


def test_a_range_that_leaves_little_but_signs_is_refused() -> None:
    """Where all signs agree, a sum of signs is everybody's own."""
    values = torch.linspace(-1, 1, 2048)
    layout = VectorLayout({ALL: {"w": Share(1.0, values)}}, {}, parties=3)

    def held_at(limit: float) -> float:
        words = layout.encode({ALL: {"w": Share(1.0, values)}}, {}, {"w": limit})
        return float(layout.numbers(words)["outside", "w"])

    assert held_at(1.0) == 0
    assert held_at(0.95) == 2 * 52
    for limit in (0.9, 1e-6):
        with pytest.raises(PrivacyRefusal, match="mostly signs"):
            held_at(limit)


def test_a_server_cannot_try_many_ranges() -> None:
    """Every refusal of one is an answer about a single site's numbers."""
    table = Table(averaging, 3)
    table.train(7)
    requests = [table.request(Kind.UPDATES, limit=10.0 + number) for number in range(5)]
    asked = [{name: {"sum": request.message()} for name in table.names} for request in requests]
    for each in asked[:4]:
        table.all(BEGIN, each)
    with pytest.raises(AlreadyUsed, match="ranges"):
        table.all(BEGIN, asked[4])
    assert table.sum(replace(requests[0], attempt=9)).survivors == table.names
