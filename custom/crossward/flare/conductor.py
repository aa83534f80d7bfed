"""The server's side of a run over FLARE's tasks: join, rounds, a last evaluation, finish.

The coordinator decides, as it does in process; this asks the sites for what it needs. A model is validated at the
start of the next round's task, by the sites that received it, so that a round is one exchange.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Mapping
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from crossward.federation.contract import (
    MOST_IMAGES,
    VALIDATION_AS_RECEIVED,
    VALIDATION_CORRECT,
    VALIDATION_COUNT,
    Report,
    State,
    Vector,
)
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import PrivacyRefusal, RunFailure, StorageFailure
from crossward.federation.outliers import EndlessRound, OutlierRound
from crossward.flare.jobs import Timing
from crossward.flare.phase import Answer, Outcome, Patience, Phase
from crossward.flare.progress import Progress
from crossward.site import messages
from crossward.site.declaration import Declaration
from crossward.site.figures import figures_of, nbytes, share
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, TRAIN
from crossward.site.study import Study
from crossward.site.troubles import Code, Refusal

Tallies = dict[str, Mapping[str, Vector]]


class Conductor:
    """Runs one job.

    Args:
        controller: FLARE's, whose tasks are used.
        study: what is run.
        coordinator: of the run, resumed where there is something to resume.
        run: the run's name.
        timing: how long to wait.
        progress: takes the events.
        fl_ctx: FLARE's context.
        abort_signal: FLARE's word that the job is to end.
    """

    def __init__(
        self,
        controller: Controller,
        study: Study,
        coordinator: Coordinator,
        *,
        run: str,
        timing: Timing,
        progress: Progress,
        fl_ctx: FLContext,
        abort_signal: Signal,
    ) -> None:
        self._controller = controller
        self._coordinator = coordinator
        self._digest = study.digest()
        self._declaration = Declaration(study)
        self._run = run
        self._timing = timing
        self._progress = progress
        self._fl_ctx = fl_ctx
        self._abort = abort_signal
        self._away: set[str] = set()
        self._scores: dict[str, Mapping[str, float | None]] = {}
        self._server_trouble: StorageFailure | None = None

    def conduct(self) -> tuple[int, dict[str, Mapping[str, float | None] | None]]:
        """Run from where the coordinator stands to the end.

        Returns:
            The best round, and for every site what it published of its deployed model: an empty mapping where its
            policy keeps the scores, None where it did not finish.

        Raises:
            Refusal: the run cannot go on; finished rounds are kept.
        """
        self._join()
        self._progress.reached(self._coordinator.state.round_number)
        while not self._coordinator.finished:
            self._round()
            # FLARE's messages are circles of objects; unless collected, each round adds its models to the memory.
            gc.collect()
        self._last_evaluation()
        return self._finish()

    def privacy(self) -> dict[str, Any]:
        """What the result says about how the run was protected."""
        return {"secagg": False}

    def _start(self) -> tuple[int, int]:
        """Say that the run begins; gives the round it stands at, and how many sites it takes to begin."""
        coordinator = self._coordinator
        number, resumed = coordinator.state.round_number, coordinator.checkpoint_path.exists()
        sites = list(coordinator.sites)
        self._progress.event(
            "started", number, run=self._run, sites=sites, rounds=coordinator.rounds,
            resumed_after=number if resumed else None,
        )  # fmt: skip
        return number, coordinator.quorum if resumed else len(sites)

    def _join(self) -> None:
        number, enough = self._start()
        patience = Patience(longest=self._timing.join, grace=self._timing.grace, enough=enough)
        asked = {site: (JOIN, self._address(number)) for site in self._coordinator.sites}

        def take(site: str, answer: Answer) -> None:
            self._checked(JOIN, answer)
            self._progress.event("joined", number, site)

        outcome = self._exchange(asked, patience, number, take, refused="refused")
        if len(outcome.answered) < enough:
            raise first_trouble(outcome)
        self._away.update(outcome.refused)

    def _round(self) -> None:
        coordinator = self._coordinator
        began = time.monotonic()
        before, number = coordinator.state.round_number, coordinator.state.round_number + 1
        invited = coordinator.cohort(number)
        self._progress.event("round", number, invited=list(invited))
        asked = {
            site: (TRAIN if site in invited else EVALUATE, self._with_model(site, number))
            for site in coordinator.sites
            if site in invited or before
        }
        facts: dict[str, dict[str, Any]] = {site: {"status": "absent"} for site in coordinator.sites}
        validated: Tallies = {}

        def take(site: str, answer: Answer) -> None:
            task = asked[site][0]
            content = self._checked(task, answer)
            if "validation" in content:
                validated[site] = _plausible(content["validation"])
            if task == TRAIN:
                report = messages.unpack_report(site, content)
                self._accept(report)
                facts[site] = figures_of(report, seconds=time.monotonic() - began)
                self._progress.event("trained", number, site, **facts[site])

        patience = Patience(longest=self._timing.round, grace=self._timing.grace, enough=coordinator.quorum)
        outcome = self._exchange(asked, patience, number, take, refused="failed", counted=invited)
        for site, refusal in outcome.refused.items():
            facts[site] = {"status": "failed", "reason": str(refusal), "code": int(refusal.code)}
        self._assess(validated)
        up = sum(fact.pop("bytes_up", 0) for fact in facts.values())
        down = sum(nbytes(coordinator.payload(site)) for site in asked)
        record = {"round": number, "bytes_up": up, "bytes_down": down, "sites": facts}
        self._close({**record, "seconds": time.monotonic() - began})

    def _accept(self, report: Report) -> None:
        try:
            self._coordinator.accept(report)
        except (PrivacyRefusal, RunFailure) as error:
            raise Refusal(Code.NOT_DECLARED) from error
        except StorageFailure as error:
            self._server_trouble = error
            raise Refusal(Code.SERVER_STORAGE) from error

    def _close(
        self, record: Mapping[str, Any], combined: State | None = None, summed: Collection[str] | None = None
    ) -> None:
        coordinator = self._coordinator
        reported = coordinator.reported if summed is None else summed
        try:
            coordinator.close_round(record, combined)
        except OutlierRound as failure:
            raise Refusal(
                Code.OUTLIER,
                site=failure.site,
                round=failure.round_number,
                times=failure.times,
                most=failure.allowed,
            ) from failure
        except EndlessRound as failure:
            raise Refusal(Code.DIVERGED) from failure
        except RunFailure as failure:
            raise Refusal(Code.QUORUM, reports=len(reported), needed=coordinator.quorum) from failure
        self._progress.reached(coordinator.state.round_number)
        self._progress.event(
            "closed", coordinator.state.round_number, reported=list(reported), seconds=record["seconds"],
            bytes_up=record["bytes_up"], bytes_down=record["bytes_down"],
        )  # fmt: skip

    def _assess(self, validated: Tallies) -> None:
        """Score the current model from what the sites counted on it, and keep it while it is the best."""
        coordinator = self._coordinator
        number = coordinator.state.round_number
        if not number or not validated:
            return
        score = coordinator.assess([validated[site] for site in coordinator.sites if site in validated])
        coordinator.keep_best()
        facts = coordinator.history[-1]["sites"]
        for site, tally in validated.items():
            facts[site]["received"] = True
            facts[site]["val_accuracy"] = share(tally, VALIDATION_CORRECT)
            facts[site]["val_accuracy_as_received"] = share(tally, VALIDATION_AS_RECEIVED)
        heard = {site: {"val_accuracy": facts[site]["val_accuracy"]} for site in coordinator.sites if site in validated}
        seconds = coordinator.history[-1]["seconds"]
        self._progress.event("aggregated", number, val_accuracy=score, seconds=seconds, sites=heard)

    def _last_evaluation(self) -> None:
        coordinator = self._coordinator
        number = coordinator.state.round_number
        asked = {site: (EVALUATE, self._with_model(site, number)) for site in coordinator.sites}
        validated: Tallies = {}

        def take(site: str, answer: Answer) -> None:
            validated[site] = _plausible(self._checked(EVALUATE, answer)["validation"])

        self._exchange(asked, self._calmly(), number, take, refused="failed")
        self._assess(validated)

    def _finish(self) -> tuple[int, dict[str, Mapping[str, float | None] | None]]:
        coordinator = self._coordinator
        best = coordinator.best_round or coordinator.state.round_number
        holders = coordinator.history[best - 1]["sites"]
        finished: dict[str, Mapping[str, float | None] | None] = dict.fromkeys(coordinator.sites)

        def ask(site: str) -> tuple[str, Answer]:
            has_it = holders.get(site, {}).get("received", False)
            model = {} if has_it else messages.pack_payload(coordinator.best_payload(site))
            return FINISH, {**self._address(best), **model}

        def take(site: str, answer: Answer) -> None:
            finished[site] = self._checked(FINISH, answer).get("scores", {})

        asked = {site: ask(site) for site in coordinator.sites}
        outcome = self._exchange(asked, self._calmly(), best, take, refused="failed")
        if not outcome.answered:
            raise first_trouble(outcome)
        self._progress.event("finished", best, best_round=best, sites=outcome.answered)
        return best, finished

    def _calmly(self) -> Patience:
        return Patience(longest=self._timing.round, grace=self._timing.grace, enough=self._coordinator.quorum)

    def _exchange(
        self,
        asked: Mapping[str, tuple[str, Answer]],
        patience: Patience,
        number: int,
        take: Any,
        *,
        refused: str,
        counted: tuple[str, ...] | None = None,
    ) -> Outcome:
        """Run one phase; who refused, was not heard, or is heard again becomes an event."""

        def on_refusal(site: str, refusal: Refusal) -> None:
            self._progress.trouble(refused, number, site, asked[site][0], refusal)

        away = set(self._away)
        phase = Phase(self._controller, take=take, on_refusal=on_refusal, away=self._away)
        outcome = phase.run(asked, patience, self._fl_ctx, self._abort, counted=counted)
        if self._abort.triggered:
            raise Refusal(Code.ABORTED)
        if self._server_trouble is not None:
            raise self._server_trouble
        for site in outcome.absent:
            if site not in away:
                silent = Refusal(Code.NO_ANSWER, seconds=outcome.waited)
                self._progress.trouble("absent", number, site, asked[site][0], silent)
        for site in away.intersection(outcome.answered):
            self._progress.event("back", number, site)
        return outcome

    def _checked(self, task: str, answer: Answer, asked: Answer | None = None) -> Answer:
        """Hold an answer against the declaration once more: the server trusts no site's gate."""
        try:
            content = self._declaration.rebuild(task, answer, asked)
        except PrivacyRefusal as error:
            raise Refusal(Code.NOT_DECLARED) from error
        if content["code"] != OK:
            raise Refusal(Code(content["code"]), **content["numbers"])
        return content

    def _address(self, number: int) -> Answer:
        return messages.address(run=self._run, study=self._digest, round_number=number)

    def _with_model(self, site: str, number: int) -> Answer:
        return {**self._address(number), **messages.pack_payload(self._coordinator.payload(site))}


def first_trouble(outcome: Outcome) -> Refusal:
    """Why an exchange did not have enough answers: a site's own word before anybody's silence."""
    for site, refusal in outcome.refused.items():
        return Refusal(refusal.code, site=site, **refusal.numbers)
    return Refusal(Code.NO_ANSWER, site=next(iter(outcome.absent), None), seconds=outcome.waited)


def _plausible(tally: Mapping[str, Vector]) -> Mapping[str, Vector]:
    """Refuse counts that cannot be counts: one site must not choose the round that all sites deploy."""
    count = tally[VALIDATION_COUNT].item()
    if not all(0 <= tally[key].item() <= count < MOST_IMAGES for key in (VALIDATION_CORRECT, VALIDATION_AS_RECEIVED)):
        raise Refusal(Code.NOT_DECLARED)
    return tally
