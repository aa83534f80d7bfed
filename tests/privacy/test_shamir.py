from __future__ import annotations

import itertools
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossward.privacy.secagg import shamir
from crossward.privacy.secagg.shamir import PRIME, SHARE_BYTES, BadShares, join, split

_secrets = st.binary(min_size=32, max_size=32)


def _at(shares: dict[int, int], place: int) -> int:
    """The polynomial through the shares at a place: rational arithmetic first, the field only at the end."""
    total = 0
    for one, value in shares.items():
        weight = Fraction(1)
        for other in shares:
            if other != one:
                weight *= Fraction(place - other, one - other)
        total += value * weight.numerator * pow(weight.denominator, PRIME - 2, PRIME)
    return total % PRIME


def _is_prime(number: int) -> bool:
    """Miller and Rabin, to the first forty odd bases."""
    odd, halvings = number - 1, 0
    while odd % 2 == 0:
        odd, halvings = odd // 2, halvings + 1
    for base in range(3, 83, 2):
        value = pow(base, odd, number)
        if value in (1, number - 1):
            continue
        if not any((value := value * value % number) == number - 1 for _ in range(halvings - 1)):
            return False
    return True


def test_the_field_is_one_and_holds_every_secret() -> None:
    assert PRIME == 2**256 + 297
    assert _is_prime(PRIME)
    assert PRIME <= 256**SHARE_BYTES


@given(_secrets, st.data())
@settings(max_examples=60)
def test_any_threshold_many_shares_give_the_secret(secret: bytes, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(places)))
    shares = split(secret, places=places, threshold=threshold)
    chosen = data.draw(st.permutations(places))[:threshold]
    assert join({place: shares[place] for place in chosen}, threshold=threshold) == secret
    numbers = {place: int.from_bytes(shares[place], "big") for place in chosen}
    assert _at(numbers, 0) == int.from_bytes(secret, "big")
    # Every other share is on the same polynomial: its degree is below the threshold.
    for place in places:
        assert _at(numbers, place) == int.from_bytes(shares[place], "big")


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_smallest_and_the_largest_secret(secret: bytes) -> None:
    for threshold in (1, 2, 3):
        shares = split(secret, places=[1, 2, 3], threshold=threshold)
        assert {
            join(dict(some), threshold=threshold) for some in itertools.combinations(shares.items(), threshold)
        } == {secret}


def test_fifty_holders() -> None:
    secret = bytes(range(32))
    shares = split(secret, places=range(1, 51), threshold=26)
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    assert join({place: shares[place] for place in range(25, 51)}, threshold=26) == secret
    assert join(shares, threshold=26) == secret
    numbers = {place: int.from_bytes(shares[place], "big") for place in range(1, 51, 2)}
    # 25 shares are one too few: the polynomial through them is another one.
    assert _at(numbers, 0) != int.from_bytes(secret, "big")


@given(_secrets, _secrets)
@settings(max_examples=25)
def test_one_share_too_few_is_consistent_with_every_secret(secret: bytes, other: bytes) -> None:
    """By construction: for another secret there is a third share that makes the same two shares its own."""
    shares = split(secret, places=[1, 2, 3, 4], threshold=3)
    held = {place: int.from_bytes(shares[place], "big") for place in (1, 3)}
    forged = _at({0: int.from_bytes(other, "big"), **held}, 4)
    assert join({1: shares[1], 3: shares[3], 4: forged.to_bytes(SHARE_BYTES, "big")}, threshold=3) == other


def test_shares_of_a_small_field_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All polynomials of a field of 11: two shares of a threshold of three are seen equally often for every secret."""
    monkeypatch.setattr(shamir, "PRIME", 11)
    seen: dict[int, set[tuple[int, int]]] = {}
    for secret, first, second in itertools.product(range(11), repeat=3):
        pair = (shamir._value_at([secret, first, second], 1), shamir._value_at([secret, first, second], 2))
        seen.setdefault(secret, set()).add(pair)
    assert all(len(pairs) == 121 for pairs in seen.values())


def test_every_split_draws_another_polynomial() -> None:
    drawn = {split(bytes(32), places=[1, 2], threshold=2)[1] for _ in range(50)}
    assert len(drawn) == 50


def test_coefficients_come_from_the_operating_system_and_cover_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda end: asked.append(end) or end - 1)  # type: ignore[func-returns-value]
    shares = split(bytes(32), places=[1, 2, 3], threshold=3)
    assert asked == [PRIME, PRIME]
    # The polynomial is -x - x^2.
    assert [int.from_bytes(shares[place], "big") for place in (1, 2, 3)] == [PRIME - 2, PRIME - 6, PRIME - 12]


@given(_secrets, st.integers(0, 2), st.integers(1, PRIME - 1))
@settings(max_examples=40)
def test_a_wrong_share_gives_another_secret_or_none(secret: bytes, which: int, by: int) -> None:
    shares = split(secret, places=[1, 2, 3], threshold=3)
    place = sorted(shares)[which]
    shares[place] = ((int.from_bytes(shares[place], "big") + by) % PRIME).to_bytes(SHARE_BYTES, "big")
    with suppress(BadShares):
        assert join(shares, threshold=3) != secret


@pytest.mark.parametrize("share", [b"", bytes(32), bytes(34), PRIME.to_bytes(33, "big"), b"\xff" * 33])
def test_what_is_no_element_of_the_field_is_refused(share: bytes) -> None:
    shares = split(bytes(32), places=[1, 2], threshold=2)
    with pytest.raises(BadShares):
        join({**shares, 2: share}, threshold=2)


def test_a_sum_beyond_32_bytes_is_no_secret() -> None:
    with pytest.raises(BadShares):
        join({1: (2**256).to_bytes(33, "big")}, threshold=1)


def test_too_few_shares_are_refused() -> None:
    with pytest.raises(BadShares):
        join(dict(list(split(bytes(32), places=[1, 2, 3], threshold=3).items())[:2]), threshold=3)


@pytest.mark.parametrize(
    ("secret", "places", "threshold"),
    [
        (bytes(31), [1, 2], 2),
        (bytes(33), [1, 2], 2),
        (bytes(32), [0, 1], 2),
        (bytes(32), [1, 1], 2),
        (bytes(32), [-1, 1], 2),
        (bytes(32), [1, PRIME], 2),
        (bytes(32), [1, 2], 0),
        (bytes(32), [1, 2], 3),
        (bytes(32), [], 1),
    ],
)
def test_a_sharing_that_makes_no_sense_is_refused(secret: bytes, places: list[int], threshold: int) -> None:
    with pytest.raises(BadShares):
        split(secret, places=places, threshold=threshold)
