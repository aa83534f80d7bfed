"""What the recorder saw of a run, and the search in it for what the server must not see of any one site."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

from crossward.federation.storage import read_tensors

Array = np.ndarray[Any, Any]

SMALLEST = 64
"""Values that an array has at least, to be held against others by correlation."""

SIGMAS = 5.0
_OURS = ("answer/code", "answer/round")
"""Whole numbers that every answer has, which say nothing of a site."""

_LONG = 12
_KINDS = ("f4", "f8", "i4", "i8")
# Signatures are texts as well: a digit among their letters and signs is no number.
_WORD = r"[^\s\"'\[\](){},:;]"


@dataclass(frozen=True)
class Secret:
    """What one site knows of itself in one round, or of its test images.

    Attributes:
        site: whose it is.
        update: its tensors.
        numbers: its counts, losses and scores.
        labels: how many of its training images are of each class, in the order of the classes.
    """

    site: str
    update: Mapping[str, Array]
    numbers: tuple[float, ...]
    labels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What the server received of sites in a run, and what sites trained meanwhile.

    Attributes:
        received: every frame of every site's connection, and what the server's parent handed on to its job process.
        contents: the same without FLARE's headers, which have whole numbers of their own.
        texts: the text fields among it.
        answers: what FLARE made of it, by place: all parts of all tasks' results.
        secrets: of every site and round.
        vectors: what sites wrote into vectors, before masks.
    """

    received: bytes
    contents: bytes
    texts: str
    answers: list[dict[str, Array]]
    secrets: list[Secret]
    vectors: list[Array]

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read what the recorder left in a folder."""
        frames = [frame for path in sorted(folder.glob("frames/*/*")) if _of_sites(path) for frame in _frames(path)]
        answers = [dict(np.load(path)) for path in sorted(folder.glob("answers/*.npz"))]
        said = [str(value) for answer in answers for value in answer.values() if value.dtype.kind == "U"]
        said += [text for frame in frames for text in _texts(_headers(frame))]
        vectors = [np.load(path) for path in sorted(folder.glob("vectors/*.npy"))]
        secrets = [_secret(path) for path in sorted(folder.glob("reports/*/*"))]
        contents = b"\0".join(frame[_headers_end(frame) :] for frame in frames)
        return cls(b"\0".join(frames), contents, "\n".join(said), answers, secrets, vectors)

    @property
    def arrays(self) -> list[Array]:
        """All arrays that arrived, bytes among them."""
        return [value for answer in self.answers for value in answer.values() if value.ndim]


@dataclass(frozen=True)
class Matches:
    """How much of what was sought was found.

    Attributes:
        float32: pairs of neighbouring values of updates, as the bytes of float32, in either order.
        float64: the same as the bytes of float64.
        numbers: counts, losses and scores as the bytes of float64, in either order.
        decoded: the same among the decoded numbers.
        texts: the same as decimal text.
        labels: ways of writing the label counts of a site all together: as bytes of a vector, as text, with the
            classes' names, or decoded.
        correlated: arrays that go along with an update or a vector before masks, of those that have its length.
    """

    float32: tuple[int, int]
    float64: tuple[int, int]
    numbers: tuple[int, int]
    decoded: tuple[int, int]
    texts: tuple[int, int]
    labels: tuple[int, int]
    correlated: tuple[int, int]

    def found(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name)[0] for field in fields(self)}

    def sought(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name)[1] for field in fields(self)}


def search(recording: Recording, others: Iterable[Secret] = (), *, public: Iterable[Array] = ()) -> Matches:
    """Look for everything secret in everything that was received.

    Args:
        recording: of a run.
        others: more that is secret.
        public: tensors that everybody knows, such as the common start: what an update has of them is not looked for.

    Two neighbouring values are enough for a match: by chance that happens once in a million runs. Values of an update
    that have few digits in binary could be anything, and are not looked for; nor are the whole numbers below 3.

    Label counts are small. One alone is looked for as other numbers are, and not as a whole number of 4 or 8 bytes,
    which could be any length. All counts of a site next to one another are looked for in every way of writing them,
    unless fewer than two of them are 3 or more: a run of zeros, ones and twos is in any message. Two larger ones in
    their places among four words, of which every byte has to agree, are in none by chance.
    """
    secrets = [*recording.secrets, *others]
    values = [np.ravel(tensor).astype(np.float32) for secret in secrets for tensor in secret.update.values()]
    known = [np.ravel(tensor).astype(np.float32) for tensor in public]
    pairs = np.setdiff1d(_all_pairs(values), _all_pairs(known))
    wide = pairs.view(np.float32).astype(np.float64)
    numbers = sorted({number for secret in secrets for number in secret.numbers if number not in (0.0, 1.0, 2.0)})
    received = _Words.of(recording.received)
    return Matches(
        (int(received.hold(pairs.view(np.float32)).sum()), len(pairs)),
        (int(received.hold(wide).reshape(-1, 2).all(axis=1).sum()), len(pairs)),
        (sum(_is_in(recording.contents, number) for number in numbers), len(numbers)),
        (_decoded(recording.answers, numbers), len(numbers)),
        (_as_text(recording, numbers), len(numbers)),
        _labels(recording, [secret.labels for secret in secrets]),
        _correlated(recording),
    )


@dataclass(frozen=True)
class _Words:
    """Every 8 neighbouring bytes of something, sorted."""

    words: Array

    @classmethod
    def of(cls, content: bytes) -> _Words:
        shifted = (content[start : start + (len(content) - start) // 8 * 8] for start in range(8))
        return cls(np.sort(np.concatenate([np.frombuffer(part, np.uint64) for part in shifted])))

    def hold(self, values: Array) -> Array:
        """Which 8 bytes of the values are among them, in either order of the values' bytes."""
        return self._hold(values.view(np.uint64)) | self._hold(values.byteswap().view(np.uint64))

    def _hold(self, keys: Array) -> Array:
        places = np.searchsorted(self.words, keys).clip(max=len(self.words) - 1)
        return np.asarray(self.words[places] == keys)


