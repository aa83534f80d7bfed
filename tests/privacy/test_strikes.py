"""What counts against a server, and what another site cannot make a site count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import Malformed
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.messages import SHARE
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import Blamed, OutOfTurn, SecureSite
from crossward.privacy.secagg.strikes import MOST, Strikes
from tests.privacy.federation import JOB, Federation, authority, binding, identity, names
from tests.privacy.steps import Round, changed

SITES = names(5)
ME, LIAR = SITES[0], SITES[1]

Lie = Callable[[Federation, int], None]


def stranger(federation: Federation, attempt: int) -> None:
    federation.sites[ME].begin(binding([*SITES, "stranger"], attempt=attempt))


def round_that_is_over(federation: Federation, attempt: int) -> None:
    federation.sites[ME].begin(binding(SITES, attempt=attempt, round_number=9, model="b"))
    federation.sites[ME].begin(binding(SITES, attempt=attempt, round_number=8, model="c"))


def forged_uploads(federation: Federation, attempt: int) -> None:
    running = Round(federation, binding(SITES, attempt=attempt)).begin().contribute()
    federation.sites[ME].survivors(dict.fromkeys(SITES, running.uploads[LIAR]))


def no_uploads_at_all(federation: Federation, attempt: int) -> None:
    Round(federation, binding(SITES, attempt=attempt)).begin().contribute()
    federation.sites[ME].survivors(dict.fromkeys(SITES, b"rubbish"))


LIES: dict[str, tuple[Lie, type[PrivacyRefusal]]] = {
    "a cohort with a stranger": (stranger, Untrusted),
    "a round that is over": (round_that_is_over, Malformed),
    "somebody else's upload": (forged_uploads, Untrusted),
    "uploads that are none": (no_uploads_at_all, Malformed),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_third_message_that_does_not_hold_ends_the_job_for_this_site(lie: str) -> None:
    tell, error = LIES[lie]
    federation = Federation.of(SITES)
    for attempt in range(1, MOST + 1):
        assert federation.sites[ME].state != "left"
        with pytest.raises(error):
            tell(federation, attempt)
    assert federation.sites[ME].state == "left"


def test_what_another_site_sealed_drives_nobody_out_of_the_job() -> None:
    """It costs the attempt, as often as it is tried; a server that relays it cannot know."""
    federation = Federation.of(SITES)
    for attempt in range(1, MOST + 3):
        running = Round(federation, binding(SITES, attempt=attempt)).begin()
        inbox = running.attempt.inbox(ME)
        lie = changed(federation, LIAR, SHARE, inbox[LIAR], pair=bytes(32))
        with pytest.raises(Blamed):
            federation.sites[ME].contribute({**inbox, LIAR: lie}, np.zeros(8, np.uint32), update="update")
    last = Round(federation, binding(SITES, attempt=MOST + 3)).begin().contribute()
    assert last.uploads.keys() == set(SITES)


def test_strikes_outlive_the_keys() -> None:
    strikes = Strikes()
    for _ in range(MOST):
        site = SecureSite(
            ME,
            JOB,
            settings=Settings(),
            identity=identity(ME),
            roots=authority().roots,
            memory=Federation.of(SITES).memories[ME],
            strikes=strikes,
        )
        assert not strikes.out
        with pytest.raises(OutOfTurn):
            site.join([])
    assert strikes.out
    assert site.state == "left"
