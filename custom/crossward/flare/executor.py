"""The site's side on FLARE: hands every task to the member of the run, and sends back what it answers."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal

from crossward.federation.errors import CrosswardError
from crossward.flare.gate import SiteGate
from crossward.flare.names import ASKED
from crossward.flare.places import is_simulated, site_credentials, site_policy
from crossward.site import messages
from crossward.site.member import Member, refusal_of


class SiteExecutor(Executor):
    """Runs in the site's job process.

    Args:
        study: what the job asks for, as ``crossward job export`` wrote it.
    """

    def __init__(self, study: Mapping[str, Any]) -> None:
        super().__init__()
        self._study = study
        self._member: Member | None = None
        self._simulated_gate = SiteGate()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answer one task; an exception would be FLARE's to report, in words that nobody checked."""
        del abort_signal
        # The last task's messages are circles of objects; unless collected, they stay beside this one's.
        gc.collect()
        message = {key: value for key, value in shareable.items() if key != ReservedHeaderKey.HEADERS}
        fl_ctx.set_prop(ASKED, message, private=True, sticky=False)
        began = time.monotonic()
        answer = Shareable()
        answer.update(self._answer(task_name, message, fl_ctx))
        seconds = time.monotonic() - began
        self.log_info(fl_ctx, f"answered '{task_name}' of round {message.get('round')} after {seconds:.2f} s of work")
        # The simulator leaves out a site's filters: there the answer takes the same way by hand.
        if not is_simulated(fl_ctx):
            return answer
        try:
            return self._simulated_gate.process(answer, fl_ctx)
        except CrosswardError:
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)

    def _answer(self, task_name: str, message: Mapping[str, Any], fl_ctx: FLContext) -> messages.Message:
        if self._member is None:
            try:
                self._member = Member(
                    fl_ctx.get_identity_name(),
                    self._study,
                    site_policy(fl_ctx),
                    job=fl_ctx.get_job_id(),
                    credentials=lambda: site_credentials(fl_ctx),
                )
            except Exception as error:
                refusal = refusal_of(error)
                self.log_error(fl_ctx, f"code {int(refusal.code)}: {refusal}", fire_event=False)
                return messages.trouble(refusal)
        return self._member.answer(task_name, message)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Let go of the site's state when the job ends."""
        del fl_ctx
        if event_type == EventType.END_RUN and self._member is not None:
            self._member.close()
            self._member = None