def _all_pairs(arrays: list[Array]) -> Array:
    return np.concatenate([np.empty(0, np.uint64), *map(_pairs, arrays)])


def _pairs(values: Array) -> Array:
    """Every two neighbours of an array of float32 that have 17 binary digits or more, as 8 bytes."""
    telling = np.asarray(values.view(np.uint32) & np.uint32(0x7F)) != 0
    neighbours = np.stack([values[:-1], values[1:]], axis=1)[telling[:-1] & telling[1:]]
    return np.ascontiguousarray(neighbours).view(np.uint64).reshape(-1)


def _is_in(contents: bytes, number: float) -> bool:
    """Whether a float64 is among bytes, in either order.

    Of one with few digits most bytes are zero, as most are of a length in a message of the protocol: it counts where
    it stands after msgpack's mark of a number, or in memory order and not after a zero.
    """
    upward, downward = struct.pack("<d", number), struct.pack(">d", number)
    if upward[:6] != bytes(6):
        return upward in contents or downward in contents
    return b"\xcb" + downward in contents or re.search(b"[^\0]" + re.escape(upward), contents) is not None


def _decoded(answers: list[dict[str, Array]], numbers: list[float]) -> int:
    kept = [
        np.ravel(value).astype(np.float64)
        for answer in answers
        for place, value in answer.items()
        # Bytes are the protocol's messages and masked vectors: every small number is among them.
        if value.dtype.kind in "iuf" and value.dtype != np.uint8 and place not in _OURS
    ]
    return int(np.isin(numbers, np.concatenate([np.empty(0), *kept])).sum())


def _as_text(recording: Recording, numbers: list[float]) -> int:
    """Long decimal numbers could stand anywhere; short ones could be anything outside a text field."""
    return sum(
        repr(number)[:_LONG].encode() in recording.received
        if len(repr(number)) >= _LONG
        else bool(re.search(rf"(?<!{_WORD}){number:g}(\.0)?(?!{_WORD})", recording.texts))
        for number in numbers
    )


def _labels(recording: Recording, known: Iterable[Mapping[str, int]]) -> tuple[int, int]:
    """In how many ways label counts were found, and in how many they could have been."""
    found = [
        way
        for labels in known
        if sum(count > 2 for count in labels.values()) > 1
        for way in _ways_of_writing(recording, labels)
    ]
    return sum(found), len(found)


