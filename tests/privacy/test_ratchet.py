"""What a site still has in memory does not open what it masked earlier."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.keys import derive
from crossward.privacy.secagg.site import SecureSite
from tests.privacy.federation import JOB, Federation, binding, names, run_round

SITES = names(3)
ME, OTHER = SITES[:2]
LATER = 7


def reachable(site: SecureSite) -> Iterator[Any]:
    """Everything that a site's memory leads to; classes, functions and modules belong to all sites."""
    seen, left = set(), [site]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, (type, FunctionType, ModuleType)):
            continue
        seen.add(id(found))
        yield found
        left += gc.get_referents(found)


def roots_within_reach(site: SecureSite) -> list[bytes]:
    """The first root with another site, and what can be taken for it: secrets, and what private keys agree on."""
    roster = site._roster
    assert roster is not None
    parts = [JOB, roster.digest, ME, OTHER]
    found = []
    for each in reachable(site):
        if isinstance(each, bytes) and len(each) == 32:
            found.append(each)
        if isinstance(each, X25519PrivateKey):
            shared = each.exchange(X25519PublicKey.from_public_bytes(roster.members[OTHER].agree_key))
            found.append(derive(shared, "root", parts=parts))
    return found


def first_seeds(site: SecureSite, context: bytes) -> set[bytes]:
    """What may have been the pair's seed in round 1, worked out from what is within reach."""
    roots = roots_within_reach(site)
    moved = [derive(root, "ratchet", parts=[1]) for root in roots]
    return {*roots, *(derive(root, "pair", context=context) for root in (*roots, *moved))}


def begun() -> tuple[Federation, SecureSite, bytes, bytes]:
    """A site in the first round, with that round's context and its seed with the other one."""
    federation = Federation.of(SITES)
    site = federation.sites[ME]
    site.begin(binding(SITES))
    assert site._attempt is not None
    return federation, site, site._attempt.context, site._attempt.pair_seeds[OTHER]


def test_the_walk_finds_what_is_there() -> None:
    _, site, context, seed = begun()
    assert seed in first_seeds(site, context)
    site.forget_attempt()
    assert seed in first_seeds(site, context), "the round is not over: its roots are there"


def test_after_a_round_its_seeds_cannot_be_had_from_the_memory_of_the_site() -> None:
    _, site, context, seed = begun()
    site.begin(binding(SITES, round_number=LATER, model="a later one"))
    assert seed not in first_seeds(site, context)


def test_the_private_key_is_gone_once_there_are_roots() -> None:
    federation = Federation.of(SITES)
    assert not any(isinstance(each, X25519PrivateKey) for each in reachable(federation.sites[ME]))
    run_round(federation, binding(SITES), {name: np.ones(4, np.uint32) for name in SITES})


def test_who_left_has_no_secret_of_the_job() -> None:
    _, site, context, seed = begun()
    keys, group = site._keys, site.group_key("purpose", round_number=1)
    site.leave()
    assert seed not in first_seeds(site, context)
    assert not {derive(root, "purpose") for root in roots_within_reach(site)} & {group}
    assert not any(isinstance(each, (X25519PrivateKey, Ed25519PrivateKey)) for each in reachable(site))
    with pytest.raises(PrivacyRefusal, match="gone"):
        keys.sign(b"message")


def test_the_key_that_only_sites_know_moves_on_with_the_rounds() -> None:
    """Sketches and turned vectors of an earlier round stay closed to who learns a later round's key."""
    federation = Federation.of(SITES)
    site = federation.sites[ME]
    first = {name: each.group_key("sketch", round_number=1) for name, each in federation.sites.items()}
    assert len(set(first.values())) == 1
    later = {name: each.group_key("sketch", round_number=LATER) for name, each in federation.sites.items()}
    assert len(set(later.values())) == 1
    secrets = roots_within_reach(site)
    moved = [derive(root, "ratchet", parts=[1]) for root in secrets]
    assert first[ME] not in {derive(root, "sketch") for root in (*secrets, *moved)}
    with pytest.raises(PrivacyRefusal, match="round 1 "):
        site.group_key("sketch", round_number=1)
