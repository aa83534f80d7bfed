"""The server's side of a run, without a transport: cohorts, reports in, next model out, checkpoint after every round.

The in-process loop and FLARE's controller drive the same object. ``accept`` may be called from several threads.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crossward.federation.algebra import Algebra, total
from crossward.federation.combine import Spooled, Sums, advance, combine_spooled, next_state, spool
from crossward.federation.contract import (
    ALL,
    VALIDATION_CORRECT,
    VALIDATION_COUNT,
    Payload,
    Plan,
    Report,
    Sealed,
    State,
    Tally,
)
from crossward.federation.errors import BadInput, OtherStudy, RunFailure
from crossward.federation.names import check_site_name
from crossward.federation.outliers import Bound, EndlessRound, Step, moved, shared_length
from crossward.federation.scopes import layout_digest, tensors_digest
from crossward.federation.seeds import derive
from crossward.federation.storage import read_tensors, write_tensors

_CHECKPOINT_FORMAT = "crossward.checkpoint/3"
# No site has such a name.
_MEAN, _SEALED = "*mean", "*sealed"


class Coordinator:
    """Runs rounds: who is invited, what they receive, how their reports become the next model.

    Args:
        folder: where this run's checkpoint and spool are kept.
        algebra: layout and rules.
        initial: the common start.
        sites: all sites of the study.
        rounds: how many rounds to run.
        seed: decides who is invited under partial participation.
        participation: the part of the sites that is invited to each round.
        quorum: how many reports a round needs; all the invited ones if not given.
        outlier: how many times as long as in earlier rounds of its sites a round's combined update may be; 0: any
            length.
        study: digest of what is run; a checkpoint of another study is refused.
    """

    def __init__(
        self,
        folder: Path,
        algebra: Algebra,
        initial: State,
        *,
        sites: Sequence[str],
        rounds: int,
        seed: int,
        participation: float = 1.0,
        quorum: int | None = None,
        outlier: float = 0.0,
        study: str = "",
    ) -> None:
        for site in sites:
            check_site_name(site)
        if not sites or len(set(sites)) < len(sites):
            raise BadInput("a run needs at least one site, and every site once")
        if quorum is not None and quorum < 1:
            raise BadInput(f"a quorum of {quorum} is not at least 1")
        if not 0 < participation <= 1:
            raise BadInput(f"participation {participation} is not above 0 and at most 1")
        self.algebra = algebra
        self.state = initial
        self.sites = tuple(sites)
        self.rounds = rounds
        self.best_round: int | None = None
        self.scores: dict[int, float] = {}
        self.history: list[dict[str, Any]] = []
        self.limits: dict[str, float] = {}
        """Ranges of the next round's products under secure aggregation; none are known at the start."""
        self.largest: dict[str, float] = {}
        """The largest value of every tensor's last sum, which the ranges follow."""
        self._folder = folder
        self._seed = seed
        self._bound = Bound(outlier)
        self._identity = hashlib.sha256(f"{layout_digest(algebra.sent)} {study}".encode()).hexdigest()
        self._invitations = max(1, math.ceil(participation * len(sites) - 1e-9))
        self.quorum = min(quorum or self._invitations, self._invitations)
        self._lock = threading.Lock()
        self._begin()

    @property
    def checkpoint_path(self) -> Path:
        return self._folder / "checkpoint.safetensors"

    @property
    def scratch(self) -> Path:
        """Where a round keeps what it would have to ask for again after a restart; empty when the round is closed."""
        return self._folder / "round"

    @property
    def finished(self) -> bool:
        return self.state.round_number >= self.rounds

    def payload(self, site: str) -> Payload:
        """Make what a site receives of the current model."""
        return self.state.payload(site, best_round=self.best_round)

    def cohort(self, round_number: int) -> tuple[str, ...]:
        """Say who is invited to a round; the same seed invites the same sites, also after a restart."""
        order = np.random.default_rng(derive(self._seed, "cohort", round_number)).permutation(len(self.sites))
        return tuple(self.sites[index] for index in sorted(order[: self._invitations]))

    def _begin(self) -> None:
        self._round = self.state.round_number + 1
        self._invited = self.cohort(self._round)
        self._plan = self.algebra.plan(self._round, self._invited, {}, {}) if self.algebra.streams else None
        self._combined: State | None = None
        self._digests: dict[str, str] = {}
        self._tallies: dict[str, Tally] = {}
        self._lengths: dict[str, float] = {}
        self._sums = Sums()
        self._spooled: dict[str, Spooled] = {}

    def accept(self, report: Report) -> None:
        """Take a site's report for the round that is open.

        Raises:
            PrivacyRefusal: the report is not what was declared; it is not used.
            RunFailure: it belongs to another round or model, or the site was not invited or has reported already.
        """
        self.algebra.check(report)
        place = f"{report.site}, round {report.round_number}"
        self._expect(report, place)
        if report.model != self._digest(report.site):
            raise RunFailure(f"{place}: the report was trained from another model than the one sent in this run")
        length = shared_length(self.algebra.layout, report.update) if self._bound else 0.0
        entry = spool(self._spool_folder, report) if self._plan is None else None
        with self._lock:
            self._expect(report, place)
            if report.site in self._tallies:
                raise RunFailure(f"{place}: the site has reported already")
            if self._combined is not None:
                raise RunFailure(f"{place}: the round is being closed")
            if self._plan is not None:
                self._sums.add(self.algebra.contribute(report, self._plan, self._invited.index(report.site)))
            if entry is not None:
                self._spooled[report.site] = entry
            self._lengths[report.site] = length
            self._tallies[report.site] = report.tally

    def _expect(self, report: Report, place: str) -> None:
        if report.round_number != self._round or report.site not in self._invited:
            raise RunFailure(f"{place}: the open round is {self._round} and expects {', '.join(self._invited)}")

    def _digest(self, site: str) -> str:
        key = site if site in self.state.personal else ALL
        if key not in self._digests:
            self._digests[key] = tensors_digest(self.payload(site).tensors)
        return self._digests[key]

    @property
    def _spool_folder(self) -> Path:
        return self._folder / "spool" / f"round-{self._round:04d}"

    @property
    def reported(self) -> tuple[str, ...]:
        """The invited sites that have reported, in the cohort's order."""
        return tuple(site for site in self._invited if site in self._tallies)

    def close_round(self, record: Mapping[str, Any], combined: State | None = None) -> State:
        """Combine what was reported, write the checkpoint, and open the next round.

        Args:
            record: facts of the round, kept in the history and in the checkpoint.
            combined: the state after it, where sites reported nothing and their sums were opened instead; the
                record then says under "secagg" whose sums.

        Raises:
            RunFailure: fewer reports than the quorum; the round is not aggregated and stays open.
            OutlierRound: it would move the model much further than earlier rounds of its sites; nothing is written.
            EndlessRound: the model would not be finite any more; likewise.
            StorageFailure: the checkpoint could not be written; the run stays at the round before, and the round
                can be closed again when there is room.
        """
        if combined is None and len(self.reported) < self.quorum:
            missing = ", ".join(site for site in self._invited if site not in self._tallies)
            raise RunFailure(
                f"round {self._round} has {len(self.reported)} of {self.quorum} reports it needs (missing: {missing}): "
                f"not aggregated, the model stays at round {self.state.round_number}"
            )
        with self._lock:
            if self._combined is None:
                self._combined = self._combine() if combined is None else combined
        after = self._combined
        own = self._lengths if combined is None else dict.fromkeys(record["secagg"]["sites"])
        history = [*self.history, {**record, **self._checked(after, own)}]
        self._write_checkpoint(after, history)
        self._tidy_best()
        for scratch in (self._folder / "spool", self.scratch):
            shutil.rmtree(scratch, ignore_errors=True)
        with self._lock:
            self.state, self.history = after, history
            self._begin()
        return after

    def _checked(self, after: State, own: Mapping[str, float | None]) -> dict[str, Any]:
        """How far the round moves the model, and by whom, where that is bounded and it is not too far."""
        step = Step(moved(self.algebra.layout, self.state, after), own)
        if not math.isfinite(step.length):
            raise EndlessRound(round_number=self._round)
        if not self._bound:
            return {}
        self._bound.check(step, earlier=[Step.of(entry) for entry in self.history], round_number=self._round)
        return step.facts()

    def _combine(self) -> State:
        if self._plan is None:
            spooled = [self._spooled[site] for site in self.reported]
            return combine_spooled(self.algebra, self.state, spooled, self._round)
        after = next_state(self.state, self._plan)
        advance(self.algebra, self.state, self._sums, self._plan, after)
        return after

    def totals(self) -> dict[str, Any]:
        """The summed tallies of the open round so far."""
        return total(self._tallies.values())

    def assess(self, tallies: Iterable[Tally]) -> float | None:
        """Score the current model from the sites' summed validation counts, and remember the best round."""
        sums = total(tallies)
        count = float(sums.get(VALIDATION_COUNT, np.zeros(1)).item())
        if not count or not self.state.round_number:
            return None
        score = float(sums[VALIDATION_CORRECT].item()) / count
        if not math.isfinite(score):
            raise RunFailure(f"round {self.state.round_number}: the sites' validation counts are not finite numbers")
        self.scores[self.state.round_number] = score
        self.best_round = self._best()
        return score

    def _best(self) -> int | None:
        """The round with the highest score; the latest of equals, whose learning rate had come down the furthest."""
        return max(self.scores, key=lambda number: (self.scores[number], number), default=None)

    def keep_best(self) -> None:
        """Keep the current model beside the checkpoint while it is the best one, for sites that were away."""
        if self.best_round == self.state.round_number:
            self._write_state(self._best_path(self.best_round), self.state, {})

    def best_payload(self, site: str) -> Payload:
        """What a site received, or would have received, after the best round."""
        return self.best_state().payload(site, best_round=self.best_round)

    def best_state(self) -> State:
        """The server's side after the best round; the current one where none was scored."""
        if self.best_round is None or self.best_round == self.state.round_number:
            return self.state
        return self._read_state(self._best_path(self.best_round))[0]

    def _best_path(self, number: int) -> Path:
        return self._folder / f"best-{number:04d}.safetensors"

    def _tidy_best(self) -> None:
        """Only now that the scores are in the checkpoint: a resumed run may find another round to be the best."""
        for path in self._folder.glob("best-*.safetensors"):
            if self.best_round is None or path != self._best_path(self.best_round):
                path.unlink(missing_ok=True)

    def _write_checkpoint(self, state: State, history: Sequence[Mapping[str, Any]]) -> None:
        progress = {
            "scores": json.dumps(self.scores, allow_nan=False),
            "history": json.dumps(history, allow_nan=False),
            "ranges": json.dumps([self.limits, self.largest], allow_nan=False),
        }
        self._write_state(self.checkpoint_path, state, progress)

    def _write_state(self, path: Path, state: State, progress: Mapping[str, str]) -> None:
        tensors = {f"*/{name}": tensor for name, tensor in state.tensors.items()}
        tensors.update({f"{_MEAN}/{name}": tensor for name, tensor in state.mean.items()})
        for site, own in state.personal.items():
            tensors.update({f"{site}/{name}": tensor for name, tensor in own.items()})
        for site, sealed in state.sealed.items():
            tensors[f"{_SEALED}/{site}"] = torch.from_numpy(sealed.words.view(np.uint8))
        metadata = {
            "format": _CHECKPOINT_FORMAT,
            "study": self._identity,
            "plan": state.plan.to_json() if state.plan else "",
            "round": str(state.round_number),
            "sealed": json.dumps({site: sealed.header() for site, sealed in state.sealed.items()}),
            **progress,
        }
        write_tensors(path, tensors, metadata)

    def _read_state(self, path: Path) -> tuple[State, dict[str, str]]:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != _CHECKPOINT_FORMAT or metadata.get("study") != self._identity:
            raise OtherStudy(f"{path} belongs to another study or version; start a new run folder")
        plan = Plan.from_json(metadata["plan"]) if metadata["plan"] else None
        state = State(int(metadata["round"]), {}, plan=plan)
        for site, header in json.loads(metadata["sealed"]).items():
            state.sealed[site] = Sealed.from_parts(header, tensors.pop(f"{_SEALED}/{site}").numpy().view(np.uint32))
        common = {ALL: state.tensors, _MEAN: state.mean}
        for key, tensor in tensors.items():
            slot, name = key.split("/", 1)
            (common[slot] if slot in common else state.personal.setdefault(slot, {}))[name] = tensor
        return state, metadata

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one.

        Raises:
            StorageFailure: there is one, but it is damaged or of another model.
        """
        if not self.checkpoint_path.exists():
            return False
        self.state, metadata = self._read_state(self.checkpoint_path)
        self.history = json.loads(metadata["history"])
        self.limits, self.largest = json.loads(metadata["ranges"])
        self.scores = {int(number): score for number, score in json.loads(metadata["scores"]).items()}
        self.best_round = self._best()
        shutil.rmtree(self._folder / "spool", ignore_errors=True)
        self._begin()
        return True
