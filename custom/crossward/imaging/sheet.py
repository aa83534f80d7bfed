"""A contact sheet of made-up hospitals: one picture that shows what every scanner makes of every class."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from crossward.federation.errors import BadInput, StorageFailure
from crossward.imaging.dicom.film import Film, read_image
from crossward.imaging.folder import HELD_OUT, LABELS, PHANTOM_NOTE

TILE = 132
GAP = 4
TITLE = "Computer-drawn phantoms: no patient, no real hospital, no real scanner"


def contact_sheet(folder: Path, out: Path, *, per_class: int = 3, seed: int = 0) -> Path:
    """Write one PNG with a row per hospital (and per held-out set) and its classes side by side.

    Args:
        folder: what ``write_hospitals`` wrote.
        out: the PNG to write.
        per_class: films per class, chosen at random.
        seed: of the choice.

    Returns:
        ``out``.

    Raises:
        BadInput: there are no made-up hospitals in the folder, or ``per_class`` is below 1.
        StorageFailure: the picture cannot be written.
    """
    if per_class < 1:
        raise BadInput(f"{per_class} films per class cannot be shown: choose 1 or more")
    sets = sorted(folder.glob(f"hospital-*/{LABELS}")) + sorted(folder.glob(f"{HELD_OUT}/*/{LABELS}"))
    if not sets or not (folder / PHANTOM_NOTE).is_file():
        raise BadInput(f"{folder} holds no made-up hospitals: write them with `crossward data phantom` first")
    rng = np.random.default_rng(seed)
    strips = [_strip(labels, per_class, rng) for labels in sets]

    width = max(picture.shape[1] for picture, _, _ in strips) / 100 + 0.4
    row = TILE / 100 + 0.5
    figure = Figure(figsize=(width, row * len(strips) + 0.5), dpi=100, layout="constrained")
    figure.suptitle(TITLE, fontsize=13, fontweight="bold")
    for axes, (picture, title, classes) in zip(figure.subplots(len(strips), squeeze=False)[:, 0], strips, strict=True):
        axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
        axes.set_title(title, fontsize=9, loc="left")
        middles = (np.arange(len(classes)) + 0.5) * (picture.shape[1] / len(classes))
        axes.set_xticks(middles, classes, fontsize=9)
        axes.set_yticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    try:
        figure.savefig(out, format="png", metadata={"Description": TITLE})
    except OSError as error:
        raise StorageFailure(f"{out} cannot be written ({error.strerror}): choose another file") from error
    return out


def _strip(labels: Path, per_class: int, rng: np.random.Generator) -> tuple[NDArray[np.float32], str, list[str]]:
    """The films of one set side by side, its title and its classes."""
    hospital = labels.parent
    by_class: dict[str, list[str]] = {}
    with labels.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            by_class.setdefault(line["label"], []).append(line["file"])
    films = [
        read_image(hospital / str(name)) if name else None
        for _, names in sorted(by_class.items())
        for name in _choose(names, per_class, rng)
    ]
    scanners = sorted({film.scanner for film in films if film is not None})
    title = f"{hospital.name}: {', '.join(scanners)} (computer-drawn phantoms)"
    return np.concatenate([_tile(film) for film in films], axis=1), title, sorted(by_class)


def _choose(names: list[str], count: int, rng: np.random.Generator) -> list[str]:
    """So many of the names, padded with empty ones where there are too few."""
    chosen = [names[place] for place in rng.permutation(len(names))[:count]]
    return chosen + [""] * (count - len(chosen))


def _tile(film: Film | None) -> NDArray[np.float32]:
    """One film scaled into a square with a white border; an empty square for none."""
    tile = np.ones((TILE, TILE + 2 * GAP), dtype=np.float32)
    if film is None:
        return tile
    height, width = film.pixels.shape
    scale = TILE / max(height, width)
    size = (round(width * scale), round(height * scale))
    small = np.asarray(Image.fromarray(film.pixels).resize(size, Image.Resampling.BICUBIC))
    top, left = (TILE - size[1]) // 2, (TILE + 2 * GAP - size[0]) // 2
    tile[top : top + size[1], left : left + size[0]] = np.clip(small, 0, 1)
    return tile
