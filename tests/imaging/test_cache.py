from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.site.conftest import _mounted

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.prepare.cache import INDEX, Cache, Kept, Key, NotPrepared, Pages, held, places
from crossward.imaging.prepare.levels import LEVELS, pixels_in, stored
from crossward.imaging.prepare.lines import Lines
from crossward.imaging.refusals import Reason, Refused

SIZE = 8
RECORD = SIZE * SIZE * 2


def key(number: int, *, digest: str = "t") -> Key:
    return (f"file-{number}", 0, digest)


def picture(number: int) -> np.ndarray:
    return np.full((1, SIZE, SIZE), number, dtype=np.uint16)


def opened(folder: Path) -> Cache:
    return Cache(folder, channels=1, size=SIZE)


def filled(folder: Path, count: int) -> Cache:
    cache = opened(folder)
    for number in range(count):
        cache.add(key(number), picture(number))
    cache.commit()
    return cache


def values(cache: Cache, keys: list[Key]) -> list[int]:
    kept = [entry for each in keys if isinstance(entry := cache[each], Kept)]
    assert len(kept) == len(keys)
    return cache.pages().take(*places(kept))[:, 0, 0, 0].tolist()


@given(arrays(np.float32, (1, 3, 3), elements=st.floats(0, 1, width=32)))
def test_a_pixel_is_off_by_half_a_step_at_most(pixels: np.ndarray) -> None:
    kept = stored(pixels)
    assert kept.dtype == np.uint16
    np.testing.assert_allclose(pixels_in(kept), kept / LEVELS, rtol=1e-7)
    assert np.abs(kept / LEVELS - pixels.astype(np.float64)).max() <= 0.5 / LEVELS + 1e-12


def test_what_is_committed_is_there_again(tmp_path: Path) -> None:
    cache = filled(tmp_path, 5)
    cache.add(key(7), Refused(Reason.TOO_NARROW, "3 x 900"))
    cache.add(key(8), picture(8))
    assert key(8) not in cache
    cache.commit()
    again = opened(tmp_path)
    assert len(again) == 7
    assert values(again, [key(8), key(0), key(3)]) == [8, 0, 3]
    refused = again[key(7)]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Reason.TOO_NARROW, "3 x 900")
    # By hand: four bytes of one record, little endian, at the place of its number.
    content = (tmp_path / again.pixels).read_bytes()
    assert content[3 * RECORD : 3 * RECORD + 4] == b"\x03\x00\x03\x00"
    assert len(content) == 6 * RECORD


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    cache = filled(tmp_path, 2)
    cache.add(key(2), picture(2))
    assert len(opened(tmp_path)) == 2


@pytest.mark.parametrize("shape", [(1, 8, 7), (3, 8, 8), (8, 8)])
def test_a_picture_of_another_shape_is_a_fault_of_the_program(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="among those of"):
        opened(tmp_path).add(key(0), np.zeros(shape, np.uint16))


def test_other_shapes_do_not_share_a_folder(tmp_path: Path) -> None:
    name = filled(tmp_path, 2).pixels
    other = Cache(tmp_path, channels=3, size=SIZE)
    assert len(other) == 0
    assert other.pixels != name


