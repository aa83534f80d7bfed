"""A federation in memory: certificates that are thrown away, sites, a server, and a round from begin to end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.identity import Identity
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.server import Attempt, SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import SecureSite
from crossward.privacy.secagg.throwaway import Authority

JOB = "job-1"
MODEL = "a" * 64


@lru_cache(maxsize=1)
def authority() -> Authority:
    return Authority()


@lru_cache(maxsize=64)
def identity(name: str) -> Identity:
    return authority().identity(name)


def names(count: int) -> list[str]:
    return [f"site-{number:02d}" for number in range(count)]


@dataclass
class Federation:
    """Sites that have agreed on keys, and their server."""

    server: SecureServer
    sites: dict[str, SecureSite]
    memories: dict[str, Forgetful] = field(default_factory=dict)

    @classmethod
    def of(cls, sites: Sequence[str], settings: Settings | None = None, *, job: str = JOB) -> Federation:
        settings = settings or Settings()
        memories = {name: Forgetful() for name in sites}
        federation = cls(SecureServer(job, settings=settings, roots=authority().roots), {}, memories)
        for name in sites:
            federation.sites[name] = secure_site(name, settings=settings, memory=memories[name], job=job)
        federation.agree()
        return federation

    def agree(self) -> None:
        for name, site in self.sites.items():
            self.server.take_hello(name, site.hello())
        hellos = self.server.hellos()
        for name, site in self.sites.items():
            self.server.take_joined(name, site.join(hellos))
        for site in self.sites.values():
            site.take_group(self.server.joined())


def secure_site(name: str, *, settings: Settings, memory: Forgetful, job: str = JOB) -> SecureSite:
    return SecureSite(name, job, settings=settings, identity=identity(name), roots=authority().roots, memory=memory)


def binding(cohort: Sequence[str], **changes: object) -> Binding:
    usual = {"study": "study", "round_number": 1, "attempt": 1, "model": MODEL, "plan": "plan", "layout": "layout"}
    return Binding(cohort=tuple(sorted(cohort)), **{**usual, **changes})  # type: ignore[arg-type]


Vectors = Mapping[str, NDArray[np.uint32]]


@dataclass
class Lost:
    """Who is gone before which step."""

    share: Collection[str] = ()
    upload: Collection[str] = ()
    survivors: Collection[str] = ()
    reveal: Collection[str] = ()


def run_round(
    federation: Federation,
    about: Binding,
    vectors: Vectors,
    *,
    lost: Lost | None = None,
    slots: Mapping[str, slice] | None = None,
    seen: Callable[[str, NDArray[np.uint32]], None] | None = None,
) -> Attempt:
    """One attempt; the vectors are left as they are, and the opened attempt comes back."""
    lost = lost or Lost()
    words = len(next(iter(vectors.values())))
    attempt = federation.server.attempt(about, words=words)
    gone = set(lost.share)
    for name in about.cohort:
        if name not in gone:
            attempt.take_shares(name, federation.sites[name].begin(about))
    sharers = attempt.close_sharing()
    gone |= set(lost.upload)
    for name in sharers:
        if name not in gone:
            masked = vectors[name].copy()
            message = federation.sites[name].contribute(
                attempt.inbox(name), masked, update=f"update of {name}", slots=slots
            )
            if seen is not None:
                seen(name, masked)
            attempt.take_vector(name, message, masked)
    uploads = attempt.close_uploads()
    gone |= set(lost.survivors)
    for name in attempt.survivors:
        if name not in gone:
            answer = federation.sites[name].survivors(uploads)
            (attempt.take_reveal if attempt.complete else attempt.take_agreement)(name, answer)
    if not attempt.complete:
        agreements = attempt.agreements()
        gone |= set(lost.reveal)
        for name in agreements:
            if name not in gone:
                attempt.take_reveal(name, federation.sites[name].reveal(agreements))
    attempt.open()
    return attempt
