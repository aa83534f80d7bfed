"""Slices in the order in which they lie in the patient, and as one array with its spacing and place.

Slices are sorted by their position along the normal of their plane. Instance numbers follow the order of acquisition
or of nothing, so they count only where a series has no positions at all, and the result says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.files import read_scan
from crossward.imaging.dicom.pixels import Limits
from crossward.imaging.dicom.scans import Frame, Header, Vector3
from crossward.imaging.refusals import Reason, Refused

# Direction cosines that differ by more are another plane; written with six digits, they differ by less.
_SAME_DIRECTION = 1e-3
# Of the spacing: what positions may be off by rounding.
_UNEVEN = 0.02
_SAME_PLACE = 0.01
_GAP = 1.5

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Series:
    """The order of slices, and what is odd about them.

    Attributes:
        order: numbers of the slices as given, from the lowest along the normal to the highest.
        by: what they are sorted by.
        spacing: millimetres between neighbours (the median), None for a single slice or without positions.
        gaps: places in ``order`` after which slices are missing.
        duplicates: slices, as given, that lie in the same place.
        problems: in words, without names.
    """

    order: tuple[int, ...]
    by: Literal["position", "instance number"]
    spacing: float | None = None
    gaps: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, ...], ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Slices as one array.

    Attributes:
        values: float32 [d,h,w] in the units of the modality.
        valid: False where a voxel is padding; None where there is none.
        spacing: millimetres between slices, rows and columns.
        affine: [4,4], from (slice, row, column, 1) to millimetres in the patient (left, posterior, superior).
        low: the smallest value that the stored bits allow.
        high: the largest.
        inverted: whether larger values are darker.
    """

    values: NDArray[np.float32]
    valid: NDArray[np.bool_] | None
    spacing: Vector3
    affine: NDArray[np.float64] = field(repr=False)
    low: float
    high: float
    inverted: bool


@dataclass(frozen=True)
class _Slice:
    position: Vector3 | None
    orientation: tuple[float, ...] | None
    spacing: tuple[float, float] | None
    size: tuple[int | None, int | None]
    instance: int | None = None


def order_slices(headers: Sequence[Header]) -> Series:
    """The order of the slices of a series.

    Raises:
        Refused: the slices are not of one stack: they differ in size, spacing, direction or frame of reference, or
            some have a position and others none; or nothing tells their order.
    """
    if len({header.frame_of_reference for header in headers if header.position}) > 1:
        raise Refused(Reason.GEOMETRY, "several frames of reference")
    return _order(
        [
            _Slice(
                header.position,
                header.orientation,
                header.spacing,
                (header.rows, header.columns),
                header.instance_number,
            )
            for header in headers
        ]
    )


def read_volume(paths: Sequence[Path], *, limits: Limits | None = None) -> Volume:
    """The slices of a series, or the frames of one file, as one array.

    Args:
        paths: the files of the series in any order, or one file with several frames.
        limits: what is too large, for each file and for all of them.

    Raises:
        Refused: a file cannot be read, or the slices make no evenly spaced stack: one is missing, twice there, in
            colour, or in another plane.
    """
    limits = limits or Limits()
    frames: list[Frame] = []
    thickness: list[float | None] = []
    references = set()
    taken = 0
    for path in paths:
        scan = read_scan(path, limits=limits)
        frames += scan.frames
        thickness.append(scan.header.slice_thickness)
        references.add(scan.header.frame_of_reference)
        taken += sum(frame.values.nbytes for frame in scan.frames)
        if taken > limits.bytes_total:
            raise Refused(Reason.TOO_LARGE, f"{len(frames)} slices")
    if len(references) > 1:
        raise Refused(Reason.GEOMETRY, "several frames of reference")
    if any(frame.colour for frame in frames):
        raise Refused(Reason.COLOUR)
    if len({frame.inverted for frame in frames}) != 1:
        raise Refused(Reason.PHOTOMETRIC, "it differs between the slices")
    series = _order(
        [_Slice(each.position, each.orientation, each.spacing, each.values.shape[:2]) for each in frames],
    )
    if series.problems:
        raise Refused(Reason.GEOMETRY, series.problems[0])
    return _stack([frames[number] for number in series.order], series.spacing or thickness[0])


def _stack(frames: list[Frame], between: float | None) -> Volume:
    first, last = frames[0], frames[-1]
    if first.position is None or last.position is None or first.orientation is None or first.spacing is None:
        raise Refused(Reason.GEOMETRY, "no position, orientation or spacing")
    if not between or between <= 0:
        raise Refused(Reason.GEOMETRY, "a single slice without a thickness")
    along_row, along_column, normal = _directions(first.orientation)
    step = normal * between
    if len(frames) > 1:
        # The true way from slice to slice: with a tilted gantry it is not along the normal.
        step = (np.array(last.position) - np.array(first.position)) / (len(frames) - 1)
    affine = np.eye(4)
    affine[:3, 0] = step
    affine[:3, 1] = along_column * first.spacing[0]
    affine[:3, 2] = along_row * first.spacing[1]
    affine[:3, 3] = first.position
    valid = None
    if any(frame.valid is not None for frame in frames):
        everywhere = np.ones(first.values.shape, dtype=np.bool_)
        valid = np.stack([everywhere if frame.valid is None else frame.valid for frame in frames])
    return Volume(
        values=np.stack([frame.values for frame in frames]),
        valid=valid,
        spacing=(between, *first.spacing),
        affine=affine,
        low=min(frame.low for frame in frames),
        high=max(frame.high for frame in frames),
        inverted=first.inverted,
    )


