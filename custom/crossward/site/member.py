"""A site's side of a run: answers the server's tasks, and turns whatever goes wrong into a code.

FLARE's executor hands every task to this object and sends back what it gives. It knows no transport, so that it can be
tried without one.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from crossward.federation.errors import (
    BadInput,
    CrosswardError,
    OtherStudy,
    PrivacyRefusal,
    SiteFailure,
    StorageFailure,
)
from crossward.federation.names import check_site_name
from crossward.federation.storage import private_folder, write_json
from crossward.imaging.data import Cohort, TooFewImages, labels_of, load_site
from crossward.imaging.prepare.cache import NotPrepared
from crossward.privacy.dp.accounting import Unpriceable
from crossward.privacy.dp.clipping_common import NotFinite
from crossward.privacy.dp.ledger import BudgetSpent, OtherUnit
from crossward.privacy.secagg.attempt import Blamed, OutOfTurn
from crossward.privacy.secagg.canonical import Malformed
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.memory import AlreadyUsed
from crossward.privacy.secagg.strikes import Strikes
from crossward.site import messages
from crossward.site.devices import Device
from crossward.site.evidence import Evidence, Witness
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, TASKS, TRAIN, Message
from crossward.site.participant import Participant
from crossward.site.payloads import payloads_of
from crossward.site.policy import Policy
from crossward.site.protection import (
    Book,
    LearnedPictures,
    LedgerRefused,
    NotPrivate,
    Protection,
    certified_ledger,
)
from crossward.site.release import Credentials, Release
from crossward.site.runfolder import DESCRIPTION, claim, clear_leftovers, hold
from crossward.site.study import Study
from crossward.site.troubles import Code, Refusal

LOCK_PATIENCE = 20.0


class Member:
    """One site in one job.

    Args:
        name: of the site.
        study: what the job asks for, as plain values; it is read when the first task arrives.
        policy: the site's own.
        patience: seconds to wait for another job at this site to end, before the site says that it is busy.
        job: the job's own name, which keys of secure aggregation are bound to.
        credentials: reads the site's certificate, when a job needs it.
    """

    def __init__(
        self,
        name: str,
        study: Mapping[str, Any],
        policy: Policy,
        *,
        patience: float = LOCK_PATIENCE,
        job: str = "",
        credentials: Callable[[], Credentials] | None = None,
    ) -> None:
        self.name = name
        self._job = job
        self._credentials = credentials
        self._release: Release | None = None
        self._strikes = Strikes()
        self._options = study
        self._policy = policy
        self._patience = patience
        self._participant: Participant | None = None
        self._run = ""
        self._lock: int | None = None
        self._log = logging.getLogger(f"crossward.site.{name}")
        self._tasks = {JOIN: self._join, TRAIN: self._train, EVALUATE: self._evaluate, FINISH: self._finish}

    def answer(self, task: str, message: Mapping[str, Any]) -> Message:
        """Do what the server asks for; never raises, because an exception in a FLARE process can end the whole job."""
        try:
            if task not in TASKS:
                raise Refusal(Code.BAD_TASK)
            participant = self._admitted(message)
            messages.check_round(task, message, rounds=participant.rounds)
            released = self._release.tasks if self._release else {}
            tasks = {**self._tasks, **released}
            if task not in tasks:
                raise Refusal(Code.BAD_TASK)
            return {"code": OK, **tasks[task](message)}
        except Exception as error:
            refusal = refusal_of(error)
            self._log.error("%s, %s of round %s: %s", self.name, task, message.get("round"), _told(error, refusal))
            if refusal.code is Code.INTERNAL:
                self._log.exception("the unexpected error")
            return messages.trouble(refusal)

    def close(self) -> None:
        """Let go of the site's state."""
        self._participant = self._release = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _join(self, message: Mapping[str, Any]) -> Message:
        del message
        return {}

    def _train(self, message: Mapping[str, Any]) -> Message:
        participant = self._admitted(message)
        payload = messages.unpack_payload(message)
        answer: Message = {"round": payload.round_number + 1}
        if payload.round_number:
            answer["validation"] = participant.receive(payload)
        return answer | messages.pack_report(participant.train(payload))

    def _evaluate(self, message: Mapping[str, Any]) -> Message:
        participant = self._admitted(message)
        payload = messages.unpack_payload(message)
        return {"round": payload.round_number, "validation": participant.receive(payload)}

    def _finish(self, message: Mapping[str, Any]) -> Message:
        participant = self._admitted(message)
        best = message.get("round")
        if type(best) is not int:
            raise Refusal(Code.BAD_TASK)
        if "tensors" in message:
            # The site was away when the best round's model was handed out, so the server sends it once more.
            payload = messages.unpack_payload(message)
            participant.receive(self._release.restore(payload) if self._release else payload)
        facts = participant.finish(best)
        try:
            return {"round": best, **self._told(participant, facts)}
        finally:
            # The site has its own result whatever may be told of it, with what that cost.
            own = {"site": self.name, "run": self._run, "method": participant.method.name, "best_round": best}
            path = self._policy.run_folder(self._run) / "result.json"
            write_json(path, {**own, **facts, "epsilon": participant.spent})

    def _told(self, participant: Participant, facts: Mapping[str, Any]) -> Message:
        """What the answer to the last task says of the test images; under masks it is kept for a sum."""
        published = self._policy.publishes(participant.tested_on) and facts["accuracy"] is not None
        if self._release is not None:
            self._release.tested(*(participant.tested(facts) if published else (0.0, 0.0)))
            return {}
        return {"scores": _published(participant, facts)} if published else {}

    def _admitted(self, message: Mapping[str, Any]) -> Participant:
        """This site's participant in the run, made with the first task: checks come before data are read."""
        study = Study.from_options(self._options)
        messages.check_address(message, study.digest())
        run = _checked_run(message.get("run"))
        if self._participant is not None and run == self._run:
            return self._participant
        self._policy.check_masking(study.masking)
        self._policy.check_privacy(study.privacy)
        self._policy.check_payloads(payloads_of(study.method.algebra(study.task, study.model()), study.privacy))
        credentials = self._certified() if study.masking or study.privacy else None
        folder = self._policy.run_folder(run)
        self._take_lock()
        cohort = self._load(study)
        private_folder(folder)
        clear_leftovers(folder)
        try:
            claim(folder, study, cohort, resume=(folder / DESCRIPTION).exists())
        except BadInput as error:
            raise Refusal(Code.DATA_CHANGED) from error
        book = self._book(run, credentials) if study.privacy and credentials else None
        participant = study.participant(cohort.sites[self.name], folder, device=Device.best(), book=book)
        if participant.protection is not None:
            self._policy.check_worked_out(participant.protection.noise)
            self._check_planned(participant.protection)
        self._participant, self._run = participant, run
        if study.masking is not None and credentials is not None:
            self._release = Release(
                self._participant,
                masking=study.masking,
                study=study.trained_digest(),
                job=self._job,
                credentials=credentials,
                memory=self._policy.state_root / "masks",
                strikes=self._strikes,
                threads=os.cpu_count() or 1,
            )
            self._release.tasks = Witness(self.name, Evidence(folder, shown=f"runs/{run}")).over(self._release.tasks)
        return self._participant

    def _check_planned(self, protection: Protection) -> None:
        try:
            protection.check_planned()
        except BudgetSpent as error:
            # Only the rule: what other jobs spent is not this one's to know.
            raise Refusal(Code.LONG_RUN, allowed=self._policy.max_epsilon) from error

    def _book(self, run: str, credentials: Credentials) -> Book:
        """The ledger of the site's images, for all jobs."""
        ledger = certified_ledger(self._policy.state_root, site=self.name, identity=credentials.identity)
        return Book(ledger, run, self._policy.budget)

    def _certified(self) -> Credentials:
        if self._credentials is None:
            raise Refusal(Code.NO_CERTIFICATE)
        try:
            return self._credentials()
        except OSError as error:
            raise Refusal(Code.NO_CERTIFICATE) from error

    def _take_lock(self) -> None:
        """Hold the site's state for this process alone; an earlier job of the site may still be ending."""
        if self._lock is None:
            try:
                self._lock = hold(private_folder(self._policy.state_root) / "lock", patience=self._patience)
            except BlockingIOError:
                raise Refusal(Code.BUSY) from None

    def _load(self, study: Study) -> Cohort:
        root, task = self._policy.data_root, study.task
        if root is None or not _has_files(root):
            raise Refusal(Code.NO_DATA)
        try:
            labels = labels_of(root, self.name, size=task.size, channels=task.channels)
            unknown = sum(count for label, count in labels.items() if label not in task.classes)
            if unknown:
                raise Refusal(Code.LABELS, unknown=unknown, images=labels.total())
            return load_site(
                root,
                name=self.name,
                classes=task.classes,
                size=task.size,
                channels=task.channels,
                seed=task.seed,
                batch_size=study.training.batch_size,
            )
        except TooFewImages as error:
            raise Refusal(Code.TOO_FEW_IMAGES) from error
        except NotPrepared as error:
            raise Refusal(Code.NOT_PREPARED) from error
        except BadInput as error:
            raise Refusal(Code.UNREADABLE_DATA) from error


