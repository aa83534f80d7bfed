"""The server's side of a run under secure aggregation: rounds of sums instead of reports.

FLARE's conductor and the in-process loop both drive it; they bring what carries the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from crossward.federation.combine import next_state
from crossward.federation.contract import (
    ALL,
    CORRECT,
    LOSS,
    SEEN,
    VALIDATION_AS_RECEIVED,
    VALIDATION_CORRECT,
    VALIDATION_COUNT,
    Plan,
    Sealed,
    State,
    Tally,
    Vector,
)
from crossward.federation.coordinator import Coordinator
from crossward.federation.rules import divide
from crossward.federation.storage import private_folder, read_json, write_json
from crossward.privacy.secagg.sketch import gram
from crossward.privacy.sums import TEST, Kind, received_digest, without
from crossward.site import messages
from crossward.site.figures import nbytes
from crossward.site.masked_differences import of_round
from crossward.site.messages import EVALUATE, TRAIN, Message
from crossward.site.summing import NoSum, Opened, Opening, Summing
from crossward.site.troubles import Code, Refusal

Cosines = dict[str, Mapping[str, Vector]]


class MaskedRun:
    """Runs rounds of masked sums.

    Args:
        coordinator: of the run.
        summing: asks for sums.
        address: what every message of a round begins with.
    """

    def __init__(self, coordinator: Coordinator, summing: Summing, address: Callable[[int], Message]) -> None:
        self.coordinator = coordinator
        self.summing = summing
        self._address = address
        self._differences: dict[str, dict[str, float]] = {}
        self._faulty: dict[str, Refusal] = {}

    def with_model(self, site: str, number: int) -> Message:
        """A message that carries the current model."""
        return {**self._address(number), **messages.pack_payload(self.coordinator.payload(site))}

    def close(self, trained: Collection[str], cosines: Cosines) -> tuple[State, Opened, Tally]:
        """Sum what the sites trained and make the next model of it.

        Args:
            trained: the sites that have a report for the open round.
            cosines: by site, what it is compared with others by.

        Returns:
            The state after the round, the sum it was made of, and all summed tallies.

        Raises:
            Refusal: too few sites; nothing was opened.
        """
        coordinator, masked = self.coordinator, self.summing.masked
        number, model = coordinator.state.round_number + 1, self._model
        self._faulty = {}
        totals: Tally = {}
        counted = trained
        if masked.totals_first:
            totals, counted = self._once(Kind.TOTALS, trained, number=number, model=model)
        present = [site for site in trained if site in counted]

        def plan_for(cohort: tuple[str, ...]) -> Plan:
            blocks = (*masked.rotated_blocks, *masked.sketched)
            inner = {block: gram([cosines[site][block] for site in cohort]) for block in blocks}
            made = masked.algebra.plan(number, cohort, without(totals, len(counted) - len(cohort)), inner)
            return self._first(made, model)

        opened = None
        if masked.limits or self._familiar(present):
            limits = masked.limits or coordinator.limits
            try:
                opened = self._sum(Kind.UPDATES, present, number=number, model=model, plan_for=plan_for, limits=limits)
            except NoSum:
                # Products may have outgrown their ranges: sites do not send what would be mostly signs.
                if masked.limits:
                    raise
        if opened is None:
            ranges, ranged = self._once(Kind.RANGES, present, number=number, model=model, plan_for=plan_for)
            limits, present = masked.first_limits(ranges), [site for site in present if site in ranged]
            opened = self._sum(Kind.UPDATES, present, number=number, model=model, plan_for=plan_for, limits=limits)
        after, largest = self._advanced(opened)
        if opened.request.plan is not None:
            self._differences = of_round(masked, opened.request.plan, totals, cosines)
        coordinator.limits = masked.next_limits(opened.request.limits, coordinator.largest, largest, opened.numbers)
        coordinator.largest = largest
        return after, opened, totals or opened.tallies

    @property
    def _model(self) -> str:
        return received_digest(self.coordinator.state.tensors, self.coordinator.state.plan)

    def _familiar(self, present: Collection[str]) -> bool:
        """Whether all of these were in the last sum, which the ranges are from."""
        history = self.coordinator.history
        return bool(self.coordinator.limits and history) and set(present) <= set(history[-1]["secagg"]["sites"])

    def _first(self, plan: Plan, model: str) -> Plan:
        """The first plan for these sites in a round: those who helped to open a sum do it again under no other.

        Sketches of a later job have another key, and give a slightly different one.
        """
        path = self.coordinator.scratch / f"plans-{plan.round_number:04d}.json"
        kept = read_json(path) if path.exists() else {}
        plans = kept["plans"] if kept.get("model") == model else {}
        cohort = " ".join(plan.cohort)
        if cohort not in plans:
            plans[cohort] = plan.to_json()
            private_folder(path.parent)
            write_json(path, {"model": model, "plans": plans})
        return Plan.from_json(plans[cohort])

    def _once(
        self, kind: Kind, present: Collection[str], *, number: int, model: str, **options: Any
    ) -> tuple[Tally, Collection[str]]:
        """A sum of a round that is opened once: after a restart sites would open it only for the same sites again.

        Returns:
            Its tallies, and whose they are.
        """
        path = self.coordinator.scratch / f"{kind}-{number:04d}.json"
        if path.exists() and (kept := read_json(path))["model"] == model:
            return {key: np.array(value) for key, value in kept["tallies"].items()}, kept["sites"]
        opened = self._sum(kind, present, number=number, model=model, **options)
        tallies = opened.tallies
        private_folder(path.parent)
        plain = {key: value.tolist() for key, value in tallies.items()}
        write_json(path, {"model": model, "sites": list(opened.survivors), "tallies": plain})
        return tallies, opened.survivors

    def _advanced(self, opened: Opened) -> tuple[State, dict[str, float]]:
        """The state after a round, and the largest value of every tensor's sum."""
        coordinator, masked, request = self.coordinator, self.summing.masked, opened.request
        if request.plan is None:
            raise Refusal(Code.SERVER_INTERNAL)
        state, plan, limits = coordinator.state, request.plan, request.limits
        after, largest = next_state(state, plan), {}
        personal = set(masked.personal)
        for name, summed in opened.layout.sums(opened.words, limits):
            largest[name] = float(summed.value.abs().max())
            if name in personal:
                after.mean[name] = divide(summed).float()
            else:
                after.tensors[name] = masked.algebra.next_value(name, state, ALL, summed, plan)
        after.sealed = {site: self._sealed(opened, site) for site in opened.survivors if site in opened.layout.slots}
        return after, largest

    def _sealed(self, opened: Opened, site: str) -> Sealed:
        names = self.summing.masked.personal
        return Sealed(
            opened.words[opened.layout.slots[site]].copy(),
            {name: opened.request.limits[name] for name in names},
            {name: float(opened.numbers["coefficient", site, name]) for name in names},
            opened.layout.ring.parties,
            opened.layout.ring.bits,
        )

    def validation(self, evaluated: Collection[str]) -> Tally:
        """The counts of the current model on all sites' validation images."""
        number = self.coordinator.state.round_number + 1
        return self._sum(Kind.VALIDATION, evaluated, number=number, model=self._model).tallies

    def test(self, finished: Collection[str]) -> tuple[float, float]:
        """How many test images the sites have together, and how many of them the deployed models get right."""
        images, correct = TEST
        number = self.coordinator.state.round_number + 1
        tallies = self._sum(Kind.TEST, finished, number=number, model=self._model).tallies
        return float(tallies[images].item()), float(tallies[correct].item())

    def assess(self, tally: Tally, heard: Collection[str], tell: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Score the current model from what was counted on it, and note who holds it.

        Args:
            tally: with the summed validation counts.
            heard: the sites that received the model.
            tell: called with the round and its figures.
        """
        coordinator = self.coordinator
        number = coordinator.state.round_number
        if not number:
            return
        score = coordinator.assess([tally])
        coordinator.keep_best()
        entry = coordinator.history[-1]
        for site in heard:
            entry["sites"][site]["received"] = True
        figures = summed_figures(tally)
        validated = {key: figures[key] for key in ("val_accuracy", "val_accuracy_as_received")}
        entry["sums"] |= validated
        tell(number, {"val_accuracy": score, "seconds": entry["seconds"], "sites": {}})

    def record(
        self,
        opened: Opened,
        tally: Tally,
        asked: Mapping[str, tuple[str, Message]],
        heard: Collection[str],
        *,
        refused: Mapping[str, Refusal],
        seconds: float,
    ) -> dict[str, Any]:
        """The facts of the round that was closed: who was in its sum, and what all of them together say.

        Args:
            opened: the sum that the round was made of.
            tally: all summed tallies.
            asked: by site, its first task of the round.
            heard: who answered that.
            refused: who refused it, and why.
            seconds: that the round took.
        """
        plan = opened.request.plan
        statuses: dict[str, Any] = {
            site: {"status": _status(site, opened.survivors, heard)} for site in self.coordinator.sites
        }
        for site, refusal in {**refused, **self._faulty}.items():
            statuses[site] = {"status": "failed", "reason": str(refusal), "code": int(refusal.code)}
        figures = summed_figures(tally)
        cut = sum(float(value) for key, value in opened.numbers.items() if key[0] == "outside")
        capped = [values["capped"] for values in (plan.values if plan else {}).values() if "capped" in values]
        return {
            "round": opened.request.round_number,
            "bytes_up": len(opened.survivors) * opened.layout.words * opened.layout.ring.bits // 8,
            "bytes_down": sum(nbytes(self.coordinator.payload(site)) for site in asked),
            "sites": statuses,
            "sums": {key: figures[key] for key in ("loss", "train_accuracy")},
            "secagg": {
                "sites": list(opened.survivors),
                "attempt": opened.request.attempt,
                "cut_off": cut,
                "sketches": len(self.summing.masked.sketched),
                "capped": max(float(each.max()) for each in capped) if capped else None,
                **self._differences,
            },
            "seconds": seconds,
        }

    def _sum(self, kind: Kind, sites: Iterable[str], *, number: int, model: str, **options: Any) -> Opened:
        """A sum; what sites were asked to open before, maybe by an earlier job, comes before any other."""
        address = {site: self._address(number) for site in sites}
        path = self.coordinator.scratch / f"openings-{kind}-{number:04d}.json"
        kept = read_json(path) if path.exists() else {}
        earlier = kept["openings"] if kept.get("model") == model else []

        def note(opening: Opening) -> None:
            noted = [list(opening.cohort), list(opening.sites)]
            if noted not in earlier:
                earlier.append(noted)
                private_folder(path.parent)
                write_json(path, {"model": model, "openings": earlier})

        try:
            return self.summing.sum(
                kind,
                address,
                round_number=number,
                model=model,
                earlier=[Opening(tuple(cohort), tuple(present)) for cohort, present in earlier],
                invited=self.coordinator.cohort(number),
                note=note,
                **options,
            )
        finally:
            self._faulty |= self.summing.faulty

    def asked(self, number: int, invited: Collection[str]) -> dict[str, tuple[str, Message]]:
        """The first task of a round: training for the invited sites, the new model for the others."""
        before = self.coordinator.state.round_number
        return {
            site: (TRAIN if site in invited else EVALUATE, self.with_model(site, number))
            for site in self.summing.sites
            if site in invited or before
        }


def summed_figures(tally: Tally) -> dict[str, float | None]:
    """What a round's sums say about training and validation, over all sites together."""
    seen, count = _value(tally, SEEN), _value(tally, VALIDATION_COUNT)
    return {
        "loss": _value(tally, LOSS) / seen if seen else None,
        "train_accuracy": _value(tally, CORRECT) / seen if seen else None,
        "val_accuracy": _value(tally, VALIDATION_CORRECT) / count if count else None,
        "val_accuracy_as_received": _value(tally, VALIDATION_AS_RECEIVED) / count if count else None,
    }


def _status(site: str, survivors: Collection[str], heard: Collection[str]) -> str:
    return "summed" if site in survivors else "dropped" if site in heard else "absent"


def _value(tally: Tally, key: str) -> float:
    return float(tally.get(key, np.zeros(1)).item())
