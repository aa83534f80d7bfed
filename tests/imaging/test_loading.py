from __future__ import annotations

import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import Split
from crossward.imaging.loading import Loading, batches
from crossward.imaging.prepare.cache import Cache, Kept, NotPrepared, places
from crossward.imaging.prepare.levels import LEVELS
from crossward.imaging.prepare.ready import StoredImages

COUNT, SIZE = 37, 8


@pytest.fixture
def levels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, LEVELS + 1, (COUNT, 1, SIZE, SIZE)).astype(np.uint16)


@pytest.fixture
def cache(tmp_path: Path, levels: np.ndarray) -> Cache:
    cache = Cache(tmp_path / "cache", channels=1, size=SIZE)
    for number, picture in enumerate(levels):
        cache.add((str(number), 0, "t"), picture)
    cache.commit()
    return cache


def stored_split(cache: Cache, *, channels: int = 1) -> Split:
    kept = [entry for number in range(COUNT) if isinstance(entry := cache[str(number), 0, "t"], Kept)]
    names = tuple(str(number) for number in range(COUNT))
    images = StoredImages(cache.pages(), *places(kept)).normalised(channels)
    return Split(images, torch.arange(COUNT), names, names)


@pytest.fixture
def split(cache: Cache) -> Split:
    return stored_split(cache)


def in_memory(split: Split) -> Split:
    return replace(split, images=split.images[:])


def gone_through(split: Split, loading: Loading, *, seed: int | None = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = batches(split, batch_size=8, seed=seed, drop_last=False, loading=loading)
    assert len(loader) == 5
    return [batch for _ in range(2) for batch in loader]


def test_pixels_are_what_was_stored(split: Split, levels: np.ndarray) -> None:
    expected = (levels.astype(np.float64) / 65535 - 0.5) / 0.25
    assert split.images.shape == (COUNT, 1, SIZE, SIZE)
    assert split.images[:].dtype == torch.float32
    np.testing.assert_allclose(split.images.numpy(), expected, atol=5e-7)


def test_grey_pictures_serve_a_model_in_colour(cache: Cache) -> None:
    grey, colour = stored_split(cache), stored_split(cache, channels=3)
    assert colour.images.shape == (COUNT, 3, SIZE, SIZE)
    for channel in range(3):
        assert torch.equal(colour.images[:][:, channel], grey.images[:][:, 0])


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        slice(2, 9, 3),
        slice(0, 0),
        [4, 0, 4],
        torch.tensor([5, 1]),
        np.array([6, 2]),
        np.arange(COUNT) % 3 == 0,
        torch.arange(COUNT) % 2 == 0,
        (slice(1, 3), 0),
        (slice(None), 0, 2, 3),
        (4, 0),
        ([1, 2], slice(None), 0),
    ],
    ids=str,
)
def test_it_is_indexed_like_the_tensor_it_stands_for(split: Split, index: object) -> None:
    whole = split.images[:]
    assert torch.equal(split.images[index], whole[index])  # type: ignore[index]


def test_an_index_beyond_the_end(split: Split) -> None:
    with pytest.raises(IndexError):
        split.images[COUNT]
    assert len(list(split.images)) == COUNT


def test_rows_stay_on_disk(split: Split) -> None:
    some = split.rows(np.array([7, 3, 3]))
    assert isinstance(some.images, StoredImages)
    assert some.labels.tolist() == [7, 3, 3]
    assert torch.equal(some.images[:], split.images[:][[7, 3, 3]])
    none = split.rows([])
    assert none.images.shape == (0, 1, SIZE, SIZE)
    assert none.images[:].shape == (0, 1, SIZE, SIZE)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    "loading", [Loading(), Loading(prefetch=0), Loading(prefetch=7), Loading(pinned=False)], ids=str
)
def test_the_same_order_and_the_same_bits_as_in_memory(split: Split, loading: Loading, seed: int | None) -> None:
    expected = gone_through(in_memory(split), Loading(), seed=seed)
    found = gone_through(split, loading, seed=seed)
    for (images, labels), (other, others) in zip(found, expected, strict=True):
        assert torch.equal(images, other)
        assert torch.equal(labels, others)
        assert images.is_contiguous()


def test_worker_processes_change_nothing(split: Split) -> None:
    expected = gone_through(in_memory(split), Loading())
    found = gone_through(split, Loading(workers=2))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_the_global_random_state_is_left_alone(split: Split) -> None:
    before = torch.get_rng_state()
    gone_through(split, Loading())
    assert torch.equal(before, torch.get_rng_state())


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "crossward-loading"]


def test_who_stops_early_leaves_no_thread_behind(split: Split) -> None:
    loader = batches(split, batch_size=4, seed=1, drop_last=False)
    first = list(islice(loader, 2))
    assert len(first) == 2
    going = iter(loader)
    next(going)
    assert readers()
    going.close()  # type: ignore[attr-defined]
    assert readers() == []


@pytest.mark.parametrize("loading", [Loading(), Loading(prefetch=0)], ids=["ahead", "not ahead"])
def test_a_damaged_picture_is_never_trained_on(cache: Cache, loading: Loading) -> None:
    path = cache.folder / cache.pixels
    content = bytearray(path.read_bytes())
    content[30 * SIZE * SIZE * 2 + 7] ^= 1
    path.write_bytes(bytes(content))
    loader = iter(batches(stored_split(cache), batch_size=8, seed=None, drop_last=False, loading=loading))
    assert [label for _, labels in islice(loader, 3) for label in labels.tolist()] == list(range(24))
    with pytest.raises(NotPrepared, match="damaged"):
        next(loader)
    assert readers() == []


@pytest.mark.parametrize("options", [{"workers": -1}, {"prefetch": -1}], ids=str)
def test_less_than_nothing_cannot_be_loaded(options: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="give 0 or more"):
        Loading(**options)  # type: ignore[arg-type]
