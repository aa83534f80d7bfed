"""A small picture of one file, as a worker process draws it; kept apart for the same reason as ``inventory_file``."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from crossward.imaging.deidentify.burned_in import text_letters
from crossward.imaging.dicom.display import display
from crossward.imaging.dicom.files import read_scan
from crossward.imaging.refusals import Reason, Refused

# Small enough that hardly any text in a picture could be read.
LONGEST_SIDE = 128


def thumbnail(item: tuple[str, int]) -> bytes:
    """One frame of a file as PNG, as a viewer would show it.

    Raises:
        Refused: it cannot be read, or there seems to be text in it.
    """
    path, frame = item
    levels = display(read_scan(Path(path), frames=[frame]).frames[0])
    grey = levels.max(axis=-1) if levels.ndim == 3 else levels
    if text_letters(grey.astype(np.float32)):
        raise Refused(Reason.BURNED_IN)
    picture = Image.fromarray(levels)
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BOX)
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return stream.getvalue()
