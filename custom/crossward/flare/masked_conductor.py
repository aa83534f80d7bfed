"""The server's side of a run under secure aggregation, over FLARE's tasks: it asks for sums and sees nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller

from crossward.evaluate.masked_differences import over_rounds
from crossward.evaluate.metrics import wilson_interval
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import PrivacyRefusal
from crossward.flare.conductor import Conductor, first_trouble
from crossward.flare.phase import Answer, Outcome, Patience
from crossward.flare.places import server_roots
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.sums import MaskedAlgebra
from crossward.site.evidence import Evidence
from crossward.site.masked_run import Cosines, MaskedRun
from crossward.site.messages import CONTRIBUTE, EVALUATE, JOIN, TRAIN
from crossward.site.study import Study
from crossward.site.summing import Summing
from crossward.site.troubles import Code, Refusal


class MaskedConductor(Conductor):
    """Runs one job whose sites send sketches and masked vectors.

    Args:
        controller: FLARE's, whose tasks are used.
        study: what is run, with its settings of secure aggregation.
        coordinator: of the run.
        fl_ctx: FLARE's context.
        options: see ``Conductor``.
    """

    def __init__(
        self, controller: Controller, study: Study, coordinator: Coordinator, *, fl_ctx: FLContext, **options: Any
    ) -> None:
        super().__init__(controller, study, coordinator, fl_ctx=fl_ctx, **options)
        masking = study.masking
        if masking is None:
            raise PrivacyRefusal("a masked run without its settings")
        job, roots, folder = fl_ctx.get_job_id(), server_roots(fl_ctx), coordinator.checkpoint_path.parent
        self._summing = Summing(
            lambda number: SecureServer(f"{job}/{number}", settings=masking, roots=roots, threads=os.cpu_count() or 1),
            MaskedAlgebra(coordinator.algebra, bits=masking.bits, reach=study.reach),
            study=study.trained_digest(),
            exchange=self._ask,
            evidence=Evidence(folder, shown=f"runs/{folder.name}"),
            left_out=self._left_out,
        )
        self._masked = MaskedRun(coordinator, self._summing, self._address)
        self._masking = masking
        self._outcome = Outcome()
        self._lost_keys = False
        self._tested: tuple[float, float] | None = None

    def privacy(self) -> dict[str, Any]:
        """How the run was protected, and the one figure on test images: of all sites together."""
        images, correct = self._tested or (0.0, 0.0)
        summed: dict[str, Any] = {"n": images, "accuracy": correct / images if images else None}
        if images:
            summed["interval"] = wilson_interval(min(round(correct), round(images)), round(images))
        return {
            "secagg": True,
            "fewest_sites": self._masking.fewest,
            "test": summed,
            "differences": over_rounds(self._coordinator.history),
        }

    @property
    def _needed(self) -> int:
        return max(self._coordinator.quorum, self._summing.fewest)

    def _join(self) -> None:
        number, enough = self._start()
        try:
            self._agree(number, max(enough, self._summing.fewest))
        except Refusal:
            if self._outcome.refused or self._outcome.absent:
                raise first_trouble(self._outcome) from None
            raise
        for site in self._summing.sites:
            self._progress.event("joined", number, site)

    def _agree(self, number: int, enough: int) -> None:
        self._lost_keys = False
        address = {site: self._address(number) for site in self._coordinator.sites}
        self._summing.agree(address, round_number=number, enough=enough)

    def _round(self) -> None:
        coordinator, began = self._coordinator, time.monotonic()
        number = coordinator.state.round_number + 1
        if self._lost_keys or set(coordinator.sites) - set(self._summing.sites):
            self._agree(number, self._needed)
        invited = coordinator.cohort(number)
        self._progress.event("round", number, invited=list(invited))
        asked = self._masked.asked(number, invited)
        cosines: Cosines = {}

        def take(site: str, answer: Answer) -> None:
            content = self._checked(asked[site][0], answer)
            if asked[site][0] == TRAIN:
                cosines[site] = content["cosines"]
                self._progress.event("trained", number, site, loss=None, seconds=time.monotonic() - began)

        patience = Patience(longest=self._timing.round, grace=self._timing.grace, enough=self._needed)
        outcome = self._heard(self._exchange(asked, patience, number, take, refused="failed", counted=invited))
        trained = [site for site in invited if site in outcome.answered]
        if len(trained) < self._needed:
            raise Refusal(Code.QUORUM, reports=len(trained), needed=self._needed)
        after, opened, tally = self._masked.close(trained, cosines)
        self._masked.assess(tally, outcome.answered, self._tell)
        seconds = time.monotonic() - began
        record = self._masked.record(opened, tally, asked, outcome.answered, refused=outcome.refused, seconds=seconds)
        self._close(record, after, opened.survivors)

    def _left_out(self, number: int, task: str, site: str, refusal: Refusal) -> None:
        """A site that is found at fault after it had answered: nobody is left out quietly."""
        self._controller.log_warning(self._fl_ctx, f"{refusal} ({refusal.evidence})")
        self._progress.trouble("failed", number, site, task, refusal)

    def _tell(self, number: int, figures: Mapping[str, Any]) -> None:
        self._progress.event("aggregated", number, **figures)

    def _last_evaluation(self) -> None:
        coordinator = self._coordinator
        number = coordinator.state.round_number
        asked = {site: (EVALUATE, self._with_model(site, number)) for site in self._summing.sites}

        def take(_: str, answer: Answer) -> None:
            self._checked(EVALUATE, answer)

        outcome = self._heard(self._exchange(asked, self._calmly(), number, take, refused="failed"))
        try:
            self._masked.assess(self._masked.validation(outcome.answered), outcome.answered, self._tell)
        except Refusal:
            # The rounds before are scored: the best of them is deployed.
            self._progress.event("unscored", number)

    def _finish(self) -> tuple[int, dict[str, Mapping[str, float | None] | None]]:
        best, finished = super()._finish()
        ready = [site for site, scores in finished.items() if scores is not None and site in self._summing.sites]
        try:
            self._tested = self._masked.test(ready)
        except Refusal:
            self._progress.event("untested", best)
        return best, finished

    def _ask(
        self,
        task: str,
        asked: Mapping[str, Answer],
        take: Callable[[str, Answer], None],
        *,
        round_number: int,
        enough: int,
    ) -> Collection[str]:
        """Carry one step of the protocol; what a site sent and does not hold is as good as no answer."""

        def taken(site: str, answer: Answer) -> None:
            content = self._checked(task, answer, asked[site])
            try:
                take(site, content)
            except PrivacyRefusal as error:
                raise Refusal(Code.NOT_DECLARED) from error

        messages = {site: (task, message) for site, message in asked.items()}
        refused = "refused" if task == JOIN else "failed"
        patience = self._patience(task, enough)
        self._outcome = self._exchange(messages, patience, round_number, taken, refused=refused)
        self._summing.refused |= self._outcome.refused
        return self._heard(self._outcome).answered

    def _patience(self, task: str, enough: int) -> Patience:
        timing = self._timing
        if task == JOIN:
            return Patience(longest=timing.join, grace=timing.grace, enough=enough)
        # A vector takes as long as a model to send; the other messages are small.
        grace = timing.grace if task == CONTRIBUTE else min(timing.grace, timing.step)
        return Patience(longest=timing.grace, grace=grace, enough=enough)

    def _heard(self, outcome: Outcome) -> Outcome:
        self._lost_keys |= any(refusal.code is Code.NO_KEYS for refusal in outcome.refused.values())
        return outcome
