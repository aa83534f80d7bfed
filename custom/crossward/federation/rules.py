"""Combining rules: how the tensors of one scope become the next model.

A rule never sees a tensor that it could combine nonlinearly: it names coefficients, and the algebra multiplies,
adds and hands the sums back. That is why every rule also runs under secure aggregation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from crossward.federation.contract import ALL, SAMPLES, Needs, Summed, Tally, Tensors, Vector


class Rule(ABC):
    """How the tensors of one group are combined. The methods' own rules override what differs."""

    needs: ClassVar[Needs] = "nothing"

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


class EqualMean(Rule):
    """The plain mean: every site counts once, however many samples it has."""

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del name, tally, plan, cohort, me
        return {ALL: 1.0}


def divide(summed: Summed) -> Tensor:
    """Divide a sum by its coefficients; where nobody contributed, the quotient is zero."""
    if isinstance(summed.coefficient, float):
        return summed.value / summed.coefficient if summed.coefficient else torch.zeros_like(summed.value)
    safe = np.where(summed.coefficient == 0, 1.0, summed.coefficient)
    return summed.value / per_row(safe, summed.value)


def per_row(coefficient: Vector, like: Tensor) -> Tensor:
    """Shape one number per row so that it multiplies the rows of a tensor."""
    return torch.from_numpy(coefficient).to(like.device).view(-1, *[1] * (like.dim() - 1))
