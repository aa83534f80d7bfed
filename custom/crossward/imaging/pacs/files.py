"""The private folder for images from an archive: each file whole, once, and under a name that says nothing.

::

    OUT/images/3f/3f9c...e1.dcm   a hash of the SOP instance UID
    OUT/pull.jsonl                what was pulled (see pacs_state)
    OUT/.lock                     one process at a time
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydicom import dcmread
from pydicom.dataelem import RawDataElement
from pydicom.errors import InvalidDicomError
from pydicom.uid import DeflatedExplicitVRLittleEndian

from crossward.federation.errors import BadInput, StorageFailure
from crossward.federation.storage import atomic_file, private_folder
from crossward.imaging.pacs.trouble import Lost, Trouble

IMAGES = "images"
_LOCKS = 64
_LARGE_ELEMENT = 64 * 1024
_UNDEFINED_LENGTH = 0xFFFFFFFF
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Kept = Literal["new", "same", "replaced"]


class ImageFolder:
    """Keeps files by SOP instance UID; any number of threads may put and look.

    Raises:
        BadInput: another process has the folder.
        StorageFailure: it cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._images = private_folder(folder / IMAGES)
        self._guards = tuple(threading.Lock() for _ in range(_LOCKS))
        self._lock = self._take_lock()
        # A process that was killed leaves what it had begun; nobody else is writing here now.
        for left_over in self._images.glob("*/.*.part"):
            left_over.unlink(missing_ok=True)

    def _take_lock(self) -> int:
        try:
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageFailure(f"the folder {self.folder} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise BadInput(
                f"{self.folder}: another process is filling it; wait for its end or choose another"
            ) from None
        return descriptor

    def path(self, sop_uid: str) -> Path:
        """Where the file with this UID is, or would be."""
        return self._at(file_name(sop_uid))

    def _at(self, name: str) -> Path:
        return self._images / name[:2] / name

    def __contains__(self, sop_uid: str) -> bool:
        return self.path(sop_uid).is_file()

    def has_file(self, name: str) -> bool:
        return self._at(name).is_file()

    def put(self, sop_uid: str, pieces: Iterable[bytes | memoryview]) -> tuple[Kept, int]:
        """Writes a file piece by piece; it appears under its name only when it is whole and the right one.

        Returns:
            Whether it is new, and its bytes.

        Raises:
            Lost: it is not DICOM, is damaged, or is another instance.
            StorageFailure: it could not be written.
        """
        path = self.path(sop_uid)
        kept: Kept = "new"
        try:
            with self._guards[int(path.name[:4], 16) % _LOCKS], atomic_file(path) as stream:
                os.fchmod(stream.fileno(), 0o600)
                for piece in pieces:
                    stream.write(piece)
                stream.flush()
                written = Path(stream.name)
                check_instance(written, sop_uid)
                if path.is_file():
                    kept = "same" if filecmp.cmp(written, path, shallow=False) else "replaced"
                size = written.stat().st_size
        except StorageFailure as failure:
            raise self._without_name(failure) from None
        return kept, size

    def _without_name(self, failure: StorageFailure) -> StorageFailure:
        cause = failure.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        what = "the disk is full" if number in _FULL else f"cannot be written ({os.strerror(number or errno.EIO)})"
        return StorageFailure(f"{self.folder}: {what}; put it right and start again, the files that are there are kept")

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> ImageFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def file_name(sop_uid: str) -> str:
    """A name that does not say whose image it is, the same for the same UID."""
    return f"{hashlib.sha256(sop_uid.encode()).hexdigest()[:32]}.dcm"


def check_instance(path: Path, sop_uid: str) -> None:
    """Refuses a file that is not DICOM, that ends within an element, or that has another SOP instance UID.

    Pixels are not decoded: that is for whoever reads the folder.
    """
    try:
        dataset = dcmread(path, defer_size=_LARGE_ELEMENT)
        found = str(dataset.get("SOPInstanceUID", ""))
        inflated = dataset.file_meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian
        # Elements as they are in the file: none is parsed, so no warning can quote one.
        ends = [
            (element.value_tell or 0) + element.length
            for element in dataset.values()
            if isinstance(element, RawDataElement) and element.length != _UNDEFINED_LENGTH
        ]
    except InvalidDicomError:
        raise Lost(Trouble.NOT_DICOM) from None
    except Exception:
        # The parser raises whatever it likes, and its texts may quote the header.
        raise Lost(Trouble.DAMAGED) from None
    if not inflated and max(ends, default=0) > path.stat().st_size:
        raise Lost(Trouble.DAMAGED)
    if found != sop_uid:
        raise Lost(Trouble.OTHER)
