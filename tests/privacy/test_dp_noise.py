"""Noise: its distribution, its grid, and that nobody can make it again."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp import noise
from crossward.privacy.dp.noise import NoiseSource

# A sound source fails each of these tests once in a million runs.
RARE = 1e-6
KEY = bytes(range(32))


@pytest.fixture
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise.os, "urandom", lambda count: KEY[:count])


def stream(count: int) -> list[int]:
    """The first numbers of 64 bits under the key, by another route."""
    text = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count))
    return [int.from_bytes(text[8 * index : 8 * index + 8], "little") for index in range(count)]


@pytest.mark.parametrize("scale", [0.01, 1.0, 37.5])
def test_values_are_normal_with_the_scale(scale: float) -> None:
    values = NoiseSource().normal((1000, 301), scale=scale).double().flatten().numpy() / scale
    assert stats.kstest(values, "norm").pvalue > RARE
    assert abs(values.mean()) < 5 / math.sqrt(len(values))
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / len(values))
    far = int((np.abs(values) > 4).sum())
    assert stats.binomtest(far, len(values), 2 * stats.norm.sf(4)).pvalue > RARE


def test_values_do_not_depend_on_each_other() -> None:
    """Neither neighbours, nor the two values of a pair, nor their squares, nor one tensor and the next."""
    count = 2 * noise._PAIRS
    first, second = torch.zeros(count), torch.zeros(count)
    NoiseSource().add_to([first, second], scale=1.0)
    one, half = first.numpy(), first.numpy()[: count // 2]
    for left, right in ((one[:-1], one[1:]), (half, one[count // 2 :]), (one, second.numpy())):
        assert stats.pearsonr(left, right).pvalue > RARE
        assert stats.pearsonr(left**2, right**2).pvalue > RARE


@pytest.mark.usefixtures("known_key")
def test_two_numbers_make_two_values_by_the_formula() -> None:
    length, turn = (number / 2**64 for number in stream(2))
    radius = math.sqrt(-2 * math.log(length))
    expected = [2.5 * radius * math.cos(2 * math.pi * turn), 2.5 * radius * math.sin(2 * math.pi * turn)]
    assert NoiseSource().normal((2,), scale=2.5).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("word", "radius"), [(0, math.sqrt(130 * math.log(2))), (2**64 - 1, 0.0)])
def test_the_radius_is_finite_at_both_ends(word: int, radius: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: NoiseSource, buffer: bytearray, words: int) -> None:
        buffer[: 8 * words] = word.to_bytes(8, "little") * (words // 2) + bytes(8 * (words // 2))

    monkeypatch.setattr(NoiseSource, "_fill", fill)
    values = NoiseSource().normal((4,), scale=1.0)
    assert values.tolist() == pytest.approx([radius, radius, 0.0, 0.0], abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    scale=st.floats(1e-6, 1e6),
    counts=st.lists(st.integers(0, 3 * noise._PAIRS), min_size=1, max_size=3),
)
def test_every_value_of_a_sum_is_on_the_grid(scale: float, counts: list[int]) -> None:
    """In double precision a sum is a whole number of steps, whatever was in the tensor before."""
    step = 2.0 ** (math.floor(math.log2(scale)) - noise.GRID_BITS)
    generator = torch.Generator().manual_seed(0)
    tensors = [scale * torch.randn(count, dtype=torch.float64, generator=generator) for count in counts]
    before = [tensor.clone() for tensor in tensors]
    NoiseSource().add_to(tensors, scale=scale)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(torch.round(tensor / step) * step, tensor)
        assert not len(tensor) or not torch.equal(tensor, old)


@pytest.mark.usefixtures("known_key")
def test_the_value_is_rounded_to_the_grid_and_the_same_noise_is_added() -> None:
    step = 2.0**-noise.GRID_BITS
    values = torch.tensor([0.0, 0.3 * step, 0.7 * step, -12.0, 1 / 3], dtype=torch.float64)
    alone, onto = torch.zeros_like(values), values.clone()
    NoiseSource().add_to([alone], scale=1.0)
    NoiseSource().add_to([onto], scale=1.0)
    assert torch.equal(
        (onto - alone) / step, torch.tensor([0, 0, 1, -12 / step, round(1 / 3 / step)], dtype=torch.float64)
    )


def test_layouts_and_types_keep_their_places() -> None:
    wide = torch.zeros(4, 6)
    turned, narrow = wide.t(), torch.full((3, 5), 100.0, dtype=torch.bfloat16)
    channels = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    single, nothing = torch.zeros(()), torch.zeros(0)
    NoiseSource().add_to([turned, narrow, channels, single, nothing], scale=1.0)
    assert (wide != 0).all()
    assert (channels != 0).all()
    assert single != 0
    assert narrow.dtype == torch.bfloat16
    assert (narrow - 100).abs().max() < 10
    assert channels.is_contiguous(memory_format=torch.channels_last)
    part = torch.zeros(10)
    NoiseSource().add_to([part[2:4]], scale=1.0)
    assert part.ne(0).tolist() == [False, False, True, True] + [False] * 6


def test_parameters_get_noise_without_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    NoiseSource().add_to([parameter], scale=1.0)
    assert parameter.grad_fn is None
    assert (parameter != 0).all()


def test_no_two_sources_and_no_two_calls_are_alike() -> None:
    torch.manual_seed(0)
    source = NoiseSource()
    seen = {tuple(each.normal((2,), scale=1.0).tolist()) for each in (source, source, NoiseSource())}
    torch.manual_seed(0)
    seen.add(tuple(NoiseSource().normal((2,), scale=1.0).tolist()))
    assert len(seen) == 4


def test_a_forked_process_has_noise_of_its_own() -> None:
    source = NoiseSource()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, source.uniform(1).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    told = np.frombuffer(os.read(reading, 8))
    os.close(reading)
    os.close(writing)
    assert told.item() not in source.uniform(4)


def test_threads_get_different_noise() -> None:
    source, found = NoiseSource(), []
    threads = [threading.Thread(target=lambda: found.append(source.uniform(2000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(np.unique(np.concatenate(found))) == 8000


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_cannot_be_copied(copied: object) -> None:
    with pytest.raises(PrivacyRefusal, match="noise would come twice"):
        copied(NoiseSource())


def test_the_key_is_in_no_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise.os, "urandom", lambda count: KEY[:count])
    source = NoiseSource()
    assert not any(isinstance(value, bytes | bytearray) for value in vars(source).values())
    assert KEY.hex() not in repr(vars(source))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_a_scale_that_protects_nothing_is_refused(scale: float) -> None:
    tensor = torch.ones(3)
    with pytest.raises(PrivacyRefusal, match="scale"):
        NoiseSource().add_to([tensor], scale=scale)
    assert torch.equal(tensor, torch.ones(3))


def test_whole_numbers_are_refused_before_anything_is_changed() -> None:
    good = torch.zeros(2)
    with pytest.raises(PrivacyRefusal, match="int64"):
        NoiseSource().add_to([good, torch.zeros(2, dtype=torch.int64)], scale=1.0)
    assert not good.any()


@pytest.mark.usefixtures("known_key")
def test_uniform_numbers_are_the_top_53_bits() -> None:
    assert NoiseSource().uniform(3).tolist() == [(number >> 11) / 2**53 for number in stream(3)]


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    values = NoiseSource().uniform(200_001)
    assert values.dtype == np.float64
    assert 0 <= values.min() < values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > RARE
    assert len(NoiseSource().uniform(0)) == 0
