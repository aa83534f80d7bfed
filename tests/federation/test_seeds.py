from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.seeds import derive

parts = st.lists(st.one_of(st.integers(-(2**40), 2**40), st.text(st.characters(exclude_characters="\0"))), max_size=4)


def test_values_stay_what_they_are() -> None:
    # Runs are repeated by these numbers: they may never change.
    assert derive(0, "start") == 1310962490577998011
    assert derive(7, "hospital-a", 3, "order", 0) == 1813933702402151565


@given(seed=st.integers(0, 2**63), one=parts, other=parts)
def test_different_places_have_different_seeds(seed: int, one: list[str | int], other: list[str | int]) -> None:
    same = [(type(part), part) for part in one] == [(type(part), part) for part in other]
    assert (derive(seed, *one) == derive(seed, *other)) == same


def test_types_boundaries_and_order_count() -> None:
    values = [
        derive(0, "1"),
        derive(0, 1),
        derive(1),
        derive(0),
        derive(0, "a", "b"),
        derive(0, "ab"),
        derive(0, "b", "a"),
        derive(0, "a", ""),
        derive(0, "a"),
        derive(0, 1, 23),
        derive(0, 12, 3),
    ]
    assert len(set(values)) == len(values)


@given(seed=st.integers(0, 2**63), place=parts)
def test_a_seed_fits_every_generator(seed: int, place: list[str | int]) -> None:
    value = derive(seed, *place)
    assert 0 <= value < 2**63
    torch.Generator().manual_seed(value)
    np.random.default_rng(value)


def test_a_separator_inside_a_name_does_not_join_two_places() -> None:
    try:
        joined = derive(0, "a\0str:b")
    except ValueError:
        return
    assert joined != derive(0, "a", "b")
