"""Faults that were found by reading, each with a test that failed before it was mended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from crossward.federation.errors import PrivacyRefusal, RunFailure
from crossward.privacy.secagg import canonical
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import Malformed, decode, encode
from crossward.privacy.secagg.keys import sign
from crossward.privacy.secagg.masks import remove_pads
from crossward.privacy.secagg.memory import AlreadyUsed
from crossward.privacy.secagg.messages import REVEAL, SHARE
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.server import Attempt, Caught
from crossward.privacy.secagg.settings import Settings
from tests.privacy.federation import Federation, Lost, binding, names, run_round, secure_site

WORDS = 8


def _vectors(sites: Collection[str]) -> dict[str, np.ndarray[Any, np.dtype[np.uint32]]]:
    return {name: np.full(WORDS, 10**number, np.uint32) for number, name in enumerate(sites)}


def _until_uploads(federation: Federation, about: Binding, *, sites: Collection[str] | None = None) -> Attempt:
    attempt = federation.server.attempt(about, words=WORDS)
    vectors = _vectors(about.cohort)
    for name in about.cohort:
        attempt.take_shares(name, federation.sites[name].begin(about))
    attempt.close_sharing()
    for name in sites or about.cohort:
        words = vectors[name].copy()
        message = federation.sites[name].contribute(attempt.inbox(name), words, update=f"update of {name}")
        attempt.take_vector(name, message, words)
    return attempt


def _lie(federation: Federation, site: str, kind: str, message: bytes, change: Mapping[str, Any]) -> bytes:
    """A message of a site that lies: its own signature under other fields."""
    outer = decode(message)
    body = {**decode(outer["body"]), **change}
    return sign(kind, body, sender=site, context=outer["context"], keys=federation.sites[site]._keys)


# Sums whose difference is one site's update


def test_a_second_attempt_with_a_drop_out_does_not_show_who_dropped_out() -> None:
    """Attempt 1 opens all five; attempt 2, of the same cohort, "loses" one site on the way: the difference is it."""
    sites = names(5)
    federation = Federation.of(sites)
    run_round(federation, binding(sites), _vectors(sites))
    with pytest.raises(PrivacyRefusal):
        run_round(federation, binding(sites, attempt=2), _vectors(sites), lost=Lost(upload=[sites[0]]))


def test_a_second_attempt_without_one_sharer_does_not_show_it() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    vectors = _vectors(sites)
    run_round(federation, binding(sites), vectors)
    with pytest.raises(PrivacyRefusal):
        run_round(federation, binding(sites, attempt=2), vectors, lost=Lost(share=[sites[0]]))


def test_a_site_whose_vector_is_left_out_does_not_help_to_open_the_others() -> None:
    """Such a site notes nothing; with a colluding one, a sum is then opened on the note of a single honest site.

    Six sites, the last colludes, threshold 4. Sum 1 is over {0, 1, 2, 5}, opened by 3 and 4 (left out though they
    uploaded), 0 and 5. Sum 2 is over {1, 2, 5}, none of which has a note. Their difference is site 0's update.
    """
    sites = names(6)
    federation = Federation.of(sites)
    attempt = _until_uploads(federation, binding(sites))
    kept = [sites[index] for index in (0, 1, 2, 5)]
    uploads = {name: attempt._uploads[name] for name in kept}
    agreements = {}
    for index in (3, 4, 0, 5):
        with suppress(PrivacyRefusal):
            agreements[sites[index]] = federation.sites[sites[index]].survivors(uploads)
    revealed = 0
    for name in agreements:
        with suppress(PrivacyRefusal):
            federation.sites[name].reveal(agreements)
            revealed += 1
    opened = revealed >= Settings().threshold(6)
    later = [sites[index] for index in (1, 2, 5)]
    with suppress(PrivacyRefusal):
        second = run_round(federation, binding(later, attempt=2), _vectors(sites))
        opened = opened and second.sum[0] == sum(10**index for index in (1, 2, 5))
    assert not opened, "sums over {0, 1, 2, 5} and {1, 2, 5} are open: their difference is the first site's update"


def test_another_plan_for_the_same_update_is_refused_after_a_sum_was_opened() -> None:
    """As many plans as there are sites, over the same updates, are as many equations as unknowns."""
    sites = names(3)
    federation = Federation.of(sites)
    run_round(federation, binding(sites, plan="weights 1 1 1"), _vectors(sites))
    with pytest.raises(AlreadyUsed):
        run_round(federation, binding(sites, plan="weights 2 1 1", attempt=2), _vectors(sites))


def test_another_update_is_refused_when_the_others_may_have_opened_the_sum() -> None:
    """The server opens sum 1 without asking site 0, which therefore has no note of it, and lets it train again."""
    sites = names(5)
    federation = Federation.of(sites)
    run_round(federation, binding(sites), _vectors(sites), lost=Lost(survivors=[sites[0]]))
    attempt = federation.server.attempt(binding(sites, attempt=2), words=WORDS)
    for name in sites:
        attempt.take_shares(name, federation.sites[name].begin(binding(sites, attempt=2)))
    attempt.close_sharing()
    with pytest.raises(AlreadyUsed):
        federation.sites[sites[0]].contribute(
            attempt.inbox(sites[0]), np.ones(WORDS, np.uint32), update="trained again"
        )


def test_two_jobs_at_once_do_not_open_two_sums() -> None:
    """Both begin before either opens: what was opened must be looked up again before a site helps to open."""
    sites = names(5)
    one = Federation.of(sites)
    other = Federation.of(sites[1:], job="job-2")
    other.sites = {
        name: secure_site(name, settings=Settings(), memory=one.memories[name], job="job-2") for name in sites[1:]
    }
    other.agree()
    both = [_until_uploads(one, binding(sites)), _until_uploads(other, binding(sites[1:]))]
    for federation, attempt in zip((one, other), both, strict=True):
        uploads = attempt.close_uploads()
        for name in attempt.survivors:
            with suppress(PrivacyRefusal):
                attempt.take_reveal(name, federation.sites[name].survivors(uploads))
    opened = [len(attempt._reveals) >= attempt._threshold for attempt in both]
    assert opened != [True, True], "the sums over all five and over four of them are both open"


# Keys that are used twice


def test_a_repeated_begin_seals_nothing_else_under_the_same_key() -> None:
    """Boxes have a key of the context and a nonce of zero: fresh shares in a second begin share their keystream."""
    sites = names(3)
    federation = Federation.of(sites)
    site = federation.sites[sites[0]]
    boxes = []
    try:
        for _ in range(2):
            outer = decode(site.begin(binding(sites)))
            boxes.append(decode(decode(outer["boxes"][sites[1]])["body"])["box"])
    except PrivacyRefusal:
        return
    assert boxes[0] == boxes[1], "two contents under one key and nonce"


def test_nothing_but_a_fresh_attempt_follows_an_error_of_any_kind() -> None:
    """The masks are on when an error of another kind than a refusal comes; the same keys mask a second vector then."""
    sites = names(3)
    federation = Federation.of(sites)
    about = binding(sites)
    attempt = federation.server.attempt(about, words=WORDS)
    for name in sites:
        attempt.take_shares(name, federation.sites[name].begin(about))
    attempt.close_sharing()
    site = federation.sites[sites[0]]
    inbox = attempt.inbox(sites[0])
    with pytest.raises((PrivacyRefusal, KeyError)):
        site.contribute(inbox, np.zeros(WORDS, np.uint32), update="u", slots={"stranger": slice(0, 2)})
    with pytest.raises(PrivacyRefusal):
        site.contribute(inbox, np.ones(WORDS, np.uint32), update="u")


# Blame, and lying sites that stop the server


def test_a_holder_that_changes_its_share_does_not_get_the_owner_blamed() -> None:
    sites = names(5)
    federation = Federation.of(sites)
    attempt = _until_uploads(federation, binding(sites))
    uploads = attempt.close_uploads()
    blamed: list[str] = []
    for name in sites:
        answer = federation.sites[name].survivors(uploads)
        if name == sites[0]:
            own = decode(decode(answer)["body"])["self"]
            changed = bytes([own[sites[1]][0], own[sites[1]][1] ^ 1]) + own[sites[1]][2:]
            answer = _lie(federation, name, REVEAL, answer, {"self": {**own, sites[1]: changed}})
        try:
            attempt.take_reveal(name, answer)
        except Caught as caught:
            blamed.append(caught.site)
    assert set(blamed) <= {sites[0]}
    # Five answered and four are enough: either the sum is opened without the liar, or the liar is named.
    assert _opened_or_blamed(attempt) in ("opened", sites[0])


def test_a_dropped_site_is_not_blamed_for_what_a_survivor_committed_to() -> None:
    """Site 0 commits to another mask towards site 1, which refuses it, uploads nothing, and is dropped for it."""
    sites = names(5)
    federation = Federation.of(sites)
    about = binding(sites)
    attempt = federation.server.attempt(about, words=WORDS)
    for name in sites:
        message = federation.sites[name].begin(about)
        if name == sites[0]:
            outer = decode(message)
            lie = _lie(federation, name, SHARE, outer["boxes"][sites[1]], {"pair": bytes(32)})
            message = encode({**outer, "boxes": {**outer["boxes"], sites[1]: lie}})
        attempt.take_shares(name, message)
    attempt.close_sharing()
    for name in sites:
        words = np.full(WORDS, 10 ** sites.index(name), np.uint32)
        with suppress(PrivacyRefusal):
            message = federation.sites[name].contribute(attempt.inbox(name), words, update=name)
            attempt.take_vector(name, message, words)
    uploads = attempt.close_uploads()
    assert sites[1] not in attempt.survivors
    for name in attempt.survivors:
        attempt.take_agreement(name, federation.sites[name].survivors(uploads))
    agreements = attempt.agreements()
    for name in agreements:
        attempt.take_reveal(name, federation.sites[name].reveal(agreements))
    assert _opened_or_blamed(attempt) in ("opened", sites[0])


def _opened_or_blamed(attempt: Attempt) -> str:
    try:
        attempt.open()
    except Caught as caught:
        return caught.site
    assert attempt.sum[0] == sum(10 ** attempt._sharers.index(name) for name in attempt.survivors)
    return "opened"


@pytest.mark.parametrize("share", [[300] * 33, [1] * 33, 5, "text", None])
def test_a_share_of_a_wrong_kind_is_refused_by_the_server(share: Any) -> None:
    sites = names(3)
    federation = Federation.of(sites)
    attempt = _until_uploads(federation, binding(sites))
    uploads = attempt.close_uploads()
    answers = {name: federation.sites[name].survivors(uploads) for name in sites}
    own = decode(decode(answers[sites[0]])["body"])["self"]
    answers[sites[0]] = _lie(federation, sites[0], REVEAL, answers[sites[0]], {"self": {**own, sites[1]: share}})
    with pytest.raises((PrivacyRefusal, RunFailure)):  # noqa: PT012
        for name, answer in answers.items():
            attempt.take_reveal(name, answer)
        attempt.open()


def test_boxes_of_a_wrong_kind_are_refused_by_the_server() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    attempt = federation.server.attempt(binding(sites), words=WORDS)
    outer = decode(federation.sites[sites[0]].begin(binding(sites)))
    with pytest.raises(PrivacyRefusal):
        attempt.take_shares(sites[0], encode({**outer, "boxes": dict.fromkeys(outer["boxes"], 5)}))


@pytest.mark.parametrize("field", ["self", "wrap", "pair"])
def test_commitments_of_a_wrong_kind_are_refused_by_the_server(field: str) -> None:
    sites = names(3)
    federation = Federation.of(sites)
    attempt = federation.server.attempt(binding(sites), words=WORDS)
    outer = decode(federation.sites[sites[0]].begin(binding(sites)))
    boxes = {peer: _lie(federation, sites[0], SHARE, box, {field: [1]}) for peer, box in outer["boxes"].items()}
    with pytest.raises(PrivacyRefusal):
        attempt.take_shares(sites[0], encode({**outer, "boxes": boxes}))


def test_shares_that_come_after_the_sharing_closed_are_refused() -> None:
    """They would replace what the others already hold: the sum could not be opened any more."""
    sites = names(3)
    federation = Federation.of(sites)
    attempt = _until_uploads(federation, binding(sites))
    other = federation.sites[sites[0]].begin(binding(sites, attempt=2))
    with pytest.raises(PrivacyRefusal):
        attempt.take_shares(sites[0], other)


def test_settings_of_a_wrong_kind_are_refused() -> None:
    message = {**Settings().message(), "colluders": "1"}
    with pytest.raises(PrivacyRefusal):
        Settings.from_message(message)


def test_a_message_with_a_list_as_a_key_is_refused() -> None:
    with pytest.raises(Malformed):
        decode(b"d" + (18).to_bytes(8) + encode([]) + encode(None))


def test_whatever_can_be_written_can_be_read() -> None:
    deep: Any = None
    for _ in range(20):
        deep = [deep]
    with pytest.raises(Malformed):
        canonical.encode(deep)


# Settings


def test_a_pair_is_not_allowed_where_more_than_one_site_may_collude() -> None:
    """With two colluders among three sites the sum is the third site's update."""
    with pytest.raises(PrivacyRefusal):
        Settings(colluders=2, min_sites=2, allow_pair=True).check_cohort(3)


