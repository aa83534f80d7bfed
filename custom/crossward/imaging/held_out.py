"""Scans to try a trained model on, kept beside the hospitals in ``held-out/SET``: DICOM images and a labels.csv each.

Their labels need not be classes: a set of spoiled films says what is wrong with each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.federation.turns import in_turn
from crossward.imaging.data import Split
from crossward.imaging.folder import HELD_OUT, listings
from crossward.imaging.pictures import normalised
from crossward.imaging.splits import Listing, Progress

NO_CLASS = -1
OWN_TEST = "own test"
"""What a hospital's own test scans are called among the sets that its model reads."""


@dataclass(frozen=True)
class NamedScans:
    """Scans with their labels as they are written.

    Attributes:
        split: images as those of a site; the label is ``NO_CLASS`` where what is written is none of the classes.
        kinds: what is written: a class, or what is wrong with the scan.
    """

    split: Split
    kinds: tuple[str, ...]

    @classmethod
    def of_classes(cls, split: Split, classes: Sequence[str]) -> NamedScans:
        """Scans whose labels are all classes."""
        return cls(split, tuple(classes[label] for label in split.labels.tolist()))


def load_held_out(
    path: Path,
    *,
    classes: Sequence[str],
    size: int,
    channels: int,
    seed: int = 0,
    at_most: int = 80,
    progress: Progress | None = None,
) -> dict[str, NamedScans]:
    """Reads some scans of every held-out set of a folder of hospitals; none where there are no such sets.

    Args:
        path: the folder of hospitals.
        classes: of the study, in its order.
        size: height and width of the study's images.
        channels: of the study's images.
        seed: decides which scans are chosen.
        at_most: scans of a set, the same number of every kind as far as there are any.
        progress: called as progress(set, images read, images to read).

    Returns:
        For the name of every set, in words, its scans in the order of its labels.csv; sets of known classes first.

    Raises:
        BadInput: with what is wrong, where, and what to do.
    """
    folder = path / HELD_OUT
    if not folder.is_dir():
        return {}
    try:
        found = {
            _in_words(listing.site): listing
            for listing in listings(folder, sites=None, seed=seed, leave_out=f"take the set out of {HELD_OUT}")
        }
        sets = {
            what: _named_scans(
                listing,
                _chosen(listing, seed=seed, at_most=at_most),
                classes=list(classes),
                size=size,
                channels=channels,
                progress=progress,
            )
            for what, listing in found.items()
        }
    except BadInput as error:
        raise BadInput(f"{HELD_OUT}/{error}") from None
    return dict(sorted(sets.items(), key=lambda entry: NO_CLASS in entry[1].split.labels))


def load_held_out_set(
    path: Path, *, classes: Sequence[str], size: int, channels: int, seed: int, progress: Progress | None = None
) -> NamedScans:
    """Reads all scans of one folder with a labels.csv; every label must be one of the classes.

    Raises:
        BadInput: with what is wrong, where, and what to do.
    """
    (listing,) = listings(path, sites=None, seed=seed, leave_out="give a folder of DICOM files without labels.csv")
    unknown = sorted(set(listing.labels) - set(classes))
    if unknown:
        raise BadInput(
            f"{listing.site}: the label '{unknown[0]}' is none of the study's ({', '.join(classes)}); correct "
            "labels.csv, or take it away to go on without labels"
        )
    rows = np.arange(len(listing.ids), dtype=np.intp)
    return _named_scans(listing, rows, classes=list(classes), size=size, channels=channels, progress=progress)


def _in_words(folder: str) -> str:
    name = folder.replace("-", " ")
    if name == OWN_TEST:
        raise BadInput(f"{folder}: is what a hospital's own test scans are called; give the set another name")
    return name


def _chosen(listing: Listing, *, seed: int, at_most: int) -> NDArray[np.intp]:
    """Rows by kinds in turn, those of a kind in the order of a hash: the same whatever the order of the files."""

    def place(row: int) -> bytes:
        return blake2b(f"{seed}/{listing.ids[row]}".encode()).digest()

    by_kind: defaultdict[str, list[int]] = defaultdict(list)
    for row in sorted(range(len(listing.ids)), key=place):
        by_kind[listing.labels[row]].append(row)
    rows = in_turn(by_kind[kind] for kind in sorted(by_kind))[:at_most]
    return np.array(sorted(rows), dtype=np.intp)


def _named_scans(
    listing: Listing,
    rows: NDArray[np.intp],
    *,
    classes: list[str],
    size: int,
    channels: int,
    progress: Progress | None,
) -> NamedScans:
    pixels, _ = listing.read(rows, size=size, progress=progress)
    if pixels.shape[1] > channels:
        raise BadInput(f"{listing.site}: has images in colour, and the study's are grey; take the set out")
    kinds = tuple(listing.labels[row] for row in rows)
    labels = [classes.index(kind) if kind in classes else NO_CLASS for kind in kinds]
    split = Split(
        images=normalised(pixels, channels),
        labels=torch.tensor(labels, dtype=torch.int64),
        patients=tuple(listing.patients[row] for row in rows),
        ids=tuple(listing.ids[row] for row in rows),
    )
    return NamedScans(split, kinds)
