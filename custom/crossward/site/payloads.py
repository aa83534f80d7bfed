"""Kinds of what leaves a site: a job needs some of them, and the site's policy says which may."""

from __future__ import annotations

from typing import Final

from crossward.federation.algebra import Algebra
from crossward.federation.scopes import Scope, names_in
from crossward.privacy.dp.settings import Privacy

PAYLOADS: Final = ("update", "personal", "prototypes", "counts")
"""What changed in the shared model; tensors of which every site gets its own mixture back; what a method reports beside
its update (class prototypes, styles); and what is counted on images, with noise or without. Masks change none of it."""


def payloads_of(algebra: Algebra, privacy: Privacy | None) -> frozenset[str]:
    """The kinds that a job lets out of a site.

    Args:
        algebra: of its method and model.
        privacy: of the job; where it hides the site as a whole, nothing is counted.
    """
    layout = algebra.layout
    needed = {
        "update": bool(names_in(layout, Scope.SHARED, Scope.BUFFER)),
        "personal": bool(names_in(layout, Scope.PERSONAL)),
        "prototypes": bool(algebra.extras),
        "counts": privacy is None or privacy.unit != "site",
    }
    return frozenset(kind for kind in PAYLOADS if needed[kind])