def _ways_of_writing(recording: Recording, labels: Mapping[str, int]) -> list[bool]:
    """Which ways of writing label counts occur in what was received."""
    counts, texts = list(labels.values()), recording.received + recording.texts.encode()
    listed = rb"(?:\.0)?\s?[,;\s]\s?".join(b"%d" % count for count in counts)
    named = [rf"{re.escape(name)}\W{{1,4}}{count}(?!\d)".encode() for name, count in labels.items()]
    return [
        *(np.array(counts, order + kind).tobytes() in recording.received for order in "<>" for kind in _KINDS),
        re.search(rb"(?<![\d.])" + listed + rb"(?!\d)", texts) is not None,
        any(re.search(each, texts) for each in named),
        any(_side_by_side(value, counts) for answer in recording.answers for value in answer.values()),
    ]


def _side_by_side(array: Array, counts: list[int]) -> bool:
    """Whether an array has these numbers next to one another; bytes are the protocol's and hold any small number."""
    flat = np.ravel(array)
    if flat.dtype.kind not in "iuf" or flat.dtype == np.uint8 or len(flat) < len(counts):
        return False
    return bool((np.lib.stride_tricks.sliding_window_view(flat, len(counts)) == counts).all(axis=1).any())


def _correlated(recording: Recording) -> tuple[int, int]:
    """Hold every array against what has as many values; bytes are held as the words that they may be."""
    sought = [np.ravel(tensor) for secret in recording.secrets for tensor in secret.update.values()]
    sought += [words.view(np.int32) for words in recording.vectors]
    by_length: dict[int, list[Array]] = {}
    for values in sought:
        if len(values) >= SMALLEST and values.std() > 0:
            by_length.setdefault(len(values), []).append(_standard(values))
    found = compared = 0
    for array in recording.arrays:
        for values in _readings(array):
            for other in by_length.get(len(values), []):
                compared += 1
                found += bool(abs(_standard(values) @ other) >= SIGMAS * np.sqrt(len(values)))
    return found, compared


def _readings(array: Array) -> Iterator[Array]:
    flat = np.ravel(array)
    if flat.dtype == np.uint8 and not len(flat) % 4:
        yield np.ascontiguousarray(flat).view("<i4")
        yield np.ascontiguousarray(flat).view("<u4")
    elif flat.dtype.kind in "iuf" and len(flat) >= SMALLEST and flat.std() > 0:
        yield flat


def _standard(values: Array) -> Array:
    centred = values.astype(np.float64) - values.mean(dtype=np.float64)
    return centred / max(1e-300, float(np.sqrt(np.mean(centred**2))))


def _of_sites(path: Path) -> bool:
    """Whether a file has what came from sites: not what the server's own processes or an administrator sent."""
    return not path.name.startswith(("server.", "_admin"))


def _frames(path: Path) -> Iterator[bytes]:
    content, start = path.read_bytes(), 0
    while start < len(content):
        length = int.from_bytes(content[start : start + 8], "big")
        yield content[start + 8 : start + 8 + length]
        start += 8 + length


def _headers_end(frame: bytes) -> int:
    return PREFIX_LEN + int(Prefix.from_bytes(frame).header_len)


def _headers(frame: bytes) -> Any:
    packed = frame[PREFIX_LEN : _headers_end(frame)]
    return msgpack.unpackb(packed) if packed else {}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from _texts(part)


def _secret(report: Path) -> Secret:
    update, metadata = read_tensors(report)
    tallies = [json.loads(metadata[part]) for part in ("tally", "validation")]
    numbers = [number for tally in tallies for values in tally.values() for number in np.ravel(values).tolist()]
    return Secret(metadata["site"], {name: tensor.numpy() for name, tensor in update.items()}, tuple(numbers))


def scores_of(site: str, result: Mapping[str, Any]) -> Secret:
    """What a site found out on its test images, from its own result.json."""
    names = ("n_train", "n_val", "n_test", "accuracy", "balanced_accuracy", "auc")
    return Secret(site, {}, tuple(float(result[name]) for name in names if result.get(name) is not None))


def labels_of(site: str, classes: Iterable[str], labels: Iterable[int]) -> Secret:
    """How many of a site's training images are of each class: all together, and each by itself."""
    counted = Counter(labels)
    counts = {name: counted[number] for number, name in enumerate(classes)}
    return Secret(site, {}, tuple(map(float, counts.values())), counts)


def forget(folder: Path) -> None:
    """Empty a recorder's folder between jobs, while the server's parent may still be writing to its files."""
    for part in folder.iterdir():
        if part.name != "frames":
            shutil.rmtree(part)
    for frames in folder.glob("frames/*/*"):
        os.truncate(frames, 0)
