"""Sites that lie to others about what they share for a sum, under their own signatures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from crossward.privacy.secagg.canonical import decode, encode
from crossward.privacy.secagg.keys import sign
from crossward.privacy.secagg.messages import BLAME, SHARE
from crossward.site.messages import BEGIN, CONTRIBUTE, Message
from crossward.site.release import Release

Lie = Callable[[str, dict[str, Any]], Mapping[str, Any]]


def lying(release: Release, liar: str, lie: Lie) -> None:
    """Let a site change what it shares with each other one."""
    honest = release.tasks[BEGIN]

    def begin(message: Mapping[str, Any]) -> Message:
        answer = honest(message)
        outer, keys = decode(answer["shares"]), release._secure._keys  # type: ignore[union-attr]
        boxes = {}
        for peer, box in outer["boxes"].items():
            signed = decode(box)
            before = decode(signed["body"])
            body = {**before, **lie(peer, before)}
            boxes[peer] = sign(SHARE, body, sender=liar, context=signed["context"], keys=keys)
        return {**answer, "shares": encode({**outer, "boxes": boxes})}

    release.tasks = {**release.tasks, BEGIN: begin}


def rubbish(victims: Collection[str]) -> Lie:
    """Shares that do not open, for some."""
    return lambda peer, body: {"box": bytes(len(body["box"]))} if peer in victims else {}


def accusing(release: Release, liar: str, *accused: Collection[str]) -> None:
    """Let a site blame others that did nothing; where several groups are given, one at every attempt."""

    def contribute(message: Mapping[str, Any]) -> Message:
        inbox = message["inbox"]
        now = accused[min(message["sum"]["attempt"], len(accused)) - 1]
        body = {"shares": {name: inbox[name] for name in now if name in inbox}}
        context = decode(next(iter(inbox.values())))["context"]
        keys = release._secure._keys  # type: ignore[union-attr]
        blame = sign(BLAME, body, sender=liar, context=context, keys=keys)
        return {"round": message["sum"]["round"], "blame": blame}

    release.tasks = {**release.tasks, CONTRIBUTE: contribute}
