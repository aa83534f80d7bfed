"""A folder of hospitals: one sub-folder each, with DICOM images and a labels.csv that lists them.

Images keep their shape: the longer side is brought to the size asked for (each new pixel the mean of those it
covers), and the shorter one is filled up with dark on both sides. Nothing of a scan is cut off.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.film import Film, read_image
from crossward.imaging.splits import Listing, Progress, choose_sites, split_patients

LABELS = "labels.csv"
COLUMNS = ("file", "patient", "label")
# Scans to try a trained model on, kept beside the hospitals; never trained on.
HELD_OUT = "held-out"
PHANTOM_NOTE = "PHANTOMS.txt"
# As the phantom writer names its films; a real scan's name, which may say whose it is, hardly ever looks like this.
_PHANTOM_FILE = re.compile(r"[A-Z][0-9]{4}-[1-9]\.dcm")
_LEAVE_OUT = "leave the site out with --sites"


def hospitals(path: Path) -> dict[str, Path]:
    """The folder itself where it has labels, otherwise its sub-folders, by name."""
    if (path / LABELS).is_file():
        return {path.absolute().name: path}
    return {
        entry.name: entry
        for entry in sorted(path.iterdir())
        if entry.is_dir() and entry.name != HELD_OUT and not entry.name.startswith(".")
    }


def has_labels(path: Path) -> bool:
    """Whether any hospital here has labels."""
    return any((hospital / LABELS).is_file() for hospital in hospitals(path).values())


def is_phantom(path: Path) -> bool:
    """Whether the folder, or the one that this single hospital or held-out set lies in, says its images are made up."""
    places = [path.resolve()]
    if (path / LABELS).is_file():
        above = places[0].parent
        places.append(above.parent if above.name == HELD_OUT else above)
    return any((place / PHANTOM_NOTE).is_file() for place in places)


def phantom_name(file: str) -> str | None:
    """The short name of a film that the phantom writer named; None for any other file."""
    name = PurePosixPath(file)
    return name.stem if _PHANTOM_FILE.fullmatch(name.name) else None


def listings(path: Path, *, sites: Sequence[str] | None, seed: int, leave_out: str = _LEAVE_OUT) -> list[Listing]:
    """Reads and checks every labels.csv, and splits each hospital's patients; no image is opened.

    Args:
        path: the folder of hospitals.
        sites: those to keep; all of them when not given.
        seed: decides which patients are in which split.
        leave_out: what to advise, in an error, for doing without a hospital.
    """
    found = hospitals(path)
    return [_listing(name, found[name], seed=seed, leave_out=leave_out) for name in choose_sites(found, sites)]


def _listing(site: str, hospital: Path, *, seed: int, leave_out: str) -> Listing:
    rows = _read_labels(site, hospital / LABELS, leave_out=leave_out)
    files: dict[Path, str] = {}
    for line, row in rows:
        file = _find(site, hospital, row["file"], line)
        if file in files:
            raise BadInput(f"{site}: {LABELS} line {line} names a file a second time; keep one line per file")
        files[file] = row["file"]
    labels = tuple(row["label"] for _, row in rows)
    patients = tuple(row["patient"] for _, row in rows)
    classes = tuple(sorted(set(labels)))
    return Listing(
        site=site,
        classes=classes,
        labels=labels,
        patients=patients,
        ids=tuple(files.values()),
        parts=split_patients(patients, [classes.index(label) for label in labels], seed=seed),
        read=partial(_read_pictures, site, tuple(files), tuple(line for line, _ in rows)),
    )


def _read_labels(site: str, path: Path, *, leave_out: str) -> list[tuple[int, dict[str, str]]]:
    """The lines of a labels.csv with their numbers, every one complete."""
    if not path.is_file():
        raise BadInput(f"{site}: has no {LABELS}; add one (columns {', '.join(COLUMNS)}), or {leave_out}")
    try:
        # Spreadsheet programs put a byte order mark in front.
        with path.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines, skipinitialspace=True)
            header = [name.strip() for name in table.fieldnames or ()]
            missing = [name for name in COLUMNS if name not in header]
            if missing:
                raise BadInput(
                    f"{site}: {LABELS} lacks the column(s) {', '.join(missing)}; its first line must name "
                    f"{', '.join(COLUMNS)}, separated by commas"
                )
            table.fieldnames = header
            rows = [(table.line_num, {name: (row[name] or "").strip() for name in COLUMNS}) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{site}: {LABELS} cannot be read ({type(error).__name__}); save it as UTF-8 CSV") from None
    for line, row in rows:
        empty = [name for name in COLUMNS if not row[name]]
        if empty:
            raise BadInput(f"{site}: {LABELS} line {line} has no {', '.join(empty)}; fill it in or delete the line")
    if not rows:
        raise BadInput(f"{site}: {LABELS} lists no images; add them, or {leave_out}")
    return rows


def _find(site: str, hospital: Path, name: str, line: int) -> Path:
    """The file that a line names, in the hospital's folder or in its images folder."""
    relative = PurePosixPath(name.replace("\\", "/"))
    if relative.is_absolute() or ".." in relative.parts:
        raise BadInput(
            f"{site}: {LABELS} line {line} names a file outside the hospital's folder; move the file into it"
        )
    for folder in (hospital, hospital / "images"):
        if (folder / relative).is_file():
            return folder / relative
    raise BadInput(f"{site}: {LABELS} line {line} names a file that is not there; add the file or delete the line")


