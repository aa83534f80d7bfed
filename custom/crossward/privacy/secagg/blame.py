"""Sites that find fault with what another shared with them, and who is left out of the next attempt for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def left_out(blames: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Decide between sites that nobody but they themselves can decide between.

    Whether sealed shares hold is known to their two ends only, so a quarrel counts against both: who disagrees with
    the most is left out, and with it its quarrels. A site that lies to everybody, or about everybody, thus goes alone.
    Of a pair whose quarrel remains one lies, and nobody can know which: both are left out. So are all that disagree
    with as many: an honest site that two accuse is left out with them, or in their place.

    Args:
        blames: by site, whom it blames.

    Returns:
        By site that is left out, the sites that it disagrees with.
    """
    quarrels = {frozenset((site, other)) for site, others in blames.items() for other in others}
    found: dict[str, tuple[str, ...]] = {}
    while quarrels:
        against = {
            site: tuple(sorted(other for quarrel in quarrels if site in quarrel for other in quarrel - {site}))
            for site in sorted(frozenset().union(*quarrels))
        }
        most = max(map(len, against.values()))
        worst = {site: others for site, others in against.items() if len(others) == most}
        found |= worst
        quarrels = {quarrel for quarrel in quarrels if quarrel.isdisjoint(worst)}
    return found
