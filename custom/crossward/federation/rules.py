"""Combining rules: how the tensors of one scope become the next model.

A rule never sees a tensor that it could combine nonlinearly: it names coefficients, and the algebra multiplies,
adds and hands the sums back. That is why every rule also runs under secure aggregation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from crossward.federation.contract import ALL, SAMPLES, Needs, Summed, Tally, Tensors, Vector
from crossward.federation.errors import PrivacyRefusal

TOLERANCE = 1e-9
"""How far numbers of a plan that are to sum to 1 may miss it."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What others come to know of the tensors that a rule combines, in plain words.

    Attributes:
        reported: what every site hands over in the open.
        summed: under masks, that of which the server learns the sum over sites; None where it cannot read the sum.
        server: under masks, what it learns beside that, on the way to the plan.
        planned: what the plan says, which everybody gets.
        received: what every site gets beside the model that is common to all.
    """

    reported: str = "update"
    summed: str | None = "update times the site's coefficient"
    server: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    received: tuple[str, ...] = ()


class Rule(ABC):
    """How the tensors of one group are combined. The methods' own rules override what differs."""

    needs: ClassVar[Needs] = "nothing"

    weighs: ClassVar[str] = ""
    """Which of its planned numbers say how much sites count, where they follow from cosines between tensors."""

    averaged: bool = False
    """Whether the server gets, under masks, the mean of personal tensors, which it cannot read one by one."""

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Name the blocks of tensors whose cosines between sites the plan needs."""
        del names
        return {}

    def measure(self, update: Tensors) -> Tally:
        """Compute, on site, the numbers about its update that the plan needs summed (such as block norms)."""
        del update
        return {}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Make the public numbers from summed tallies and cosine matrices (zero rows for zero vectors)."""
        del totals, gram
        return {}

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        """Refuse, on site and under masks, numbers that ``plan`` never makes for so many sites.

        A rule that plans something overrides this: with weights of its choice a server could ask for one site alone.

        Raises:
            PrivacyRefusal: an unknown or missing key, another shape, or values that are not allowed.
        """
        del cohort
        check_planned(plan, {})

    def bounded(self, plan: Mapping[str, Vector], totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, float]:
        """Count, at the server, what this rule's bounds changed in a plan, from what it was made of: for the record."""
        del plan, totals, gram
        return {}

    def shown(self) -> Shown:
        """Say what the server and other sites come to know by this rule."""
        return Shown()

    @abstractmethod
    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        """Say with which coefficient site ``cohort[me]`` adds its tensor ``name`` to which slots."""

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        """Make the next value from the current one and the sums.

        Nobody reads the sums again, so their memory may be reused. The default adds the weighted mean, which suits
        updates. Personal tensors and extras are reported as they are, not as differences: their rules override this.
        """
        del name, plan
        return divide(summed).add_(current).to(current.dtype)


class SampleMean(Rule):
    """The mean weighted by sample counts: every site adds n_k * update, and the sum is divided by the sum of n_k."""

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del name, plan, cohort, me
        return {ALL: float(tally[SAMPLES].item())}

    def shown(self) -> Shown:
        return Shown(summed="update times the number of training images")


class EqualMean(Rule):
    """The plain mean: every site counts once, however many samples it has."""

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del name, tally, plan, cohort, me
        return {ALL: 1.0}

    def shown(self) -> Shown:
        return Shown(summed="update")


def check_planned(plan: Mapping[str, Vector], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse planned numbers of other names or shapes than these, or that are not finite."""
    demand(plan.keys() == shapes.keys(), f"it says {sorted(plan)}, and {sorted(shapes)} is what it has to say")
    for key, shape in shapes.items():
        value = plan[key]
        demand(value.shape == shape, f"'{key}' has shape {value.shape}, and not {shape}")
        demand(value.dtype == np.float64 and np.isfinite(value).all(), f"'{key}' has values that are no finite numbers")


def demand(fits: bool | np.bool_, what_is_wrong: str) -> None:
    """Refuse unless something fits."""
    if not fits:
        raise PrivacyRefusal(what_is_wrong)


def divide(summed: Summed) -> Tensor:
    """Divide a sum by its coefficients; where nobody contributed, the quotient is zero."""
    if isinstance(summed.coefficient, float):
        return summed.value / summed.coefficient if summed.coefficient else torch.zeros_like(summed.value)
    safe = np.where(summed.coefficient == 0, 1.0, summed.coefficient)
    return summed.value / per_row(safe, summed.value)


def per_row(coefficient: Vector, like: Tensor) -> Tensor:
    """Shape one number per row so that it multiplies the rows of a tensor."""
    return torch.from_numpy(coefficient).to(like.device).view(-1, *[1] * (like.dim() - 1))
