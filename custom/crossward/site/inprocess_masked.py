"""A whole federation in one process under secure aggregation: real keys, masks and sums, certificates thrown away."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from crossward.evaluate.masked_differences import over_rounds
from crossward.evaluate.metrics import wilson_interval
from crossward.federation.errors import CrosswardError, PrivacyRefusal, StorageFailure
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.secagg.throwaway import Authority
from crossward.privacy.sums import MaskedAlgebra
from crossward.site import messages
from crossward.site.evidence import Evidence, Witness
from crossward.site.inprocess import Event, Run
from crossward.site.masked_run import Cosines, MaskedRun
from crossward.site.member import refusal_of
from crossward.site.messages import EVALUATE, Message
from crossward.site.release import Credentials, Release
from crossward.site.summing import Summing
from crossward.site.troubles import Refusal

_RUN = "run"


class MaskedInProcess(Run):
    """Runs a federation whose server sees sums only."""

    def _open(self, pool: ThreadPoolExecutor) -> None:
        if self._study.masking is None:
            raise PrivacyRefusal("a masked run without its settings")
        masking, authority, job = self._study.masking, Authority(), secrets.token_hex(8)
        self._pool = pool
        self._releases = {
            name: Release(
                participant,
                masking=masking,
                study=self._study.trained_digest(),
                job=job,
                credentials=Credentials(authority.identity(name), authority.roots),
                memory=self._folder / "sites" / name / "masks",
            )
            for name, participant in self._participants.items()
        }
        for name, release in self._releases.items():
            release.tasks = Witness(name, _evidence(self._folder / "sites" / name)).over(release.tasks)
        self._summing = Summing(
            lambda number: SecureServer(f"{job}/{number}", settings=masking, roots=authority.roots),
            MaskedAlgebra(self._coordinator.algebra, bits=masking.bits, reach=self._study.reach),
            study=self._study.trained_digest(),
            exchange=self._exchange,
            evidence=_evidence(self._folder / "server"),
            left_out=self._left_out,
        )
        self._masked = MaskedRun(self._coordinator, self._summing, self._address)
        number = self._coordinator.state.round_number
        self._summing.agree(
            {name: self._address(number) for name in self._releases},
            round_number=number,
            enough=len(self._releases),
        )

    def _address(self, number: int) -> Message:
        return messages.address(run=_RUN, study=self._study.digest(), round_number=number)

    def _round(self, pool: ThreadPoolExecutor) -> None:
        del pool
        began, coordinator = time.monotonic(), self._coordinator
        number = coordinator.state.round_number + 1
        invited = coordinator.cohort(number)
        self._listen(Event("round", number, figures={"invited": list(invited)}))
        cosines: Cosines = {}

        def take(site: str, answer: Message) -> None:
            if "cosines" in answer:
                cosines[site] = answer["cosines"]
                self._listen(Event("trained", number, site, {"loss": None}))

        asked = self._masked.asked(number, invited)
        heard, refused = self._ask(asked, take, number)
        after, opened, tally = self._masked.close([site for site in invited if site in heard], cosines)
        self._masked.assess(tally, heard, self._aggregated)
        coordinator.close_round(
            self._masked.record(opened, tally, asked, heard, refused=refused, seconds=time.monotonic() - began), after
        )

    def _left_out(self, number: int, task: str, site: str, refusal: Refusal) -> None:
        del task
        self._failed(refusal, number, site)

    def _aggregated(self, number: int, figures: Mapping[str, Any]) -> None:
        self._listen(Event("aggregated", number, figures=figures))

    def _close(self, pool: ThreadPoolExecutor) -> None:
        del pool
        number = self._coordinator.state.round_number
        asked = {site: (EVALUATE, self._masked.with_model(site, number)) for site in self._summing.sites}
        heard, _ = self._ask(asked, lambda site, answer: None, number)
        self._masked.assess(self._masked.validation(heard), heard, self._aggregated)

    def _result(self, pool: ThreadPoolExecutor, began: float) -> dict[str, Any]:
        result = super()._result(pool, began)
        for name, facts in result["sites"].items():
            self._releases[name].tested(*self._participants[name].tested(facts))
        images, correct = self._masked.test(list(self._releases))
        summed: dict[str, Any] = {"n": images, "accuracy": correct / images if images else None}
        if images:
            summed["interval"] = wilson_interval(max(0, min(round(correct), round(images))), round(images))
        # Once more, as what was told of the test images is in it now.
        paid = {"epsilon": self._spent()}
        protected = {"secagg": True, "test": summed, "differences": over_rounds(result["rounds"])}
        return {**result, "privacy": {**result["privacy"], **paid, **protected}}

    def _exchange(
        self,
        task: str,
        asked: Mapping[str, Message],
        take: Callable[[str, Message], None],
        *,
        round_number: int,
        enough: int,
    ) -> Collection[str]:
        del enough
        heard, refused = self._ask({site: (task, message) for site, message in asked.items()}, take, round_number)
        self._summing.refused |= refused
        return heard

    def _ask(
        self, asked: Mapping[str, tuple[str, Message]], take: Callable[[str, Message], None], number: int
    ) -> tuple[list[str], dict[str, Refusal]]:
        """Hand every site its task; answers are taken in the sites' order, so that sums are the same in every run.

        Returns:
            Who answered, and why the others did not.
        """

        def answer(site: str) -> Message | CrosswardError:
            task, message = asked[site]
            try:
                return self._releases[site].tasks[task](message)
            except StorageFailure:
                raise
            except CrosswardError as failure:
                return failure

        heard, refused = [], {}
        for site, outcome in zip(asked, self._pool.map(answer, asked), strict=True):
            try:
                if isinstance(outcome, CrosswardError):
                    raise outcome
                take(site, outcome)
                heard.append(site)
            except CrosswardError as failure:
                self._failed(failure, number, site)
                refused[site] = refusal_of(failure)
        return heard, refused


def _evidence(folder: Path) -> Evidence:
    """Whoever runs a federation in one process made its folders, and finds them by their paths."""
    return Evidence(folder, shown=str(folder))
