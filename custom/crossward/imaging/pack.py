"""A pack: one .npz file per site with small uint8 images and the pack's own splits.

Each file holds `x` (N,H,H or N,H,H,3), `y` (index into `classes`), `split` (0 training, 1 validation, 2 test), `ids`
and `classes`. A manifest.csv may name the group (patient, lesion) of every image; without one each stands for itself.
"""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from crossward.federation.errors import BadInput
from crossward.imaging.splits import Listing, Progress, choose_sites

MANIFEST = "manifest.csv"
KEYS = ("x", "y", "split", "ids", "classes")
SIZE_SUFFIX = re.compile(r"_(32|64|128|256)$")
CHUNK = 512


def is_pack(path: Path) -> bool:
    """Whether the folder has .npz files."""
    return any(path.glob("*.npz"))


def files_of(path: Path) -> dict[str, Path]:
    """The pack's files by site."""
    files: dict[str, Path] = {}
    for file in sorted(path.glob("*.npz")):
        site = SIZE_SUFFIX.sub("", file.stem)
        if site in files:
            raise BadInput(f"{site}: both {files[site].name} and {file.name} are this site's; keep one of them")
        files[site] = file
    return files


def listings(path: Path, *, sites: Sequence[str] | None) -> list[Listing]:
    """Reads and checks the files of the sites asked for."""
    files = files_of(path)
    groups = _groups(path / MANIFEST)
    return [_listing(site, files[site], groups) for site in choose_sites(files, sites)]


def _listing(site: str, file: Path, groups: dict[tuple[str, int], str] | None) -> Listing:
    arrays = _arrays(site, file)
    classes = tuple(str(name) for name in arrays["classes"])
    ids = tuple(str(name) for name in arrays["ids"])
    try:
        patients = ids if groups is None else tuple(groups[file.name, row] for row in range(len(ids)))
    except KeyError:
        raise BadInput(f"{site}: {MANIFEST} does not list every image of {file.name}; complete it") from None
    parts = arrays["split"].astype(np.uint8)
    if len(set(zip(patients, parts.tolist(), strict=True))) > len(set(patients)):
        raise BadInput(f"{site}: {file.name} has images of one patient in two splits; split it by patient")
    return Listing(
        site=site,
        classes=classes,
        labels=tuple(classes[code] for code in arrays["y"]),
        patients=patients,
        ids=ids,
        parts=parts,
        read=partial(_read_pictures, site, arrays["x"]),
    )


def _arrays(site: str, file: Path) -> dict[str, NDArray[Any]]:
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("a single array")
        with loaded:
            arrays = dict(loaded)
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise BadInput(
            f"{site}: {file.name} is damaged or no pack file ({type(error).__name__}); copy it again"
        ) from None
    problem = _problem(arrays)
    if problem:
        raise BadInput(f"{site}: {file.name} {problem}; make the pack again")
    return arrays


def _problem(arrays: dict[str, NDArray[Any]]) -> str | None:
    """What is wrong with the contents of a file, if anything."""
    missing = [key for key in KEYS if key not in arrays]
    if missing:
        return f"lacks {', '.join(missing)}"
    x, y, split = arrays["x"], arrays["y"], arrays["split"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or x.shape[1] != x.shape[2] or (x.ndim == 4 and x.shape[3] != 3):
        return "does not hold square uint8 images, grey or RGB"
    if not len(x):
        return "holds no images"
    if any(arrays[key].shape != (len(x),) for key in ("y", "split", "ids")) or arrays["classes"].ndim != 1:
        return "has lists that do not fit its number of images"
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(arrays["classes"]):
        return "has labels that are none of its classes"
    if split.dtype.kind not in "iu" or not np.isin(split, (0, 1, 2)).all():
        return "has splits other than 0, 1 and 2"
    return None


def _groups(manifest: Path) -> dict[tuple[str, int], str] | None:
    """The group of every (file, row), where there is a manifest with a column for it."""
    if not manifest.is_file():
        return None
    try:
        with manifest.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines)
            column = next(
                (name for name in table.fieldnames or () if re.fullmatch(r"patient|(\w+_)?group", name)), None
            )
            return None if column is None else {(row["file"], int(row["row"])): row[column] for row in table}
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError, TypeError) as error:
        raise BadInput(
            f"{manifest.name}: cannot be read ({type(error).__name__}); it needs the columns file and row, as UTF-8 CSV"
        ) from None


def _read_pictures(
    site: str, stored: NDArray[np.uint8], rows: NDArray[np.intp], *, size: int, progress: Progress | None
) -> tuple[torch.Tensor, str]:
    """The images, shrunk by area or enlarged smoothly; a pack does not say which scanner they come from."""
    channels = 3 if stored.ndim == 4 else 1
    pictures = torch.empty(len(rows), channels, size, size)
    for start in range(0, len(rows), CHUNK):
        pictures[start : start + CHUNK] = sized(stored[rows[start : start + CHUNK]], size)
        if progress is not None:
            progress(site, min(start + CHUNK, len(rows)), len(rows))
    return pictures, ""


def sized(stored: NDArray[np.uint8], size: int) -> torch.Tensor:
    """Stored images (N,H,H or N,H,H,3) as [n, 1 or 3, size, size] in [0, 1], shrunk by area or enlarged smoothly."""
    colours = stored if stored.ndim == 4 else stored[..., None]
    images = torch.from_numpy(colours).permute(0, 3, 1, 2).float().div_(255)
    if stored.shape[1] > size:
        return interpolate(images, size=(size, size), mode="area")
    if stored.shape[1] < size:
        return interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images
