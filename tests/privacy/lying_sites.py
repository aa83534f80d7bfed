"""Sites that lie to an honest server: whatever they sign, the server adds up right, blames, or gives the attempt up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import numpy as np

from crossward.federation.errors import CrosswardError
from crossward.privacy.secagg.canonical import Malformed, decode, encode
from crossward.privacy.secagg.keys import sign
from crossward.privacy.secagg.server import Caught
from tests.privacy.federation import Federation, binding

WORDS = 4
_JUNK: tuple[Any, ...] = (
    None,
    0,
    -1,
    "",
    "text",
    b"",
    bytes(32),
    bytes(33),
    b"\xff" * 33,
    [],
    [1],
    [300] * 33,
    {},
    {"a": 1},
)


def bent(message: bytes, dice: Random, *, resign: Callable[[dict[str, Any], dict[str, Any]], bytes]) -> bytes:
    """A message with something else in one place, signed again by its sender where it was signed."""
    outer = decode(message)
    if "body" not in outer:
        return encode(_bent_value(outer, dice, resign))
    return resign(outer, _bent_value(decode(outer["body"]), dice, resign))


def _bent_value(value: dict[str, Any], dice: Random, resign: Any) -> dict[str, Any]:
    key = dice.choice(sorted(value))
    change = {
        "drop": lambda: {name: each for name, each in value.items() if name != key},
        "more": lambda: {**value, "site-99": dice.choice(_JUNK)},
        "junk": lambda: {**value, key: dice.choice(_JUNK)},
        "flip": lambda: {**value, key: _flipped(value[key], dice, resign)},
    }
    return change[dice.choice(["drop", "more", "junk", "flip", "flip", "flip"])]()


def _flipped(value: Any, dice: Random, resign: Any) -> Any:
    if isinstance(value, dict) and value:
        key = dice.choice(sorted(value))
        return {**value, key: _flipped(value[key], dice, resign)}
    if isinstance(value, bytes) and value:
        try:
            return bent(value, dice, resign=resign)
        except (Malformed, TypeError):
            where = dice.randrange(len(value))
            return value[:where] + bytes([value[where] ^ (1 << dice.randrange(8))]) + value[where + 1 :]
    return dice.choice(_JUNK)


class HonestServer:
    """One attempt at an honest server among sites of which some bend what they send.

    Args:
        federation: that has agreed on keys.
        liars: sites that lie.
        seed: of all that they decide.
        lies: how often.
    """

    def __init__(self, federation: Federation, liars: Collection[str], *, seed: int, lies: float = 0.4) -> None:
        self._federation = federation
        self._liars = liars
        self._dice = Random(seed)
        self._lies = lies
        self.outcomes: Counter[str] = Counter()

    def go(self, attempt_number: int) -> str:
        """How the attempt ended; an error that is not one of Crossward's own comes through."""
        sites = sorted(self._federation.sites)
        about = binding(sites, attempt=attempt_number)
        vectors = {name: np.full(WORDS, 16**number, np.uint32) for number, name in enumerate(sites)}
        attempt = self._federation.server.attempt(about, words=WORDS)

        def sent(name: str, message: bytes) -> bytes:
            lie = name in self._liars and self._dice.random() < self._lies
            return bent(message, self._dice, resign=lambda *parts: self._signed(name, *parts)) if lie else message

        for name in sites:
            self._ask("shares", lambda name=name: attempt.take_shares(name, sent(name, self._site(name).begin(about))))
        if self._ask("sharers", attempt.close_sharing) is None:
            return "too few sharers"

        def contribute(name: str) -> None:
            words = vectors[name].copy()
            message = self._site(name).contribute(attempt.inbox(name), words, update=f"update of {name}")
            attempt.take_vector(name, sent(name, message), words)

        for name in attempt._sharers:
            self._ask("vector", lambda name=name: contribute(name))
        uploads = self._ask("uploads", attempt.close_uploads)
        if uploads is None:
            return "too few uploads"
        for name in attempt.survivors:
            take = attempt.take_reveal if attempt.complete else attempt.take_agreement
            self._ask(
                "survivors", lambda name=name, take=take: take(name, sent(name, self._site(name).survivors(uploads)))
            )
        agreements = {} if attempt.complete else self._ask("agreements", attempt.agreements)
        if agreements is None:
            return "too few agreed"
        for name in agreements:
            self._ask(
                "reveal", lambda name=name: attempt.take_reveal(name, sent(name, self._site(name).reveal(agreements)))
            )
        if self._ask("open", attempt.open) is None:
            return "not opened"
        expected = sum(int(vectors[name][0]) for name in attempt.survivors)
        assert attempt.sum.tolist() == [expected] * WORDS, "a wrong sum"
        return "opened"

    def _site(self, name: str) -> Any:
        return self._federation.sites[name]

    def _signed(self, name: str, outer: dict[str, Any], body: dict[str, Any]) -> bytes:
        keys = self._site(name)._keys
        return sign(outer["kind"], body, sender=outer["sender"], context=outer["context"], keys=keys)

    def _ask(self, step: str, function: Callable[[], Any]) -> Any:
        try:
            found = function()
        except CrosswardError as error:
            self.outcomes[f"{step}: {type(error).__name__}"] += 1
            if isinstance(error, Caught) and error.site not in self._liars:
                raise AssertionError(f"{error.site} is honest, and blamed") from error
            return None
        return True if found is None else found
