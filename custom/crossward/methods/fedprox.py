"""FedProx (Li et al., 2020): FedAvg with a proximal term that holds a site near the model it received."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from crossward.federation.errors import BadInput
from crossward.methods.base import Context, Method, Model
from crossward.methods.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """Local objective F_k(w) + mu/2 * ||w - w_received||^2 (Eq. 2), over the parameters that are shared.

    Attributes:
        mu: strength of the proximal term; 0 is FedAvg.
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedAvg with a proximal term"
    normalisation: ClassVar[str] = "parameters and running statistics averaged; batch counter left alone"

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise BadInput(f"fedprox: mu is {self.mu}, and must be a finite number that is not negative")

    def penalty(self, model: Model, context: Context) -> dict[str, Tensor]:
        distances = [
            (parameter - context.received[name]).square().sum()
            for name, parameter in model.named_parameters()
            if name in context.received
        ]
        return {"proximal": 0.5 * self.mu * sum(distances[1:], start=distances[0])}
