from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import Malformed
from crossward.privacy.secagg.settings import Settings

# Sites, colluders, threshold: the protocol's table; 20 % and 33 % of colluders are rounded down, but are one at least.
TABLE = [
    (3, 1, 3),
    (5, 1, 4),
    (10, 1, 6),
    (10, 2, 7),
    (10, 3, 7),
    (20, 1, 11),
    (20, 4, 13),
    (20, 6, 14),
    (50, 1, 26),
    (50, 10, 31),
    (50, 16, 34),
]


@pytest.mark.parametrize(("sites", "colluders", "threshold"), TABLE)
def test_the_threshold(sites: int, colluders: int, threshold: int) -> None:
    assert Settings(colluders=colluders).threshold(sites) == threshold


@given(st.integers(3, 200), st.integers(0, 60))
def test_nobody_opens_both_secrets_of_a_site(sites: int, colluders: int) -> None:
    """Two thresholds of shares, with every honest site answering once and every colluding one twice, are too many."""
    settings = Settings(colluders=colluders)
    threshold = settings.threshold(sites)
    assert 2 * threshold > (sites - colluders) + 2 * colluders
    # And it is the smallest such threshold.
    assert 2 * (threshold - 1) <= sites + colluders


@given(st.integers(0, 30), st.integers(3, 40), st.integers(1, 60))
def test_a_cohort_leaves_two_honest_sites_and_can_open_secrets(colluders: int, min_sites: int, count: int) -> None:
    settings = Settings(colluders=colluders, min_sites=min_sites)
    allowed = count >= max(3, colluders + 2, min_sites) and (count + colluders) // 2 + 1 <= count
    if allowed:
        settings.check_cohort(count)
        assert count - colluders >= 2
    else:
        with pytest.raises(PrivacyRefusal):
            settings.check_cohort(count)


def test_two_sites_only_where_it_is_allowed() -> None:
    with pytest.raises(PrivacyRefusal):
        Settings().check_cohort(2)
    with pytest.raises(PrivacyRefusal):
        Settings(min_sites=2)
    with pytest.raises(PrivacyRefusal):
        Settings(allow_pair=True).check_cohort(2)
    pair = Settings(allow_pair=True, min_sites=2)
    pair.check_cohort(2)
    assert pair.threshold(2) == 2
    with pytest.raises(PrivacyRefusal):
        pair.check_cohort(1)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8},
        {"bits": 64},
        {"cipher": "rot13"},
        {"colluders": -1},
        {"min_sites": 1},
        {"min_sites": 1, "allow_pair": True},
        {"rounds": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PrivacyRefusal):
        Settings(**options)


_options: Any = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([16, 24, 32]),
        "cipher": st.sampled_from(["aes-256-ctr", "chacha20"]),
        "colluders": st.integers(0, 9),
        "min_sites": st.integers(3, 9),
        "allow_pair": st.booleans(),
        "rounds": st.integers(1, 9),
    }
)


@given(_options, _options)
def test_what_is_signed_is_what_is_read_and_nothing_else(one: Any, other: Any) -> None:
    first, second = Settings(**one), Settings(**other)
    assert Settings.from_message(first.message()) == first
    assert (first.digest() == second.digest()) == (one == other)


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"version": None}, {"more": 1}, {"version": 0}, {"Bits": 32}, {"threshold": 1}]
)
def test_another_version_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        Settings.from_message({**Settings().message(), **change})
    with pytest.raises(Malformed):
        Settings.from_message({name: value for name, value in Settings().message().items() if name != "bits"})
