"""Small hospitals on disk as packs, a full disk, and messages as they are after a journey; for members of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.site.made_up_sites import BATCH, CLASSES, SITES, SIZE

from crossward.imaging.data import Cohort, load

IMAGES = 40


def write_packs(
    folder: Path, sites: tuple[str, ...] = SITES, *, classes: tuple[str, ...] = CLASSES, images: int = IMAGES
) -> Path:
    """A bright quadrant is the class, and every site has a brightness of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    half = SIZE // 2
    for number, site in enumerate(sites):
        rng = np.random.default_rng(number)
        labels = np.arange(images) % len(classes)
        pixels = rng.normal(70 + 25 * number, 30, (images, SIZE, SIZE))
        for row, label in enumerate(labels):
            down, right = divmod(int(label), 2)
            pixels[row, down * half : (down + 1) * half, right * half : (right + 1) * half] += 35
        np.savez(
            folder / f"{site}.npz",
            x=pixels.clip(0, 255).astype(np.uint8),
            y=labels.astype(np.uint8),
            split=np.array([(0, 0, 1, 2)[row % 4] for row in range(images)], dtype=np.uint8),
            ids=np.array([f"{site}-{row}" for row in range(images)]),
            classes=np.array(classes),
        )
    return folder


def cohort_in(data: Path) -> Cohort:
    return load(data, size=SIZE, classes=CLASSES, batch_size=BATCH)


def carried(message: Any) -> Any:
    """A message as it arrives: the same values in memory of its own, which cannot be written to."""
    if isinstance(message, Mapping):
        return {str(key): carried(value) for key, value in message.items()}
    if isinstance(message, np.ndarray):
        return np.frombuffer(message.tobytes(), dtype=message.dtype).reshape(message.shape)
    if isinstance(message, list):
        return [carried(value) for value in message]
    assert message is None or type(message) in (int, float, str, bytes), type(message)
    return message


def fill(path: Path, *, but: int = 0) -> None:
    """Write until the disk has no byte left, then give some back."""
    written = 0
    with path.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    written += stream.write(bytes(size))
            except OSError:
                continue
        stream.truncate(written - but)
