"""FedAvg (McMahan et al., 2017): the mean of the sites' models, weighted by sample counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossward.methods.base import Method
from crossward.methods.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Everything is shared: parameters, and BatchNorm's running statistics with the same weights."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "Federated averaging"
    normalisation: ClassVar[str] = "parameters and running statistics averaged; batch counter left alone"
