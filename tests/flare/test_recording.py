"""The search in what the server received finds what is there, and nothing where only noise is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import msgpack
import numpy as np
import pytest

from tests.flare.recording import Array, Recording, Secret, search

UPDATE = np.random.default_rng(1).normal(size=100).astype(np.float32)
# Every value has all its binary digits.
UPDATE.view(np.uint32)[:] |= 1
NUMBERS = (24.0, 61.218780517578125)


def recording(received: bytes = b"", texts: str = "", answers: dict[str, Array] | None = None) -> Recording:
    noise = np.random.default_rng(2).bytes(200_000)
    secret = Secret("hospital-a", {"weight": UPDATE}, NUMBERS)
    everything = noise + received + noise
    return Recording(everything, everything, texts, [answers or {}], [secret], [])


def test_nothing_is_found_in_noise() -> None:
    noise = np.random.default_rng(3).integers(0, 256, 400, dtype=np.uint8)
    found = search(recording(texts="24h 1.24 a24", answers={"answer/vector": noise, "answer/round": np.array(24)}))
    assert found.sought() == {
        "float32": 99, "float64": 99, "numbers": 2, "decoded": 2, "texts": 2, "correlated": 2
    }  # fmt: skip
    assert not any(found.found().values())


@pytest.mark.parametrize("kind", ["<f4", ">f4"])
def test_values_are_found_as_float32(kind: str) -> None:
    found = search(recording(b"odd" + UPDATE[10:42].astype(kind).tobytes())).found()
    assert found == {"float32": 31, "float64": 0, "numbers": 0, "decoded": 0, "texts": 0, "correlated": 0}


@pytest.mark.parametrize("kind", ["<f8", ">f8"])
def test_values_and_numbers_are_found_as_float64(kind: str) -> None:
    values = np.concatenate([UPDATE[10:42].astype(kind), np.array(NUMBERS[1:], kind)]).astype(kind)
    found = search(recording(b"odd" + values.tobytes())).found()
    assert found == {"float32": 0, "float64": 31, "numbers": 1, "decoded": 0, "texts": 0, "correlated": 0}


def test_counts_are_found_as_numpy_and_msgpack_write_them_and_lengths_are_no_counts() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([0.0, 7.0, 24.0]))
    assert search(recording(stream.getvalue())).found()["numbers"] == 1
    assert search(recording(msgpack.packb({"n": 24.0}))).found()["numbers"] == 1
    # 56 bytes follow, and their first one is 0x40.
    assert search(recording((0x38).to_bytes(8, "big") + b"@" + bytes(55))).found()["numbers"] == 0


@pytest.mark.parametrize("written", [str, json.dumps, lambda number: f"n={number:g}, n: {number:g}"])
def test_numbers_are_found_as_text(written: Callable[[float], str]) -> None:
    count, loss = (written(number) for number in NUMBERS)
    assert search(recording(loss.encode(), texts=f"before {count} after")).found()["texts"] >= 1
    assert search(recording(texts=count)).found()["texts"] == 1


def test_numbers_are_found_among_decoded_ones_of_any_kind() -> None:
    answers = {"answer/tally/n": np.array([24]), "answer/loss": np.array(NUMBERS[1], np.float64)}
    assert search(recording(answers=answers)).found()["decoded"] == 2


def test_a_hidden_copy_is_found_by_correlation() -> None:
    blurred = UPDATE + np.random.default_rng(4).normal(size=100)
    found = search(recording(answers={"answer/blurred": blurred.astype(np.float32)})).found()
    assert found == {"float32": 0, "float64": 0, "numbers": 0, "decoded": 0, "texts": 0, "correlated": 1}


def test_what_everybody_knows_is_not_looked_for() -> None:
    found = search(recording(UPDATE.tobytes()), public=[UPDATE[:50]])
    assert found.float32 == (50, 50)
