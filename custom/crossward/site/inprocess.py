"""A whole federation in one process: the participants and the coordinator of FLARE, joined by function calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crossward.evaluate.facts import versions
from crossward.evaluate.metrics import summarise
from crossward.federation.contract import VALIDATION_AS_RECEIVED, VALIDATION_CORRECT, Report
from crossward.federation.errors import (
    CrosswardError,
    PrivacyRefusal,
    RunFailure,
    SiteFailure,
    StorageFailure,
)
from crossward.imaging.data import Cohort
from crossward.site.devices import Device
from crossward.site.figures import cross_site_of, facts_of, figures_of, nbytes, share
from crossward.site.handover import HANDOVER, write_handover
from crossward.site.participant import Participant
from crossward.site.protection import own_book
from crossward.site.runfolder import claim, owned
from crossward.site.study import Study


@dataclass(frozen=True)
class Event:
    """Something that happened, for a progress display: one per site and round, and one per round."""

    kind: str
    round_number: int
    site: str | None = None
    figures: Mapping[str, Any] | None = None


Listener = Callable[[Event], None]

_RUN = "run"
"""A folder has one run, and its sites' ledgers no other's."""


def simulate(
    cohort: Cohort,
    study: Study,
    folder: Path,
    *,
    resume: bool = False,
    jobs: int | None = None,
    listen: Listener = lambda event: None,
) -> dict[str, Any]:
    """Run a federation and return its result (see evaluate/facts.py).

    Args:
        cohort: the sites' images.
        study: what to run.
        folder: of the run; made if it is not there.
        resume: go on with the run in the folder.
        jobs: sites that train at the same time; as many as there are cores if not given.
        listen: called for every event, from several threads.

    Raises:
        BadInput: the folder holds another run, or one that was not asked to be resumed.
        CrosswardError: a round could not be completed; the run can be resumed.
    """
    # Imported here, as it builds on this module.
    from crossward.site.inprocess_masked import MaskedInProcess

    kind = Run if study.masking is None else MaskedInProcess
    run = kind(cohort, study, folder, jobs=jobs, listen=listen)
    with owned(folder):
        claim(folder, study, cohort, resume=resume)
        return run.run()


class Run:
    """Runs a federation in the open."""

    def __init__(self, cohort: Cohort, study: Study, folder: Path, *, jobs: int | None, listen: Listener) -> None:
        self._cohort = cohort
        self._study = study
        self._listen = listen
        device = Device.best()
        on_cuda = device.kind.type == "cuda"
        self._jobs = 1 if on_cuda else max(1, min(jobs or os.cpu_count() or 1, len(cohort.sites)))
        self._device = device
        self._coordinator = study.coordinator(folder / "server", sorted(cohort.sites))
        self._folder = folder
        self._participants: dict[str, Participant] = {}

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        self._participants = {name: self._participant(name) for name in self._coordinator.sites}
        if self._coordinator.resume():
            self._listen(Event("resumed", self._coordinator.state.round_number))
        # One thread of computation per site: results then do not depend on how many sites run at once.
        pool = ThreadPoolExecutor(self._jobs, initializer=torch.set_num_threads, initargs=(1,))
        try:
            self._open(pool)
            while not self._coordinator.finished:
                self._round(pool)
            self._close(pool)
            return self._result(pool, began)
        finally:
            # Not waiting lets Ctrl-C end at once; what a site was writing is atomic.
            pool.shutdown(wait=False, cancel_futures=True)

    def _open(self, pool: ThreadPoolExecutor) -> None:
        self._assess(pool)

    def _close(self, pool: ThreadPoolExecutor) -> None:
        """Every round has been assessed already."""

    def _participant(self, name: str) -> Participant:
        folder = self._folder / "sites" / name
        book = own_book(folder, site=name, run=_RUN) if self._study.privacy else None
        return self._study.participant(self._cohort.sites[name], folder, device=self._device, book=book)

    def _round(self, pool: ThreadPoolExecutor) -> None:
        began = time.monotonic()
        coordinator = self._coordinator
        number = coordinator.state.round_number + 1
        invited = coordinator.cohort(number)
        self._listen(Event("round", number, figures={"invited": list(invited)}))
        outcomes = [self._accepted(outcome) for outcome in pool.map(self._train, invited)]
        facts: dict[str, Any] = {name: {"status": "absent"} for name in coordinator.sites}
        failures = [outcome for outcome in outcomes if isinstance(outcome, CrosswardError)]
        for name, outcome in zip(invited, outcomes, strict=True):
            facts[name] = (
                {"status": "failed", "reason": str(outcome)} if isinstance(outcome, CrosswardError) else outcome
            )
        up = sum(fact.pop("bytes_up", 0) for fact in facts.values())
        down = sum(nbytes(coordinator.payload(name)) for name in coordinator.sites)
        record = {"round": number, "seconds": 0.0, "bytes_up": up, "bytes_down": down, "sites": facts}
        record["seconds"] = time.monotonic() - began
        try:
            coordinator.close_round(record)
        except RunFailure as failure:
            causes = "; ".join(str(each) for each in failures)
            raise RunFailure(f"{causes}. Then: {failure}" if causes else str(failure)) from failure
        self._assess(pool)
        coordinator.history[-1]["seconds"] = time.monotonic() - began

    def _train(self, name: str) -> tuple[Report, float] | CrosswardError:
        began = time.monotonic()
        number = self._coordinator.state.round_number + 1
        try:
            report = self._participants[name].train(self._coordinator.payload(name))
        except StorageFailure:
            raise
        except CrosswardError as failure:
            return self._failed(failure, number, name)
        except Exception as error:
            broken = SiteFailure(
                site=name,
                round_number=number,
                cause=f"training stopped with {type(error).__name__}: {error}",
                remedy="CROSSWARD_DEBUG=1 shows where",
            )
            broken.__cause__ = error
            return self._failed(broken, number, name)
        return report, time.monotonic() - began

    def _accepted(self, outcome: tuple[Report, float] | CrosswardError) -> dict[str, Any] | CrosswardError:
        """Hand a report to the coordinator, in the cohort's order, so that sums are the same in every run."""
        if isinstance(outcome, CrosswardError):
            return outcome
        report, seconds = outcome
        try:
            self._coordinator.accept(report)
        except PrivacyRefusal as refusal:
            return self._failed(refusal, report.round_number, report.site)
        figures = figures_of(report, seconds=seconds)
        self._listen(Event("trained", report.round_number, report.site, figures))
        return figures

    def _failed(self, failure: CrosswardError, number: int, name: str) -> CrosswardError:
        if os.environ.get("CROSSWARD_DEBUG"):
            raise failure
        self._listen(Event("failed", number, name, {"reason": str(failure)}))
        return failure

    def _assess(self, pool: ThreadPoolExecutor) -> None:
        """Let every site receive the current model and count it on its validation images."""
        coordinator = self._coordinator
        number = coordinator.state.round_number
        if not number:
            return
        names = list(coordinator.sites)
        tallies = list(pool.map(lambda name: self._participants[name].receive(coordinator.payload(name)), names))
        score = coordinator.assess(tallies)
        coordinator.keep_best()
        facts = coordinator.history[-1]["sites"]
        for name, tally in zip(names, tallies, strict=True):
            facts[name]["val_accuracy"] = share(tally, VALIDATION_CORRECT)
            facts[name]["val_accuracy_as_received"] = share(tally, VALIDATION_AS_RECEIVED)
        self._listen(Event("aggregated", number, figures={"val_accuracy": score, "sites": facts}))

    def _result(self, pool: ThreadPoolExecutor, began: float) -> dict[str, Any]:
        coordinator, study, cohort = self._coordinator, self._study, self._cohort
        best = coordinator.best_round or coordinator.state.round_number
        names = list(coordinator.sites)
        sites = dict(zip(names, pool.map(lambda name: self._participants[name].finish(best), names), strict=True))
        write_handover(self._folder / "server" / HANDOVER, study, coordinator.best_state())
        options = study.options()
        return {
            "method": study.method.name,
            "data": facts_of(cohort),
            "options": {**options, "device": str(self._device)},
            "rounds": coordinator.history,
            "best_round": best,
            "personal": coordinator.best_state().personal_digests(),
            "sites": sites,
            "summary": summarise(sites),
            "cross_site": cross_site_of(cohort, names, self._accuracies(pool, names)),
            "privacy": {
                "secagg": False,
                "dp": study.privacy_facts(),
                "epsilon": self._spent(),
            },
            "warnings": list(cohort.warnings),
            "versions": versions(),
            "seconds": time.monotonic() - began,
        }

    def _spent(self) -> dict[str, float | None]:
        return {name: participant.spent for name, participant in self._participants.items()}

    def _accuracies(self, pool: ThreadPoolExecutor, names: list[str]) -> list[list[float | None]]:
        """Score every site's deployed model on every site's test images: only where all data are in one place."""

        def row(name: str) -> list[float | None]:
            return [self._participants[name].accuracy_on(self._cohort.sites[other].test) for other in names]

        return list(pool.map(row, names))
