from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from crossward.federation import storage
from crossward.federation.errors import StorageFailure
from crossward.federation.storage import TensorFile, atomic_file, read_json, read_tensors, write_json, write_tensors

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8])


def filled(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(start, start + count, dtype=torch.float64) % 251).to(dtype).reshape(shape)


@pytest.mark.usefixtures("without_fsync")
@given(
    declared=st.dictionaries(names, st.tuples(shapes, dtypes), max_size=5),
    metadata=st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3),
)
def test_what_is_written_is_read_back_by_the_library_and_by_us(
    declared: dict[str, tuple[tuple[int, ...], torch.dtype]], metadata: dict[str, str]
) -> None:
    tensors = {name: filled(shape, dtype, 3 * place) for place, (name, (shape, dtype)) in enumerate(declared.items())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        write_tensors(path, tensors, metadata)
        by_library = load_file(path)
        ours, read_metadata = read_tensors(path)
        assert os.listdir(folder) == [path.name]
    assert read_metadata == metadata
    for result in (by_library, ours):
        assert result.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert result[name].dtype == tensor.dtype
            assert result[name].shape == tensor.shape
            assert torch.equal(result[name], tensor)


@pytest.mark.usefixtures("without_fsync")
@given(declared=st.lists(shapes, min_size=1, max_size=4), data=st.data())
def test_ranges_are_read_from_our_files_and_from_the_librarys(
    declared: list[tuple[int, ...]], data: st.DataObject
) -> None:
    tensors = {f"t{place}": filled(shape, torch.float32, 7 * place) for place, shape in enumerate(declared)}
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder) / "ours", tensors, {"round": "3"})
        save_file(tensors, Path(folder) / "library", {"round": "3"})
        for source in ("ours", "library"):
            with TensorFile(Path(folder) / source) as file:
                assert file.metadata == {"round": "3"}
                for name, tensor in tensors.items():
                    whole = file.read(name)
                    assert whole.shape == tensor.shape
                    assert torch.equal(whole, tensor)
                    first = data.draw(st.integers(0, tensor.numel()))
                    count = data.draw(st.integers(0, tensor.numel() - first))
                    into = np.full(count, np.nan, dtype=np.float32)
                    file.read_range(name, first, into)
                    assert into.tolist() == tensor.reshape(-1)[first : first + count].tolist()


def test_the_order_in_memory_does_not_matter(tmp_path: Path) -> None:
    values = torch.arange(48.0).reshape(2, 3, 2, 4)
    tensors = {
        "channels_last": values.to(memory_format=torch.channels_last),
        "transposed": values.permute(3, 1, 0, 2),
        "slice": values[:, 1:, :, ::2],
        "parameter": torch.nn.Parameter(values),
    }
    write_tensors(tmp_path / "f", tensors, {})
    for name, tensor in load_file(tmp_path / "f").items():
        assert torch.equal(tensor, tensors[name]), name


def test_the_data_begin_on_eight_bytes(tmp_path: Path) -> None:
    for length in range(1, 10):
        write_tensors(tmp_path / "f", {"x" * length: torch.ones(1)}, {})
        assert int.from_bytes((tmp_path / "f").read_bytes()[:8], "little") % 8 == 0


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    # A map of the file would: and where the file is cut short or its disk fails, the process would be killed.
    path = tmp_path / "f"
    write_tensors(path, {"x": torch.arange(5000.0)}, {})
    tensors, _ = read_tensors(path)
    with path.open("r+b") as stream:
        stream.write(b"\0" * path.stat().st_size)
    assert torch.equal(tensors["x"], torch.arange(5000.0))


def test_a_tensor_is_read_into_memory_that_is_there(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"x": torch.arange(6.0).view(2, 3), "point": torch.tensor(7.0)}, {})
    there, point = torch.full((2, 3), -1.0), torch.tensor(-1.0)
    place = there.data_ptr()
    with TensorFile(tmp_path / "f") as file:
        file.read_into("x", there)
        file.read_into("point", point)
    assert there.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert there.data_ptr() == place
    assert point.item() == 7


@pytest.mark.parametrize("tensor", [torch.empty(3, 2), torch.empty(6), torch.empty(2, 3, dtype=torch.float64)])
def test_memory_of_another_shape_or_kind_is_not_filled(tmp_path: Path, tensor: torch.Tensor) -> None:
    write_tensors(tmp_path / "f", {"x": torch.zeros(2, 3)}, {})
    with TensorFile(tmp_path / "f") as file, pytest.raises(StorageFailure, match=r"'x' is F32 of shape \[2, 3\]"):
        file.read_into("x", tensor)


def test_memory_that_is_not_in_order_is_refused_rather_than_a_copy_filled(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"x": torch.zeros(2, 3)}, {})
    with TensorFile(tmp_path / "f") as file, pytest.raises(RuntimeError, match="view"):
        file.read_into("x", torch.empty(3, 2).T)


def test_only_float32_is_combined(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"x": torch.ones(2, dtype=torch.float64)}, {})
    with TensorFile(tmp_path / "f") as file, pytest.raises(StorageFailure, match="'x' is F64"):
        file.read_range("x", 0, np.empty(2, dtype=np.float32))


def test_a_file_cut_short_is_noticed_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_tensors(path, {"x": torch.ones(100), "y": torch.ones(100)}, {})
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 4)
        assert file.read("x").sum() == 100
        with pytest.raises(StorageFailure, match="'y' ends early"):
            file.read("y")
    with pytest.raises(StorageFailure, match="damaged"):
        TensorFile(path)


