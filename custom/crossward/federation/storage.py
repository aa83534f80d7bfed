"""Files that are either whole or not there: safetensors written atomically, read whole or range by range."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from crossward.federation.errors import StorageFailure

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}


@contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when it is complete and, if ``durable``, on disk.

    Raises:
        StorageFailure: it could not be written; the file that was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageFailure(_explain(path, error)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(path: Path, error: OSError) -> str:
    kept = "the previous version is untouched"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"disk full while writing {path}: {kept}; free some space and resume"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write {path}: {kept}; choose a folder that can be written"
    return f"could not write {path} ({error.strerror or error}): {kept}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON atomically; a number that is not finite is an error, not a NaN in the file."""
    text = json.dumps(content, indent=2, allow_nan=False)
    with atomic_file(path) as stream:
        stream.write(text.encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that write_json wrote."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageFailure(f"could not read {path}: {error}") from error
    if not isinstance(content, dict):
        raise StorageFailure(f"{path} does not hold a JSON object")
    return content


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, durable: bool = True
) -> None:
    """Write a safetensors file atomically, streaming one tensor at a time; scratch files need not be durable."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_file(path, durable=durable) as stream:
        stream.write(struct.pack("<Q", len(encoded)))
        stream.write(encoded)
        for tensor in tensors.values():
            stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a whole safetensors file: its tensors and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StorageFailure(f"could not read {path}: {error}") from error


class TensorFile:
    """A safetensors file read range by range, so that a large one never has to be in memory.

    Reads go through a plain file descriptor rather than a memory map: mapped pages would count as this
    process's memory, and the combiner reads every site's file once per block.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
        header = json.loads(os.pread(self._descriptor, length, 8))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, dict[str, Any]] = header
        self._start = 8 + length

    def read(self, name: str) -> Tensor:
        """Read one tensor whole."""
        entry = self._entries[name]
        values = torch.empty(entry["shape"], dtype=torch.float32)
        self.read_range(name, 0, values.view(-1).numpy())
        return values

    def read_range(self, name: str, first: int, into: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Fill ``into`` with the flattened values of a float32 tensor, from index ``first`` on."""
        entry = self._entries[name]
        if entry["dtype"] != "F32":
            raise StorageFailure(f"tensor '{name}' is {entry['dtype']}, and only F32 can be combined")
        position = self._start + entry["data_offsets"][0] + 4 * first
        wanted = into.data.cast("B")
        while len(wanted):
            count = os.preadv(self._descriptor, [wanted], position)
            if count == 0:
                raise StorageFailure(f"tensor '{name}' ends early: the file is damaged")
            wanted, position = wanted[count:], position + count

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
