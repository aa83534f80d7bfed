"""The search in what the server received finds what is there, and nothing where only noise is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import msgpack
import numpy as np
import pytest

from tests.flare.recording import Array, Recording, Secret, labels_of, search

UPDATE = np.random.default_rng(1).normal(size=100).astype(np.float32)
# Every value has all its binary digits.
UPDATE.view(np.uint32)[:] |= 1
NUMBERS = (24.0, 61.218780517578125)
LABELS = {"effusion": 8, "nodule": 0, "normal": 11, "pneumothorax": 5}
COUNTS = list(LABELS.values())


def recording(received: bytes = b"", texts: str = "", answers: dict[str, Array] | None = None) -> Recording:
    noise = np.random.default_rng(2).bytes(200_000)
    secret = Secret("hospital-a", {"weight": UPDATE}, NUMBERS, LABELS)
    everything = noise + received + noise
    return Recording(everything, everything, texts, [answers or {}], [secret], [])


def test_nothing_is_found_in_noise() -> None:
    noise = np.random.default_rng(3).integers(0, 256, 400, dtype=np.uint8)
    found = search(recording(texts="24h 1.24 a24", answers={"answer/vector": noise, "answer/round": np.array(24)}))
    assert found.sought() == {
        "float32": 99, "float64": 99, "numbers": 2, "decoded": 2, "texts": 2, "labels": 11, "correlated": 2
    }  # fmt: skip
    assert not any(found.found().values())


@pytest.mark.parametrize("kind", ["<f4", ">f4"])
def test_values_are_found_as_float32(kind: str) -> None:
    found = search(recording(b"odd" + UPDATE[10:42].astype(kind).tobytes())).found()
    assert found == {"float32": 31, "float64": 0, "numbers": 0, "decoded": 0, "texts": 0, "labels": 0, "correlated": 0}


@pytest.mark.parametrize("kind", ["<f8", ">f8"])
def test_values_and_numbers_are_found_as_float64(kind: str) -> None:
    values = np.concatenate([UPDATE[10:42].astype(kind), np.array(NUMBERS[1:], kind)]).astype(kind)
    found = search(recording(b"odd" + values.tobytes())).found()
    assert found == {"float32": 0, "float64": 31, "numbers": 1, "decoded": 0, "texts": 0, "labels": 0, "correlated": 0}


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
    assert found == {"float32": 0, "float64": 0, "numbers": 0, "decoded": 0, "texts": 0, "labels": 0, "correlated": 1}


def test_what_everybody_knows_is_not_looked_for() -> None:
    found = search(recording(UPDATE.tobytes()), public=[UPDATE[:50]])
    assert found.float32 == (50, 50)


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", ">f8", "<i4", ">i4", "<i8", ">i8"])
def test_label_counts_are_found_as_bytes_of_a_vector(kind: str) -> None:
    assert search(recording(b"odd" + np.array(COUNTS, kind).tobytes())).labels == (1, 11)
    others = np.array([*COUNTS[:-1], 4], kind)
    assert search(recording(b"odd" + others.tobytes())).labels == (0, 11)


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(COUNTS),
        json.dumps([float(count) for count in COUNTS]),
        json.dumps(COUNTS, separators=(",", ":")),
        json.dumps({"effusion": 8}),
        "nodule=0",
        " ".join(map(str, COUNTS)),
    ],
)
def test_label_counts_are_found_as_text(written: str) -> None:
    assert search(recording(texts=written)).labels == (1, 11)
    assert search(recording(received=written.encode())).labels == (1, 11)


def test_label_counts_are_found_among_decoded_numbers() -> None:
    among = np.array([1.0, *COUNTS, 2.0])
    assert search(recording(answers={"answer/labels": among})).labels == (1, 11)
    assert search(recording(answers={"answer/labels": among.astype(np.uint8)})).labels == (0, 11)


def test_a_single_label_count_is_looked_for_as_other_numbers_are() -> None:
    secret = labels_of("hospital-b", ["effusion", "normal"], [0] * 17 + [1] * 9)
    assert dict(secret.labels) == {"effusion": 17, "normal": 9}
    told = recording(answers={"answer/tally/n": np.array([17])})
    assert search(told, [secret]).decoded == (1, len(NUMBERS) + 2)


def test_label_counts_of_zeros_ones_and_twos_are_not_looked_for_together() -> None:
    """They would be found in any message."""
    tiny = labels_of("hospital-b", ["effusion", "normal"], [0, 0, 1, 1, 1, 1])
    assert search(recording(), [tiny]).labels == (0, 11)
