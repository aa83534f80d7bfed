"""A server that lies about models, kinds of sums, plans and ranges to real ``Release`` objects: one random run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from crossward.federation.contract import Payload, Plan
from crossward.federation.errors import CrosswardError
from crossward.federation.scopes import Scope
from crossward.privacy.secagg.canonical import decode
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.messages import REVEAL as REVEALED
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind, MaskedAlgebra, Request
from crossward.site import messages, release
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    JOIN,
    KEYS,
    REVEAL,
    ROSTER,
    SURVIVORS,
    TRAIN,
    Message,
)
from crossward.site.release import Credentials
from tests.privacy.federation import authority, identity
from tests.privacy.lying_server import STAGES, Tastes
from tests.privacy.lying_watch import ALGEBRAS, CLASSES, Hospital, WatchedRelease, WiredObserver, WiredSite, place

_ROUNDS = 6


class WiredRun:
    """One run of a study under one lying server.

    Args:
        seed: of everything that the adversary decides.
    """

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        tastes = Tastes(self.dice)
        self.told, self.happens = tastes.told, tastes.happens
        self.refused: Counter[str] = Counter()
        self.stage = 0
        make, fewest = ALGEBRAS[self.dice.choice(sorted(ALGEBRAS))]
        self.algebra = make(fewest)
        self.settings = Settings(min_sites=fewest, rounds=_ROUNDS)
        names = [f"site-{number:02d}" for number in self.dice.sample(range(64), self.dice.randint(fewest, fewest + 2))]
        self.names = sorted(names)
        self.colluding = set(self.dice.sample(self.names, self.dice.choice([0, 1, 1])))
        self.observer = WiredObserver(self.colluding, self.settings.fewest)
        self.memories = {place(name): Forgetful() for name in names}
        # Classes that few have are what a lying server would like to see.
        self.hospitals = {
            name: Hospital(name, self.algebra, classes=self.dice.sample(range(CLASSES), self.dice.randint(1, CLASSES)))
            for name in names
        }
        self.masked = MaskedAlgebra(self.algebra, bits=32)
        self.sites: dict[str, WatchedRelease] = {}
        self.jobs = self.round = self.model = self.attempt = 0
        self.cosines: dict[str, Mapping[str, Any]] = {}

    def go(self) -> list[str]:
        """Play the run; gives what the observer has to say against it."""
        with self._watched():
            self._job()
            for _ in range(self.dice.randint(1, 4)):
                self._play_round()
                if self.happens("another job", 0.15):
                    self._job()
        if self.observer.sums():
            self._reached("completed")
        return self.observer.broken()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        def secure(*values: Any, **options: Any) -> WiredSite:
            site = WiredSite(*values, **options)
            site.observer = self.observer
            return site

        def rows(masked: MaskedAlgebra, request: Request, report: Any) -> bytes:
            told = real_rows(masked, request, report)
            lies = report.site in self.colluding and self.happens("a colluding site says that it adds to all rows", 0.5)
            return b"\xff" * len(told) if lies else told

        real_rows = MaskedAlgebra.rows
        with ExitStack() as stack:
            stack.enter_context(patch.object(release, "SecureSite", secure))
            stack.enter_context(patch.object(release, "DurableMemory", self.memories.__getitem__))
            stack.enter_context(patch.object(MaskedAlgebra, "rows", rows))
            yield

    def _reached(self, stage: str) -> None:
        self.stage = max(self.stage, STAGES.index(stage))

    def _ask(self, site: str, task: str, message: Message) -> Message | None:
        """A site's answer, or None where it refuses. Any other error is a crash, and the run fails."""
        try:
            return self.sites[site].tasks[task](message)
        except CrosswardError as refusal:
            self.refused[f"{task}: {type(refusal).__name__}"] += 1
            return None

    def _all(self, task: str, asked: Mapping[str, Message]) -> dict[str, Message]:
        answers = {site: self._ask(site, task, asked[site]) for site in self.dice.sample(sorted(asked), len(asked))}
        return {site: answer for site, answer in answers.items() if answer is not None}

    # Keys

    def _job(self) -> None:
        self.jobs += 1
        names = list(self.names)
        if len(names) > self.settings.fewest and self.happens("the job comes again with one site fewer", 0.3):
            names.remove(self.dice.choice(names))
        self.sites = {
            name: WatchedRelease(
                self.hospitals[name],  # type: ignore[arg-type]
                masking=self.settings,
                study="run",
                job=f"job-{self.jobs}",
                credentials=Credentials(identity(name), authority().roots),
                memory=place(name),
            )
            for name in names
        }
        self._agree()

    def _agree(self) -> None:
        self.attempt, number = 0, self.dice.randint(1, 3)
        hellos = self._all(JOIN, {site: {"agreement": number} for site in self.sites})
        listed = {"hellos": [answer["hello"] for answer in hellos.values()]}
        joined = self._all(ROSTER, dict.fromkeys(hellos, listed))
        told = {"joined": {site: answer["joined"] for site, answer in joined.items()}}
        if self._all(KEYS, dict.fromkeys(joined, told)):
            self._reached("nobody masked")

    # One round

    def _play_round(self) -> None:
        if self.round == 0 or self.dice.random() < 0.6:
            self.round, self.model, self.attempt = min(self.round + 1, _ROUNDS - 1), self.model + 1, 0
        self._train()
        kinds = [Kind.TOTALS] * self.masked.totals_first + [Kind.UPDATES]
        if self.happens("asks for ranges", 0.3):
            kinds.insert(-1, Kind.RANGES)
        for kind in kinds:
            self._sum(kind)
        for _ in range(self.dice.randint(0, 3)):
            self._more()

    def _more(self) -> None:
        if self.happens("trains again", 0.2, plot="near"):
            self._train()
        if self.happens("new keys between training and sum", 0.1):
            self._agree()
        if self.happens("counts by themselves", 0.15, plot="differences"):
            self._all(EVALUATE, dict.fromkeys(self.sites, self._payload(self.round - 1)))
            self._sum(Kind.VALIDATION)
        if self.happens("counts of test images", 0.15, plot="differences"):
            best = self.dice.choice([5, 5, 5, 6])
            for site in self.sites.values():
                site.tested(images=9, correct=best)
            self._sum(Kind.TEST)
        if self.happens("the same kind of sum again", 0.15, plot="differences"):
            self._sum(self.dice.choice([Kind.TOTALS, Kind.TOTALS, Kind.UPDATES, Kind.RANGES]))

    def _payload(self, round_number: int) -> Message:
        near = 1e-4 * self.dice.randint(1, 9) * self.happens("nearly the same model", 0.1, plot="near")
        shapes = {name: spec.shape for name, spec in self.algebra.layout.items()}
        tensors = {name: torch.full(shape, self.model + near) for name, shape in shapes.items()}
        return messages.pack_payload(Payload(max(0, round_number), tensors))

    def _train(self) -> None:
        for site, hospital in self.hospitals.items():
            if site in self.sites:
                hospital.trained += self.happens("a site has lost its report", 0.03)
        number = self.round - 1 - self.happens("an earlier round again", 0.1)
        usual = self._payload(number)
        asked = dict.fromkeys(self.sites, usual)
        if self.happens("another model for one site", 0.08):
            asked[self.dice.choice(sorted(asked))] = self._payload(number)
        self.cosines = {site: answer["cosines"] for site, answer in self._all(TRAIN, asked).items()}

    # One sum

    def _cohort(self) -> tuple[str, ...]:
        cohort = sorted(self.sites)
        while len(cohort) > self.settings.fewest and self.happens("a smaller cohort", 0.15, plot="differences"):
            cohort.remove(self.dice.choice(cohort))
        return tuple(cohort)

    def _plan(self, cohort: tuple[str, ...]) -> Plan:
        values = {group: plan for group, rule in _PLANS.items() if (plan := rule(self, len(cohort))) is not None}
        known = self.algebra.rules()
        return Plan(self.round, cohort, {group: plan for group, plan in values.items() if group in known and plan})

    def _sum(self, kind: Kind) -> None:
        cohort = self._cohort()
        self.attempt += 1
        planned = kind in (Kind.RANGES, Kind.UPDATES)
        limit = 10.0 ** self.dice.randint(-12, 12) if self.happens("ranges of its choice", 0.2) else 1e3
        request = Request(
            kind=kind,
            round_number=self.round,
            attempt=self.attempt,
            cohort=cohort,
            plan=self._plan(cohort) if planned else None,
            limits=dict.fromkeys(self.algebra.sent, limit) if kind is Kind.UPDATES else {},
        )
        asked = {site: {"sum": self._odd(request).message()} for site in cohort}
        shares = {site: decode(answer["shares"])["boxes"] for site, answer in self._all(BEGIN, asked).items()}
        absent = {site for site in shares if self.happens("a site is not there to upload", 0.05)}
        inboxes = {
            site: {**asked[site], "inbox": {peer: shares[peer][site] for peer in shares if peer != site}}
            for site in shares
            if site not in absent
        }
        uploads = {site: answer["upload"] for site, answer in self._all(CONTRIBUTE, inboxes).items()}
        if uploads:
            self._reached("masked upload")
            self._open(uploads)

    def _odd(self, request: Request) -> Request:
        """What one site is told in another way than the others."""
        if self.happens("another plan for one site", 0.04) and request.plan is not None:
            return replace(request, plan=self._plan(request.cohort))
        if self.happens("another kind for one site", 0.02):
            return replace(request, kind=self.dice.choice(list(Kind)))
        return request

    def _open(self, uploads: Mapping[str, bytes]) -> None:
        view = {
            site: upload for site, upload in uploads.items() if not self.happens("a vector is said to be late", 0.1)
        }
        opened = self._all(SURVIVORS, {site: {"uploads": view} for site in view})
        agreed = {site: answer["opening"] for site, answer in opened.items()}
        agreed = {site: message for site, message in agreed.items() if decode(message)["kind"] != REVEALED}
        if agreed:
            self._reached("agreed to survivors")
            self._all(REVEAL, {site: {"agreements": agreed} for site in agreed})


