"""What may leave a site in answer to each task, worked out from the study alone.

The gate at a site builds every answer anew from this list, and the server holds what arrives against the same list.
Whatever is not on it is not dropped quietly: the whole answer is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from crossward.federation.contract import VALIDATION
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import decode
from crossward.privacy.secagg.messages import AGREED, BLAME, JOINED, UPLOAD
from crossward.privacy.secagg.messages import REVEAL as REVEALED
from crossward.privacy.secagg.sketch import WIDTH
from crossward.privacy.sums import MaskedAlgebra, Request
from crossward.site import messages
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    FINISH,
    JOIN,
    KEYS,
    OK,
    REVEAL,
    ROSTER,
    SCORES,
    SURVIVORS,
    TRAIN,
    Message,
)
from crossward.site.study import Study
from crossward.site.troubles import SITE_CODES, Code, settings_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_ROUNDS = 1_000_000
_LONGEST_MESSAGE = 1 << 20

Check = Callable[[str, Any], Any]


class Declaration:
    """The whitelist of one study: for every task the names, kinds and shapes of what an answer may hold."""

    def __init__(self, study: Study) -> None:
        self.algebra = study.method.algebra(study.task, study.model())
        tensors = {name: _array(spec.shape, np.float32) for name, spec in self.algebra.sent.items()}
        tally = {key: _array(shape, np.float64) for key, shape in self.algebra.tallies.items()}
        self.masking = study.masking
        self.masked = study.masking and MaskedAlgebra(self.algebra, bits=study.masking.bits, reach=study.reach)
        self.privacy = study.privacy
        self._required: dict[str, dict[str, Check]]
        self._optional: dict[str, dict[str, Check]]
        if self.masked:
            self._required, self._optional = _masked_checks(self.masked), {}
            return
        validation = dict.fromkeys(VALIDATION, _array((1,), np.float64))
        self._required = {
            JOIN: {},
            TRAIN: {"round": _round, "model": _digest, "update": _mapping(tensors), "tally": _mapping(tally)},
            EVALUATE: {"round": _round, "validation": _mapping(validation)},
            FINISH: {"round": _round},
        }
        self._optional = {
            TRAIN: {"validation": _mapping(validation)},
            FINISH: {"scores": _mapping(dict.fromkeys(SCORES, _number_or_none))},
        }

    def rebuild(self, task: str, answer: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> Message:
        """Copy an answer, piece by declared piece.

        Args:
            task: that is answered.
            answer: to it.
            asked: the server's message, which decides how long a masked vector is.

        Raises:
            PrivacyRefusal: it is not an answer to this task, lacks something, or holds anything else.
        """
        if task not in self._required:
            raise PrivacyRefusal(f"an answer to the unknown task '{task[:40]}' may not leave the site")
        code = answer.get("code")
        if type(code) is not int:
            raise PrivacyRefusal(f"{task}: an answer without a code may not leave the site")
        if code != OK:
            return _rebuilt_trouble(task, code, answer)
        required, optional = self._required[task], self._optional.get(task, {})
        if task == CONTRIBUTE and "blame" in answer:
            required = {"round": _round, "blame": _blame(asked or {})}
        elif task == CONTRIBUTE:
            required = {**required, "vector": self._vector(asked or {})}
        checks = {**required, **optional}
        for name in answer:
            if name not in checks and name != "code":
                raise PrivacyRefusal(f"{task}: the answer holds '{name}', which may not leave the site")
        for name in required:
            if name not in answer:
                raise PrivacyRefusal(f"{task}: the answer lacks '{name}'")
        parts = {name: check(f"{task}: {name}", answer[name]) for name, check in checks.items() if name in answer}
        return {"code": OK, **parts}

    def _vector(self, asked: Mapping[str, Any]) -> Check:
        """A masked vector has exactly the length that the request for it, the plan in it and the study give."""
        if not self.masked:
            raise PrivacyRefusal("a masked vector in a job without secure aggregation")
        request = Request.from_message(asked.get("sum") or {})
        self.masked.check(request)
        layout = self.masked.layout(request)
        return _array((layout.words * layout.ring.bits // 8,), np.uint8)

    def rows(self) -> list[dict[str, str]]:
        """What may leave, for people: a row per task and kind of content."""
        sent = self.algebra.sent
        values = sum(spec.numel for spec in sent.values())
        contents = {
            "update": f"{len(sent)} tensors, {values:,} float32 values",
            "tally": ", ".join(self.algebra.tallies),
            "validation": ", ".join(VALIDATION),
            "scores": f"{', '.join(SCORES)} (policy: publish_scores, minimum_cell)",
            "model": "SHA-256 of the model that was received",
            "round": "number",
            "cosines": _compared(self.masked) if self.masked else "",
            "vector": "masked whole numbers; what is in them can only be read as a sum over sites",
            "hello": "the site's keys of this job, signed by its certificate",
            "joined": "signed: the list of keys that the site was given",
            "shares": "shares of this attempt's secrets, each sealed to one other site",
            "upload": "signed: digest of the masked vector",
            "blame": "signed, in place of both: a site whose shares do not hold, and these as it signed them",
            "opening": "signed: shares that take masks off the sum, or agreement to the sites in it",
        }
        return [
            {"task": task, "part": part, "content": contents[part]}
            for task in messages.TASKS
            if task in self._required
            for part in (
                *self._required[task],
                *self._optional.get(task, {}),
                *(["blame"] if task == CONTRIBUTE else []),
            )
        ]


def _masked_checks(masked: MaskedAlgebra) -> dict[str, dict[str, Check]]:
    """What leaves under secure aggregation: messages of the protocol, sketches, and masked vectors."""
    shapes = {block: masked.algebra.sent[name].numel for block, name in masked.rotated_blocks.items()}
    shapes |= dict.fromkeys(masked.sketched, WIDTH)
    cosines = {block: _array((size,), np.float64) for block, size in shapes.items()}
    opening = {"round": _round, "opening": _signed(AGREED, REVEALED)}
    return {
        JOIN: {"hello": _message(frozenset({"body", "certificate", "signature"}))},
        ROSTER: {"joined": _signed(JOINED)},
        KEYS: {},
        TRAIN: {"round": _round, "cosines": _mapping(cosines)},
        EVALUATE: {"round": _round},
        BEGIN: {"round": _round, "shares": _message(frozenset({"boxes", "wrapped"}))},
        CONTRIBUTE: {"round": _round, "upload": _signed(UPLOAD), "vector": _refused},
        SURVIVORS: opening,
        REVEAL: opening,
        FINISH: {"round": _round},
    }


def _compared(masked: MaskedAlgebra) -> str:
    sketches, turned = len(masked.sketched), len(masked.rotated)
    parts = [f"{sketches} sketches of {WIDTH} numbers"] * bool(sketches)
    parts += [f"{turned} vector{'s' * (turned > 1)} turned by a key of the sites"] * bool(turned)
    return ", ".join(parts) or "nothing"


def items_of(answer: Mapping[str, Any]) -> list[tuple[str, list[int], int]]:
    """Name, shape and bytes of everything in an answer, for the journal."""
    found: list[tuple[str, list[int], int]] = []
    for name, value in answer.items():
        if isinstance(value, Mapping):
            found += [(f"{name}/{inner}", shape, size) for inner, shape, size in items_of(value)]
        elif isinstance(value, np.ndarray):
            found.append((name, list(value.shape), value.nbytes))
        else:
            found.append((name, [], len(value) if isinstance(value, str | bytes) else 8))
    return found


def _rebuilt_trouble(task: str, code: int, answer: Mapping[str, Any]) -> Message:
    if code not in SITE_CODES:
        raise PrivacyRefusal(f"{task}: {code} is not a code that may leave the site")
    allowed = dict.fromkeys(settings_of(Code(code)), _number)
    if set(answer) - {"code", "numbers"}:
        raise PrivacyRefusal(f"{task}: an answer with code {code} holds more than its numbers")
    numbers = _mapping(allowed, optional=True)(f"{task}: numbers", answer.get("numbers", {}))
    return {"code": code, "numbers": numbers}


def _mapping(entries: Mapping[str, Check], *, optional: bool = False) -> Check:
    def check(where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise PrivacyRefusal(f"{where} is not what was declared")
        for name in value:
            if name not in entries:
                raise PrivacyRefusal(f"{where} holds '{name}', which may not leave the site")
        if not optional and len(value) < len(entries):
            missing = next(name for name in entries if name not in value)
            raise PrivacyRefusal(f"{where} lacks '{missing}'")
        # The names are ours, not those that came with the answer.
        return {name: entry(f"{where}/{name}", value[name]) for name, entry in entries.items() if name in value}

    return check


def _array(shape: tuple[int, ...], kind: type[np.generic]) -> Check:
    def check(where: str, value: Any) -> np.ndarray[Any, Any]:
        if type(value) is not np.ndarray or value.dtype != kind or value.shape != shape:
            raise PrivacyRefusal(f"{where} is not an array {shape} of {np.dtype(kind).name}, as was declared")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise PrivacyRefusal(f"{where} has values that are not finite")
        return value

    return check


def _message(fields: frozenset[str]) -> Check:
    """Bytes that are one message of the protocol with these fields."""

    def check(where: str, value: Any) -> bytes:
        if type(value) is not bytes or len(value) > _LONGEST_MESSAGE:
            raise PrivacyRefusal(f"{where} is not a message of the protocol")
        content = decode(value)
        if type(content) is not dict or content.keys() != fields:
            raise PrivacyRefusal(f"{where} is not the message that belongs there")
        return value

    return check


def _signed(*kinds: str) -> Check:
    """Bytes that are a signed message of one of these kinds."""
    whole = _message(frozenset({"kind", "sender", "context", "body", "signature"}))

    def check(where: str, value: Any) -> bytes:
        found: bytes = whole(where, value)
        if decode(found)["kind"] not in kinds:
            raise PrivacyRefusal(f"{where} is not the message that belongs there")
        return found

    return check


def _blame(asked: Mapping[str, Any]) -> Check:
    """A signed message that holds what others sealed to this site, as it came, and nothing else."""
    inbox = asked.get("inbox")
    whole = _signed(BLAME)

    def check(where: str, value: Any) -> bytes:
        found: bytes = whole(where, value)
        body = decode(decode(found)["body"])
        shares = body.get("shares") if type(body) is dict and body.keys() == {"shares"} else None
        if type(shares) is not dict or not shares or not isinstance(inbox, Mapping):
            raise PrivacyRefusal(f"{where} is not the message that belongs there")
        if any(inbox.get(accused) != share for accused, share in shares.items()):
            raise PrivacyRefusal(f"{where} holds something else than others shared with the site")
        return found

    return check


def _refused(where: str, value: Any) -> Any:
    del value
    raise PrivacyRefusal(f"{where} may not leave the site: nobody asked for a sum")


def _round(where: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_ROUNDS:
        raise PrivacyRefusal(f"{where} is not the number of a round")
    return value


def _digest(where: str, value: Any) -> str:
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise PrivacyRefusal(f"{where} is not a digest")
    return value


def _number_or_none(where: str, value: Any) -> float | None:
    return None if value is None else _number(where, value)


def _number(where: str, value: Any) -> float:
    # Compared, not converted: a whole number may be larger than any float.
    if type(value) not in (int, float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise PrivacyRefusal(f"{where} is not a finite number")
    return float(value)
