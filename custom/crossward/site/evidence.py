"""What shows that somebody broke secure aggregation: signed messages, in a folder of the run at whoever found it.

A file holds what its signers said, what was wrong with it, and the signed keys to check it with. It holds no secret
and nothing of an update: what opens masks, in whole or in part, is never written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from crossward.federation.errors import PrivacyRefusal, StorageFailure
from crossward.federation.storage import private_folder, write_json
from crossward.privacy.secagg.attempt import Blamed, OutOfTurn
from crossward.privacy.secagg.canonical import Malformed, decode
from crossward.privacy.secagg.memory import Replayed
from crossward.privacy.secagg.messages import AGREED, BLAME, SHARE, UPLOAD
from crossward.site.messages import BEGIN, CONTRIBUTE, REVEAL, ROSTER, SURVIVORS, Message

FOLDER: Final = "evidence"
KEPT: Final = "; evidence: "
"""Stands in a log line before the place of the evidence."""

SERVER: Final = "server"
MOST_FILES: Final = 200
"""The first ones say most; whoever goes on must not fill the disk with them."""

_FORMAT: Final = "crossward.evidence/1"
_KINDS: Final = frozenset({SHARE, UPLOAD, AGREED, BLAME})

Task = Callable[[Mapping[str, Any]], Message]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that was done against the rules.

    Attributes:
        site: that did it, or the server.
        what: it did, in plain words.
        round_number: in which round.
        attempt: at which sum of it.
        messages: that show it, by what they are.
        hellos: the signers' keys, signed by their certificates.
    """

    site: str
    what: str
    round_number: int
    attempt: int
    messages: Mapping[str, bytes]
    hellos: Mapping[str, bytes]


class Evidence:
    """Files of evidence, one for each fault.

    Args:
        run: folder of the run.
        shown: how log lines call that folder; they may be read where nobody need know the whole path.
    """

    def __init__(self, run: Path, *, shown: str) -> None:
        self._folder = run / FOLDER
        self._shown = f"{shown}/{FOLDER}"

    def keep(self, fault: Fault) -> str:
        """Write what shows a fault; gives the line for the log, which says where it is.

        A disk that is full does not stop a run whose evidence it cannot hold: the line says so.
        """
        content = {
            "format": _FORMAT,
            "site": fault.site,
            "round": fault.round_number,
            "attempt": fault.attempt,
            "what": fault.what,
            "messages": {name: _text(each) for name, each in fault.messages.items() if _may_be_kept(each)},
            "hellos": {name: _text(hello) for name, hello in fault.hellos.items()},
        }
        told = f"{fault.site}, round {fault.round_number}, attempt {fault.attempt}: {fault.what}"
        unique = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        name = f"round-{fault.round_number:04d}-{fault.site}-{unique}.json"
        try:
            folder = private_folder(self._folder)
            if len(list(folder.iterdir())) >= MOST_FILES:
                return f"{told}{KEPT}not kept, {self._shown} has {MOST_FILES} files already"
            write_json(folder / name, content)
        except (StorageFailure, OSError) as error:
            return f"{told}{KEPT}could not be kept ({error})"
        return f"{told}{KEPT}{self._shown}/{name}"


@dataclass
class _Heard:
    """What a site was told and said at one sum, as far as it was signed."""

    round_number: int = 0
    attempt: int = 0
    said: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)


class Witness:
    """Stands beside a site's tasks, and keeps what others signed where the site finds fault with it.

    Args:
        site: its name.
        evidence: where it is kept.
    """

    def __init__(self, site: str, evidence: Evidence) -> None:
        self._evidence = evidence
        self._log = logging.getLogger(f"crossward.site.{site}")
        self._hellos: dict[str, bytes] = {}
        self._heard = _Heard()

    def over(self, tasks: Mapping[str, Task]) -> dict[str, Task]:
        """The same tasks, watched."""
        return {name: self._watched(name, task) for name, task in tasks.items()}

    def _watched(self, name: str, task: Task) -> Task:
        def answered(message: Mapping[str, Any]) -> Message:
            try:
                answer = task(message)
            except Blamed as fault:
                signed = {key: _part(message, key).get(fault.site, b"") for key in ("inbox", "uploads", "agreements")}
                self._keep(fault.site, fault.what, {f"{fault.site}: {key}": each for key, each in signed.items()})
                raise
            except (OutOfTurn, Replayed) as fault:
                second = {f"then: {name}": each for name, each in _part(message, "uploads").items()}
                second |= {f"then agreed: {name}": each for name, each in _part(message, "agreements").items()}
                if name in (BEGIN, SURVIVORS, REVEAL) and self._heard.said:
                    self._keep(SERVER, f"asked for '{name}' a second time or out of turn ({fault})", second)
                raise
            self._note(name, message, answer)
            return answer

        return answered

    def _note(self, name: str, message: Mapping[str, Any], answer: Message) -> None:
        if name == ROSTER:
            self._hellos = {_sender(hello): hello for hello in message["hellos"]}
        if name == BEGIN:
            self._heard = _Heard(answer["round"], int(message["sum"]["attempt"]))
        if name == CONTRIBUTE and "blame" in answer:
            for accused, share in _part(decode(decode(answer["blame"])["body"]), "shares").items():
                self._keep(accused, "shared what does not hold", {f"{accused}: inbox": share, "blame": answer["blame"]})
        if name == SURVIVORS:
            self._heard.uploads = dict(message["uploads"])
        self._heard.said |= {part: answer[part] for part in ("upload", "opening") if part in answer}

    def _keep(self, against: str, what: str, messages: Mapping[str, bytes]) -> None:
        heard = self._heard
        first = {f"first: {name}": each for name, each in heard.uploads.items()}
        own = {f"own {part}": each for part, each in heard.said.items()}
        fault = Fault(
            site=against,
            what=what,
            round_number=heard.round_number,
            attempt=heard.attempt,
            messages={**first, **own, **messages},
            hellos=self._hellos,
        )
        self._log.error("%s", self._evidence.keep(fault))


def _may_be_kept(message: bytes) -> bool:
    """Shares that were revealed open masks, and a message of no known kind may hold anything."""
    try:
        content = decode(message)
    except PrivacyRefusal:
        return False
    return type(content) is dict and content.get("kind") in _KINDS


def _part(message: Any, name: str) -> dict[str, bytes]:
    """A mapping of signed messages in a task; nothing where the server sent something else."""
    found = message.get(name)
    return {key: each for key, each in found.items() if type(each) is bytes} if isinstance(found, dict) else {}


def _sender(hello: bytes) -> str:
    try:
        return str(decode(decode(hello)["body"])["name"])
    except (Malformed, KeyError, TypeError) as error:
        raise Malformed("a site of the roster says no name") from error


def _text(message: bytes) -> str:
    return base64.b64encode(message).decode()
