"""What may name a site: names become file names, certificate names and seeds."""

from __future__ import annotations

import re

from crossward.federation.errors import BadInput

_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_site_name(name: str) -> None:
    """Refuse a name that could not be a file name everywhere."""
    if not _SITE_NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot name a site; rename its folder with letters, digits, '.', '_' and '-', 64 at most"
        )