def _order(slices: Sequence[_Slice]) -> Series:
    if not slices:
        raise Refused(Reason.GEOMETRY, "no slices")
    if len({each.size for each in slices}) > 1:
        raise Refused(Reason.GEOMETRY, "slices of different sizes")
    placed = [each.position is not None and each.orientation is not None for each in slices]
    if not any(placed):
        return _by_instance(slices)
    if not all(placed):
        raise Refused(Reason.GEOMETRY, "some slices have no position")
    spacings = np.array([each.spacing or (0.0, 0.0) for each in slices])
    if np.abs(spacings - spacings[0]).max() > 1e-4 * max(1.0, spacings[0].max()):
        raise Refused(Reason.GEOMETRY, "slices of different spacing")
    directions = np.array([each.orientation for each in slices])
    if np.abs(directions - directions[0]).max() > _SAME_DIRECTION:
        raise Refused(Reason.GEOMETRY, "slices of different orientation")
    _, _, normal = _directions(directions[0])
    positions = np.array([each.position for each in slices])
    return _by_position(positions, normal)


def _directions(orientation: Sequence[float] | Vector) -> tuple[Vector, Vector, Vector]:
    """Unit vectors along a row, along a column and along the normal."""
    along_row, along_column = np.array(orientation[:3]), np.array(orientation[3:])
    lengths = np.linalg.norm(along_row), np.linalg.norm(along_column)
    if max(abs(length - 1) for length in lengths) > 0.01 or abs(along_row @ along_column) > 0.01:
        raise Refused(Reason.GEOMETRY, "directions that are not at right angles")
    along_row, along_column = along_row / lengths[0], along_column / lengths[1]
    normal = np.cross(along_row, along_column)
    return along_row, along_column, normal / np.linalg.norm(normal)


def _by_position(positions: Vector, normal: Vector) -> Series:
    heights = positions @ normal
    order = np.argsort(heights, kind="stable")
    steps = np.diff(heights[order])
    apart = steps[steps > _SAME_PLACE]
    spacing = float(np.median(apart)) if apart.size else None
    same = steps <= _SAME_PLACE
    gaps = tuple(int(place) for place in np.flatnonzero(steps > _GAP * spacing)) if spacing else ()
    duplicates = _runs(order, same)
    problems = []
    if duplicates:
        problems.append(f"{sum(map(len, duplicates))} slices share {len(duplicates)} places")
    if gaps:
        problems.append(f"slices are missing in {len(gaps)} places")
    uneven = np.abs(apart - spacing) > _UNEVEN * spacing if spacing else np.zeros(0, dtype=np.bool_)
    if uneven.sum() > len(gaps):
        problems.append("slices are not evenly spaced")
    if spacing and _off_the_line(positions[order], spacing):
        problems.append("slices are not one above the other")
    return Series(
        order=tuple(int(number) for number in order),
        by="position",
        spacing=spacing,
        gaps=gaps,
        duplicates=duplicates,
        problems=tuple(problems),
    )


def _off_the_line(positions: Vector, spacing: float) -> bool:
    """Whether a slice is shifted sideways from the line between the first and the last."""
    line = positions[-1] - positions[0]
    along = (positions - positions[0]) @ line / (line @ line)
    away = np.linalg.norm(positions - positions[0] - np.outer(along, line), axis=1)
    return bool(away.max() > max(_SAME_PLACE, _UNEVEN * spacing))


def _runs(order: NDArray[np.intp], same: NDArray[np.bool_]) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbours that lie in the same place."""
    groups: list[list[int]] = []
    for place, is_same in enumerate(same):
        if not is_same:
            continue
        if groups and groups[-1][-1] == order[place]:
            groups[-1].append(int(order[place + 1]))
        else:
            groups.append([int(order[place]), int(order[place + 1])])
    return tuple(tuple(group) for group in groups)


def _by_instance(slices: Sequence[_Slice]) -> Series:
    numbers = [each.instance for each in slices]
    if len(slices) > 1 and (None in numbers or len(set(numbers)) != len(numbers)):
        raise Refused(Reason.GEOMETRY, "no positions, and no instance number for every slice")
    order = sorted(range(len(slices)), key=lambda number: numbers[number] or 0)
    return Series(order=tuple(order), by="instance number", problems=("no positions: sorted by instance number",))
