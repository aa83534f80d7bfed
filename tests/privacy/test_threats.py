"""What a server may try against secure aggregation, one test at least for each threat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg import site as site_module
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import decode, encode
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.keys import JobKeys, sign
from crossward.privacy.secagg.masks import Mask, apply_masks
from crossward.privacy.secagg.memory import AlreadyUsed, Forgetful
from crossward.privacy.secagg.messages import AGREED, SHARE, set_digest
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import Blamed, OutOfTurn
from tests.privacy.federation import Federation, Lost, binding, names, run_round, secure_site
from tests.privacy.steps import CHANCE, Round, Vector, uniform

# Reads single updates


def test_reads_single_updates() -> None:
    """What travels is uniform and unrelated to the update, to other sites' vectors and to the same update again."""
    size = 20_000
    sites = names(3)
    federation = Federation.of(sites)
    vectors = {name: np.full(size, number, np.uint32) for number, name in enumerate(sites)}
    ramp = np.linspace(-1, 1, size).astype(np.float32)
    Ring(32, 3).encode_into(vectors[sites[0]], ramp, weight=1 / 3, limit=1.0)
    seen = []
    for attempt in (1, 2):
        done = Round(federation, binding(sites, attempt=attempt), words=size).begin().contribute(vectors=vectors)
        seen += [done.masked[name] for name in sites]
        federation.sites[sites[0]].forget_attempt()
    # 6 vectors, and the 15 differences between two of them.
    differences = [one - other for number, one in enumerate(seen) for other in seen[:number]]
    assert min(uniform(words) for words in seen + differences) > CHANCE / 21
    signals = [ramp.astype(np.float64), *(words.view(np.int32).astype(np.float64) for words in seen)]
    correlations = np.corrcoef(signals)[np.triu_indices(len(signals), 1)]
    # Of 21 pairs, none beyond what chance gives once in a million: 5.6 standard deviations.
    assert np.abs(correlations).max() < stats.norm.isf(CHANCE / 42) / np.sqrt(size)


