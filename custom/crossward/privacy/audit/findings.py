"""What an audit found: one figure for each attack and setting, with the rule it is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]

_SEEN = 12.0
"""Decibel below which little is left of an image but shades."""


class Setting(StrEnum):
    """What protects the update that the attacker sees."""

    NONE = "unprotected"
    DP = "differential privacy"
    SECAGG = "secure aggregation"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One attack in one setting.

    Attributes:
        subject: what was attacked: the built-in set-up, or a site of a run.
        attack: its name.
        setting: what protected.
        figure: what it came to; None for a check that has no figure.
        unit: of the figure.
        rule: what it is held against, in words; empty where there is no rule.
        passed: whether the rule holds; None without one.
        words: more about it, for a reader.
        seconds: that it took.
    """

    subject: str
    attack: str
    setting: Setting
    figure: float | None
    unit: str
    rule: str = ""
    passed: bool | None = None
    words: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """An original, and what attackers made of it.

    Attributes:
        subject: where the image is from.
        original: [h,w] or [h,w,3].
        rebuilt: by setting, with its likeness in decibel.
    """

    subject: str
    original: Picture
    rebuilt: Mapping[Setting, tuple[Picture, float]]


@dataclass
class Findings:
    """Everything that an audit found, and pictures of it."""

    rows: list[Finding] = field(default_factory=list)
    pictures: list[Pictured] = field(default_factory=list)

    def extend(self, other: Findings) -> None:
        self.rows += other.rows
        self.pictures += other.pictures

    @property
    def failed(self) -> list[Finding]:
        """What breaks its rule."""
        return [row for row in self.rows if row.passed is False]

    def facts(self) -> list[dict[str, Any]]:
        """Plain values, as in ``audit.json``."""
        return [
            {
                **{name: getattr(row, name) for name in ("subject", "attack", "figure", "unit", "rule", "passed")},
                "setting": row.setting.value,
                "words": row.words,
                "seconds": round(row.seconds, 3),
            }
            for row in self.rows
        ]


def shown(value: float | None, unit: str) -> str:
    """A figure as a reader wants it."""
    if value is None:
        return ""
    return f"{value:.1f} {unit}" if unit == "dB" else f"{value:.0f} {unit}" if unit == "%" else f"{value:.3f}"


def worked(figure: float, least: float, *, unit: str) -> tuple[str, bool]:
    """Rule of an attack that has to succeed where nothing protects: else the audit shows nothing."""
    return f"works: above {least:g}{_with(unit)}", figure > least


def below(figure: float, most: float, *, unit: str = "") -> tuple[str, bool]:
    """Rule of an attack that has to fail."""
    return f"below {most:g}{_with(unit)}", figure < most


def no_picture(figure: float, blind: float) -> tuple[str, bool]:
    """Rule of a gradient inversion that has to fail: nothing to see, or nothing that a guess would not have shown."""
    if blind + 1 <= _SEEN:
        return below(figure, _SEEN, unit="dB")
    return f"at most {blind + 1:.1f} dB: a blind guess and 1 dB", figure <= blind + 1


def _with(unit: str) -> str:
    return f" {unit}" if unit else ""
