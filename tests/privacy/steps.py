"""What tests of threats have in common: an attempt step by step, a site that lies, and whether words are uniform."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import decode
from crossward.privacy.secagg.keys import sign
from crossward.privacy.secagg.server import Attempt
from tests.privacy.federation import Federation

Vector = NDArray[np.uint32]
CHANCE = 1e-6
"""Below this a statistic fails by chance."""


class Round:
    """An attempt step by step, so that a test can interfere between any two steps."""

    def __init__(self, federation: Federation, about: Binding, *, words: int = 8) -> None:
        self.federation = federation
        self.about = about
        self.attempt: Attempt = federation.server.attempt(about, words=words)
        self.masked: dict[str, Vector] = {}
        self.uploads: dict[str, bytes] = {}
        self._words = words

    def begin(self, **others: Binding) -> Round:
        for name in self.about.cohort:
            about = others.get(name.replace("-", "_"), self.about)
            self.attempt.take_shares(name, self.federation.sites[name].begin(about))
        self.attempt.close_sharing()
        return self

    def contribute(self, sites: Collection[str] | None = None, vectors: Mapping[str, Vector] | None = None) -> Round:
        for name in sites or self.about.cohort:
            words = vectors[name].copy() if vectors else np.zeros(self._words, np.uint32)
            message = self.federation.sites[name].contribute(self.attempt.inbox(name), words, update="update")
            self.masked[name], self.uploads[name] = words, message
            self.attempt.take_vector(name, message, words)
        return self

    def some(self, *sites: str) -> dict[str, bytes]:
        return {name: self.uploads[name] for name in sites}


def changed(federation: Federation, name: str, kind: str, message: bytes, **changes: Any) -> bytes:
    """A site that lies under its own signature."""
    outer = decode(message)
    body = {**decode(outer["body"]), **changes}
    return sign(kind, body, sender=name, context=outer["context"], keys=federation.sites[name]._keys)


def uniform(words: Vector) -> float:
    """The chance of octets as uneven as these, if all are equally likely: chi-square over 256 cells."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    return float(stats.chisquare(counts).pvalue)
