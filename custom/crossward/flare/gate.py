"""The gate: the one filter at a site. Everything that leaves the site passes it, built anew from a whitelist.

What may leave is worked out here from the signed job's study, and not asked of the code that made the answer. An
answer with anything else in it is stopped whole, and the site's journal says so. The gate stops mistakes, changed
or foreign answers; code that runs in the same process could get round it, which is why sites allow no code in jobs.
"""

from __future__ import annotations

import json
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from crossward.federation.errors import CrosswardError, PrivacyRefusal, StorageFailure
from crossward.flare.names import ASKED, EXECUTOR
from crossward.flare.places import job_configuration, site_policy
from crossward.site import messages
from crossward.site.declaration import Declaration, items_of
from crossward.site.journal import Journal
from crossward.site.member import refusal_of
from crossward.site.messages import OK
from crossward.site.payloads import payloads_of
from crossward.site.policy import Policy
from crossward.site.study import Study
from crossward.site.troubles import Refusal

JOURNAL = "journal.jsonl"
_RETURN_CODES = frozenset(value for name, value in vars(ReturnCode).items() if name.isupper())


class SiteGate(Filter):
    """Lets declared answers out, and writes down what left."""

    def __init__(self) -> None:
        super().__init__()
        self._job = ""
        self._declaration: Declaration | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Give the answer that may leave.

        Raises:
            PrivacyRefusal: nothing leaves; FLARE tells the server no more than that a filter refused.
        """
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME, ""))
        entry: dict[str, Any] = {"job": fl_ctx.get_job_id(), "task": task[:40]}
        try:
            rebuilt, answer = self._rebuilt(task, shareable, fl_ctx)
        except Refusal as error:
            # A policy that is not understood names no journal either.
            return self._bare_code(error, fl_ctx)
        except Exception as error:
            # Whatever goes wrong here, nothing leaves; only our own words are sure to hold no values.
            reason = str(error) if isinstance(error, CrosswardError) else type(error).__name__
            self.log_error(fl_ctx, f"the gate stopped an answer to '{task[:40]}': {reason}", fire_event=False)
            _journal(fl_ctx).write({**entry, "left": False, "reason": reason})
            raise PrivacyRefusal(f"the gate stopped an answer to '{task[:40]}': {reason}") from None
        items = items_of(answer)
        if "round" in answer:
            entry["round"] = answer["round"]
        record = {**entry, "left": True, "bytes": sum(size for _, _, size in items), "items": items}
        try:
            _journal(fl_ctx).write(record)
        except (StorageFailure, Refusal) as error:
            bare = self._bare_code(error, fl_ctx)
            return bare if answer.get("code", OK) == OK else rebuilt
        return rebuilt

    def _bare_code(self, error: CrosswardError, fl_ctx: FLContext) -> Shareable:
        """Holds nothing of the site's, and is how the server learns of a full disk or a wrong policy."""
        self.log_error(fl_ctx, f"{error}; only a code leaves the site", fire_event=False)
        return _shareable(messages.trouble(refusal_of(error)))

    def _rebuilt(self, task: str, shareable: Shareable, fl_ctx: FLContext) -> tuple[Shareable, dict[str, Any]]:
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            if code not in _RETURN_CODES:
                raise PrivacyRefusal("the answer's return code is not one of FLARE's")
            return make_reply(code), {}
        content = {key: value for key, value in shareable.items() if key != ReservedHeaderKey.HEADERS}
        whitelist = self._whitelist(fl_ctx)
        answer = whitelist.rebuild(task, content, fl_ctx.get_prop(ASKED))
        policy = site_policy(fl_ctx)
        if answer["code"] == OK:
            _hold_against(policy, whitelist, task)
        if "scores" in answer and not policy.publishes(answer["scores"]["n_test"] or 0):
            raise PrivacyRefusal(f"{task}: the site's policy keeps its scores")
        return _shareable(answer), answer

    def _whitelist(self, fl_ctx: FLContext) -> Declaration:
        job = fl_ctx.get_job_id()
        if self._declaration is None or self._job != job:
            self._declaration = Declaration(_study_of_job(fl_ctx))
            self._job = job
        return self._declaration


def _hold_against(policy: Policy, whitelist: Declaration, task: str) -> None:
    """Ask the policy once more, so that nothing of a weaker job leaves where the member failed to."""
    try:
        policy.check_masking(whitelist.masking)
        policy.check_privacy(whitelist.privacy)
        policy.check_payloads(payloads_of(whitelist.algebra, whitelist.privacy))
    except Refusal as refusal:
        raise PrivacyRefusal(f"{task}: the job is not within the site's policy: {refusal}") from refusal


def _shareable(answer: messages.Message) -> Shareable:
    shareable = Shareable()
    shareable.update(answer)
    shareable.set_return_code(ReturnCode.OK)
    return shareable


def _journal(fl_ctx: FLContext) -> Journal:
    return Journal(site_policy(fl_ctx).state_root / JOURNAL)


def _study_of_job(fl_ctx: FLContext) -> Study:
    try:
        configuration = json.loads(job_configuration(fl_ctx).read_text(encoding="utf-8"))
        (entry,) = configuration["executors"]
        executor = entry["executor"]
        if executor["path"] != EXECUTOR:
            raise ValueError("another executor")
        return Study.from_options(executor["args"]["study"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrivacyRefusal("the job's configuration does not say what may leave the site") from error
