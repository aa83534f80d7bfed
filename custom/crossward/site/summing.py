"""The server's side of one masked sum, over whatever carries the tasks: attempts until one is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from crossward.federation.contract import Plan, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.blame import left_out
from crossward.privacy.secagg.masks import Words
from crossward.privacy.secagg.server import Attempt, Caught, SecureServer, TooFew
from crossward.privacy.secagg.vector import VectorLayout
from crossward.privacy.sums import Kind, MaskedAlgebra, Request, tallies_of
from crossward.site.evidence import Evidence, Fault
from crossward.site.messages import BEGIN, CONTRIBUTE, JOIN, KEYS, REVEAL, ROSTER, SURVIVORS, Message
from crossward.site.troubles import Code, Refusal

MOST_ATTEMPTS = 4


class Exchange(Protocol):
    """One task for several sites; gives those that answered well. ``take`` may refuse an answer, which is then none."""

    def __call__(
        self,
        task: str,
        asked: Mapping[str, Message],
        take: Callable[[str, Message], None],
        *,
        round_number: int,
        enough: int,
    ) -> Collection[str]: ...


@dataclass(frozen=True)
class Opening:
    """A sum that sites were asked to open: those who have helped are in no other one of the same updates.

    Attributes:
        cohort: who was asked for a vector; the plan is for all of them.
        sites: whose vectors are in the sum.
    """

    cohort: tuple[str, ...]
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """A sum without masks."""

    request: Request
    layout: VectorLayout
    words: Words
    survivors: tuple[str, ...]

    @cached_property
    def numbers(self) -> dict[tuple[str, ...], Vector]:
        return self.layout.numbers(self.words)

    @property
    def tallies(self) -> dict[str, Vector]:
        return tallies_of(self.numbers)


class NoSum(Refusal):
    """Too few sites are left for a sum, and none is known to be at fault; the code is theirs where they agree."""


class Summing:
    """Asks sites for masked sums.

    Args:
        server: makes the server's side of the protocol under a name for the keys; a new one for every agreement.
        masked: what sums there are.
        study: digest of what is trained, see ``Study.trained_digest``.
        exchange: carries tasks.
        evidence: where is kept what shows that a site is at fault.
        left_out: called with round, task, site and reason when one that answered well is found at fault.
    """

    def __init__(
        self,
        server: Callable[[int], SecureServer],
        masked: MaskedAlgebra,
        *,
        study: str,
        exchange: Exchange,
        evidence: Evidence,
        left_out: Callable[[int, str, str, Refusal], None] = lambda number, task, site, refusal: None,
    ) -> None:
        self.masked = masked
        self._make_server = server
        self.server = server(0)
        self.study = study
        self._exchange = exchange
        self.evidence = evidence
        self.left_out = left_out
        self.faulty: dict[str, Refusal] = {}
        """The sites that were found at fault in the sum that is asked for; it goes on without them."""
        self.refused: dict[str, Refusal] = {}
        """Why sites took no step of that sum, by their own word; noted by whoever carries the tasks."""
        self._agreements = 0
        self.attempts = 0
        self._tried: Counter[tuple[Kind, int]] = Counter()
        self.sites: tuple[str, ...] = ()

    @property
    def fewest(self) -> int:
        """The fewest sites that a sum is over."""
        return self.server.settings.fewest

    def agree(self, asked: Mapping[str, Message], *, round_number: int, enough: int) -> tuple[str, ...]:
        """Let sites join and agree on keys; gives those that did.

        Args:
            asked: by site, the address of the message.
            round_number: of the run.
            enough: how many sites it takes.

        Raises:
            Refusal: they are too few.
        """
        present = tuple(asked)
        for _ in range(MOST_ATTEMPTS):
            self._agreements += 1
            self.server = self._make_server(self._agreements)
            agreement = {"agreement": self._agreements}
            joined = self.ask(
                JOIN,
                {site: {**asked[site], **agreement} for site in present},
                round_number,
                enough,
                lambda site, answer: self.server.take_hello(site, answer["hello"]),
            )
            if len(joined) < enough:
                present = joined
                break
            hellos = {"hellos": self.server.hellos()}
            present = self.ask(
                ROSTER,
                {site: {**asked[site], **hellos} for site in joined},
                round_number,
                len(joined),
                lambda site, answer: self.server.take_joined(site, answer["joined"]),
            )
            if present == joined:
                answers = {"joined": self.server.joined()}
                self.sites = self.ask(
                    KEYS,
                    {site: {**asked[site], **answers} for site in joined},
                    round_number,
                    enough,
                    lambda site, answer: None,
                )
                return self.sites
            if len(present) < enough:
                break
        raise Refusal(Code.NO_SUM, sites=len(present), needed=enough)

    def sum(
        self,
        kind: Kind,
        address: Mapping[str, Message],
        *,
        round_number: int,
        model: str,
        plan_for: Callable[[tuple[str, ...]], Plan] | None = None,
        limits: Mapping[str, float] | None = None,
        earlier: Sequence[Opening] = (),
        invited: Collection[str] = (),
        note: Callable[[Opening], None] = lambda opening: None,
    ) -> Opened:
        """Open one sum over the sites in ``address``, or over those of them that stay.

        Args:
            kind: of sum.
            address: by site, what every message to it begins with.
            round_number: of the sum.
            model: digest of what all sites received.
            plan_for: makes the plan for a cohort.
            limits: of the products.
            earlier: what sites were asked to open before, oldest first; tried before anything else.
            invited: who should be in it. Where one of them is not even asked, it is missing: no other's word says why.
            note: called before sites are asked to open something.

        Raises:
            Refusal: too few sites are left, for some that are at fault; nothing was opened.
            NoSum: too few are left, and nobody is known to be at fault; nothing was opened.
        """
        self.faulty, self.refused = {}, {}
        everybody = tuple(sorted(address))
        again = [
            opening
            for opening in earlier
            if set(opening.sites) <= set(everybody) and set(opening.cohort) <= set(self.sites)
        ]
        present = everybody
        for first in dict.fromkeys([*again, Opening(everybody, everybody)]):
            cohort, present = first.cohort, tuple(site for site in first.sites if site not in self.faulty)
            for _ in range(MOST_ATTEMPTS):
                if len(present) < self.fewest:
                    break
                self._tried[kind, round_number] += 1
                request = Request(
                    kind=kind,
                    round_number=round_number,
                    attempt=self._tried[kind, round_number],
                    cohort=cohort,
                    plan=plan_for(cohort) if plan_for else None,
                    limits=limits or {},
                )
                self.attempts += 1
                try:
                    return _Sum(self, request, {site: address[site] for site in present}, model, note).run()
                except _Left as left:
                    cohort, present = left.cohort, left.present
        raise self._end({*everybody, *invited}, present)

    def _end(self, everybody: Collection[str], present: Collection[str]) -> Refusal:
        """Why there is no sum: who is at fault, what all that are left out said, or how few the others are."""
        if self.faulty:
            fault = next(iter(self.faulty.values()))
            alike = sorted(site for site, other in self.faulty.items() if other.code is fault.code)
            return Refusal(fault.code, site=" and ".join(alike), **fault.numbers)
        gone = [site for site in sorted(everybody) if site not in present]
        said = [self.refused[site] for site in gone if site in self.refused]
        if len({refusal.code for refusal in said}) == 1 and len(said) == len(gone):
            return NoSum(said[0].code, site=" and ".join(gone), **said[0].numbers)
        return NoSum(Code.NO_SUM, sites=len(present), needed=self.fewest)

    def ask(
        self,
        task: str,
        asked: Mapping[str, Message],
        round_number: int,
        enough: int,
        take: Callable[[str, Message], None],
    ) -> tuple[str, ...]:
        return tuple(sorted(self._exchange(task, asked, take, round_number=round_number, enough=enough)))


class _Left(Exception):
    """An attempt failed; the next one is with those that are left, and for no others unless a cohort is given."""

    def __init__(self, present: Iterable[str], cohort: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.present = tuple(sorted(present))
        self.cohort = cohort or self.present


class _Sum:
    """One attempt."""

    def __init__(
        self,
        summing: Summing,
        request: Request,
        address: Mapping[str, Message],
        model: str,
        note: Callable[[Opening], None],
    ) -> None:
        self._note = note
        self._summing = summing
        self._request = request
        self._address = address
        self._layout = summing.masked.layout(request)
        binding = summing.masked.binding(request, study=summing.study, model=model)
        self._attempt: Attempt = summing.server.attempt(binding, words=self._layout.words)
        settings = summing.server.settings
        self._enough = max(settings.fewest, settings.threshold(len(request.cohort)))

    def run(self) -> Opened:
        attempt, request = self._attempt, self._request
        described = {"sum": request.message()}
        present = self._ask(
            BEGIN,
            dict.fromkeys(self._address, described),
            lambda site, answer: attempt.take_shares(site, answer["shares"]),
        )
        sharers = self._step(attempt.close_sharing, present)
        self._demand_whole(sharers)
        present = self._ask(
            CONTRIBUTE, {site: {**described, "inbox": attempt.inbox(site)} for site in sharers}, self._take_vector
        )
        self._settle(present)
        uploads = self._step(attempt.close_uploads, present)
        survivors = attempt.survivors
        self._demand_whole(survivors)
        opening = Opening(request.cohort, survivors)
        if attempt.complete:
            self._note(opening)
        take = attempt.take_reveal if attempt.complete else attempt.take_agreement
        present = self._ask(
            SURVIVORS,
            {site: {"uploads": uploads} for site in survivors},
            lambda site, answer: take(site, answer["opening"]),
        )
        if not attempt.complete:
            agreements = self._step(attempt.agreements, present)
            self._note(opening)
            self._ask(
                REVEAL,
                {site: {"agreements": agreements} for site in agreements},
                lambda site, answer: attempt.take_reveal(site, answer["opening"]),
            )
        try:
            words = self._step(attempt.open, survivors)
        except _Left as left:
            # Who has revealed its shares helps with this sum again, and with no other one.
            raise _Left(left.present, request.cohort) from left
        return Opened(request, self._layout, words, survivors)

    def _demand_whole(self, present: Collection[str]) -> None:
        """Where a plan is for all of a cohort, the rest of it gets another plan."""
        if self._request.whole and len(present) < len(self._request.cohort):
            raise _Left(present)

    def _settle(self, present: Collection[str]) -> None:
        """Where sites blame one another, the next attempt is without those who stand against most."""
        found = left_out(self._attempt.blames)
        for site, others in found.items():
            what = f"what was shared between {site} and {', '.join(others)} does not hold, by what they signed"
            code, numbers = (Code.DISPUTED, {"sites": len(others)}) if len(others) > 1 else (Code.QUARREL, {})
            messages = self._attempt.quarrel(site, others)
            self._report(CONTRIBUTE, self._at_fault(code, site, what, messages, signers=(site, *others), **numbers))
        if found:
            raise _Left(site for site in present if site not in found)

    def _at_fault(
        self,
        code: Code,
        site: str,
        what: str,
        messages: Mapping[str, bytes],
        *,
        signers: Sequence[str],
        **numbers: float,
    ) -> Refusal:
        """Write down what a site did; the sum is asked for without it from here on."""
        summing, request = self._summing, self._request
        fault = Fault(
            site=site,
            what=what,
            round_number=request.round_number,
            attempt=request.attempt,
            messages=messages,
            hellos={signer: summing.server.hello_of(signer) for signer in signers},
        )
        refusal = Refusal(code, site=site, **numbers)
        refusal.evidence = summing.evidence.keep(fault)
        summing.faulty[site] = refusal
        return refusal

    def _caught(self, caught: Caught) -> Refusal:
        messages = {f"message {place}": each for place, each in enumerate(caught.evidence, start=1)}
        return self._at_fault(Code.CAUGHT, caught.site, caught.what, messages, signers=self._request.cohort)

    def _report(self, task: str, refusal: Refusal) -> None:
        self._summing.left_out(self._request.round_number, task, refusal.site or "", refusal)

    def _take_vector(self, site: str, answer: Message) -> None:
        if "blame" in answer:
            self._attempt.take_blame(site, answer["blame"])
            return
        self._attempt.take_vector(site, answer["upload"], self._layout.ring.unpack(answer["vector"]))

    def _ask(
        self, task: str, content: Mapping[str, Mapping[str, Any]], take: Callable[[str, Message], None]
    ) -> tuple[str, ...]:
        asked = {site: {**self._address[site], **part} for site, part in content.items()}

        def taken(site: str, answer: Message) -> None:
            try:
                take(site, answer)
            except Caught as caught:
                raise self._caught(caught) from caught

        return self._summing.ask(task, asked, self._request.round_number, self._enough, taken)

    def _step(self, close: Callable[[], Any], present: Collection[str]) -> Any:
        try:
            return close()
        except TooFew as error:
            raise _Left(present) from error
        except Caught as error:
            self._report(SURVIVORS, self._caught(error))
            raise _Left(site for site in present if site != error.site) from error
        except PrivacyRefusal as error:
            raise _Left(()) from error
