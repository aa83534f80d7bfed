"""All files of a folder at a glance: a contact sheet of what was read, and a row for every file.

Nothing here names a person: captions are made of numbers and of terms of the standard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.federation.storage import atomic_file
from crossward.imaging.dicom.codecs import syntax_name
from crossward.imaging.dicom.display import display
from crossward.imaging.dicom.files import read_header, read_scan
from crossward.imaging.dicom.scans import Frame, Header
from crossward.imaging.refusals import Refused
from crossward.imaging.workers import work

TILE = 160
_COLUMNS = 8
# Whatever else stands in the place of a term of the standard may be anything, and is not shown.
_MODALITIES = (
    " ANN AR ASMT AU BDUS BI BMD CR CT CTPROTOCOL DG DMS DX ECG EEG EMG EOG EPS ES FID GM HC HD IO IOL IVOCT IVUS KER "
    "KO LEN LS M3D MG MR NM OAM OCT OP OPM OPT OPTBSV OPTENF OPV OSS OT PA POS PR PT PX REG RESP RF RG RTDOSE RTIMAGE "
    "RTINTENT RTPLAN RTRAD RTRECORD RTSEGANN RTSTRUCT RWV SEG SM SMR SR SRF STAIN TEXTUREMAP TG US VA XA XAPROTOCOL XC "
)
_PHOTOMETRIC = (
    " MONOCHROME1 MONOCHROME2 PALETTE COLOR RGB YBR_FULL YBR_FULL_422 YBR_PARTIAL_420 YBR_PARTIAL_422 YBR_ICT YBR_RCT "
)
_LONGEST_LINE = 32


@dataclass(frozen=True)
class Row:
    """One file.

    Attributes:
        number: of the file in the folder, by name, from 0.
        modality: as the header says.
        syntax: name of the transfer syntax.
        photometric: as the header says.
        size: frames, rows and columns.
        reason: why it is not read; empty where it is.
        thumbnail: the frame in the middle as uint8, its longer side `TILE`; None where the file is not read.
    """

    number: int
    modality: str = ""
    syntax: str = ""
    photometric: str = ""
    size: str = ""
    reason: str = ""
    thumbnail: NDArray[np.uint8] | None = None

    @property
    def caption(self) -> str:
        syntax = self.syntax if len(self.syntax) <= _LONGEST_LINE else self.syntax[: _LONGEST_LINE - 3] + "..."
        return f"{self.number}: {self.modality} {self.size}\n{syntax}\n{self.photometric}"


def table(folder: Path, *, processes: int | None = None) -> list[Row]:
    """A row for every file of a folder and the folders in it, by name; files are read in worker processes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise BadInput(f"{folder} has no files to look at: choose another folder")
    rows: dict[int, Row] = {}
    for number, result in work(_look, list(enumerate(files)), processes=processes):
        rows[number] = Row(number, reason=str(result)) if isinstance(result, Refused) else result
    return [rows[number] for number in sorted(rows)]


def contact_sheet(folder: Path, out: Path, *, processes: int | None = None) -> list[Row]:
    """Writes one PNG with every picture of a folder and a list of what is refused.

    Returns:
        The rows.
    """
    # Takes a second to import.
    from matplotlib.figure import Figure

    rows = table(folder, processes=processes)
    shown = [row for row in rows if row.thumbnail is not None]
    refused = [row for row in rows if row.thumbnail is None]
    lines = max(1, -(-len(shown) // _COLUMNS))
    list_height = 0.3 + 0.16 * len(refused)
    height = 2.35 * lines + list_height + 0.4
    figure = Figure(figsize=(2.0 * _COLUMNS, height), dpi=100)
    figure.suptitle(f"{len(shown)} files read, {len(refused)} refused", fontsize=11, y=1 - 0.15 / height)
    for place, row in enumerate(shown):
        line, column = divmod(place, _COLUMNS)
        top = height - 0.4 - 2.35 * line
        axes = figure.add_axes((column / _COLUMNS + 0.012, (top - 1.75) / height, 1 / _COLUMNS - 0.024, 1.7 / height))
        axes.imshow(row.thumbnail, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_axis_off()
        figure.text(column / _COLUMNS + 0.012, (top - 1.8) / height, row.caption, fontsize=6.5, va="top")
    for place, row in enumerate(refused):
        y = (list_height - 0.1 - 0.16 * place) / height
        figure.text(0.012, y, f"{row.number}: {row.modality} {row.syntax}: {row.reason}", fontsize=7.5, va="top")
    with atomic_file(out) as stream:
        figure.savefig(stream, format="png")
    return rows


def _look(item: tuple[int, Path]) -> Row:
    number, path = item
    try:
        header = read_header(path)
    except Refused as refused:
        return Row(number, reason=str(refused))
    facts = (
        _known(header.modality, _MODALITIES),
        syntax_name(header.transfer_syntax),
        _known(header.photometric, _PHOTOMETRIC),
        _size(header),
    )
    try:
        scan = read_scan(path, frames=(header.frames // 2,))
    except Refused as refused:
        return Row(number, *facts, reason=str(refused))
    return Row(number, *facts, thumbnail=thumbnail(scan.frames[0]))


def thumbnail(frame: Frame, *, side: int = TILE) -> NDArray[np.uint8]:
    """The picture on a screen, made small; its shape is kept."""
    from PIL import Image

    picture = Image.fromarray(display(frame))
    picture.thumbnail((side, side), Image.Resampling.BOX)
    return np.asarray(picture)


def _known(text: str, terms: str) -> str:
    return text if f" {text} " in terms else ""


def _size(header: Header) -> str:
    frames = f"{header.frames} x " if header.frames > 1 else ""
    return f"{frames}{header.rows} x {header.columns}" if header.rows else ""


def lines(rows: Sequence[Row]) -> list[str]:
    """The rows as text, one line each."""
    return [
        f"{row.number:4d}  {row.modality:8s}{row.size:18s}{row.photometric:16s}{row.syntax[:36]:38s}"
        f"{row.reason or 'read'}"
        for row in rows
    ]
