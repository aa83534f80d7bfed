"""What one attempt at a sum is about. Its digest goes into every key, so that none of it can differ between sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossward.privacy.secagg.canonical import Malformed, digest, field

_KINDS: Mapping[str, type] = {
    "study": str,
    "round": int,
    "attempt": int,
    "cohort": list,
    "model": str,
    "plan": str,
    "layout": str,
}


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One attempt at one sum.

    Attributes:
        study: digest of what is trained and how; every run of it has the same, in whatever job.
        round_number: from 1.
        attempt: from 1; a new number is a new set of masks over the same update.
        cohort: those who are asked for a part, in the order of their names.
        model: digest of the model that the parts were made from.
        plan: digest of the published coefficients.
        layout: digest of the vector's sections, their ranges and weights.
    """

    study: str
    round_number: int
    attempt: int
    cohort: tuple[str, ...]
    model: str
    plan: str
    layout: str

    def __post_init__(self) -> None:
        if self.round_number < 1 or self.attempt < 1:
            raise Malformed("rounds and attempts are counted from 1")
        if list(self.cohort) != sorted(set(self.cohort)):
            raise Malformed("a cohort names every site once, in order")

    def message(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "round": self.round_number,
            "attempt": self.attempt,
            "cohort": list(self.cohort),
            "model": self.model,
            "plan": self.plan,
            "layout": self.layout,
        }

    @classmethod
    def from_message(cls, message: Any) -> Binding:
        """Read what ``message`` gave."""
        values = {name: field(message, name, kind) for name, kind in _KINDS.items()}
        if message.keys() != _KINDS.keys() or not all(type(name) is str for name in values["cohort"]):
            raise Malformed("a begin that says something else")
        return cls(
            study=values["study"],
            round_number=values["round"],
            attempt=values["attempt"],
            cohort=tuple(values["cohort"]),
            model=values["model"],
            plan=values["plan"],
            layout=values["layout"],
        )

    def context(self, *, job: str, roster: bytes, settings: bytes, group: bytes) -> bytes:
        """The salt of every key of this attempt: who was told another cohort, model or plan has other keys."""
        return digest("context", job, roster, settings, group, self.message())