def test_reads_single_updates_the_statistics_would_see_a_weak_mask() -> None:
    size = 20_000
    plain = np.linspace(0, 2**31, size).astype(np.uint32)
    assert uniform(plain) < CHANCE / 21
    leaking = (plain // 4) + np.frombuffer(np.random.default_rng(0).bytes(4 * size), np.uint32) // 2
    correlation = np.corrcoef(plain.astype(np.float64), leaking.astype(np.float64))[0, 1]
    assert abs(correlation) > stats.norm.isf(CHANCE / 42) / np.sqrt(size)


def test_reads_single_updates_from_all_partial_sums() -> None:
    """No sum over fewer than all three vectors is anything but uniform."""
    size = 20_000
    sites = names(3)
    done = Round(Federation.of(sites), binding(sites), words=size).begin().contribute()
    one, two, three = (done.masked[name] for name in sites)
    for words in (one + two, two + three, one + three, one + two + three):
        assert uniform(words) > CHANCE / 4


# Weak generator, short seeds


def test_weak_prg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask has a key of 32 bytes of its own, and both ends of a pair the same one with opposite signs."""
    used: list[tuple[bytes, int]] = []

    def watch(words: Vector, masks: list[Mask], **options: Any) -> None:
        used.extend((mask.key, mask.sign) for mask in masks)
        apply_masks(words, masks, **options)

    monkeypatch.setattr(site_module, "apply_masks", watch)
    sites = names(5)
    federation = Federation.of(sites)
    for attempt in (1, 2):
        Round(federation, binding(sites, attempt=attempt)).begin().contribute()
    assert {len(key) for key, _ in used} == {32}
    keys = [key for key, _ in used]
    counts = {key: keys.count(key) for key in keys}
    # In two attempts: five self masks and ten pairs each.
    assert sorted(counts.values()) == [1] * 10 + [2] * 20
    assert all(sum(sign for each, sign in used if each == key) == 0 for key, count in counts.items() if count == 2)
    octets = np.frombuffer(b"".join(counts), np.uint8)
    assert stats.chisquare(np.bincount(octets // 16, minlength=16)).pvalue > CHANCE


# Key substitution


@pytest.mark.parametrize("kind", ["agree_key", "verify_key"])
def test_key_substitution(kind: str) -> None:
    sites = names(3)
    members = {name: secure_site(name, settings=Settings(), memory=Forgetful()) for name in sites}
    hellos = {name: member.hello() for name, member in members.items()}
    outer = decode(hellos[sites[1]])
    body = {**decode(outer["body"]), kind: getattr(JobKeys(), kind)}
    told = {**hellos, sites[1]: encode({**outer, "body": encode(body)})}
    with pytest.raises(Untrusted):
        members[sites[0]].join(list(told.values()))
    assert members[sites[0]].state == "greeted"


def test_key_substitution_by_messages_under_another_key() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    inbox = running.attempt.inbox(sites[0])
    outer = decode(inbox[sites[1]])
    forged = sign(SHARE, decode(outer["body"]), sender=sites[1], context=outer["context"], keys=JobKeys())
    with pytest.raises(Blamed):
        federation.sites[sites[0]].contribute({**inbox, sites[1]: forged}, np.zeros(8, np.uint32), update="update")


# Survivors lie


def test_survivors_lie() -> None:
    """After a site has revealed shares of the one kind, no message makes it reveal the other."""
    sites = names(7)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin().contribute()
    site = federation.sites[sites[0]]
    revealed = decode(decode(site.survivors(running.uploads))["body"])
    assert revealed["self"].keys() == set(sites)
    assert not revealed["wrap"]
    fewer = running.some(*sites[:6])
    with pytest.raises(OutOfTurn):
        site.survivors(fewer)
    agreements = {name: federation.sites[name].survivors(fewer) for name in sites[1:6]}
    with pytest.raises(OutOfTurn):
        site.reveal(agreements)
    other = decode(decode(federation.sites[sites[1]].reveal(agreements))["body"])
    assert other["self"].keys() == set(sites[:6])
    assert other["wrap"].keys() == {sites[6]}


def test_survivors_lie_three_times_and_the_site_leaves() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin().contribute()
    site = federation.sites[sites[0]]
    site.survivors(running.uploads)
    for _ in range(3):
        with pytest.raises(OutOfTurn):
            site.survivors(running.uploads)
    assert site.state == "left"
    with pytest.raises(OutOfTurn):
        site.begin(binding(sites, attempt=2))
    with pytest.raises(OutOfTurn):
        site.group_key("purpose", round_number=1)


def test_survivors_lie_about_who_uploaded() -> None:
    """Without a signed upload nobody is a survivor, be it a stranger or somebody else's signature."""
    sites = names(5)
    for lie in ("stranger", "another's", "nothing"):
        federation = Federation.of(sites)
        running = Round(federation, binding(sites)).begin().contribute(sites[:4])
        told = {
            "stranger": {**running.uploads, "site-99": running.uploads[sites[1]]},
            "another's": {**running.uploads, sites[4]: running.uploads[sites[1]]},
            "nothing": {**running.uploads, sites[4]: b""},
        }[lie]
        with pytest.raises(PrivacyRefusal):
            federation.sites[sites[0]].survivors(told)
        assert federation.sites[sites[0]].state == "keyed"


def test_survivors_lie_when_too_few_are_left() -> None:
    sites = names(7)  # threshold 5
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin().contribute()
    with pytest.raises(PrivacyRefusal):
        federation.sites[sites[0]].survivors(running.some(*sites[:4]))


# Split view


def test_split_view() -> None:
    """Two sets of survivors for two halves: neither half gets the agreements that it takes to reveal."""
    sites = names(7)  # threshold 5
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin().contribute()
    views = [running.some(*sites[:6]), running.some(*sites[:5])]
    halves = {name: views[number % 2] for number, name in enumerate(sites[:5])}
    agreed = {name: federation.sites[name].survivors(view) for name, view in halves.items()}
    for name in sites[:5]:
        with pytest.raises(PrivacyRefusal):
            federation.sites[name].reveal(agreed)
        assert federation.sites[name].state == "keyed"


def test_split_view_names_who_agreed_to_another_set() -> None:
    sites = names(7)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin().contribute()
    agreed = {name: federation.sites[name].survivors(running.some(*sites[:6])) for name in sites[:5]}
    other = sign(
        AGREED,
        {"survivors": set_digest(sites[:5])},
        sender=sites[5],
        context=decode(agreed[sites[0]])["context"],
        keys=federation.sites[sites[5]]._keys,
    )
    with pytest.raises(Blamed) as blamed:
        federation.sites[sites[0]].reveal({**agreed, sites[5]: other})
    assert blamed.value.site == sites[5]


def test_split_view_of_sharers() -> None:
    """Sites that masked for different sharers do not open each other's vectors."""
    sites = names(7)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites)).begin()
    uploads = {}
    for name in sites[:6]:
        inbox = running.attempt.inbox(name)
        if name == sites[0]:
            del inbox[sites[6]]
        uploads[name] = federation.sites[name].contribute(inbox, np.zeros(8, np.uint32), update="update")
    for name in sites[:6]:
        with pytest.raises(PrivacyRefusal):
            federation.sites[name].survivors(uploads)