# Narrow rings


@pytest.mark.parametrize("bits", [16, 24])
def test_a_packed_vector_is_the_one_that_was_signed(bits: Any) -> None:
    """Of a 16- or 24-bit ring only the lower bits travel; the signature is over all 32."""
    sites = names(3)
    federation = Federation.of(sites, Settings(bits=bits))
    about = binding(sites)
    attempt = federation.server.attempt(about, words=WORDS)
    for name in sites:
        attempt.take_shares(name, federation.sites[name].begin(about))
    attempt.close_sharing()
    narrow = Ring(bits, 3)
    words = np.arange(WORDS, dtype=np.uint32)
    message = federation.sites[sites[0]].contribute(attempt.inbox(sites[0]), words, update="u")
    attempt.take_vector(sites[0], message, narrow.unpack(narrow.pack(words)))


# Secrets in a traceback


def test_secrets_of_an_attempt_are_not_printed() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    site = federation.sites[sites[0]]
    site.begin(binding(sites))
    assert site._attempt is not None
    assert repr(site._attempt.self_seed) not in repr(site._attempt)


# What is right once is wrong twice


def test_a_sum_is_opened_once() -> None:
    """A second call takes the masks off again: a wrong sum, and no error."""
    sites = names(3)
    attempt = run_round(Federation.of(sites), binding(sites), _vectors(sites))
    with suppress(PrivacyRefusal, RunFailure):
        attempt.open()
    np.testing.assert_array_equal(attempt.sum, 111)


def test_pads_are_removed_once_and_only_where_there_are_any() -> None:
    sites = names(3)
    federation = Federation.of(sites)
    attempt = run_round(federation, binding(sites), _vectors(sites), slots={sites[0]: slice(0, WORDS)})
    slot = attempt.sum.copy()
    remove_pads(slot, federation.sites[sites[0]].take_pads())
    with suppress(PrivacyRefusal):
        remove_pads(slot, federation.sites[sites[0]].take_pads())
    np.testing.assert_array_equal(slot, 111)
    with pytest.raises(PrivacyRefusal):
        remove_pads(attempt.sum.copy(), federation.sites[sites[1]].take_pads())
