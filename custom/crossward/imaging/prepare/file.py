"""One file of a site as a worker process prepares it: read, checked and made into pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.deidentify.burned_in import text_letters
from crossward.imaging.dicom.files import read_scan
from crossward.imaging.dicom.scans import Frame
from crossward.imaging.prepare.levels import stored
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.transforms.pipeline import Fitter, Pipeline

# A long series of frames is never in memory as a whole.
_FRAMES_AT_ONCE: Final = 32
_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Stamp:
    """A file as it was: when both are the same, it is taken for the same file."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        try:
            status = path.stat()
        except OSError:
            raise Refused(Reason.CHANGED, "it is gone") from None
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Wanted:
    """A file, its scanner's domain, and the frames to take."""

    file: str
    domain: str
    frames: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """What came of a file.

    Attributes:
        stamp: of the file.
        sha256: of its bytes.
        results: by frame in the order that was wanted, as far as the first refusal.
    """

    stamp: Stamp
    sha256: str
    results: tuple[Any, ...]


@dataclass(frozen=True)
class Recipe:
    """How files become pictures: the same for all of a site, by domain.

    Attributes:
        folder: of the images.
        pipelines: by domain.
        look_for_text: whether pictures that seem to show burned-in text are refused.
    """

    folder: Path
    pipelines: Mapping[str, Pipeline]
    look_for_text: bool

    def __call__(self, wanted: Wanted) -> Made:
        """Makes the pictures of one file, as they are cached."""
        pipeline = self.pipelines[wanted.domain]

        def picture(frame: Frame) -> NDArray[np.uint16]:
            if self.look_for_text and (letters := text_letters(_grey(frame))):
                raise Refused(Reason.BURNED_IN, f"{letters} letter-like shapes in rows")
            return stored(pipeline(frame))

        return _made(self.folder / wanted.file, wanted.frames, picture)


@dataclass(frozen=True)
class Lesson:
    """How the steps of every domain learn from a training image.

    Attributes:
        folder: of the images.
        fitters: by domain.
    """

    folder: Path
    fitters: Mapping[str, Fitter]

    def __call__(self, wanted: Wanted) -> Made:
        """Looks at the frames of one file."""
        return _made(self.folder / wanted.file, wanted.frames, self.fitters[wanted.domain].summary)


@dataclass(frozen=True)
class Hashing:
    """Hashes files, to know again those that were moved."""

    folder: Path

    def __call__(self, file: str) -> Made:
        return _made(self.folder / file, (), lambda frame: None)


def _made(path: Path, frames: Sequence[int], make: Any) -> Made:
    """Reads a file and gives what ``make`` gives for its frames.

    Raises:
        Refused: the file is not there, or changed while it was read.
    """
    before = Stamp.of(path)
    digest = _sha256(path)
    results = tuple(_results(path, frames, make))
    if Stamp.of(path) != before:
        raise Refused(Reason.CHANGED)
    return Made(before, digest, results)


def _results(path: Path, frames: Sequence[int], make: Any) -> Iterator[Any]:
    try:
        for start in range(0, len(frames), _FRAMES_AT_ONCE):
            for frame in read_scan(path, frames=frames[start : start + _FRAMES_AT_ONCE]).frames:
                yield make(frame)
    except Refused as refusal:
        yield refusal


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise Refused(Reason.UNREADABLE, type(error).__name__) from None
    return digest.hexdigest()


def _grey(frame: Frame) -> NDArray[np.float32]:
    """What shows most in any colour; text may be drawn in one."""
    values: NDArray[np.float32] = frame.values.max(axis=2) if frame.colour else frame.values
    return values