# Mask reuse


def test_mask_reuse() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    Round(federation, binding(sites)).begin().contribute()
    site = federation.sites[sites[0]]
    with pytest.raises(AlreadyUsed):
        site.begin(binding(sites))
    with pytest.raises(OutOfTurn):
        site.contribute({}, np.zeros(8, np.uint32), update="update")


def test_mask_reuse_by_a_restored_copy_of_the_site() -> None:
    """The copy has the keys of before; the record on disk is newer than the copy."""
    sites = names(3)
    federation = Federation.of(sites)
    first = Round(federation, binding(sites)).begin()
    site = federation.sites[sites[0]]
    keys, pairs, roster = site._keys, site._pairs, site._roster
    first.contribute()
    copy = secure_site(sites[0], settings=site.settings, memory=federation.memories[sites[0]])
    copy._keys, copy._pairs, copy._roster, copy._state = keys, pairs, roster, "keyed"
    with pytest.raises(AlreadyUsed):
        copy.begin(binding(sites))


@pytest.mark.parametrize("change", ["round_number", "attempt", "model", "plan", "layout", "study", "job", "cohort"])
def test_mask_reuse_across_anything_that_differs(change: str) -> None:
    """Zeros are masked, so what travels is the masks themselves: they never agree in a word but by chance."""
    sites = names(4)
    federation = Federation.of(sites)
    one = Round(federation, binding(sites), words=2000).begin().contribute()
    changes = {"round_number": 2, "attempt": 2, "model": "b", "plan": "b", "layout": "b", "study": "b"}
    about = binding(sites[:3] if change == "cohort" else sites, attempt=2)
    if change in changes:
        about = binding(sites, **{"attempt": 2, change: changes[change]})
    if change == "job":
        federation = Federation.of(sites, job="job-2")
        about = binding(sites)
    other = Round(federation, about, words=2000).begin().contribute()
    for name in about.cohort:
        difference = one.masked[name] - other.masked[name]
        assert uniform(difference) > CHANCE / 4
        assert uniform(one.masked[name] + other.masked[name]) > CHANCE / 4


# Model inconsistency, zero weights


@pytest.mark.parametrize("change", [{"model": "b" * 64}, {"layout": "b"}, {"study": "b"}, {"attempt": 2}])
def test_model_inconsistency(change: dict[str, Any]) -> None:
    """A site that was told something else shares no key with the others: no vector leaves anybody."""
    _check_seen_through(change)


