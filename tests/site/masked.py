"""A masked federation in one process whose messages can be lost, changed and looked at; its sites train nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.site.made_up_sites import made_up_study
from tests.site.packs import carried
from tests.standins import mean_algebra
from torch import Tensor

from crossward.federation.algebra import Algebra
from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, VALIDATION, Payload, Report, State, Tally
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import CrosswardError
from crossward.federation.scopes import tensors_digest
from crossward.privacy.secagg.identity import Identity
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.throwaway import Authority
from crossward.privacy.sums import Kind, MaskedAlgebra, Request, received_digest
from crossward.site import messages
from crossward.site.evidence import Evidence, Witness
from crossward.site.masked_run import MaskedRun
from crossward.site.member import refusal_of
from crossward.site.messages import BEGIN, TRAIN, Message
from crossward.site.release import Credentials, Release
from crossward.site.summing import Summing
from crossward.site.troubles import Code, Refusal
from crossward.site.vault import Vault

RUN, STUDY = "run-1", "study"
ALGEBRA = mean_algebra({"conv.weight": (3, 5), "bias": (7,)})
"""A small model whose sites are averaged."""


@lru_cache(maxsize=1)
def authority() -> Authority:
    return Authority()


@lru_cache(maxsize=64)
def identity(name: str) -> Identity:
    return authority().identity(name)


def names_of(count: int) -> tuple[str, ...]:
    return tuple(f"site-{number:02d}" for number in range(count))


def random_update(algebra: Algebra, seed: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(spec.shape, generator=generator) for name, spec in algebra.sent.items()}


class Hospital:
    """Stands in for a participant: it reports what it is given, and keeps a real vault."""

    reach = None

    def __init__(self, name: str, algebra: Algebra, folder: Path, *, seed: int) -> None:
        self.name = name
        self.algebra = algebra
        self.vault = Vault(folder / "vault", study="study")
        self.update = random_update(algebra, seed)
        self.samples = 10.0 + seed
        self.received: list[Payload] = []
        self.trained = 0

    @property
    def validation(self) -> Tally:
        return {name: np.array([self.samples + place]) for place, name in enumerate(VALIDATION)}

    def receive(self, payload: Payload) -> Tally:
        self.received.append(payload)
        self.vault.keep_model(payload.round_number, payload.tensors)
        self.vault.tidy(received=payload.round_number, best=payload.best_round)
        return self.validation

    def train(self, payload: Payload, validation: Tally | None = None) -> Report:
        self.trained += 1
        counts = {SAMPLES: self.samples, LOSS: 0.5 * self.samples, SEEN: self.samples, CORRECT: 1.0}
        tally = {key: np.array([value]) for key, value in counts.items()} | dict(self.algebra.measure(self.update))
        model = tensors_digest(payload.tensors)
        # Two rounds never train to the same bits.
        nudged = {name: value * (1 + payload.round_number * 2.0**-22) for name, value in self.update.items()}
        return Report(self.name, payload.round_number + 1, model, nudged, tally, validation or {})


@dataclass(frozen=True)
class Answered:
    """One task that a site answered."""

    task: str
    site: str
    message: Message
    answer: Message


Lose = Callable[[str, str], bool]


class Federation:
    """Sites that have agreed on keys, their server, and all that they said to one another.

    ``deaf`` says whose tasks do not arrive, ``lost`` whose answers do not; ``amend`` changes a task on its way.
    """

    def __init__(
        self,
        folder: Path,
        algebra: Algebra,
        count: int,
        *,
        masking: Settings | None = None,
        study: str = STUDY,
        job: str = "job-1",
        start: Mapping[str, Tensor] | None = None,
        rounds: int = 3,
        outlier: float = 0.0,
        agree: bool = True,
    ) -> None:
        self.folder, self.algebra, self.study, self.job = folder, algebra, study, job
        self.masking = masking or Settings(rounds=rounds + 1)
        self.names = names_of(count)
        self.hospitals = {
            name: Hospital(name, algebra, folder / name, seed=seed) for seed, name in enumerate(self.names)
        }
        zeros = {name: torch.zeros(spec.shape) for name, spec in algebra.layout.items() if spec.scope.leaves}
        begun = State(0, dict(start or zeros))
        self.coordinator = Coordinator(
            folder / f"server of {study}", algebra, begun, sites=self.names, rounds=rounds, seed=0, outlier=outlier
        )
        self.deaf: Lose = lambda task, site: False
        self.lost: Lose = lambda task, site: False
        self.amend: Callable[[str, str, Message], Message] = lambda task, site, message: message
        self.said: list[Answered] = []
        self.refused: list[tuple[str, str, Code]] = []
        self.left_out: list[tuple[int, str, str, Refusal]] = []
        self.releases: dict[str, Release] = {}
        self.open_job(job)
        if agree:
            self.agree()

    def open_job(self, job: str) -> None:
        """All processes begin anew; what is on disk stays."""
        self.job = job
        self.releases = {name: self._release(name) for name in self.names}
        roots = authority().roots
        self.summing = Summing(
            lambda number: SecureServer(f"{job}/{number}", settings=self.masking, roots=roots),
            MaskedAlgebra(self.algebra, bits=self.masking.bits),
            study=self.study,
            exchange=self.exchange,
            evidence=Evidence(self.folder / "server", shown="runs/server"),
            left_out=lambda *found: self.left_out.append(found),
        )
        self.run = MaskedRun(self.coordinator, self.summing, self.address)

    def restart(self, name: str) -> None:
        """One site's process begins anew."""
        self.releases[name] = self._release(name)

    def _release(self, name: str) -> Release:
        release = Release(
            self.hospitals[name],  # type: ignore[arg-type]
            masking=self.masking,
            study=self.study,
            job=self.job,
            credentials=Credentials(identity(name), authority().roots),
            memory=self.folder / name / "masks",
        )
        release.tasks = Witness(name, Evidence(self.folder / name, shown=f"runs/{name}")).over(release.tasks)
        return release

    def address(self, number: int) -> Message:
        return messages.address(run=RUN, study=STUDY, round_number=number)

    def agree(self, sites: Sequence[str] | None = None) -> tuple[str, ...]:
        asked = {name: self.address(0) for name in sites or self.names}
        return self.summing.agree(asked, round_number=0, enough=len(asked))

    def exchange(
        self,
        task: str,
        asked: Mapping[str, Message],
        take: Callable[[str, Message], None],
        *,
        round_number: int,
        enough: int,
    ) -> list[str]:
        heard = []
        for site, message in asked.items():
            answer = None if self.deaf(task, site) else self.ask(site, task, self.amend(task, site, message))
            if answer is None or self.lost(task, site):
                continue
            try:
                take(site, carried(answer))
            except CrosswardError:
                continue
            heard.append(site)
        return heard

    def ask(self, site: str, task: str, message: Message) -> Message | None:
        """What a site answers; nothing where it refuses, which is noted."""
        try:
            answer = self.releases[site].tasks[task](carried(message))
        except CrosswardError as error:
            self.summing.refused[site] = refusal_of(error)
            self.refused.append((site, task, self.summing.refused[site].code))
            return None
        self.said.append(Answered(task, site, message, answer))
        return answer

    def refusal(self, site: str, task: str, message: Message) -> Code:
        """The code with which a site refuses a task."""
        before = len(self.refused)
        assert self.ask(site, task, message) is None, f"{site} did as it was told"
        assert len(self.refused) == before + 1
        return self.refused[-1][2]

    def train(self, sites: Sequence[str] | None = None) -> dict[str, Mapping[str, Any]]:
        """Let sites train the open round; gives what each is compared by."""
        number = self.coordinator.state.round_number + 1
        found: dict[str, Mapping[str, Any]] = {}
        asked = {site: self.run.with_model(site, number) for site in sites or self.names}
        self.exchange(
            TRAIN,
            asked,
            lambda site, answer: found.__setitem__(site, answer["cosines"]),
            round_number=number,
            enough=len(asked),
        )
        return found

    def close(self, cosines: Mapping[str, Mapping[str, Any]]) -> State:
        """Sum what was trained, and go on to the next round."""
        after, opened, tally = self.run.close(list(cosines), dict(cosines))
        record = self.run.record(opened, tally, {}, list(cosines), refused={}, seconds=0.0)
        return self.coordinator.close_round(record, after)

    def round(self, sites: Sequence[str] | None = None) -> State:
        return self.close(self.train(sites))

    def request(self, kind: Kind = Kind.UPDATES, **changes: Any) -> Request:
        """A request for a sum of the open round that every site takes."""
        number = self.coordinator.state.round_number + 1
        planned = kind in (Kind.RANGES, Kind.UPDATES)
        made = Request(
            kind=kind,
            round_number=number,
            attempt=1,
            cohort=self.names,
            plan=self.algebra.plan(number, self.names, {}, {}) if planned else None,
            limits=dict.fromkeys(self.algebra.sent, 1000.0) if kind is Kind.UPDATES else {},
        )
        return replace(made, **changes)

    def asking(self, request: Request, **parts: Any) -> Message:
        return {**self.address(request.round_number), "sum": request.message(), **parts}

    def begun(self, request: Request) -> dict[str, Message]:
        """Let all sites begin; gives everybody's task to contribute."""
        model = received_digest(self.coordinator.state.tensors, self.coordinator.state.plan)
        binding = self.summing.masked.binding(request, study=self.study, model=model)
        attempt = self.summing.server.attempt(binding, words=self.summing.masked.layout(request).words)
        for site in request.cohort:
            answer = self.ask(site, BEGIN, self.asking(request))
            assert answer is not None, (site, self.refused)
            attempt.take_shares(site, answer["shares"])
        attempt.close_sharing()
        self.attempt = attempt
        return {site: self.asking(request, inbox=attempt.inbox(site)) for site in request.cohort}


def mean_of(hospitals: Sequence[Hospital], name: str) -> np.ndarray[Any, Any]:
    """The mean weighted by samples, by plain arithmetic."""
    parts = [(hospital.samples, hospital.update[name].double().numpy()) for hospital in hospitals]
    return np.asarray(sum(n * value for n, value in parts) / sum(n for n, _ in parts))


@lru_cache(maxsize=2)
def algebra_of(method: str) -> Algebra:
    study = made_up_study(method).masked(Settings())
    return study.method.algebra(study.task, study.model())


def uses(federation: Federation, site: str) -> list[dict[str, Any]]:
    """What a site wrote down about attempts at sums."""
    lines = [path.read_text().splitlines() for path in sorted((federation.folder / site / "masks").iterdir())]
    found = [json.loads(line.partition(" ")[2]) for each in lines for line in each]
    return [use for use in found if use["attempt"]]
