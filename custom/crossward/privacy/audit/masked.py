"""What a server sees under secure aggregation: real masks, real sums, and whether a masked vector tells anything.

A masked vector is made of whole numbers modulo 2^32. There is no gradient in it that could be matched, so the question
is a statistical one: does it go along with the update under it, or is it anything but uniform?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from crossward.federation.contract import Vector
from crossward.federation.errors import BadInput
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.masks import Words
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import SecureSite
from crossward.privacy.secagg.throwaway import Authority

BY_CHANCE = 1e-4
"""A vector that tells nothing looks as if it did with this chance."""

_JOB = "audit"


@dataclass(frozen=True)
class Opened:
    """One sum.

    Attributes:
        masked: what the server got of every site.
        total: what it opened: the sum, and nothing else.
    """

    masked: list[Words]
    total: Vector


@dataclass(frozen=True)
class Telling:
    """How much a masked vector tells of an update.

    Attributes:
        correlation: of its numbers with the update's values.
        by_chance: of a correlation so far from 0, if there is none.
        uniform: of octets so uneven, if all are equally likely.
    """

    correlation: float
    by_chance: float
    uniform: float

    @property
    def nothing(self) -> bool:
        return min(self.by_chance, self.uniform) > BY_CHANCE


def sum_up(updates: Sequence[NDArray[np.float32]]) -> Opened:
    """Sum updates as sites and server do, with keys that are thrown away.

    Args:
        updates: flat, one for each site.
    """
    settings = Settings()
    authority, names = Authority(), [f"site-{number:03d}" for number in range(len(updates))]
    server = SecureServer(_JOB, settings=settings, roots=authority.roots)
    sites = {
        name: SecureSite(
            name,
            _JOB,
            settings=settings,
            identity=authority.identity(name),
            roots=authority.roots,
            memory=Forgetful(),
        )
        for name in names
    }
    for name, site in sites.items():
        server.take_hello(name, site.hello())
    for name, site in sites.items():
        server.take_joined(name, site.join(server.hellos()))
    for site in sites.values():
        site.take_group(server.joined())
    ring, limit = Ring(settings.bits, len(updates)), max(float(np.abs(update).max()) for update in updates)
    about = Binding(
        study=_JOB, round_number=1, attempt=1, cohort=tuple(names), model=_JOB, plan=_JOB, layout=f"{limit}"
    )
    attempt = server.attempt(about, words=len(updates[0]))
    for name, site in sites.items():
        attempt.take_shares(name, site.begin(about))
    attempt.close_sharing()
    masked = []
    for (name, site), update in zip(sites.items(), updates, strict=True):
        words: Words = np.zeros(len(update), dtype=np.uint32)
        ring.encode_into(words, update, weight=1 / len(updates), limit=limit)
        upload = site.contribute(attempt.inbox(name), words, update=f"update of {name}")
        masked.append(words.copy())
        attempt.take_vector(name, upload, words)
    uploads = attempt.close_uploads()
    for name, site in sites.items():
        attempt.take_reveal(name, site.survivors(uploads))
    total = ring.decode(attempt.open(), limit=limit * len(updates))
    return Opened(masked, total)


def telling(words: Words, update: NDArray[np.float32]) -> Telling:
    """Hold a masked vector against the update that is under it."""
    if len(words) != len(update) or len(words) < 100:
        raise BadInput("a masked vector is held against its own update, of a hundred values or more")
    seen = words.view(np.int32).astype(np.float64)
    correlation = float(np.corrcoef(seen, update.astype(np.float64))[0, 1])
    by_chance = float(2 * stats.norm.sf(abs(correlation) * np.sqrt(len(words))))
    counts = np.bincount(words.view(np.uint8), minlength=256)
    return Telling(correlation, by_chance, float(stats.chisquare(counts).pvalue))
