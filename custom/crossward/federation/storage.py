"""Files that are either whole or not there: safetensors written atomically, read whole or range by range."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from crossward.federation.errors import StorageFailure

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_CHECKSUM = "sha256"


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
            sync_folder(path.parent)
    except OSError as error:
        _discard(temporary)
        raise StorageFailure(_explain(path, error)) from error
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: Path) -> None:
    """Remove a half-written file; where even that fails, the error that led here matters more."""
    with suppress(OSError):
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's own list of files on disk."""
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


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can look into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise StorageFailure(f"the folder {folder} cannot be used: {error.strerror}") from error
    return folder


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
    """Write a safetensors file atomically, one tensor at a time.

    Args:
        path: of the file.
        tensors: float32, float64, int64 or uint8.
        metadata: kept in the header.
        durable: put it on disk and add a checksum of the values; scratch files need neither.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    checksum = {_CHECKSUM: _checksum(tensors)} if durable else {}
    encoded = json.dumps({"__metadata__": {**metadata, **checksum}, **header}, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_file(path, durable=durable) as stream:
        stream.write(struct.pack("<Q", len(encoded)))
        stream.write(encoded)
        for tensor in tensors.values():
            stream.write(_bytes_of(tensor))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a whole safetensors file: its tensors and its metadata.

    Raises:
        StorageFailure: it is not there, is not such a file, or its values are not those that were written.
    """
    with TensorFile(path) as file:
        tensors = {name: file.read(name) for name in file.names}
    if file.checksum is not None and file.checksum != _checksum(tensors):
        raise StorageFailure(f"{path} is damaged: its values are not those that were written")
    return tensors, file.metadata


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


class TensorFile:
    """A safetensors file read range by range, so that a large one never has to be in memory.

    Reads go through a plain file descriptor rather than a memory map: mapped pages would count as this process's
    memory, and a mapped file that is cut short kills the process.

    Raises:
        StorageFailure: there is no such file, or it is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StorageFailure(f"could not read {path}: {error.strerror}") from error
        try:
            header, self._start = self._read_header()
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.checksum: str | None = self.metadata.pop(_CHECKSUM, None)
            self._entries: dict[str, dict[str, Any]] = header
            self._check_header()
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, OSError) as error:
            self.close()
            raise StorageFailure(f"could not read {path}: it is damaged, or not a file of tensors") from error

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
        if length > os.fstat(self._descriptor).st_size:
            raise ValueError("the header is longer than the file")
        return dict(json.loads(os.pread(self._descriptor, length, 8))), 8 + length

    def _check_header(self) -> None:
        """Hold every entry against the size of the file: tensors follow one another and fill it exactly."""
        position = 0
        for entry in self._entries.values():
            begin, end = entry["data_offsets"]
            size = math.prod(entry["shape"]) * _TORCH_DTYPES[entry["dtype"]].itemsize
            if begin != position or end != begin + size:
                raise ValueError("an entry does not match its place")
            position = end
        if self._start + position != os.fstat(self._descriptor).st_size:
            raise ValueError("the file is shorter or longer than its header says")

    def read(self, name: str) -> Tensor:
        """Read one tensor whole."""
        entry = self._entries[name]
        tensor = torch.empty(entry["shape"], dtype=_TORCH_DTYPES[entry["dtype"]])
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read one tensor whole into memory that is there already.

        Raises:
            StorageFailure: it is of another shape or kind, or the file ends early.
        """
        entry = self._entries[name]
        if list(tensor.shape) != entry["shape"] or _DTYPES[tensor.dtype] != entry["dtype"]:
            raise StorageFailure(
                f"{self._path}: tensor '{name}' is {entry['dtype']} of shape {entry['shape']}, "
                f"not {_DTYPES[tensor.dtype]} of shape {list(tensor.shape)}"
            )
        # view, not reshape: of a tensor that is not contiguous the latter would fill a copy.
        self._fill(name, entry["data_offsets"][0], tensor.view(-1).view(torch.uint8).numpy().data)

    def read_range(self, name: str, first: int, into: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Fill ``into`` with the flattened values of a float32 tensor, from index ``first`` on."""
        entry = self._entries[name]
        if entry["dtype"] != "F32":
            raise StorageFailure(f"tensor '{name}' is {entry['dtype']}, and only F32 can be combined")
        self._fill(name, entry["data_offsets"][0] + 4 * first, into.data.cast("B"))

    def _fill(self, name: str, offset: int, wanted: memoryview) -> None:
        position = self._start + offset
        while len(wanted):
            count = os.preadv(self._descriptor, [wanted], position)
            if count == 0:
                raise StorageFailure(f"{self._path}: tensor '{name}' ends early, the file is damaged")
            wanted, position = wanted[count:], position + count

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
