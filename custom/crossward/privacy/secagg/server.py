"""The server's side of SA-1: relays sealed messages, adds masked vectors up, and opens their sum.

It holds no secret of any site. What sites reveal is enough to take the masks off the sum of those whose vectors
arrived, and of nothing less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from crossward.federation.errors import PrivacyRefusal, RunFailure
from crossward.privacy.secagg import canonical
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import Malformed, decode, digest
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.keys import signed_by, unlock
from crossward.privacy.secagg.masks import Mask, Words, apply_masks, fingerprint
from crossward.privacy.secagg.messages import (
    AGREED,
    BLAME,
    REVEAL,
    SHARE,
    UPLOAD,
    commitment,
    names_of,
    set_digest,
)
from crossward.privacy.secagg.roster import Roster, check_roster, checked_hello
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.shamir import BadShares, join


class TooFew(RunFailure):
    """An attempt that cannot be finished with the sites that are left; the next attempt may."""


class Caught(PrivacyRefusal):
    """A site's own signed messages contradict one another, or what it committed to.

    Args:
        site: which.
        what: it did.
        evidence: its messages.
    """

    def __init__(self, site: str, what: str, *evidence: bytes) -> None:
        super().__init__(f"{site} {what}")
        self.site = site
        self.what = what
        self.evidence = evidence


class SecureServer:
    """The server in one job.

    Args:
        job: the job's own name.
        settings: from the job.
        roots: the federation's root certificate.
        threads: for taking masks off.
    """

    def __init__(self, job: str, *, settings: Settings, roots: bytes, threads: int = 1) -> None:
        self.settings = settings
        self.threads = threads
        self._job = job
        self._trusted = roots
        self._hellos: dict[str, bytes] = {}
        self._joined: dict[str, bytes] = {}
        self.roster: Roster | None = None

    def take_hello(self, site: str, message: bytes) -> None:
        """Keep a site's keys, where its certificate endorses them: one that does not is that site's trouble alone."""
        if checked_hello(message, job=self._job, settings=self.settings, roots=self._trusted)["name"] != site:
            raise Untrusted(f"{site} sent another site's keys")
        self._hellos[site] = message

    def hellos(self) -> list[bytes]:
        """The roster for every site, checked as they will check it."""
        found = [self._hellos[site] for site in sorted(self._hellos)]
        self.roster = check_roster(found, job=self._job, settings=self.settings, roots=self._trusted)
        if self.roster.members.keys() != self._hellos.keys():
            raise Untrusted("a site sent another site's keys")
        return found

    def take_joined(self, site: str, message: bytes) -> None:
        self._joined[site] = message

    def joined(self) -> dict[str, bytes]:
        """What every site answered to the roster, for every site."""
        return dict(self._joined)

    def hello_of(self, site: str) -> bytes:
        """A site's keys, signed by its certificate: what its messages are checked with."""
        return self._hellos[site]

    def attempt(self, binding: Binding, *, words: int) -> Attempt:
        """Begin an attempt at a sum of vectors of so many words."""
        if self.roster is None:
            raise RunFailure("a sum before the sites have agreed on keys")
        return Attempt(self, self.roster, binding, words=words)


