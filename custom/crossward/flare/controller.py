"""The server's side on FLARE: makes or resumes a run, conducts it, and says in a file of its own how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from crossward.evaluate.facts import versions, write_result
from crossward.evaluate.metrics import summarise, wilson_interval
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import BadInput, OtherStudy, PrivacyRefusal, StorageFailure
from crossward.federation.names import check_site_name
from crossward.federation.storage import private_folder, read_json, write_json
from crossward.flare.conductor import Conductor
from crossward.flare.jobs import Timing
from crossward.flare.masked_conductor import MaskedConductor
from crossward.flare.names import RESULT, RUN_FILES, STATISTICS
from crossward.flare.places import run_folder, server_policy
from crossward.flare.progress import Progress
from crossward.site.handover import HANDOVER, write_handover
from crossward.site.member import LOCK_PATIENCE, is_disk_full
from crossward.site.policy import Policy
from crossward.site.runfolder import DESCRIPTION, Busy, owned
from crossward.site.study import Study
from crossward.site.troubles import Code, Refusal

_KEPT_BY_POLICY = "kept by the site's policy"
_SUMMED_ONLY = "kept at the site: under secure aggregation figures leave it only as sums"
_NOT_HEARD = "the site did not finish; outcome.json says why"


class FederationController(Controller):
    """Runs in the server's job process.

    Args:
        study: what is run, as ``crossward job export`` wrote it.
        timing: seconds to wait for joining sites, for a round, and for the rest of a round.
        resume: name of the run to go on with; a new run if empty.
    """

    def __init__(self, study: Mapping[str, Any], timing: Mapping[str, int], resume: str = "") -> None:
        super().__init__(task_check_period=0.1)
        self._options = study
        self._timing = Timing(**timing)
        self._resume = resume
        self._progress: Progress | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to do before the job runs."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to do after it: what matters is on disk already."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the job; whatever goes wrong ends in outcome.json first, and only then in FLARE's own report."""
        run = self._resume or fl_ctx.get_job_id()
        progress = self._progress = Progress(run, rounds=_planned(self._options))
        folder = run_folder(fl_ctx) / RUN_FILES
        best: int | None = None
        refusal: Refusal | None = None
        try:
            best = self._run(run, progress, folder, abort_signal, fl_ctx)
        except Exception as error:
            refusal = _refusal_of(error)
            self.log_exception(fl_ctx, f"the run {run} stopped: {refusal} ({error})", fire_event=False)
        try:
            progress.end(folder, best_round=best, refusal=refusal)
        except StorageFailure as error:
            refusal = refusal or _refusal_of(error)
            self.log_error(fl_ctx, f"how the run {run} ended cannot be written down: {error}", fire_event=False)
        if refusal is not None and not abort_signal.triggered:
            self.system_panic(f"code {int(refusal.code)}: {refusal}", fl_ctx)

    def _run(self, run: str, progress: Progress, results: Path, abort_signal: Signal, fl_ctx: FLContext) -> int:
        began = time.monotonic()
        study = Study.from_options(self._options)
        folder = _checked_folder(server_policy(fl_ctx), run)
        if self._resume and not (folder / DESCRIPTION).exists():
            raise Refusal(Code.NOT_RESUMABLE)
        with owned(private_folder(folder), patience=LOCK_PATIENCE):
            online = sorted(client.name for client in fl_ctx.get_engine().get_clients())
            sites = _described(folder, study, online)
            coordinator = study.coordinator(folder, sites)
            coordinator.resume()
            kind = Conductor if study.masking is None else MaskedConductor
            conductor = kind(
                self,
                study,
                coordinator,
                run=run,
                timing=self._timing,
                progress=progress,
                fl_ctx=fl_ctx,
                abort_signal=abort_signal,
            )
            try:
                best, published = conductor.conduct()
            finally:
                self._keep(progress, folder / "events.jsonl", fl_ctx)
            result = _result(study, coordinator, best, published, run=run, seconds=time.monotonic() - began)
            result["privacy"] |= conductor.privacy()
            for place in (folder, results):
                write_result(place / RESULT, result)
                write_handover(place / HANDOVER, study, coordinator.best_state())
            return best

    def _keep(self, progress: Progress, path: Path, fl_ctx: FLContext) -> None:
        """Events are for people to look back on: that they cannot be kept must not hide how the run ended."""
        try:
            progress.keep(path)
        except OSError as error:
            self.log_error(fl_ctx, f"the run's events cannot be kept: {error}", fire_event=False)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Answer the administrator's question how far the job is."""
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._progress is not None:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, None)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info(STATISTICS, self._progress.statistics())

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer to a task that is over is never used: the site's next task tells it where the run stands."""
        del client_task_id, result
        self.log_info(fl_ctx, f"{client.name}: an answer to '{task_name}' came too late and is not used")


