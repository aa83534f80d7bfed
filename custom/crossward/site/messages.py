"""What server and site say to each other, as plain values: numbers, short strings and numpy arrays, never objects.

The server's message names the run, the round and the study, and carries a model. A site's answer is a code with
numbers, or the declared tensors and counts. FLARE carries both; nothing here knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

import crossward
from crossward.federation.contract import Payload, Plan, Report, Sealed
from crossward.federation.errors import PrivacyRefusal
from crossward.site.troubles import Code, Refusal

Message = dict[str, Any]

JOIN: Final = "join"
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
FINISH: Final = "finish"
ROSTER: Final = "roster"
KEYS: Final = "keys"
BEGIN: Final = "begin"
CONTRIBUTE: Final = "contribute"
SURVIVORS: Final = "survivors"
REVEAL: Final = "reveal"
OPEN_TASKS: Final = (JOIN, TRAIN, EVALUATE, FINISH)
TASKS: Final = (*OPEN_TASKS, ROSTER, KEYS, BEGIN, CONTRIBUTE, SURVIVORS, REVEAL)
"""Every exchange between server and site is one of these tasks; nothing travels beside them."""

OK: Final = 0
PROTOCOL: Final = 1
SCORES: Final = ("n_train", "n_val", "n_test", "accuracy", "balanced_accuracy", "auc", "accuracy_as_received")
"""What a site publishes about its test images, where its policy lets it."""


def address(*, run: str, study: str, round_number: int) -> Message:
    """What every message of the server begins with."""
    return {
        "protocol": PROTOCOL,
        "version": crossward.__version__,
        "study": study,
        "run": run,
        "round": round_number,
    }


def check_address(message: Mapping[str, Any], study: str) -> None:
    """Refuse a message of another protocol, version or study."""
    expected = (PROTOCOL, crossward.__version__, study)
    if (message.get("protocol"), message.get("version"), message.get("study")) != expected:
        raise Refusal(Code.VERSION)


def check_round(task: str, message: Mapping[str, Any], *, rounds: int) -> None:
    """Refuse a model of a round that the study does not plan: each would be one more look at the site's images."""
    if "model_round" not in message:
        return
    number, last = message["model_round"], rounds - 1 if task == TRAIN else rounds
    if type(number) is not int or not 0 <= number <= last:
        raise Refusal(Code.BAD_TASK) from PrivacyRefusal(
            f"'{task}' with a model after round {number} of a study of {rounds} rounds"
        )


def pack_payload(payload: Payload) -> Message:
    """A model as plain values; the arrays are the tensors' own memory."""
    return {
        "model_round": payload.round_number,
        "best_round": payload.best_round,
        "plan": payload.plan.to_json() if payload.plan else "",
        "sealed": _pack_sealed(payload.sealed),
        "tensors": {name: tensor.detach().cpu().numpy() for name, tensor in payload.tensors.items()},
    }


def unpack_payload(message: Mapping[str, Any]) -> Payload:
    """The model in a message."""
    try:
        return Payload(
            int(message["model_round"]),
            {name: torch.from_numpy(_writable(array)) for name, array in message["tensors"].items()},
            message["best_round"],
            Plan.from_json(message["plan"]) if message["plan"] else None,
            _unpack_sealed(message["sealed"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(Code.BAD_TASK) from error


def pack_report(report: Report) -> Message:
    """A report as plain values."""
    return {
        "model": report.model,
        "update": {name: tensor.detach().cpu().numpy() for name, tensor in report.update.items()},
        "tally": dict(report.tally),
    }


def unpack_report(site: str, answer: Mapping[str, Any]) -> Report:
    """The report in an answer; whether it is what was declared is checked by the declaration."""
    return Report(
        site,
        int(answer["round"]),
        str(answer["model"]),
        {name: torch.from_numpy(_writable(array)) for name, array in answer["update"].items()},
        dict(answer["tally"]),
    )


def trouble(refusal: Refusal) -> Message:
    """The answer of a site that could not do what it was asked for."""
    return {"code": int(refusal.code), "numbers": refusal.numbers}


def _pack_sealed(sealed: Sealed | None) -> Message:
    return {} if sealed is None else {"header": sealed.header(), "words": sealed.words}


def _unpack_sealed(message: Mapping[str, Any]) -> Sealed | None:
    return Sealed.from_parts(message["header"], _writable(message["words"])) if message else None


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Torch takes no read-only memory, which is what a message may be made of."""
    return array if array.flags.writeable else array.copy()