def _read_pictures(
    site: str,
    files: tuple[Path, ...],
    lines: tuple[int, ...],
    rows: NDArray[np.intp],
    *,
    size: int,
    progress: Progress | None,
) -> tuple[torch.Tensor, str]:
    fit = fit_square(size)

    def picture(row: int) -> tuple[torch.Tensor, str]:
        try:
            film = read_image(files[row])
            check_shape(files[row], film, size)
        except BadInput as error:
            # The line says which file it is; the file's name may say whose, and errors end in logs.
            reason = str(error).removeprefix(f"{files[row].name}: ")
            raise BadInput(f"{site}: {LABELS} line {lines[row]}: {reason}") from None
        return fit(film), film.scanner

    pictures: list[torch.Tensor] = []
    scanners: set[str] = set()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # When one file is refused, map() cancels those that have not begun.
        for image, scanner in pool.map(picture, rows.tolist()):
            pictures.append(image)
            scanners.add(scanner)
            if progress is not None:
                progress(site, len(pictures), len(rows))
    channels = max(len(image) for image in pictures)
    return torch.stack([image.expand(channels, -1, -1) for image in pictures]), ", ".join(sorted(scanners))


def check_shape(file: Path, film: Film, size: int) -> None:
    """Refuse a strip that would be no picture once it is shrunk to the size."""
    height, width = film.pixels.shape[:2]
    if max(height, width) > size * min(height, width):
        raise BadInput(f"{file.name}: {height} x {width} pixels is too narrow for a picture; take it out of the list")


def fit_square(size: int) -> Callable[[Film], torch.Tensor]:
    """A film to a [c, size, size] tensor: shrunk by area, enlarged smoothly, its shape kept by dark margins."""
    # Takes seconds to import, and packs do without it.
    from monai.transforms import Compose, EnsureChannelFirst, EnsureType, Resize, SpatialPad

    def pipeline(mode: str) -> Compose:
        return Compose(
            [
                EnsureChannelFirst(channel_dim=-1),
                Resize(spatial_size=size, size_mode="longest", mode=mode),
                SpatialPad(spatial_size=(size, size)),
                EnsureType(dtype=torch.float32, track_meta=False),
            ]
        )

    shrink, enlarge = pipeline("area"), pipeline("bilinear")

    def fit(film: Film) -> torch.Tensor:
        picture: torch.Tensor = (shrink if max(film.pixels.shape[:2]) >= size else enlarge)(np.atleast_3d(film.pixels))
        return picture

    return fit