def _weights(run: WiredRun, cohort: int) -> dict[str, Any]:
    """As few sites as must be heard, or all."""
    heard = run.settings.fewest - 1
    weights = np.zeros(cohort)
    weights[run.dice.sample(range(cohort), heard)] = 1 / heard
    if not run.happens("weights for as few as may be", 0.5, plot="weights"):
        weights = np.full(cohort, 1 / cohort)
    return {"weights": weights[None], "length": np.ones(1), "capped": np.zeros(1)}


def _attention(run: WiredRun, cohort: int) -> dict[str, Any]:
    """Every site receives from two others, or from all."""
    mixed = np.full((cohort, cohort), 1 / cohort)
    if run.happens("mixtures of as few as may be", 0.5, plot="weights"):
        mixed = np.eye(cohort) / 2
        for row in range(cohort):
            mixed[row, run.dice.sample([each for each in range(cohort) if each != row], 2)] = 0.25
    return {"attention": mixed[None], "capped": np.zeros(1)}


def _held(run: WiredRun, cohort: int) -> dict[str, Any]:
    del cohort
    shown = run.dice.choice([range(CLASSES), range(CLASSES), range(1)])
    return {"held": np.array([float(row in shown) for row in range(CLASSES)])}


def _groups(run: WiredRun, cohort: int) -> dict[str, Any]:
    groups = np.zeros(cohort)
    if cohort >= 2 * run.settings.fewest:
        groups[run.dice.sample(range(cohort), run.settings.fewest)] = 1
    return {"group": groups}


def _shared(run: WiredRun, cohort: int) -> dict[str, Any] | None:
    if run.algebra.needs == "totals":
        return {"total": np.array([1000.0 * run.dice.random() + 20.0])}
    personal = any(spec.scope is Scope.PERSONAL for spec in run.algebra.layout.values())
    return _weights(run, cohort) if personal else None


_PLANS: Mapping[str, Callable[[WiredRun, int], dict[str, Any] | None]] = {
    "shared": _shared,
    "personal": _attention,
    "prototypes": _held,
    "style": _groups,
}
