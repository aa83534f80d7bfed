"""Noisy sums of releases: one patient moves them by at most 1, and the noise has the size that is accounted for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.noise import GRID_BITS, NoiseSource
from crossward.privacy.dp.release import CUT_BITS, noisy_sums

SHAPES: Mapping[str, tuple[int, ...]] = {"vectors": (3, 4), "counts": (3,), "number": ()}
Batches = list[tuple[dict[str, Tensor], Tensor]]


class Silent:
    """In place of noise: none; it notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[tuple[int, ...]], float]] = []

    def add_to(self, tensors: Sequence[Tensor], *, scale: float) -> None:
        assert all(tensor.dtype == torch.float64 for tensor in tensors)
        self.asked.append(([tuple(tensor.shape) for tensor in tensors], scale))


class Loud:
    """In place of a cryptographic source: noise that can be drawn again."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def add_to(self, tensors: Sequence[Tensor], *, scale: float) -> None:
        for tensor in tensors:
            tensor += scale * torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64)


def samples(count: int, seed: int, size: float) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(np.asarray(size * rng.normal(size=(count, *shape)))) for name, shape in SHAPES.items()
    }


def flat(sums: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in sums.values()])


def cut(batch: dict[str, Tensor], weights: Tensor, at: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    for piece in (slice(0, at), slice(at, None)):
        yield {name: part[piece] for name, part in batch.items()}, weights[piece]


@given(
    others=st.integers(0, 12),
    own=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-9, 0.1, 1.0, 30.0, 1e12, 1e250]),
    noise=st.floats(1e-6, 1e3),
    at=st.integers(0, 20),
)
def test_one_patient_moves_the_sums_by_at_most_one(
    others: int, own: int, seed: int, size: float, noise: float, at: int
) -> None:
    rng = np.random.default_rng(seed)
    batch = samples(others + own, seed, size)
    # A patient of many images who says the same in all of them moves the sums most.
    if seed % 2:
        batch = {
            name: torch.cat([part[:others], part[-1:].expand(own, *part.shape[1:])]) for name, part in batch.items()
        }
    weights = torch.from_numpy(np.concatenate([rng.uniform(size=others), np.full(own, 1 / own)]))
    without = {name: part[:others] for name, part in batch.items()}
    with_patient = flat(noisy_sums(cut(batch, weights, at), noise=noise, source=Silent()))
    without_patient = flat(noisy_sums([(without, weights[:others])], noise=noise, source=Silent()))
    assert float((with_patient - without_patient).norm()) <= 1 + 1e-12


@given(count=st.integers(0, 20), seed=st.integers(0, 2**32 - 1), at=st.integers(0, 20))
def test_sums_are_those_of_an_independent_way_and_the_same_in_any_order(count: int, seed: int, at: int) -> None:
    rng = np.random.default_rng(seed)
    batch, weights = samples(count, seed, 0.4), torch.from_numpy(rng.uniform(size=count))
    noise = 1e-3
    sums = noisy_sums([(batch, weights)], noise=noise, source=Silent())
    expected = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for row in range(count):
        norm = math.sqrt(sum(float(part[row].square().sum()) for part in batch.values()))
        for name, part in batch.items():
            expected[name] += weights[row].item() * part[row].numpy() / max(1.0, norm)
    grid = 2.0**-CUT_BITS * noise
    for name, part in sums.items():
        assert part.dtype == torch.float64
        assert part.shape == SHAPES[name]
        np.testing.assert_allclose(part.numpy(), expected[name], rtol=0, atol=(count + 1) * grid)
    order = torch.from_numpy(rng.permutation(count))
    mixed = {name: part[order] for name, part in batch.items()}
    again = noisy_sums(cut(mixed, weights[order], at), noise=noise, source=Silent())
    assert all(torch.equal(again[name], part) for name, part in sums.items())


def test_by_hand() -> None:
    batch = {"a": torch.tensor([[3.0, 0.0], [0.5, 0.0]]), "b": torch.tensor([4.0, 0.0])}
    # (3, 0, 4) has length 5 and becomes (0.6, 0, 0.8), of which one half; (0.5, 0, 0) stays.
    sums = noisy_sums([(batch, torch.tensor([0.5, 1.0]))], noise=1e-6, source=Silent())
    torch.testing.assert_close(sums["a"], torch.tensor([0.8, 0.0], dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(sums["b"], torch.tensor(0.4, dtype=torch.float64), rtol=0, atol=1e-9)


def test_the_noise_is_drawn_once_for_all_parts() -> None:
    silent = Silent()
    noisy_sums(itertools.repeat((samples(4, 1, 1.0), torch.ones(4)), 3), noise=2.5, source=silent)
    assert silent.asked == [([(3, 4), (3,), ()], 2.5)]


@pytest.mark.parametrize("source", [Loud(4), NoiseSource()], ids=["stand-in", "real"])
def test_the_noise_has_the_size_that_was_asked_for(source: NoiseSource) -> None:
    values = 40_000
    zeros = {"a": torch.zeros(2, values), "b": torch.zeros(2, values)}
    sums = noisy_sums([(zeros, torch.ones(2))], noise=2.5, source=source)
    drawn = flat(sums).numpy()
    # Of n = 80,000 normal numbers: the mean within 6 sigma / sqrt(n), the deviation within 6 sigma / sqrt(2 n):
    # one run in 10^8 is outside by chance.
    assert abs(drawn.mean()) < 6 * 2.5 / math.sqrt(2 * values)
    assert abs(drawn.std() - 2.5) < 6 * 2.5 / math.sqrt(4 * values)
    assert abs(np.corrcoef(sums["a"].numpy(), sums["b"].numpy())[0, 1]) < 6 / math.sqrt(values)


@pytest.mark.parametrize("noise", [0.003, 1.0, 7.3, 400.0])
def test_no_digit_of_a_noisy_sum_is_finer_than_the_step_of_the_noise(noise: float) -> None:
    batches = [(samples(50, 2, 1.0), torch.full((50,), 1 / 3))]
    step = 2.0 ** (math.floor(math.log2(noise)) - GRID_BITS)
    silent = flat(noisy_sums(batches, noise=noise, source=Silent()))
    cut_to = 2.0 ** (math.floor(math.log2(noise)) - CUT_BITS)
    assert silent.any()
    assert torch.equal(silent, cut_to * torch.round(silent / cut_to))
    assert cut_to >= step
    sums = flat(noisy_sums(batches, noise=noise, source=NoiseSource()))
    assert torch.equal(sums, step * torch.round(sums / step))
    assert not torch.equal(sums, silent)


def test_a_batch_without_samples_is_noise_alone() -> None:
    sums = noisy_sums([(samples(0, 1, 1.0), torch.ones(0))], noise=1.0, source=Loud(8))
    assert {name: tuple(part.shape) for name, part in sums.items()} == dict(SHAPES)
    assert flat(sums).all()
    assert torch.isfinite(flat(sums)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_sample_with_a_value_that_is_not_finite_counts_as_nothing(value: float, weight: float) -> None:
    """A refusal would show it to everybody."""
    batch = samples(4, 1, 1.0)
    weights = torch.full((4,), weight)
    without = {name: part[[0, 1, 3]] for name, part in batch.items()}
    expected = noisy_sums([(without, weights[:3])], noise=1.0, source=Silent())
    batch["counts"][2, 1] = value
    found = noisy_sums([(batch, weights)], noise=1.0, source=Silent())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weight", [-0.01, 1.01, math.nan, math.inf])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(PrivacyRefusal, match="weight"):
        noisy_sums([(samples(3, 1, 1.0), torch.tensor([0.5, weight, 0.5]))], noise=1.0, source=Silent())


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_no_noise_is_no_release(noise: float) -> None:
    with pytest.raises(PrivacyRefusal, match="noise"):
        noisy_sums([(samples(3, 1, 1.0), torch.ones(3))], noise=noise, source=Silent())


def test_parts_that_do_not_fit_are_refused() -> None:
    batch = samples(3, 1, 1.0)
    ones = torch.ones(3)
    fewer = {name: part for name, part in batch.items() if name != "counts"}
    narrower = {**batch, "vectors": batch["vectors"][:, :, :1]}
    cases: list[tuple[Batches, str]] = [
        ([], "not one batch"),
        ([(batch, torch.ones(2))], "one weight for each"),
        ([(batch, torch.ones(3, 1))], "one weight for each"),
        ([({"number": torch.tensor(1.0)}, torch.ones(1))], "one weight for each"),
        ([(batch, ones), (fewer, ones)], "different parts"),
        ([(batch, ones), (narrower, ones)], "different parts"),
    ]
    for batches, said in cases:
        with pytest.raises(PrivacyRefusal, match=said):
            noisy_sums(batches, noise=1.0, source=Silent())
