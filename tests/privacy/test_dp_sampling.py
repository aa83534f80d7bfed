from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.contract import Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler

FAR = 6.0  # standard deviations: once in five hundred million


class Scripted:
    """Gives numbers that were written down."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def uniform(self, count: int) -> Vector:
        given_out, self.numbers = self.numbers[:count], self.numbers[count:]
        assert len(given_out) == count
        return np.array(given_out, dtype=np.float64)


def test_a_step_by_hand() -> None:
    # "b" has rows 0, 2 and 4; "a" row 1; "c" row 3. The first seen is the first unit.
    sampler = PatientSampler(["b", "a", "b", "c", "b"], rate=0.5, source=Scripted(0.49, 0.5, 0.1, 0.7, 0.9))
    assert sampler.units == 3
    # b and c are drawn (a is not: 0.5 is not below the rate); 0.7 x 3 images is b's third.
    assert sampler.draw().tolist() == [4, 3]


def test_a_step_by_hand_with_images_as_units() -> None:
    source = Scripted(0.2, 0.6, 0.3, 0.1, 0.0, 0.0, 0.0)
    sampler = PatientSampler(["b", "a", "b", "c"], rate=0.35, unit="image", source=source)
    assert sampler.units == 4
    assert sampler.draw().tolist() == [0, 2, 3]


def test_an_empty_step_is_a_step() -> None:
    rows = PatientSampler(["a", "b"], rate=0.5, source=Scripted(0.9, 0.5)).draw()
    assert rows.shape == (0,)
    assert np.arange(3)[rows].tolist() == []


@given(
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=14, max_size=14),
    rate=st.floats(1e-6, 1),
)
def test_no_patient_is_in_a_step_twice(owners: list[int], numbers: list[float], rate: float) -> None:
    """Whatever the numbers are: that is what makes a patient's share of a step one clipped gradient."""
    patients = [f"p{owner}" for owner in owners]
    sampler = PatientSampler(patients, rate=rate, source=Scripted(*numbers))
    assert sampler.units == len(set(patients))
    drawn = [patients[row] for row in sampler.draw()]
    assert len(drawn) == len(set(drawn))
    wanted = list(dict.fromkeys(patients))
    assert drawn == [patient for patient, number in zip(wanted, numbers, strict=False) if number < rate]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_the_largest_number_below_one_is_the_last_image(count: int) -> None:
    sampler = PatientSampler(["a"] * count, rate=1.0, source=Scripted(0.0, math.nextafter(1.0, 0.0)))
    assert sampler.draw().tolist() == [count - 1]


def test_a_rate_of_one_draws_everybody() -> None:
    patients = ["a", "a", "b", "c", "c", "c"]
    drawn = PatientSampler(patients, rate=1.0, source=NoiseSource()).draw()
    assert [patients[row] for row in drawn] == ["a", "b", "c"]


def steps(patients: Sequence[str], rate: float, count: int) -> np.ndarray:
    """For each step, which rows were drawn, as a table of 0 and 1."""
    sampler = PatientSampler(patients, rate=rate, source=NoiseSource())
    table = np.zeros((count, len(patients)))
    for step in table:
        step[sampler.draw()] = 1
    return table


def far_off(count: int, chance: float, trials: int) -> float:
    return abs(count - trials * chance) / math.sqrt(trials * chance * (1 - chance))


def test_everybody_is_drawn_alike_and_on_their_own() -> None:
    """A batch of a fixed size, drawn without replacement, would fail here: pairs are rarer, and sizes do not vary."""
    trials, rate, number = 20_000, 0.2, 8
    table = steps([f"p{k}" for k in range(number)], rate, trials)
    for patient in range(number):
        assert far_off(table[:, patient].sum(), rate, trials) < FAR
        for other in range(patient):
            assert far_off((table[:, patient] * table[:, other]).sum(), rate**2, trials) < FAR
    sizes = table.sum(axis=1)
    assert far_off((sizes == 0).sum(), (1 - rate) ** number, trials) < FAR
    assert far_off((sizes == 3).sum(), math.comb(number, 3) * rate**3 * (1 - rate) ** (number - 3), trials) < FAR
    # And no step tells about the next.
    assert far_off((table[:-1] * table[1:]).sum(), rate**2, (trials - 1) * number) < FAR


def test_many_images_make_no_patient_more_likely_and_each_image_has_its_turn() -> None:
    trials, rate = 20_000, 0.3
    table = steps(["few", "many", "many", "many", "many"], rate, trials)
    assert far_off(table[:, 0].sum(), rate, trials) < FAR
    assert far_off(table[:, 1:].sum(), rate, trials) < FAR
    assert table[:, 1:].sum(axis=1).max() == 1
    for image in range(1, 5):
        assert far_off(table[:, image].sum(), rate / 4, trials) < FAR


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_a_rate_that_is_no_chance_is_refused(rate: float) -> None:
    with pytest.raises(PrivacyRefusal, match="chance"):
        PatientSampler(["a"], rate=rate, source=NoiseSource())


@pytest.mark.parametrize("unit", ["patient", "image"])
def test_nobody_to_draw_is_refused(unit) -> None:
    with pytest.raises(PrivacyRefusal, match="no patient"):
        PatientSampler([], rate=0.5, unit=unit, source=NoiseSource())
