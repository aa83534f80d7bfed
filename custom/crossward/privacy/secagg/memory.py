"""What a site remembers about its update of a model, so that it never enters two sums that differ.

Two sums over cohorts that differ by a few sites differ by the updates of those few. A site that has helped to open a
sum therefore gives the same update to the same cohort again, or to none. The record outlives jobs: a job that
is submitted again with one site fewer would otherwise escape it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import digest

Step = Literal["masked", "opened"]


class AlreadyUsed(PrivacyRefusal):
    """An attempt, a model or an update that was used before in a way that forbids using it again."""


class Replayed(AlreadyUsed):
    """An attempt that the server asks for a second time."""


@dataclass(frozen=True)
class Use:
    """One step of one attempt, on disk before the step is taken.

    Attributes:
        job: whose keys masked it.
        round_number: of the attempt.
        attempt: its number.
        cohort: whose parts the sum has.
        update: digest of this site's part before masking.
        about: digest of the plan and the layout that it was masked under.
        step: masked, or this site helped to open the sum.
    """

    job: str
    round_number: int
    attempt: int
    cohort: tuple[str, ...]
    update: str
    about: str
    step: Step


class Memory(Protocol):
    """Keeps uses under (study, model) across jobs and restarts; ``keep`` returns only when it is on disk."""

    def uses(self, study: str, model: str) -> Sequence[Use]:
        """Everything kept for a model of a study."""

    def keep(self, study: str, model: str, use: Use) -> None:
        """Keep one more."""


class Forgetful:
    """A memory for tests and simulations: it ends with its process."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], list[Use]] = {}

    def uses(self, study: str, model: str) -> Sequence[Use]:
        return tuple(self._uses.get((study, model), ()))

    def keep(self, study: str, model: str, use: Use) -> None:
        self._uses.setdefault((study, model), []).append(use)


def check_new(uses: Sequence[Use], binding: Binding, *, job: str) -> None:
    """Refuse an attempt that would mask twice with one set of keys, or show the difference of two sums.

    A sum that was opened without some of those who were asked is asked for in the same words again: whose parts are
    in it is seen before anything is masked, see ``check_sum``.

    Raises:
        AlreadyUsed: with what was used before.
    """
    for use in uses:
        same_keys = (use.job, use.round_number, use.attempt) == (job, binding.round_number, binding.attempt)
        if same_keys or (use.job == job and use.round_number == binding.round_number and use.attempt > binding.attempt):
            raise Replayed(f"attempt {binding.attempt} of round {binding.round_number} was made before")
    for use in uses:
        if use.step == "opened" and not (use.about == about_of(binding) and set(use.cohort) <= set(binding.cohort)):
            raise AlreadyUsed(_opened(use))


def about_of(binding: Binding) -> str:
    """What the parts of a sum are multiplied with, and how they are written."""
    return digest("about", binding.plan, binding.layout).hex()


def check_sum(uses: Sequence[Use], *, cohort: tuple[str, ...], about: str) -> None:
    """Refuse another sum of a model for which one was opened: other sites or other weights are another equation.

    Raises:
        AlreadyUsed: with the round of the earlier one.
    """
    for use in uses:
        if use.step == "opened" and (use.cohort, use.about) != (cohort, about):
            raise AlreadyUsed(_opened(use))


def _opened(use: Use) -> str:
    return (
        f"the update of round {use.round_number} is in a sum that this site helped to open; it may enter another only "
        "with the same sites and the same plan"
    )


def check_same_update(uses: Sequence[Use], update: str) -> None:
    """Refuse another update of a model: the others may have opened the sum with the first one without this site."""
    if any(use.update != update for use in uses):
        raise AlreadyUsed("another update of the same model was masked before; only the same one may be masked again")


def hold_to(memory: Memory, study: str, what: str, value: str, *, job: str, most: int = 1) -> None:
    """Let something have only so many different values in a study, also beyond this job and process.

    Raises:
        AlreadyUsed: this would be one more.
    """
    kept = {use.update for use in memory.uses(study, what)}
    if value in kept:
        return
    if len(kept) >= most:
        raise AlreadyUsed(f"{what}: it was {len(kept)} times something else before, and that is the most")
    memory.keep(study, what, Use(job, 0, 0, (), value, "", "masked"))
