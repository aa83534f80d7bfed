"""Threats from small cohorts, lying sites, the network, late vectors and stolen kits, one test at least for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import decode, encode
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.keys import PairRoots
from crossward.privacy.secagg.masks import Mask, apply_masks, remove_pads
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.messages import REVEAL, SHARE
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.server import Caught
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import Blamed, OutOfTurn
from crossward.privacy.secagg.strikes import Strikes
from tests.privacy.federation import Federation, Lost, authority, binding, identity, names, run_round, secure_site
from tests.privacy.steps import CHANCE, Round, changed, uniform

# Small cohorts


def test_small_cohort() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    for cohort in (sites[:1], sites[:2]):
        with pytest.raises(PrivacyRefusal):
            federation.sites[sites[0]].begin(binding(cohort))
    with pytest.raises(PrivacyRefusal):
        Federation.of(names(2))


def test_small_cohort_of_sharers() -> None:
    """The cohort is large; the server passes on what two of the others shared."""
    sites = names(5)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    inbox = {name: running.attempt.inbox(sites[0])[name] for name in sites[1:3]}
    words = np.zeros(8, np.uint32)
    with pytest.raises(PrivacyRefusal):
        federation.sites[sites[0]].contribute(inbox, words, update="update")
    assert not words.any()


def test_small_cohort_with_strangers_or_without_the_site() -> None:
    sites = names(4)
    federation = Federation.of(sites)
    with pytest.raises(Untrusted):
        federation.sites[sites[0]].begin(binding([*sites[:3], "site-98", "site-99"]))
    with pytest.raises(Untrusted):
        federation.sites[sites[0]].begin(binding(sites[1:]))


def test_small_cohort_when_more_may_collude() -> None:
    federation = Federation.of(names(6), Settings(colluders=3))
    with pytest.raises(PrivacyRefusal):
        federation.sites["site-00"].begin(binding(names(4)))
    federation.sites["site-00"].begin(binding(names(5)))


# Overflow


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_overflow(bits: Any) -> None:
    """All sites at the end of the range, and one far beyond it: the sum is at the end, not on the other side."""
    sites = names(5)
    federation = Federation.of(sites, Settings(bits=bits))
    ring = Ring(bits, 5)
    vectors = {name: np.zeros(2, np.uint32) for name in sites}
    outside = [
        ring.encode_into(vectors[name], np.array([1, -1], np.float32) * np.float32(10**number), weight=1 / 5, limit=1.0)
        for number, name in enumerate(sites)
    ]
    assert outside == [0, 2, 2, 2, 2]
    total = run_round(federation, binding(sites), vectors).sum
    assert ring.decode(total, limit=1.0).tolist() == pytest.approx([1, -1], abs=2e-4)


def test_overflow_of_a_vector_of_another_size_is_refused() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    words = np.zeros(9, np.uint32)
    message = federation.sites[sites[0]].contribute(running.attempt.inbox(sites[0]), words, update="update")
    with pytest.raises(PrivacyRefusal):
        running.attempt.take_vector(sites[0], message, words)
    assert not running.attempt.sum.any()


# Corrupt shares


def test_corrupt_shares_are_blamed() -> None:
    """A flipped bit in what a site shares: the receiver names the sender, and masks nothing."""
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    inbox = running.attempt.inbox(sites[0])
    box = inbox[sites[1]]
    for where in range(0, len(box), 37):
        changed = box[:where] + bytes([box[where] ^ 1]) + box[where + 1 :]
        words = np.zeros(8, np.uint32)
        with pytest.raises(Blamed) as blamed:
            federation.sites[sites[0]].contribute({**inbox, sites[1]: changed}, words, update="update")
        assert blamed.value.site == sites[1]
        assert not words.any()
        federation = Federation.of(sites)
        running = Round(federation, binding(sites)).begin()
        inbox = running.attempt.inbox(sites[0])
        box = inbox[sites[1]]


@pytest.mark.parametrize("changes", [{"pair": bytes(32)}, {"to": "site-02"}, {"box": b""}, {"box": bytes(82)}])
def test_corrupt_shares_are_blamed_when_the_sender_signed_them(changes: dict[str, Any]) -> None:
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    inbox = running.attempt.inbox(sites[0])
    lie = changed(federation, sites[1], SHARE, inbox[sites[1]], **changes)
    with pytest.raises(Blamed) as blamed:
        federation.sites[sites[0]].contribute({**inbox, sites[1]: lie}, np.zeros(8, np.uint32), update="update")
    assert blamed.value.site == sites[1]


@pytest.mark.parametrize("changes", [{"self": bytes(32)}, {"wrap": bytes(32)}, {"wrapped": bytes(32)}])
def test_corrupt_shares_are_blamed_by_the_server(changes: dict[str, Any]) -> None:
    """What a site commits to differs from peer to peer, or from what it sends."""
    sites = names(3)
    federation = Federation.of(sites)
    attempt = federation.server.attempt(binding(sites), words=8)
    outer = decode(federation.sites[sites[0]].begin(binding(sites)))
    boxes = dict(outer["boxes"])
    boxes[sites[1]] = changed(federation, sites[0], SHARE, boxes[sites[1]], **changes)
    with pytest.raises(Caught) as caught:
        attempt.take_shares(sites[0], encode({**outer, "boxes": boxes}))
    assert caught.value.site == sites[0]
    assert caught.value.evidence


def test_corrupt_shares_are_blamed_when_the_secret_is_another_than_committed() -> None:
    """The site commits to one self mask towards everybody and shares another."""
    sites = names(5)  # one answer more than it takes: all five are on one polynomial
    federation = Federation.of(sites)
    about = binding(sites)
    attempt = federation.server.attempt(about, words=8)
    for name in sites:
        message = federation.sites[name].begin(about)
        if name == sites[1]:
            outer = decode(message)
            lies = {peer: changed(federation, name, SHARE, box, self=bytes(32)) for peer, box in outer["boxes"].items()}
            message = encode({**outer, "boxes": lies})
        attempt.take_shares(name, message)
    attempt.close_sharing()
    for name in sites:
        words = np.zeros(8, np.uint32)
        message = federation.sites[name].contribute(attempt.inbox(name), words, update="update")
        attempt.take_vector(name, message, words)
    uploads = attempt.close_uploads()
    for name in sites:
        attempt.take_reveal(name, federation.sites[name].survivors(uploads))
    with pytest.raises(Caught) as caught:
        attempt.open()
    assert caught.value.site == sites[1]


def test_corrupt_shares_are_blamed_when_something_else_is_revealed() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin().contribute()
    answer = federation.sites[sites[0]].survivors(running.attempt.close_uploads())
    own = decode(decode(answer)["body"])["self"]
    for lie in ({"self": {}}, {"wrap": {sites[1]: bytes(33)}}, {"self": {**own, "site-99": bytes(33)}}):
        with pytest.raises(Caught) as caught:
            running.attempt.take_reveal(sites[0], changed(federation, sites[0], REVEAL, answer, **lie))
        assert caught.value.site == sites[0]


# Replayed or reordered messages


def test_replayed_or_reordered_messages() -> None:
    """Every message of a site in every state but its own: no answer, and nothing changes."""
    sites = names(5)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    site = federation.sites[sites[0]]
    inbox = running.attempt.inbox(sites[0])

    def steps(*which: str) -> None:
        calls = {
            "hello": site.hello,
            "join": lambda: site.join(federation.server.hellos()),
            "group": lambda: site.take_group(federation.server.joined()),
            "contribute": lambda: site.contribute(inbox, np.zeros(8, np.uint32), update="update"),
            "survivors": lambda: site.survivors(running.uploads),
            "reveal": lambda: site.reveal({}),
            "pads": site.take_pads,
        }
        before = site.state
        for name in which:
            site._strikes = Strikes()
            with pytest.raises(OutOfTurn):
                calls[name]()
            assert site.state == before

    steps("hello", "join", "group", "survivors", "reveal", "pads")
    running.contribute()
    steps("hello", "join", "group", "contribute", "reveal", "pads")
    four = running.some(*sites[:4])
    agreements = {name: federation.sites[name].survivors(four) for name in sites[:4]}
    steps("hello", "join", "group", "contribute", "survivors", "pads")
    site.reveal(agreements)
    steps("hello", "join", "group", "contribute", "survivors", "reveal")


def test_replayed_messages_of_an_earlier_attempt() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    first = Round(federation, binding(sites)).begin()
    old_inbox = first.attempt.inbox(sites[0])
    first.contribute()
    agreed = {name: federation.sites[name].survivors(first.some(*sites[:4])) for name in sites[:4]}
    second = Round(federation, binding(sites, attempt=2)).begin()
    inbox = second.attempt.inbox(sites[1])
    with pytest.raises(Blamed):
        federation.sites[sites[0]].contribute(old_inbox, np.zeros(8, np.uint32), update="update")
    second.contribute(sites[1:])
    assert inbox.keys() == {name for name in sites if name != sites[1]}
    with pytest.raises(PrivacyRefusal):
        federation.sites[sites[1]].survivors({**second.uploads, sites[2]: first.uploads[sites[2]]})
    for name in sites[2:]:
        federation.sites[name].survivors(second.uploads)
        with pytest.raises(PrivacyRefusal):
            federation.sites[name].reveal(agreed)


def test_reflected_messages() -> None:
    """A site's own share comes back to it as if it were another's."""
    sites = names(3)
    federation = Federation.of(sites)
    own = decode(federation.sites[sites[0]].begin(binding(sites)))["boxes"]
    with pytest.raises(PrivacyRefusal):
        federation.sites[sites[0]].contribute(
            {sites[1]: own[sites[1]], sites[2]: own[sites[2]]}, np.zeros(8, np.uint32), update="update"
        )


# Late uploads


def test_late_upload() -> None:
    """The vector of a site that was declared dropped: with all that is revealed, it stays masked."""
    size = 20_000
    sites = names(5)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites), words=size).begin().contribute(sites[:4])
    words = np.zeros(size, np.uint32)
    begun = federation.sites[sites[4]]._attempt
    assert begun is not None
    own = begun.self_seed
    late = federation.sites[sites[4]].contribute(running.attempt.inbox(sites[4]), words, update="update")
    attempt = running.attempt
    uploads = attempt.close_uploads()
    with pytest.raises(PrivacyRefusal):
        attempt.take_vector(sites[4], late, words)
    for name in sites[:4]:
        attempt.take_agreement(name, federation.sites[name].survivors(uploads))
    agreements = attempt.agreements()
    for name in sites[:4]:
        attempt.take_reveal(name, federation.sites[name].reveal(agreements))
    attempt.open()
    assert not attempt.sum.any()
    # All pair masks of the late one are known now; its own is not, and would be all that is missing.
    apply_masks(words, [Mask(mask.key, -mask.sign) for mask in attempt._masks_with(sites[4])])
    assert uniform(words) > CHANCE
    apply_masks(words, [Mask(own, -1)])
    assert not words.any()
    with pytest.raises(KeyError):
        attempt._secret(sites[4], "self")


# Personal slots


def test_personal_slot_of_a_dropped_site_stays_unreadable() -> None:
    size = 20_000
    sites = names(5)
    federation = Federation.of(sites)
    slots = {name: slice(size * number, size * (number + 1)) for number, name in enumerate(sites)}
    vectors = {name: np.zeros(5 * size, np.uint32) for name in sites}
    attempt = run_round(federation, binding(sites), vectors, lost=Lost(upload=[sites[4]]), slots=slots)
    assert all(uniform(attempt.sum[where]) > CHANCE / 5 for where in slots.values())
    for name in sites[:2]:
        own = attempt.sum[slots[name]].copy()
        remove_pads(own, federation.sites[name].take_pads())
        assert not own.any()
    for name in sites[2:4]:
        others = attempt.sum[slots[sites[4]]].copy()
        remove_pads(others, federation.sites[name].take_pads())
        assert others.any()


# Stolen kits


def test_a_stolen_kit_cannot_open_another_sites_vector() -> None:
    """The certificate and key of one site, and everything that the server saw: no box opens, no mask comes off."""
    size = 20_000
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites), words=size).begin().contribute()
    thief = secure_site(sites[1], settings=Settings(), memory=Forgetful())
    thief.hello()
    with pytest.raises(Untrusted):
        thief.join(federation.server.hellos())
    # Even one that skips its own checks agrees on other secrets.
    thief._roster = federation.server.roster
    assert thief._roster is not None
    victim = federation.sites[sites[0]]
    parts = ["job-1", thief._roster.digest, *sites[:2]]
    stolen = PairRoots({sites[0]: thief._keys.agree(victim._keys.agree_key, parts=parts)}, last=1)
    stolen.move_to(1)
    pairs = federation.sites[sites[1]]._pairs
    assert victim._pairs is not None
    assert pairs is not None
    assert pairs.key(sites[0], "pair") == victim._pairs.key(sites[1], "pair")
    assert pairs.key(sites[0], "pair") != stolen.key(sites[0], "pair")
    assert uniform(running.masked[sites[0]]) > CHANCE


def test_a_stolen_kit_is_one_site_and_no_other() -> None:
    """It signs as the site that it was stolen from, and as nobody else."""
    stolen = identity("site-01")
    for name in ("site-00", "site-02"):
        member = secure_site(name, settings=Settings(), memory=Forgetful())
        member._identity = stolen
        message = member.hello()
        checking = secure_site("site-03", settings=Settings(), memory=Forgetful())
        with pytest.raises(Untrusted):
            checking.join([checking.hello(), message])
    assert stolen.certificate != authority().roots