def refusal_of(error: BaseException) -> Refusal:
    """The code that stands for an error; whatever is not known to be something else is an internal error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, BudgetSpent):
        return Refusal(Code.BUDGET, limit=error.limit, asked=error.asked, left=error.left)
    refusal = Refusal(_code_of(error))
    refusal.__cause__ = error
    return refusal


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is a disk without room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _code_of(error: BaseException) -> Code:
    if is_disk_full(error):
        return Code.DISK_FULL
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    # PyTorch tells of memory that the processor could not give as a plain RuntimeError.
    return Code.MEMORY if isinstance(error, RuntimeError) and "memory" in str(error) else Code.INTERNAL


_CODES: tuple[tuple[tuple[type[BaseException], ...], Code], ...] = (
    ((OtherStudy,), Code.OTHER_VAULT),
    ((MemoryError, torch.OutOfMemoryError), Code.MEMORY),
    ((SiteFailure, NotFinite), Code.DIVERGED),
    ((AlreadyUsed,), Code.MASKED_BEFORE),
    ((LedgerRefused,), Code.LEDGER),
    ((OtherUnit,), Code.OTHER_UNIT),
    ((Unpriceable,), Code.NO_PRICE),
    ((NotPrivate,), Code.NOT_PRIVATE),
    ((LearnedPictures,), Code.LEARNED_PICTURES),
    ((Blamed, Malformed, OutOfTurn, Untrusted), Code.NOT_MASKED),
    ((PrivacyRefusal,), Code.BAD_TASK),
    ((StorageFailure, OSError), Code.STORAGE),
    ((NotPrepared,), Code.NOT_PREPARED),
    ((BadInput,), Code.STUDY),
)


def _checked_run(run: Any) -> str:
    """A run's name becomes a folder's, so it may not lead out of it."""
    if not isinstance(run, str):
        raise Refusal(Code.BAD_TASK)
    try:
        check_site_name(run)
    except BadInput as error:
        raise Refusal(Code.BAD_TASK) from error
    return run


def _has_files(root: Path) -> bool:
    try:
        return any(root.iterdir())
    except OSError:
        return False


def _told(error: BaseException, refusal: Refusal) -> str:
    """For the site's own log: the code's words and the original ones."""
    cause = error.__cause__ if isinstance(error, Refusal) else error
    detail = f" ({cause})" if isinstance(cause, CrosswardError) else f" ({type(cause).__name__})" if cause else ""
    return f"code {int(refusal.code)}: {refusal}{detail}"


def _published(participant: Participant, facts: Mapping[str, Any]) -> dict[str, float | None]:
    if participant.protection is not None:
        tested, right = participant.tested(facts)
        return {**dict.fromkeys(messages.SCORES), "n_test": tested, "accuracy": right / tested if tested else None}
    scores = {name: facts.get(name) for name in messages.SCORES}
    return {**scores, "accuracy_as_received": facts["as_received"]["accuracy"]}
