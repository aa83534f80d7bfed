"""Local training: every site for itself, the baseline that a federation has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossward.federation.scopes import Scope, mark_where
from crossward.methods.base import Method, Model
from crossward.methods.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Every tensor is local, so nothing but summed counts leaves a site."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "No federation"
    normalisation: ClassVar[str] = "stays local with everything else"

    def place(self, model: Model) -> None:
        mark_where(model, lambda module: True, parameters=Scope.LOCAL)