class Attempt:
    """One attempt at one sum."""

    def __init__(self, server: SecureServer, roster: Roster, binding: Binding, *, words: int) -> None:
        server.settings.check_cohort(len(binding.cohort))
        self.binding = binding
        self._settings = server.settings
        self._threads = server.threads
        self._members = roster.members
        self._threshold = server.settings.threshold(len(binding.cohort))
        self._words = words
        self._context = b""
        self._contexts: dict[str, bytes] = {}
        self._boxes: dict[str, dict[str, bytes]] = {}
        self._commitments: dict[str, dict[str, dict[str, Any]]] = {}
        self._wrapped: dict[str, bytes] = {}
        self._uploads: dict[str, bytes] = {}
        self._agreements: dict[str, bytes] = {}
        self._reveals: dict[str, dict[str, Any]] = {}
        self._blames: dict[str, bytes] = {}
        self._blamed: dict[str, tuple[str, ...]] = {}
        self.sum = np.zeros(words, dtype=np.uint32)
        self._sharers: tuple[str, ...] = ()
        self._survivors: tuple[str, ...] = ()
        self._opened = False

    def take_shares(self, site: str, message: bytes) -> None:
        """Keep what a site shares, after its signatures were checked."""
        if self._sharers:
            raise Malformed(f"{site} shares after the sharing was closed")
        outer = decode(message)
        boxes, wrapped = canonical.field(outer, "boxes", dict), canonical.field(outer, "wrapped", bytes)
        peers = set(self.binding.cohort) - {site}
        if site not in self.binding.cohort or boxes.keys() != peers:
            raise Malformed(f"{site} did not share with exactly the others")
        bodies = {}
        # Sites bind what they were told into a context that the server cannot make: it does not know their group key.
        if not all(type(box) is bytes for box in boxes.values()):
            raise Malformed(f"{site}'s boxes are none")
        context = canonical.field(decode(next(iter(boxes.values()))), "context", bytes)
        for peer, box in boxes.items():
            bodies[peer] = self._open(box, SHARE, site, context)
            _check_commitments(site, bodies[peer])
            if bodies[peer].get("wrapped") != digest("wrapped seeds", wrapped):
                raise Caught(site, "signed another sealed list than it sent", box)
        if len({(body["self"], body["wrap"], *body["own"]) for body in bodies.values()}) != 1:
            raise Caught(site, "committed to different secrets towards different sites", *boxes.values())
        self._boxes[site], self._commitments[site], self._wrapped[site] = boxes, bodies, wrapped
        self._contexts[site] = context

    def close_sharing(self) -> tuple[str, ...]:
        """Nobody shares any more; gives the sharers, which are all those of the context that most have.

        Raises:
            TooFew: for a sum with these.
        """
        votes = Counter(self._contexts.values())
        self._context = max(votes, key=lambda context: (votes[context], context), default=b"")
        self._sharers = names_of(site for site, context in self._contexts.items() if context == self._context)
        if len(self._sharers) < max(self._settings.fewest, self._threshold):
            raise TooFew(f"{len(self._sharers)} of {len(self.binding.cohort)} sites shared their secrets")
        return self._sharers

    def inbox(self, site: str) -> dict[str, bytes]:
        """What the other sharers shared with a site."""
        return {sender: self._boxes[sender][site] for sender in self._sharers if sender != site}

    def take_blame(self, site: str, message: bytes) -> None:
        """Keep whom a site blames in place of a vector, when each of them signed what it is blamed for.

        Raises:
            PrivacyRefusal: it shows nothing that the accused shared with this site.
        """
        self._expect_vector(site)
        shares = canonical.field(self._open(message, BLAME, site), "shares", dict)
        relayed = self.inbox(site)
        if not shares or any(relayed.get(accused) != share for accused, share in shares.items()):
            raise Malformed(f"{site} blames others for what they did not share with it")
        self._blames[site], self._blamed[site] = message, tuple(shares)

    @property
    def blames(self) -> dict[str, tuple[str, ...]]:
        """By site, whom it blames."""
        return dict(self._blamed)

    def quarrel(self, site: str, others: Iterable[str]) -> dict[str, bytes]:
        """What a site and others signed against one another."""
        ends = {site: set(others), **{other: {site} for other in others}}
        return {
            f"{name} blames": message
            for name, message in self._blames.items()
            if not ends.get(name, set()).isdisjoint(self._blamed[name])
        }

    def _expect_vector(self, site: str) -> None:
        if site not in self._sharers or site in self._uploads or site in self._blames or self._survivors:
            raise Malformed(f"a vector of {site} that nobody waits for")

    def take_vector(self, site: str, message: bytes, words: Words) -> None:
        """Add a site's masked vector to the sum."""
        self._expect_vector(site)
        body = self._open(message, UPLOAD, site)
        if words.dtype != np.uint32 or words.shape != (self._words,):
            raise Malformed(f"{site}'s vector is not of {self._words} words")
        if body.get("sharers") != set_digest(self._sharers):
            raise Caught(site, "masked for other sharers", message)
        if body.get("vector") != fingerprint(words, self._context):
            raise Malformed(f"{site}'s vector is not the one that it signed")
        self._uploads[site] = message
        np.add(self.sum, words, out=self.sum)

    def close_uploads(self) -> dict[str, bytes]:
        """No vector is taken any more; gives the signed uploads of the survivors, for every one of them."""
        if len(self._uploads) < max(self._settings.fewest, self._threshold):
            raise TooFew(f"{len(self._uploads)} of {len(self._sharers)} vectors arrived")
        self._survivors = names_of(self._uploads)
        return dict(self._uploads)

    @property
    def complete(self) -> bool:
        """Whether every sharer's vector is in the sum, so that sites reveal without agreeing first."""
        return self._survivors == self._sharers

    @property
    def survivors(self) -> tuple[str, ...]:
        return self._survivors

    def take_agreement(self, site: str, message: bytes) -> None:
        body = self._open(message, AGREED, site)
        if site not in self._sharers or body.get("survivors") != set_digest(self._survivors):
            raise Caught(site, "agreed to other survivors", message)
        self._agreements[site] = message

    def agreements(self) -> dict[str, bytes]:
        """Enough sites' agreement to the survivors, for every one of them."""
        if len(self._agreements) < self._threshold:
            raise TooFew(f"{len(self._agreements)} of the {self._threshold} sites that it takes agreed")
        return dict(self._agreements)

    def take_reveal(self, site: str, message: bytes) -> None:
        body = self._open(message, REVEAL, site)
        own, wrap = canonical.field(body, "self", dict), canonical.field(body, "wrap", dict)
        dropped = set(self._sharers) - set(self._survivors)
        if site not in self._sharers or own.keys() != set(self._survivors) or wrap.keys() != dropped:
            raise Caught(site, "revealed something else than was asked for", message)
        for place, shares in enumerate((own, wrap)):
            for owner, share in shares.items():
                held = self._commitments[owner][site]["shares"] if owner != site else self._own(owner)
                what = ("self share", "wrap share")[place]
                if type(share) is not bytes or commitment(what, self._context, share) != held[place]:
                    given = self._boxes[owner].get(site, b"")
                    raise Caught(site, f"revealed another share than {owner} gave it", given, message)
        self._reveals[site] = body

    def open(self) -> Words:
        """Take the masks off the sum.

        Raises:
            TooFew: sites revealed.
            Caught: what was revealed is not what a site committed to.
        """
        if self._opened:
            raise Malformed("the sum is open already")
        if len(self._reveals) < self._threshold:
            raise TooFew(f"{len(self._reveals)} of the {self._threshold} sites that it takes revealed their shares")
        masks = [Mask(self._secret(site, "self"), -1) for site in self._survivors]
        for site in set(self._sharers) - set(self._survivors):
            masks += self._masks_with(site)
        self._opened = True
        apply_masks(self.sum, masks, cipher=self._settings.cipher, threads=self._threads)
        return self.sum

    def _own(self, site: str) -> list[bytes]:
        found: list[bytes] = next(iter(self._commitments[site].values()))["own"]
        return found

    def _secret(self, site: str, which: str) -> bytes:
        shares = {self._members[holder].place: body[which][site] for holder, body in self._reveals.items()}
        committed = next(iter(self._commitments[site].values()))[which]
        try:
            secret = join(shares, threshold=self._threshold)
        except BadShares as error:
            raise Caught(site, "shared something that is no secret", *self._boxes[site].values()) from error
        # Holders are tied to their shares, so a secret that does not fit is its owner's doing.
        if commitment(which, self._context, secret) != committed:
            raise Caught(site, "shared another secret than it committed to", *self._boxes[site].values())
        return secret

    def _masks_with(self, dropped: str) -> list[Mask]:
        """The masks that survivors put on for a site whose own vector is missing."""
        secret, boxes = self._secret(dropped, "wrap"), self._boxes[dropped]
        try:
            content = unlock(secret, self._wrapped[dropped], about=digest("wrapped", self._context, dropped))
            sealed = decode(content)
            seeds = {survivor: canonical.field(sealed, survivor, bytes) for survivor in self._survivors}
        except (Untrusted, Malformed) as error:
            raise Caught(dropped, "sealed a list of masks that is none", *boxes.values()) from error
        found = []
        for survivor, seed in seeds.items():
            used = commitment("pair", self._context, seed)
            if used != self._commitments[dropped][survivor]["pair"]:
                raise Caught(dropped, f"sealed another mask for {survivor} than it committed to", boxes[survivor])
            if used != self._commitments[survivor][dropped]["pair"]:
                both = (self._boxes[survivor][dropped], boxes[survivor])
                raise Caught(survivor, f"committed to another mask for {dropped} than {dropped} sealed", *both)
            # The survivor added it where its name comes first, and took it away otherwise.
            found.append(Mask(seed, -1 if survivor < dropped else 1))
        return found

    def _open(self, message: bytes, kind: str, site: str, context: bytes | None = None) -> dict[str, Any]:
        if site not in self._members:
            raise Untrusted("a message of a site that is not on the roster")
        return signed_by(
            message, kind, sender=site, context=context or self._context, verify_key=self._members[site].verify_key
        )


def _check_commitments(site: str, body: Mapping[str, Any]) -> None:
    """Every one of them is a hash, and there is one for each share."""
    single = [canonical.field(body, name, bytes) for name in ("pair", "self", "wrap", "wrapped")]
    double = [each for name in ("shares", "own") for each in canonical.field(body, name, list)]
    if len(double) != 4 or not all(type(each) is bytes and len(each) == 32 for each in (*single, *double)):
        raise Malformed(f"{site}'s commitments are none")