@settings(max_examples=25)
@given(st.integers(0, 400))
def test_an_index_that_was_cut_off_anywhere_loses_only_its_end(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    filled(folder, 6)
    content = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(content[: max(0, len(content) - cut)])
    cache = opened(folder)
    left = [number for number in range(6) if key(number) in cache]
    assert left == list(range(len(left)))
    assert values(cache, [key(number) for number in left]) == left
    for number in range(6):
        if key(number) not in cache:
            cache.add(key(number), picture(number))
    cache.commit()
    again = opened(folder)
    assert values(again, [key(number) for number in range(6)]) == list(range(6))


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_in_the_index_never_gives_another_picture(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    filled(folder, 4)
    content = bytearray((folder / INDEX).read_bytes())
    content[place % len(content)] ^= 1 << bit
    (folder / INDEX).write_bytes(bytes(content))
    cache = opened(folder)
    for number in range(4):
        if key(number) in cache:
            assert values(cache, [key(number)]) == [number]
    assert all(file in {f"file-{number}" for number in range(4)} for file, _, _ in cache._entries)


def test_a_half_written_record_is_passed_over(tmp_path: Path) -> None:
    cache = filled(tmp_path, 3)
    with (tmp_path / cache.pixels).open("ab") as stream:
        stream.write(b"x" * (RECORD + 5))
    cache = opened(tmp_path)
    cache.add(key(3), picture(3))
    cache.commit()
    assert values(cache, [key(number) for number in range(4)]) == [0, 1, 2, 3]
    assert cache[key(3)] == Kept(5, zlib.crc32(picture(3).tobytes()))
    cache.keep_only([key(number) for number in range(4)])
    assert (tmp_path / cache.pixels).stat().st_size == 4 * RECORD
    assert values(opened(tmp_path), [key(number) for number in range(4)]) == [0, 1, 2, 3]


def test_verify_forgets_what_is_damaged(tmp_path: Path) -> None:
    cache = filled(tmp_path, 4)
    content = bytearray((tmp_path / cache.pixels).read_bytes())
    content[2 * RECORD + 9] ^= 4
    (tmp_path / cache.pixels).write_bytes(bytes(content[: 4 * RECORD - 1]))
    cache = opened(tmp_path)
    with pytest.raises(NotPrepared, match="damaged"):
        values(cache, [key(2)])
    with pytest.raises(NotPrepared, match="missing"):
        values(cache, [key(3)])
    assert cache.verify() == 2
    assert [key(number) in cache for number in range(4)] == [True, True, False, False]
    assert cache.verify() == 0


def test_what_no_file_stands_for_is_gone_from_the_disk(tmp_path: Path) -> None:
    cache = filled(tmp_path, 6)
    cache.add(key(9), Refused(Reason.COLOUR))
    cache.commit()
    mapped, kept = cache.pages(), [cache[key(number)] for number in range(6)]
    before = cache.pixels
    wanted = [key(number) for number in (1, 4)]
    cache.keep_only(wanted)
    assert cache.pixels != before
    for each in (cache, opened(tmp_path)):
        assert len(each) == 2
        assert values(each, wanted) == [1, 4]
    # The old file is there until a manifest no longer needs it, and a map of it outlives its name.
    cache.clear_leftovers()
    assert [path.name for path in tmp_path.glob("pixels-*")] == [cache.pixels]
    assert (tmp_path / cache.pixels).stat().st_size == 2 * RECORD
    assert mapped.take(*places(kept))[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]  # type: ignore[arg-type]


def test_nothing_is_written_anew_where_all_is_wanted(tmp_path: Path) -> None:
    cache = filled(tmp_path, 3)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    cache.keep_only([key(number) for number in range(3)])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_index_without_its_heading_begins_anew_beside_the_old_pictures(tmp_path: Path) -> None:
    name = filled(tmp_path, 3).pixels
    old = (tmp_path / name).read_bytes()
    (tmp_path / INDEX).unlink()
    cache = filled(tmp_path, 1)
    assert cache.pixels > name
    assert (tmp_path / name).read_bytes() == old


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = filled(folder, 2)
    cache.keep_only([key(1)])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_pages_of_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(NotPrepared, match="cannot be read"):
        Pages(tmp_path / "pixels-000001", channels=1, size=SIZE)


def test_lines_with_names_of_all_kinds(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines")
    rows = [["a b", 1], ["ü\n\udcff", 2], ["", 3]]
    lines.append(rows)
    lines.append([["more", 4]])
    assert list(lines.read()) == [*rows, ["more", 4]]
    lines.rewrite(rows[:1])
    assert list(lines.read()) == rows[:1]


@contextmanager
def child(body: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """A process of its own that may write to a pipe; gives its id and the pipe's other end, and kills it after all."""
    told, tell = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            body(tell)
        finally:
            os._exit(0)
    os.close(tell)
    try:
        yield process, told
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(told)


def test_one_process_at_a_time_and_the_lock_of_a_killed_one_is_free(tmp_path: Path) -> None:
    def body(tell: int) -> None:
        with held(tmp_path):
            os.write(tell, b"x")
            time.sleep(60)

    with child(body) as (_, told):
        assert os.read(told, 1) == b"x"
        with pytest.raises(BadInput, match="wait until it has ended"), held(tmp_path):
            pass
    with held(tmp_path):
        pass


def test_killed_between_any_two_writes(tmp_path: Path) -> None:
    """A process that commits picture after picture is killed; all that it said was done is there."""

    def body(tell: int) -> None:
        cache = opened(tmp_path)
        for number in range(60_000):
            cache.add(key(number), picture(number))
            cache.commit()
            os.write(tell, b"x")

    with child(body) as (process, told):
        os.read(told, 1)
        time.sleep(0.2)
        os.kill(process, signal.SIGKILL)
        count = 1
        while said := os.read(told, 1 << 16):
            count += len(said)
    cache = opened(tmp_path)
    assert cache.verify() == 0
    assert values(cache, [key(number) for number in range(count)]) == list(range(count))
    assert len(cache) - count in (0, 1)


def fill(cache: Cache, committed: list[int]) -> None:
    """Go on until there is no room, and say what was committed."""
    while True:
        numbers = range(len(committed), len(committed) + 64)
        for number in numbers:
            cache.add(key(number), picture(number))
        cache.commit()
        committed += numbers


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "size=64k") as disk:
        cache = opened(disk / "cache")
        committed: list[int] = []
        with pytest.raises(StorageFailure, match="what was prepared before is kept; free some space"):
            fill(cache, committed)
        done = len(committed)
        assert done
        again = opened(disk / "cache")
        assert again.verify() == 0
        assert values(again, [key(number) for number in range(done)]) == list(range(done))


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "ro,size=64k") as disk, pytest.raises(StorageFailure), held(disk / "cache"):
        pass
