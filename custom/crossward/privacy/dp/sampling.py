"""Who takes part in a step: every patient with the same chance, by the operating system's randomness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from crossward.federation.contract import Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.settings import Unit

IntArray = np.ndarray[Any, np.dtype[np.intp]]


class Uniform(Protocol):
    """Gives numbers that nobody can foretell; ``privacy.dp.noise.NoiseSource`` is one."""

    def uniform(self, count: int) -> Vector:
        """Numbers in [0, 1)."""


class PatientSampler:
    """Poisson sampling of patients, and of one image of each that is drawn.

    What accounting reckons with holds by construction: every unit is drawn on its own, with the same chance, anew in
    every step. The number of rows varies, and may be none. However many images a patient has, a step takes at most
    one.

    Args:
        patients: whose each row (image) is.
        rate: the chance of a unit to be drawn in a step.
        unit: what is drawn; with "image" every row is a unit of its own.
        source: of randomness; one with a seed would let others work out who was drawn.

    Attributes:
        units: how many patients, or images, there are.

    Raises:
        PrivacyRefusal: there is nobody to draw, or the rate is no chance above 0.
    """

    def __init__(self, patients: Sequence[str], *, rate: float, unit: Unit = "patient", source: Uniform) -> None:
        if not 0 < rate <= 1:
            raise PrivacyRefusal(f"patients are drawn with a chance above 0 and up to 1, not {rate}; check batch size")
        if not len(patients):
            raise PrivacyRefusal("there is no patient to draw; private training needs images")
        self._rate = rate
        self._source = source
        owners = _owners(patients) if unit == "patient" else np.arange(len(patients))
        # Rows of one unit stand together: those of unit u begin at starts[u].
        self._rows: IntArray = np.argsort(owners, kind="stable")
        self._counts: IntArray = np.bincount(owners)
        self._starts: IntArray = np.cumsum(self._counts) - self._counts
        self.units = len(self._counts)

    def draw(self) -> IntArray:
        """The rows of one step, possibly none."""
        drawn = np.flatnonzero(self._source.uniform(self.units) < self._rate)
        counts = self._counts[drawn]
        choice = (self._source.uniform(len(drawn)) * counts).astype(np.intp)
        # A number just below 1 may round up to the count.
        rows: IntArray = self._rows[self._starts[drawn] + np.minimum(choice, counts - 1)]
        return rows


def _owners(patients: Sequence[str]) -> IntArray:
    """A number from 0 for each row's patient."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(patient, len(numbers)) for patient in patients], dtype=np.intp)
