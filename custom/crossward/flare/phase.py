"""One exchange with several sites: a task of its own for each, answers in any order, and when to stop waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from crossward.site.troubles import Code, Refusal

_PAUSE = 0.05
_FLARE_MARGIN = 60
"""Seconds by which FLARE's own time limit of a task is longer than ours, so that it is never the one to strike."""

Answer = dict[str, Any]
Take = Callable[[str, Answer], None]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long an exchange waits.

    Attributes:
        longest: seconds after which it ends in any case.
        grace: seconds without a further answer after which it ends once there are enough of them.
        enough: how many good answers that is.
    """

    longest: float
    grace: float
    enough: int


@dataclass
class Outcome:
    """Who answered, who refused and why, and who was not heard.

    Attributes:
        seconds: until each answer.
        waited: seconds until the exchange was over.
    """

    answered: list[str] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0


class Phase:
    """Sends every site its own message and hands the answers on as they come.

    Never a broadcast: FLARE sends all sites of a broadcast what the first of them was given.

    Args:
        controller: whose tasks these are.
        take: called with every good answer, one at a time; a Refusal that it raises is the site's.
        on_refusal: called with a site and why it did not do its part.
        away: sites that missed the exchange before; nobody waits for them until they fetch a task again.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        take: Take,
        on_refusal: Callable[[str, Refusal], None],
        away: set[str],
    ) -> None:
        self._controller = controller
        self._take = take
        self._on_refusal = on_refusal
        self._away = away
        self._lock = threading.Lock()
        self._outcome = Outcome()
        self._open = True
        self._began = self._last = time.monotonic()

    def run(
        self,
        messages: Mapping[str, tuple[str, Answer]],
        patience: Patience,
        fl_ctx: FLContext,
        abort_signal: Signal,
        *,
        counted: Collection[str] | None = None,
    ) -> Outcome:
        """Exchange one message with every site; returns when it is over, or at once when the job is aborted.

        Args:
            messages: by site, the name of the task and what to send.
            patience: how long to wait.
            fl_ctx: FLARE's context.
            abort_signal: FLARE's word that the job is to end.
            counted: the sites whose answers count towards ``patience.enough``; all of them if not given.
        """
        counted = messages.keys() if counted is None else counted
        self._began = self._last = time.monotonic()
        tasks = {site: self._scheduled(site, *message, patience, fl_ctx) for site, message in messages.items()}
        while not abort_signal.triggered and self._goes_on(tasks, patience, counted):
            time.sleep(_PAUSE)
        with self._lock:
            # From here on no answer is taken: a round that is being closed must not change any more.
            self._open = False
        outcome = self._outcome
        outcome.waited = time.monotonic() - self._began
        for site, task in tasks.items():
            if task.completion_status is None:
                self._controller.cancel_task(task, fl_ctx=fl_ctx)
            task.data = Shareable()
            if site not in outcome.seconds:
                outcome.absent.append(site)
        self._away.difference_update(outcome.seconds)
        self._away.update(outcome.absent)
        return outcome

    def _scheduled(self, site: str, name: str, message: Answer, patience: Patience, fl_ctx: FLContext) -> Task:
        data = Shareable()
        data.update(message)
        task = Task(
            name=name,
            data=data,
            timeout=int(patience.longest) + _FLARE_MARGIN,
            before_task_sent_cb=self._fetched,
            result_received_cb=self._received,
        )
        self._controller.send(task=task, fl_ctx=fl_ctx, targets=[site])
        return task

    def _goes_on(self, tasks: Mapping[str, Task], patience: Patience, counted: Collection[str]) -> bool:
        now = time.monotonic()
        with self._lock:
            pending = {
                site for site, task in tasks.items() if site not in self._outcome.seconds and not task.completion_status
            }
            good = sum(site in counted for site in self._outcome.answered)
            waited_for = pending - self._away
            quiet = now - self._last >= patience.grace
        if not pending or now - self._began >= patience.longest:
            return False
        hopeful = good + sum(site in counted for site in pending) >= patience.enough
        if hopeful and good < patience.enough:
            # Worth waiting, also for those who were away before.
            return True
        return bool(waited_for) and not quiet

    def _fetched(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        del fl_ctx
        with self._lock:
            self._away.discard(client_task.client.name)
            self._last = time.monotonic()

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """FLARE calls this with exactly these argument names, and loses the answer when it raises."""
        site, result = client_task.client.name, client_task.result
        client_task.result = None
        with self._lock:
            if not self._open or site in self._outcome.seconds:
                return
            self._last = time.monotonic()
            try:
                self._take(site, _content(result))
                self._outcome.answered.append(site)
            except Refusal as refusal:
                self._outcome.refused[site] = refusal
                if refusal.__cause__ is not None:
                    self._controller.log_warning(fl_ctx, f"{site}: {refusal} ({str(refusal.__cause__)!r})")
                self._on_refusal(site, refusal)
            except Exception as error:
                self._controller.log_exception(fl_ctx, f"the answer of {site} could not be used: {error}")
                self._outcome.refused[site] = Refusal(Code.SERVER_INTERNAL)
                self._on_refusal(site, self._outcome.refused[site])
            self._outcome.seconds[site] = self._last - self._began


def _content(result: Shareable | None) -> Answer:
    """What a site answered.

    Raises:
        Refusal: with the site's own code, or with ours where FLARE says that there is no answer.
    """
    code = ReturnCode.EXECUTION_EXCEPTION if result is None else result.get_return_code()
    if code == ReturnCode.TASK_RESULT_FILTER_ERROR:
        raise Refusal(Code.GATE)
    if code != ReturnCode.OK or result is None:
        raise Refusal(Code.NOT_EXECUTED)
    return {key: value for key, value in result.items() if key != ReservedHeaderKey.HEADERS}
