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

from crossward.federation.errors import PrivacyRefusal
from crossward.site import messages
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, SCORES, TRAIN, VALIDATION, Message
from crossward.site.study import Study
from crossward.site.troubles import SITE_CODES, Code, numbers_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_ROUNDS = 1_000_000

Check = Callable[[str, Any], Any]


class Declaration:
    """The whitelist of one study: for every task the names, kinds and shapes of what an answer may hold."""

    def __init__(self, study: Study) -> None:
        self.algebra = study.method.algebra(study.task, study.model())
        tensors = {name: _array(spec.shape, np.float32) for name, spec in self.algebra.sent.items()}
        tally = {key: _array(shape, np.float64) for key, shape in self.algebra.tallies.items()}
        validation = dict.fromkeys(VALIDATION, _array((1,), np.float64))
        self._required: dict[str, dict[str, Check]] = {
            JOIN: {},
            TRAIN: {"round": _round, "model": _digest, "update": _mapping(tensors), "tally": _mapping(tally)},
            EVALUATE: {"round": _round, "validation": _mapping(validation)},
            FINISH: {"round": _round},
        }
        self._optional: dict[str, dict[str, Check]] = {
            TRAIN: {"validation": _mapping(validation)},
            FINISH: {"scores": _mapping(dict.fromkeys(SCORES, _number_or_none))},
        }

    def rebuild(self, task: str, answer: Mapping[str, Any]) -> Message:
        """Copy an answer, piece by declared piece.

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
        checks = {**required, **optional}
        for name in answer:
            if name not in checks and name != "code":
                raise PrivacyRefusal(f"{task}: the answer holds '{name}', which may not leave the site")
        for name in required:
            if name not in answer:
                raise PrivacyRefusal(f"{task}: the answer lacks '{name}'")
        parts = {name: check(f"{task}: {name}", answer[name]) for name, check in checks.items() if name in answer}
        return {"code": OK, **parts}

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
        }
        return [
            {"task": task, "part": part, "content": contents[part]}
            for task in messages.TASKS
            for part in (*self._required[task], *self._optional.get(task, {}))
        ]


def items_of(answer: Mapping[str, Any]) -> list[tuple[str, list[int], int]]:
    """Name, shape and bytes of everything in an answer, for the journal."""
    found: list[tuple[str, list[int], int]] = []
    for name, value in answer.items():
        if isinstance(value, Mapping):
            found += [(f"{name}/{inner}", shape, size) for inner, shape, size in items_of(value)]
        elif isinstance(value, np.ndarray):
            found.append((name, list(value.shape), value.nbytes))
        else:
            found.append((name, [], len(value) if isinstance(value, str) else 8))
    return found


def _rebuilt_trouble(task: str, code: int, answer: Mapping[str, Any]) -> Message:
    if code not in SITE_CODES:
        raise PrivacyRefusal(f"{task}: {code} is not a code that may leave the site")
    allowed = dict.fromkeys(numbers_of(Code(code)), _number)
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
        if not np.isfinite(value).all():
            raise PrivacyRefusal(f"{where} has values that are not finite")
        return value

    return check


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
