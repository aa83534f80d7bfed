"""FedBN (Li et al., 2021): FedAvg that keeps every normalisation layer at its site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossward.federation.scopes import Scope, mark_where
from crossward.methods.base import Method, Model
from crossward.methods.registry import register
from crossward.nets import is_normalisation


@register
@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """Normalisation layers are found by their type, so a shortcut's BatchNorm is not missed; all else is shared."""

    name: ClassVar[str] = "fedbn"
    title: ClassVar[str] = "FedAvg with local normalisation"
    normalisation: ClassVar[str] = "every normalisation layer stays local, parameters and statistics"

    def place(self, model: Model) -> None:
        mark_where(model, is_normalisation, parameters=Scope.LOCAL)
