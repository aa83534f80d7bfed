"""A folder of DICOM images without labels: whatever can be read is read, and what cannot is counted by reason."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from crossward.federation.errors import BadInput
from crossward.imaging.data import Split
from crossward.imaging.dicom.film import read_image
from crossward.imaging.folder import check_shape, fit_square
from crossward.imaging.held_out import NO_CLASS
from crossward.imaging.pictures import normalised
from crossward.imaging.splits import Progress

_PREAMBLE = 128
_MAGIC = b"DICM"


@dataclass(frozen=True)
class Unlabelled:
    """Images of a hospital that has no labels.

    Attributes:
        split: the images; every label is ``NO_CLASS``, and every image counts as a patient of its own.
        scanner: what the files say they come from.
        rejected: how many DICOM files were left out, by the kind of reason.
    """

    split: Split
    scanner: str
    rejected: Counter[str]


def load_unlabelled(path: Path, *, size: int, channels: int, progress: Progress | None = None) -> Unlabelled:
    """Reads every DICOM image below a folder; other files are passed over.

    Args:
        path: the folder.
        size: height and width of the study's images.
        channels: of the study's images.
        progress: called as progress(folder, images read, images to read).

    Raises:
        BadInput: no folder, or no image in it that can be read.
    """
    if not path.is_dir():
        raise BadInput(f"{path}: no such folder; give the folder that holds the hospital's DICOM files")
    files = [file for file in sorted(path.rglob("*")) if _is_dicom(file)]
    fit = fit_square(size)

    def picture(file: Path) -> tuple[torch.Tensor | None, str]:
        """The image and its scanner; or none, and why."""
        try:
            film = read_image(file)
            check_shape(file, film, size)
        except BadInput as error:
            # The reason begins with the file's name, which may say whose scan it is.
            return None, str(error).removeprefix(f"{file.name}: ")
        image = fit(film)
        return (image, film.scanner) if len(image) <= channels else (None, "in colour, and the study's images are grey")

    images: list[torch.Tensor] = []
    names: list[str] = []
    scanners: set[str] = set()
    rejected: Counter[str] = Counter()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for done, (file, (image, what)) in enumerate(zip(files, pool.map(picture, files), strict=True), start=1):
            if image is None:
                rejected[what] += 1
            else:
                images.append(image.expand(channels, -1, -1))
                names.append(str(file.relative_to(path)))
                scanners.add(what)
            if progress is not None:
                progress(path.name, done, len(files))
    if not images:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in rejected.most_common(3))
        raise BadInput(f"{path}: no DICOM image that can be read{f' ({reasons})' if reasons else ''}; check the folder")
    split = Split(
        images=normalised(torch.stack(images), channels),
        labels=torch.full((len(images),), NO_CLASS),
        patients=tuple(names),
        ids=tuple(names),
    )
    return Unlabelled(split, ", ".join(sorted(scanners)), rejected)


def _is_dicom(file: Path) -> bool:
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(_PREAMBLE + len(_MAGIC))[_PREAMBLE:] == _MAGIC
    except OSError:
        return False
