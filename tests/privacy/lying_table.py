"""Real ``Release`` objects in memory and a server that a test plays by hand: every step may be a lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from crossward.federation.algebra import Algebra
from crossward.federation.contract import Payload, Plan, Sealed
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind, MaskedAlgebra, Request
from crossward.site import messages, release
from crossward.site.messages import BEGIN, CONTRIBUTE, EVALUATE, JOIN, KEYS, REVEAL, ROSTER, SURVIVORS, TRAIN, Message
from crossward.site.release import Credentials, Release
from crossward.site.summing import Opened
from tests.privacy.federation import authority, identity, names
from tests.privacy.lying_watch import CLASSES, Hospital, place

STUDY = "study"


class Table:
    """Sites, what they remember from job to job, and all that a server does.

    Args:
        algebra: makes what is summed, from the fewest sites of a sum.
        count: of sites.
        fewest: sites of a sum.
        classes: by site, those that it has images of.
    """

    def __init__(
        self,
        algebra: Callable[[int], Algebra],
        count: int,
        *,
        fewest: int = 3,
        classes: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self.names = tuple(names(count))
        self.settings = Settings(min_sites=fewest, rounds=9)
        self.algebra = algebra(fewest)
        self.masked = MaskedAlgebra(self.algebra, bits=32)
        self.memories = {place(name): Forgetful() for name in self.names}
        held = classes or {}
        self.hospitals = {
            name: Hospital(name, self.algebra, classes=held.get(name, range(CLASSES))) for name in self.names
        }
        self.sites: dict[str, Release] = {}
        self._attempt = 0
        self.job("job-1")

    def job(self, name: str, sites: Sequence[str] | None = None, *, study: str = STUDY) -> None:
        """All processes begin anew, and the sites agree on keys."""
        with patch.object(release, "DurableMemory", self.memories.__getitem__):
            self.sites = {
                site: Release(
                    self.hospitals[site],  # type: ignore[arg-type]
                    masking=self.settings,
                    study=study,
                    job=name,
                    credentials=Credentials(identity(site), authority().roots),
                    memory=place(site),
                )
                for site in sites or self.names
            }
        self._job = name
        self.agree()

    def agree(self, number: int = 1) -> None:
        self.server = SecureServer(f"{self._job}/{number}", settings=self.settings, roots=authority().roots)
        for site, answer in self.all(JOIN, {site: {"agreement": number} for site in self.sites}).items():
            self.server.take_hello(site, answer["hello"])
        listed = {"hellos": self.server.hellos()}
        for site, answer in self.all(ROSTER, dict.fromkeys(self.sites, listed)).items():
            self.server.take_joined(site, answer["joined"])
        self.all(KEYS, {site: {"joined": self.server.joined()} for site in self.sites})

    def all(self, task: str, asked: Mapping[str, Message]) -> dict[str, Message]:
        """Everybody's answer; a refusal comes through."""
        return {site: self.sites[site].tasks[task](message) for site, message in asked.items()}

    def model(
        self, number: int, *, after: int = 0, near: float = 0.0, plan: Plan | None = None, sealed: Sealed | None = None
    ) -> Message:
        """A made-up model as the result of a round, as it travels; ``near`` changes it by a little."""
        shapes = {name: spec.shape for name, spec in self.algebra.layout.items()}
        tensors = {name: torch.full(shape, number + near) for name, shape in shapes.items()}
        return messages.pack_payload(Payload(after, tensors, None, plan, sealed))

    def train(self, number: int, *, after: int = 0, near: float = 0.0) -> dict[str, Mapping[str, Any]]:
        asked = dict.fromkeys(self.sites, self.model(number, after=after, near=near))
        return {site: answer["cosines"] for site, answer in self.all(TRAIN, asked).items()}

    def evaluate(self, number: int, *, after: int = 1, near: float = 0.0) -> None:
        self.all(EVALUATE, dict.fromkeys(self.sites, self.model(number, after=after, near=near)))

    def tested(self, correct: int) -> None:
        for site in self.sites.values():
            site.tested(images=9, correct=correct)

    def request(
        self,
        kind: Kind,
        cohort: Sequence[str] | None = None,
        *,
        round_number: int = 1,
        limit: float = 100.0,
        values: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Request:
        """The next attempt at a sum, with a plan of these values."""
        self._attempt += 1
        cohort = tuple(cohort or sorted(self.sites))
        return Request(
            kind=kind,
            round_number=round_number,
            attempt=self._attempt,
            cohort=cohort,
            plan=Plan(round_number, cohort, values or {}) if kind in (Kind.RANGES, Kind.UPDATES) else None,
            limits=dict.fromkeys(self.algebra.sent, limit) if kind is Kind.UPDATES else {},
        )

    def sum(self, request: Request, *, mute: Collection[str] = (), late: Collection[str] = ()) -> Opened:
        """Open a sum as a server would that says what it likes.

        Args:
            request: the same for all.
            mute: who is said to have shared no secrets.
            late: whose vectors are said to have come too late.
        """
        layout = self.masked.layout(request)
        binding = self.masked.binding(request, study=STUDY, model="")
        attempt = self.server.attempt(binding, words=layout.words)
        asked = {"sum": request.message()}
        for site, answer in self.all(BEGIN, dict.fromkeys(request.cohort, asked)).items():
            if site not in mute:
                attempt.take_shares(site, answer["shares"])
        sharers = attempt.close_sharing()
        inboxes = {site: {**asked, "inbox": attempt.inbox(site)} for site in sharers}
        for site, answer in self.all(CONTRIBUTE, inboxes).items():
            if site not in late:
                attempt.take_vector(site, answer["upload"], layout.ring.unpack(answer["vector"]))
        uploads = attempt.close_uploads()
        take = attempt.take_reveal if attempt.complete else attempt.take_agreement
        for site, answer in self.all(SURVIVORS, {site: {"uploads": uploads} for site in attempt.survivors}).items():
            take(site, answer["opening"])
        if not attempt.complete:
            agreed = attempt.agreements()
            for site, answer in self.all(REVEAL, {site: {"agreements": agreed} for site in agreed}).items():
                attempt.take_reveal(site, answer["opening"])
        return Opened(request, layout, attempt.open(), attempt.survivors)
