"""Made-up hospitals: folders of computer-drawn chest films as DICOM files, with labels, for trying everything out."""

from __future__ import annotations

import csv
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.anatomy import CLASSES, Array, draw_chest, draw_finding, draw_person
from crossward.imaging.folder import COLUMNS, HELD_OUT, LABELS, PHANTOM_NOTE
from crossward.imaging.phantom_file import Label, write_film
from crossward.imaging.scanner import Scanner, take_film
from crossward.imaging.scanner_profiles import HOSPITAL_SCANNERS, UNSEEN_SCANNER
from crossward.imaging.splits import Progress
from crossward.imaging.spoiled import KINDS, spoiled_film

UNFINISHED = ".partial"
FEWEST_PATIENTS = 4
USUAL_PATIENTS = 240
NOTE = """Everything in this folder is computer-drawn.

The films are phantoms: shapes drawn by a program from random numbers. No patient was ever imaged, no person,
hospital, scanner or maker named here exists, and nothing here may be used to judge how well a model reads
the films of real patients. They are for trying out Crossward only.
"""


@dataclass(frozen=True)
class Hospitals:
    """What was written: the hospitals' folder names, and how many films and made-up patients of which classes."""

    folder: Path
    hospitals: tuple[str, ...]
    files: int
    patients: int
    classes: tuple[str, ...]


@dataclass(frozen=True)
class _Film:
    """One film still to be drawn."""

    folder: str
    scanner: Scanner
    label: Label
    kind: str


def write_hospitals(
    out: Path,
    *,
    sites: int = 4,
    patients: int = USUAL_PATIENTS,
    seed: int = 0,
    unseen: bool = False,
    spoiled: bool = False,
    progress: Progress | None = None,
) -> Hospitals:
    """Write made-up hospitals, each with its own scanner.

    The same options and seed give the same files, byte for byte. Hospitals appear under ``out`` only when every
    film is on disk.

    Args:
        out: folder to make, or an empty one.
        sites: number of hospitals.
        patients: made-up patients per hospital, the same number of every class; a quarter have two or three films.
        seed: of all random numbers.
        unseen: also write films of a scanner that no hospital has, under ``held-out/unseen-scanner``.
        spoiled: also write spoiled films, labelled by what is wrong with them, under ``held-out/spoiled``.
        progress: called as ``progress(what, done, total)``.

    Raises:
        BadInput: the options make no sense, or ``out`` is not empty or cannot be written.
        StorageFailure: the disk failed half-way; nothing is left behind.
    """
    _check(out, sites=sites, patients=patients, seed=seed)
    names = tuple(f"hospital-{chr(ord('a') + site)}" for site in range(sites))
    scanners = HOSPITAL_SCANNERS[:sites]
    films: list[_Film] = []
    for name, scanner in zip(names, scanners, strict=True):
        films += _set_of_films(name, name[-1].upper(), (scanner,), CLASSES, patients, seed)
    held_out = max(FEWEST_PATIENTS, patients // 2)
    if unseen:
        films += _set_of_films(f"{HELD_OUT}/unseen-scanner", "U", (UNSEEN_SCANNER,), CLASSES, held_out, seed)
    if spoiled:
        films += _set_of_films(f"{HELD_OUT}/spoiled", "S", scanners, KINDS, held_out, seed)

    existed = out.exists()
    partial = out / UNFINISHED
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"{out} cannot be written ({error.strerror}): choose another folder") from error
    try:
        _write_all(partial, films, progress)
        for made in sorted(partial.iterdir()):
            made.rename(out / made.name)
        partial.rmdir()
    except BaseException as error:
        for left in out.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if not existed:
            out.rmdir()
        if isinstance(error, OSError):
            raise StorageFailure(
                f"{out}: writing the films failed ({error.strerror}) and nothing was kept: "
                "check the disk, then run it again"
            ) from error
        raise
    return Hospitals(out, names, len(films), len({film.label.patient for film in films}), CLASSES)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds phantoms that were written to the end."""
    return (folder / PHANTOM_NOTE).exists() and not (folder / UNFINISHED).exists()


def _check(out: Path, *, sites: int, patients: int, seed: int) -> None:
    """Refuse what cannot be done, before anything is written."""
    if not 1 <= sites <= len(HOSPITAL_SCANNERS):
        raise BadInput(f"{sites} hospitals cannot be made: choose from 1 to {len(HOSPITAL_SCANNERS)}")
    if patients < FEWEST_PATIENTS:
        raise BadInput(f"{patients} patients per hospital are too few: choose {FEWEST_PATIENTS} or more")
    if seed < 0:
        raise BadInput(f"the seed {seed} is negative: choose 0 or more")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise BadInput(f"{out} exists and is not an empty folder: choose another, or empty it first")
    except OSError as error:
        raise BadInput(f"{out} cannot be read ({error.strerror}): choose another folder") from error


def _set_of_films(
    folder: str, letter: str, scanners: tuple[Scanner, ...], kinds: tuple[str, ...], patients: int, seed: int
) -> list[_Film]:
    """Plan one set of films: as many patients of every kind, every fourth of a kind with two or three films."""
    order = np.random.default_rng([seed, ord(letter)]).permutation(patients)
    films = []
    for person, place in enumerate(order, start=1):
        turn, which = divmod(int(place), len(kinds))
        count = 1 if turn % 4 else 2 + turn // 4 % 2
        scanner = scanners[turn % len(scanners)]
        labels = (Label(letter, person, film, seed) for film in range(1, count + 1))
        films += [_Film(folder, scanner, label, kinds[which]) for label in labels]
    return films


def _write_all(root: Path, films: list[_Film], progress: Progress | None) -> None:
    """Draw and write every film, then the labels of every set and the note."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for done, film in enumerate(films, start=1):
        if film.folder not in rows:
            (root / film.folder / "images").mkdir(parents=True)
        name = f"images/{film.label.file_name}"
        write_film(root / film.folder / name, _draw(film), scanner=film.scanner, label=film.label)
        rows.setdefault(film.folder, []).append((name, film.label.patient, film.kind))
        if progress is not None:
            progress("films", done, len(films))
    for folder, lines in rows.items():
        with (root / folder / LABELS).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(lines)
    (root / PHANTOM_NOTE).write_text(NOTE, encoding="utf-8")


def _draw(film: _Film) -> Array:
    """Draw a film; the person and the finding are the same on all films of one patient."""
    label = film.label
    who = np.random.default_rng([label.seed, ord(label.letter), label.person])
    # Films count from 1: numpy takes [a, b] and [a, b, 0] for the same seed.
    how = np.random.default_rng([label.seed, ord(label.letter), label.person, label.film])
    if film.kind in KINDS:
        return spoiled_film(film.kind, scanner=film.scanner, rng=how)
    person, finding = draw_person(who), draw_finding(film.kind, who)
    return take_film(film.scanner, lambda x, y: draw_chest(person, finding, x, y), how)