@pytest.mark.parametrize("content", [None, b"", b"abc", b"\xff" * 8, (20).to_bytes(8, "little") + b"{not json"])
def test_a_file_that_is_no_tensor_file_is_refused_in_our_words(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "f"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageFailure):
        read_tensors(path)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageFailure):
        TensorFile(path)
    assert len(os.listdir("/proc/self/fd")) == open_before


class Unlucky(Exception):
    pass


@pytest.mark.parametrize("error", [Unlucky(), KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_failure_in_the_middle_leaves_the_old_file(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_file(path) as stream:
            stream.write(b"new, but not all of i")
            stream.flush()
            raise error

    expected = StorageFailure if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_nothing_appears_under_the_name_before_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "f"
    with atomic_file(path) as stream:
        stream.write(b"content")
        stream.flush()
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_is_on_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The order is what makes it atomic against a power failure: data, then name, then folder.
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def traced_fsync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "data"
        events.append(f"{kind}{'' if kind == 'folder' else os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def traced_replace(self: Path, target: Path) -> Path:
        events.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    with atomic_file(tmp_path / "f") as stream:
        stream.write(b"x" * 10)
    assert events == ["data10", "name", "folder"]


def test_json_is_written_whole_and_never_with_nan(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    content = {"a": [1, 2.5, None], "b": {"ü": "é\n"}}
    write_json(path, content)
    assert read_json(path) == content
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(path, {"a": {"b": [bad]}})
    assert read_json(path) == content
    assert os.listdir(tmp_path) == ["f.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_json_that_is_not_an_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(StorageFailure, match=r"f\.json"):
        read_json(tmp_path / "f.json")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system of its own at ``folder``; the test is skipped where that is not permitted."""
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


WRITERS: dict[str, Callable[[Path], None]] = {
    "tensors": lambda path: write_tensors(path, {f"t{place}": torch.ones(1 << 16) for place in range(8)}, {}),
    "json": lambda path: write_json(path, {"text": "x" * (2 << 20)}),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_says_so(kind: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m"):
        path = tmp_path / "disk" / "f"
        write_tensors(path, {"t": torch.arange(100.0)}, {"round": "1"})
        with pytest.raises(StorageFailure, match=r"^disk full while writing .*free some space"):
            WRITERS[kind](path)
        # What was read may be a map of the file, and would keep the file system busy: only plain values leave here.
        assert read_tensors(path)[0]["t"].tolist() == list(range(100))
        assert read_tensors(path)[1] == {"round": "1"}
        assert os.listdir(path.parent) == ["f"]
        write_tensors(path, {"t": torch.ones(200)}, {"round": "2"})
        assert read_tensors(path)[1] == {"round": "2"}


def test_a_disk_that_cannot_be_written_is_reported_in_our_words(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "size=1m,ro"),
        pytest.raises(StorageFailure, match=r"no permission to write .*choose a folder"),
    ):
        write_json(tmp_path / "disk" / "f.json", {})


def test_a_file_where_a_folder_should_be_is_reported_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(StorageFailure, match="could not write"):
        write_json(tmp_path / "occupied" / "f.json", {})


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_without_permission_is_reported_in_our_words(mode: int, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as reachable:
        os.chmod(reachable, 0o755)
        folder = Path(reachable) / "closed"
        folder.mkdir(mode=0o700)
        write_json(folder / "f.json", {"old": True})
        folder.chmod(mode)
        if in_child_as_nobody(lambda: write_json(folder / "f.json", {"new": True})) != "refused in our words":
            pytest.fail("the error is not a StorageFailure that says 'no permission'")
        folder.chmod(0o700)
        assert read_json(folder / "f.json") == {"old": True}
        assert os.listdir(folder) == ["f.json"]


def in_child_as_nobody(action: Callable[[], None]) -> str:
    """Try something in a forked child that has given up root's rights; a plain fork, because tests may run threads."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            ctypes.CDLL(None).setresuid(NOBODY, NOBODY, NOBODY)
            action()
            code = 1
        except StorageFailure as failure:
            code = 0 if "no permission to write" in str(failure) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    outcomes = {0: "refused in our words", 1: "written", 2: "another reason", 3: "another error"}
    return outcomes[os.waitstatus_to_exitcode(status)]


HALF_WAY = """
import sys, time
from pathlib import Path
from crossward.federation.storage import atomic_file
with atomic_file(Path(sys.argv[1])) as stream:
    stream.write(b"new" * 1000)
    stream.flush()
    print("half way", flush=True)
    time.sleep(60)
"""

FOR_EVER = """
import sys
from pathlib import Path
import torch
from crossward.federation.storage import write_tensors
for number in range(1, 1 << 20):
    write_tensors(Path(sys.argv[1]), {f"t{k}": torch.full((5000,), float(number)) for k in range(20)}, {})
    if number == 3:
        print("writing", flush=True)
"""


def killed(program: str, path: Path, *, after_seconds: float) -> None:
    """Start a program, and kill it without warning some time after it has said something."""
    inherited = {**os.environ, "PYTHONPATH": str(Path(storage.__file__).parents[2])}
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, env=inherited)
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=after_seconds)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_a_process_killed_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    killed(HALF_WAY, path, after_seconds=0.01)
    assert path.read_bytes() == b"old"


def test_a_process_killed_at_any_time_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    killed(FOR_EVER, path, after_seconds=0.017)
    tensors, _ = read_tensors(path)
    values = {float(value) for tensor in tensors.values() for value in tensor.unique()}
    assert len(tensors) == 20
    assert len(values) == 1
    assert values.pop() >= 3