def _planned(options: Mapping[str, Any]) -> int:
    """The planned rounds, for whoever asks before it is known whether the study can be understood."""
    task = options.get("task")
    rounds = task.get("rounds") if isinstance(task, Mapping) else None
    return rounds if isinstance(rounds, int) else 0


def _checked_folder(policy: Policy, run: str) -> Path:
    """A run's name comes with the job and becomes a folder's, so it may not lead out of the runs."""
    try:
        check_site_name(run)
    except BadInput as error:
        raise Refusal(Code.NOT_RESUMABLE) from error
    return policy.run_folder(run)


def _described(folder: Path, study: Study, online: list[str]) -> list[str]:
    """The sites of the run: those online when it was started, the same ones when it is resumed."""
    path = folder / DESCRIPTION
    if not path.exists():
        write_json(path, {"options": study.options(), "sites": online})
        return online
    described = read_json(path)
    if described["options"] != study.options():
        raise Refusal(Code.NOT_RESUMABLE)
    return list(described["sites"])


def _refusal_of(error: Exception) -> Refusal:
    """The code for what ended a run at the server."""
    if isinstance(error, Refusal):
        return error
    if is_disk_full(error):
        return Refusal(Code.SERVER_DISK_FULL)
    kinds: tuple[tuple[type[Exception], Code], ...] = (
        (OtherStudy, Code.NOT_RESUMABLE),
        (StorageFailure, Code.SERVER_STORAGE),
        (OSError, Code.SERVER_STORAGE),
        (Busy, Code.BUSY),
        (BadInput, Code.STUDY),
        (PrivacyRefusal, Code.NOT_DECLARED),
    )
    return Refusal(next((code for kind, code in kinds if isinstance(error, kind)), Code.SERVER_INTERNAL))


def _result(
    study: Study,
    coordinator: Coordinator,
    best: int,
    published: Mapping[str, Mapping[str, float | None] | None],
    *,
    run: str,
    seconds: float,
) -> dict[str, Any]:
    kept = _KEPT_BY_POLICY if study.masking is None else _SUMMED_ONLY
    sites = {name: _site_facts(scores, kept) for name, scores in published.items()}
    task = study.task
    return {
        "method": study.method.name,
        "run": run,
        "data": {
            "path": "at the sites",
            "kind": "each site's own",
            "classes": list(task.classes),
            "phantom": False,
            "size": task.size,
        },
        "options": study.options(),
        "rounds": coordinator.history,
        "best_round": best,
        "personal": coordinator.best_state().personal_digests(),
        "sites": sites,
        "summary": summarise(sites),
        "privacy": {"secagg": False, "dp": study.privacy_facts(), "epsilon": dict.fromkeys(sites)},
        "versions": versions(),
        "seconds": seconds,
    }


def _site_facts(scores: Mapping[str, float | None] | None, kept: str) -> dict[str, Any]:
    """One site's entry in the result, from what it published."""
    if not scores:
        reason = _NOT_HEARD if scores is None else kept
        undefined = dict.fromkeys(("accuracy", "balanced_accuracy", "auc"), reason)
        unknown: dict[str, Any] = dict.fromkeys(("n_train", "n_val", "n_test", "accuracy", "balanced_accuracy", "auc"))
        return {**unknown, "n": 0, "undefined": undefined, "as_received": {"accuracy": None, "undefined": undefined}}
    counts = {name: int(scores[name] or 0) for name in ("n_train", "n_val", "n_test")}
    accuracy, n = scores["accuracy"], counts["n_test"]
    metrics = {name: scores[name] for name in ("accuracy", "balanced_accuracy", "auc")}
    return {
        **counts,
        **metrics,
        "accuracy_interval": None if accuracy is None else wilson_interval(round(accuracy * n), n),
        "undefined": {name: "undefined at the site" for name, value in metrics.items() if value is None},
        "as_received": {"accuracy": scores["accuracy_as_received"]},
    }
