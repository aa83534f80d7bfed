"""Options of transform and augmentation steps: what is allowed, what is usual, and what to say about anything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from crossward.federation.errors import BadInput
from crossward.imaging.rules.site import Step


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        usual: its value where it is not given; None where that means something of its own.
        allowed: whether a value will do.
        says: what will do, in words that fit after "must be".
        kept: the value in the one form that digests and steps see.
    """

    usual: Any
    allowed: Callable[[Any], bool]
    says: str
    kept: Callable[[Any], Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(usual: float | None, low: float, high: float, *, above: bool = False) -> Option:
    """A number from ``low`` to ``high``; ``above`` leaves ``low`` itself out."""
    says = f"a number above {low:g}, up to {high:g}" if above else f"a number from {low:g} to {high:g}"

    def allowed(value: Any) -> bool:
        return _is_number(value) and low <= value <= high and not (above and value == low)

    return Option(usual, allowed, says, float)


def whole(usual: int | None, low: int, high: int) -> Option:
    """A whole number from ``low`` to ``high``."""
    return Option(
        usual,
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
        f"a whole number from {low} to {high}",
        int,
    )


def choice(usual: str, *others: str) -> Option:
    """One of some words."""
    words = (usual, *others)
    return Option(usual, lambda value: value in words, f"one of {', '.join(words)}", str)


def or_auto(option: Option) -> Option:
    """Also the word auto, which means the same as leaving the option out."""
    return replace(
        option,
        allowed=lambda value: value == "auto" or option.allowed(value),
        says=f"{option.says}, or auto",
        kept=lambda value: option.usual if value == "auto" else option.kept(value),
    )


def yes_or_no(usual: bool) -> Option:
    """True or false."""
    return Option(usual, lambda value: isinstance(value, bool), "true or false", bool)


def rising(
    usual: Sequence[float] | None, low: float, high: float, *, least: int = 2, most: int = 99, level: bool = False
) -> Option:
    """A list of increasing numbers; ``level`` allows equal neighbours."""

    def allowed(value: Any) -> bool:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            return False
        if not all(_is_number(item) and low <= item <= high for item in value):
            return False
        return all(a < b or (level and a == b) for a, b in pairwise(value))

    return Option(
        None if usual is None else tuple(usual),
        allowed,
        f"a list of {least} to {most} increasing numbers from {low:g} to {high:g}",
        _numbers,
    )


def pair(usual: Sequence[float] | None, low: float, high: float) -> Option:
    """Two numbers, such as millimetres between rows and between columns."""
    return Option(
        usual,
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(_is_number(item) and low <= item <= high for item in value)
        ),
        f"two numbers from {low:g} to {high:g}, for rows and columns",
        _numbers,
    )


def _numbers(value: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(item) for item in value)


def settled(step: Step, options: Mapping[str, Option]) -> dict[str, Any]:
    """A step's options, checked, in one form and with the usual values for those not given.

    Raises:
        BadInput: an option is not known, or its value will not do; without a line number.
    """
    for name in step.options:
        if name not in options:
            raise BadInput(f"{step.name} has no option {name}{hint(name, options)}")
    found = {}
    for name, option in options.items():
        value = step.options.get(name)
        if value is None:
            found[name] = option.usual
            continue
        if not option.allowed(value):
            raise BadInput(f"{step.name}: {name} must be {option.says}")
        found[name] = option.kept(value)
    return found


def hint(name: object, known: Mapping[str, object]) -> str:
    """The known name nearest to a wrong one, and otherwise all of them."""
    near = get_close_matches(str(name), known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; choose from {', '.join(known)}" if known else "; it takes none"
