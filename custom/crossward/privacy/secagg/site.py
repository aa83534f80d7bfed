"""A site's side of SA-1 as a state machine: every message is checked against what the site knows before it is answered.

``hello`` -> ``join`` -> ``take_group`` -> (``begin`` -> ``contribute`` -> ``survivors`` [-> ``reveal``])*. A message
that does not hold ends the attempt; one that nobody waits for is not answered. The third that is the server's fault
ends the job for this site, see ``Strikes``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg import canonical, messages
from crossward.privacy.secagg.attempt import Blamed, OutOfTurn, SiteAttempt
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import Malformed, digest, encode
from crossward.privacy.secagg.identity import Identity, Untrusted
from crossward.privacy.secagg.keys import GROUP, JobKeys, PairRoots, fresh, lock, sign, signed_by, unlock
from crossward.privacy.secagg.masks import Mask, Words, apply_masks, fingerprint
from crossward.privacy.secagg.memory import Memory, Replayed, Use, about_of, check_new, check_same_update, check_sum
from crossward.privacy.secagg.messages import AGREED, BLAME, JOINED, REVEAL, SHARE, UPLOAD, names_of
from crossward.privacy.secagg.pads import Pads
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.roster import Roster, check_roster, hello
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.shamir import split
from crossward.privacy.secagg.strikes import Strikes

_BEFORE_KEYS = ("new", "greeted", "joined", "left")


class SecureSite:
    """One site in one job.

    Args:
        name: of the site, as in its certificate.
        job: the job's own name: keys are of this job only.
        settings: from the signed job, checked against the site's policy by the caller.
        identity: the site's certificate and key.
        roots: the site's own copy of the federation's root certificate.
        memory: what was used before; kept on disk by the caller.
        outsiders: names that have certificates of the federation and are no sites, such as the server's.
        strikes: of the job, where it has had other keys before.
        threads: for masking.
    """

    def __init__(
        self,
        name: str,
        job: str,
        *,
        settings: Settings,
        identity: Identity,
        roots: bytes,
        memory: Memory,
        outsiders: Collection[str] = (),
        strikes: Strikes | None = None,
        threads: int = 1,
    ) -> None:
        self.name = name
        self.settings = settings
        self._job = job
        self._identity = identity
        self._trusted = roots
        self._memory = memory
        self._outsiders = outsiders
        self._threads = threads
        self._keys = JobKeys()
        self._state = "new"
        self._strikes = strikes or Strikes()
        self._roster: Roster | None = None
        self._pairs: PairRoots | None = None
        self._attempt: SiteAttempt | None = None
        self._begun: set[bytes] = set()

    @property
    def state(self) -> str:
        return self._state

    def hello(self) -> bytes:
        """This site's keys for the job."""
        self._expect("new")
        self._state = "greeted"
        return hello(self.name, self._job, settings=self.settings, identity=self._identity, keys=self._keys)

    def join(self, hellos: Sequence[bytes]) -> bytes:
        """Check everybody's keys; the first site by name also draws the key that only sites know."""
        self._expect("greeted")
        roster = check_roster(hellos, job=self._job, settings=self.settings, roots=self._trusted)
        if not roster.members.keys().isdisjoint(self._outsiders):
            raise Untrusted("somebody on the roster is no site")
        own = roster.members.get(self.name)
        if own is None or (own.agree_key, own.verify_key) != (self._keys.agree_key, self._keys.verify_key):
            raise Untrusted("the roster has other keys for this site than its own")
        self._roster = roster
        others = {name: member.agree_key for name, member in roster.members.items() if name != self.name}
        roots = self._keys.roots(self.name, others, parts=[self._job, roster.digest])
        self._pairs = PairRoots(roots, last=self.settings.rounds)
        self._state = "joined"
        boxes = {}
        if self.name == min(roster.members):
            secret = fresh()
            boxes = {other: lock(self._group_key(other), secret, about=roster.digest) for other in roots}
            self._pairs.add_group(secret)
        return sign(JOINED, {"boxes": boxes}, sender=self.name, context=roster.digest, keys=self._keys)

    def take_group(self, joined: Mapping[str, bytes]) -> None:
        """See that every site has the same roster, and take the key that only sites know from the first of them."""
        self._expect("joined")
        roster = self._known_roster()
        if joined.keys() != roster.members.keys():
            raise Untrusted("not every site of the roster has answered to it")
        bodies = {name: self._open(message, JOINED, name, roster.digest) for name, message in joined.items()}
        first = min(roster.members)
        if self.name != first:
            box = canonical.field(canonical.field(bodies[first], "boxes", dict), self.name, bytes)
            self._known_pairs().add_group(unlock(self._group_key(first), box, about=roster.digest))
        self._state = "keyed"

    def group_key(self, purpose: str, *, round_number: int, parts: Sequence[Any] = ()) -> bytes:
        """A key that all sites know and the server does not, for one purpose in one round; keys of earlier ones go."""
        pairs = self._pairs
        if pairs is None or not pairs.grouped:
            raise OutOfTurn("the sites have not agreed on keys yet")
        pairs.move_to(round_number)
        return pairs.key(GROUP, purpose, parts=parts)

    def begin(self, binding: Binding, *, note: bytes = b"") -> bytes:
        """Begin an attempt: draw its secrets and share them among the cohort.

        Args:
            binding: made from what this site itself received and trained from.
            note: for the other sites to read, and not for the server; of the same length at every site.
        """
        if self._state in _BEFORE_KEYS:
            self._strike()
            raise OutOfTurn("a sum before the sites have agreed on keys")
        self.forget_attempt()
        roster, pairs = self._known_roster(), self._known_pairs()
        with self._counting():
            if self.name not in binding.cohort or not set(binding.cohort) <= roster.members.keys():
                raise Untrusted("a cohort with strangers, or without this site")
            self.settings.check_cohort(len(binding.cohort))
            check_new(self._memory.uses(binding.study, binding.model), binding, job=self._job)
            group = self.group_key("context", round_number=binding.round_number)
        context = binding.context(job=self._job, roster=roster.digest, settings=self.settings.digest(), group=group)
        # Boxes have a key of the context and no nonce: a context seals once.
        if context in self._begun:
            raise Replayed(f"attempt {binding.attempt} of round {binding.round_number} was begun before")
        self._begun.add(context)
        peers = [name for name in binding.cohort if name != self.name]
        seeds = {peer: pairs.key(peer, "pair", context=context) for peer in peers}
        self_seed, wrap_key = fresh(), fresh()
        threshold = self.settings.threshold(len(binding.cohort))
        places = {name: roster.members[name].place for name in binding.cohort}
        self_shares, wrap_shares = (
            split(secret, places=list(places.values()), threshold=threshold) for secret in (self_seed, wrap_key)
        )
        shares = {name: messages.Shares(self_shares[place], wrap_shares[place]) for name, place in places.items()}
        wrapped = lock(wrap_key, encode(seeds), about=digest("wrapped", context, self.name))
        boxes = {}
        for peer in peers:
            hidden = {"pair": seeds[peer], "self": self_seed, "wrap": wrap_key}
            box = lock(self._share_key(context, self.name, peer), shares[peer].packed(note), about=context)
            body = messages.share_body(context, peer, box, shares[peer], shares[self.name], hidden, wrapped)
            boxes[peer] = sign(SHARE, body, sender=self.name, context=context, keys=self._keys)
        self._attempt = SiteAttempt(binding, context, threshold, seeds, self_seed, shares[self.name], note)
        self._state = "shared"
        return encode({"boxes": boxes, "wrapped": wrapped})

    def contribute(
        self,
        inbox: Mapping[str, bytes],
        words: Words,
        *,
        update: str,
        slots: Mapping[str, slice] | None = None,
        heed: Callable[[Mapping[str, bytes]], None] | None = None,
    ) -> bytes:
        """Mask this site's vector in place, and sign it.

        Args:
            inbox: from every sharer but this site, what it shared with this one.
            words: the vector as whole numbers; masked when this returns.
            update: digest of the update that the vector was made from.
            slots: parts of the vector that only the named site may read.
            heed: gets every sharer's note, and may refuse to mask.

        Raises:
            Blamed: a sharer's message does not hold; nothing is masked then.
        """
        with self._attempting("shared") as attempt:
            self._take_shares(attempt, inbox)
            if heed is not None:
                heed({**attempt.notes, self.name: attempt.own_note})
            return self._mask(attempt, words, update, slots or {})

    def _take_shares(self, attempt: SiteAttempt, inbox: Mapping[str, bytes]) -> None:
        sharers = tuple(sorted([*inbox, self.name]))
        if self.name in inbox or not set(sharers) <= set(attempt.binding.cohort):
            raise Untrusted("sharers that are not of the cohort")
        self.settings.check_cohort(len(sharers))
        if len(sharers) < attempt.threshold:
            raise PrivacyRefusal(f"{len(sharers)} sites shared their secrets, and opening takes {attempt.threshold}")
        # What its sender did not sign like this accuses nobody: the server may have changed it.
        bodies = {peer: self._signed_share(attempt, peer, message) for peer, message in inbox.items()}
        faults = attempt.take_shares(self.name, bodies, lambda peer: self._share_key(attempt.context, peer, self.name))
        if faults:
            # The server has what the accused signed; nothing else is shown.
            shown = {"shares": {fault.site: inbox[fault.site] for fault in faults}}
            raise Blamed.of(faults, sign(BLAME, shown, sender=self.name, context=attempt.context, keys=self._keys))
        attempt.held[self.name] = attempt.own_shares
        attempt.sharers = sharers

    def _mask(self, attempt: SiteAttempt, words: Words, update: str, slots: Mapping[str, slice]) -> bytes:
        sharers = attempt.sharers
        if not set(slots) <= set(attempt.binding.cohort):
            raise Untrusted("a slot for a site that is not of the cohort")
        uses = self._memory.uses(attempt.binding.study, attempt.binding.model)
        check_same_update(uses, update)
        check_sum(uses, cohort=sharers, about=about_of(attempt.binding))
        attempt.update = update
        # On disk before the first mask is made: a copy of this process must not use these keys again.
        self._note(attempt, sharers, "masked")
        masks = [Mask(attempt.self_seed, 1)]
        masks += [Mask(attempt.pair_seeds[peer], 1 if self.name < peer else -1) for peer in attempt.notes]
        apply_masks(words, masks, cipher=self.settings.cipher, threads=self._threads)
        pads = Pads(self.name, self._known_pairs(), attempt.context)
        for owner, where in slots.items():
            if owner == self.name:
                attempt.pads = pads.of_others(sharers)
            else:
                apply_masks(words[where], [pads.put_on(owner)], cipher=self.settings.cipher, threads=self._threads)
        Ring(self.settings.bits, len(sharers)).narrow(words)
        attempt.self_seed, attempt.pair_seeds = b"", {}
        self._state = "uploaded"
        body = {"sharers": messages.set_digest(sharers), "vector": fingerprint(words, attempt.context)}
        return sign(UPLOAD, body, sender=self.name, context=attempt.context, keys=self._keys)

    def survivors(self, uploads: Mapping[str, bytes]) -> bytes:
        """Hear whose vectors are in the sum: opens it at once when nobody dropped out, else agrees to the set first.

        Args:
            uploads: the signed uploads of those whose vectors are in the sum.
        """
        with self._attempting("uploaded") as attempt:
            return self._hear_survivors(attempt, uploads)

    def _hear_survivors(self, attempt: SiteAttempt, uploads: Mapping[str, bytes]) -> bytes:
        survivors = names_of(uploads)
        if not set(survivors) <= set(attempt.sharers):
            raise Untrusted("vectors of sites that shared no secrets are said to be in the sum")
        if self.name not in survivors:
            # It would leave no note at this site that its shares opened a sum.
            raise PrivacyRefusal("this site's vector is left out of the sum, so it does not help to open it")
        if len(survivors) < max(self.settings.fewest, attempt.threshold):
            raise PrivacyRefusal(f"a sum over {len(survivors)} sites is too small to be opened")
        for name, message in uploads.items():
            body = self._open(message, UPLOAD, name, attempt.context)
            if body.get("sharers") != messages.set_digest(attempt.sharers):
                raise Blamed(name, "masked for other sharers than this site")
        attempt.survivors = survivors
        if survivors == attempt.sharers:
            return self._reveal(attempt)
        self._state = "agreed"
        body = {"survivors": messages.set_digest(survivors)}
        return sign(AGREED, body, sender=self.name, context=attempt.context, keys=self._keys)

    def reveal(self, agreements: Mapping[str, bytes]) -> bytes:
        """Open the sum once enough sites have agreed to the same survivors."""
        with self._attempting("agreed") as attempt:
            self._check_agreements(attempt, agreements)
            return self._reveal(attempt)

    def _check_agreements(self, attempt: SiteAttempt, agreements: Mapping[str, bytes]) -> None:
        if not set(agreements) <= set(attempt.sharers) or len(agreements) < attempt.threshold:
            raise PrivacyRefusal(f"{len(agreements)} sites agreed to the survivors, and it takes {attempt.threshold}")
        for name, message in agreements.items():
            body = self._open(message, AGREED, name, attempt.context)
            if body.get("survivors") != messages.set_digest(attempt.survivors):
                raise Blamed(name, "agreed to another set of survivors; the server told sites different things")

    def take_pads(self) -> list[bytes]:
        """The keys of the others' pads on this site's own slot of the opened sum; given out once."""
        attempt = self._at("opened")
        if not attempt.pads:
            raise OutOfTurn("the sum has no slot for this site, or its pads were taken already")
        pads, attempt.pads = attempt.pads, {}
        return [pads[peer] for peer in attempt.survivors if peer != self.name]

    def forget_attempt(self) -> None:
        """Give an attempt up; its secrets are gone."""
        self._attempt = None
        if self._state not in _BEFORE_KEYS:
            self._state = "keyed"

    def leave(self) -> None:
        """Forget all keys of the job."""
        self.forget_attempt()
        self._state = "left"
        self._keys.forget()
        if self._pairs is not None:
            self._pairs.forget()

    def _reveal(self, attempt: SiteAttempt) -> bytes:
        # Looked up again: another job may have opened another sum since this attempt began.
        uses = self._memory.uses(attempt.binding.study, attempt.binding.model)
        check_sum(uses, cohort=attempt.survivors, about=about_of(attempt.binding))
        self._note(attempt, attempt.survivors, "opened")
        self._state = "opened"
        dropped = [name for name in attempt.sharers if name not in attempt.survivors]
        body = {
            "self": {name: attempt.held[name].self_share for name in attempt.survivors},
            "wrap": {name: attempt.held[name].wrap_share for name in dropped},
        }
        attempt.held = {}
        return sign(REVEAL, body, sender=self.name, context=attempt.context, keys=self._keys)

    def _signed_share(self, attempt: SiteAttempt, peer: str, message: bytes) -> dict[str, Any]:
        try:
            return self._open(message, SHARE, peer, attempt.context)
        except (Untrusted, Malformed) as error:
            raise Blamed(
                peer, f"or the server changed what it shares, or has another round in mind ({error})"
            ) from error

    def _note(self, attempt: SiteAttempt, cohort: tuple[str, ...], step: Any) -> None:
        binding = attempt.binding
        about = about_of(binding)
        use = Use(self._job, binding.round_number, binding.attempt, cohort, attempt.update, about, step)
        self._memory.keep(binding.study, binding.model, use)

    def _share_key(self, context: bytes, sender: str, receiver: str) -> bytes:
        other = receiver if sender == self.name else sender
        return self._known_pairs().key(other, "share", context=context, parts=[sender, receiver])

    def _group_key(self, other: str) -> bytes:
        roster = self._known_roster()
        return self._known_pairs().key(other, "group", context=roster.digest)

    def _open(self, message: bytes, kind: str, sender: str, context: bytes) -> dict[str, Any]:
        members = self._known_roster().members
        if sender not in members:
            raise Untrusted("a message of a site that is not on the roster")
        return signed_by(message, kind, sender=sender, context=context, verify_key=members[sender].verify_key)

    def _expect(self, state: str) -> None:
        if self._state != state:
            self._strike()
            raise OutOfTurn(f"a message for a site that is '{state}', and this one is '{self._state}'")

    def _strike(self) -> None:
        self._strikes.add()
        if self._strikes.out:
            self.leave()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what does not hold in a sum; what another site did is not the server's fault, and is ``Blamed``."""
        try:
            yield
        except (Untrusted, Malformed):
            self._strike()
            raise

    @contextmanager
    def _attempting(self, state: str) -> Iterator[SiteAttempt]:
        """Take a message in its turn; one that does not hold ends the attempt, and its secrets are gone."""
        attempt = self._at(state)
        try:
            with self._counting():
                yield attempt
        except BaseException:
            self.forget_attempt()
            raise

    def _at(self, state: str) -> SiteAttempt:
        self._expect(state)
        if self._attempt is None:
            raise OutOfTurn("there is no attempt at a sum")
        return self._attempt

    def _known_roster(self) -> Roster:
        if self._roster is None:
            raise OutOfTurn("the site knows no roster")
        return self._roster

    def _known_pairs(self) -> PairRoots:
        if self._pairs is None:
            raise OutOfTurn("the site shares no keys")
        return self._pairs