@pytest.mark.parametrize("plan", ["1 for site-00 and 0 for the others", ""])
def test_zero_weights(plan: str) -> None:
    _check_seen_through({"plan": plan})


def _check_seen_through(change: dict[str, Any]) -> None:
    sites = names(5)
    federation = Federation.of(sites)
    boxes = {
        name: decode(federation.sites[name].begin(binding(sites, **(change if name == sites[0] else {}))))["boxes"]
        for name in sites
    }
    for name in sites:
        words = np.arange(8, dtype=np.uint32)
        inbox = {sender: boxes[sender][name] for sender in sites if sender != name}
        with pytest.raises(Blamed) as blamed:
            federation.sites[name].contribute(inbox, words, update="update")
        assert name == sites[0] or blamed.value.site == sites[0]
        np.testing.assert_array_equal(words, np.arange(8))
        assert federation.sites[name].state == "keyed"


def test_model_inconsistency_of_cohorts() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    boxes = {
        name: decode(federation.sites[name].begin(binding(sites if name != sites[0] else sites[:4])))["boxes"]
        for name in sites
    }
    inbox = {sender: boxes[sender][sites[0]] for sender in sites[1:4]}
    with pytest.raises(Blamed):
        federation.sites[sites[0]].contribute(inbox, np.zeros(8, np.uint32), update="update")


def test_model_inconsistency_leaves_the_server_without_the_one_that_differs() -> None:
    """An honest server goes on with those who agree, and says who is left out by leaving it out of the sharers."""
    sites = names(5)
    federation = Federation.of(sites)
    running = Round(federation, binding(sites))
    running.begin(site_02=binding(sites, model="another"))
    assert running.attempt._sharers == tuple(name for name in sites if name != sites[2])


# Disaggregation over rounds


def test_disaggregation_over_rounds() -> None:
    """A sum over all, then a cohort without one over the same model: whoever helped with the first refuses."""
    sites = names(5)
    federation = Federation.of(sites)
    vectors = {name: np.ones(8, np.uint32) for name in sites}
    run_round(federation, binding(sites), vectors)
    for cohort in (sites[1:], sites[:4]):
        for name in cohort:
            with pytest.raises(AlreadyUsed):
                federation.sites[name].begin(binding(cohort, attempt=2))
            with pytest.raises(AlreadyUsed):
                federation.sites[name].begin(binding(cohort, round_number=2))


def refuses_a_larger_sum(federation: Federation, about: Binding, *, opened_by: Sequence[str]) -> None:
    """They may share secrets with one more site, to open the same sum again; their vectors are in no other one."""
    running = Round(federation, about).begin()
    for name in opened_by:
        words = np.zeros(8, np.uint32)
        with pytest.raises(AlreadyUsed):
            federation.sites[name].contribute(running.attempt.inbox(name), words, update="update")
        assert not words.any()


def test_disaggregation_over_rounds_by_adding_a_site() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    run_round(federation, binding(sites[:4]), {name: np.ones(8, np.uint32) for name in sites})
    refuses_a_larger_sum(federation, binding(sites, attempt=2), opened_by=sites[:4])


def test_disaggregation_over_rounds_after_a_drop_out() -> None:
    """The one that dropped out is not added to a second sum over the same model."""
    sites = names(5)
    federation = Federation.of(sites)
    vectors = {name: np.ones(8, np.uint32) for name in sites}
    run_round(federation, binding(sites), vectors, lost=Lost(upload=[sites[4]]))
    refuses_a_larger_sum(federation, binding(sites, attempt=2), opened_by=sites[:4])


def test_disaggregation_over_rounds_by_another_update() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    run_round(federation, binding(sites), {name: np.ones(8, np.uint32) for name in sites})
    running = Round(federation, binding(sites, attempt=2)).begin()
    words = np.zeros(8, np.uint32)
    with pytest.raises(AlreadyUsed):
        federation.sites[sites[0]].contribute(running.attempt.inbox(sites[0]), words, update="another")
    assert not words.any()
