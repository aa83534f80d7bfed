"""A frame as a person would see it: grey levels by its VOI table or window, or by its range; air is dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.scans import Frame, Table, Window
from crossward.imaging.refusals import Reason, Refused

Range = Literal["auto", "stored"]
Values = NDArray[np.floating[Any]]


def display(frame: Frame, *, window: int | None = 0, range: Range = "auto") -> NDArray[np.uint8]:
    """The picture on a screen, uint8 [h,w] or [h,w,3].

    The file's VOI table goes first, then the window with that number, then the range; padding is black.

    Args:
        frame: the frame.
        window: which of the file's windows; None leaves table and windows aside.
        range: without table and windows, from the smallest to the largest value in the frame (``auto``), or from the
            smallest to the largest that the stored bits allow (``stored``).

    Raises:
        Refused: the file has windows, but not so many.
    """
    if frame.colour:
        return _levels(frame.values)
    shown = _shown(frame, window, range)
    if frame.inverted:
        shown = 1.0 - shown
    return _levels(shown if frame.valid is None else np.where(frame.valid, shown, 0.0))


def unit(frame: Frame) -> NDArray[np.float32]:
    """Values in [0, 1] by the range that the stored bits allow, so that a value is the same grey in every file.

    MONOCHROME1 is turned, and padding is 0: dark is air or nothing.
    """
    if frame.colour:
        return frame.values
    scaled = _between(frame.values.astype(np.float64), frame.low, frame.high)
    if frame.inverted:
        scaled = 1.0 - scaled
    if frame.valid is not None:
        scaled = np.where(frame.valid, scaled, 0.0)
    return scaled.astype(np.float32)


def apply_window(values: Values, window: Window) -> NDArray[np.float64]:
    """A window's output in [0, 1] (PS3.3 C.11.2.1.2 and C.11.2.1.3)."""
    return _FUNCTIONS[window.function](values.astype(np.float64), window.centre, window.width)


def apply_table(values: Values, table: Table) -> NDArray[np.float64]:
    """A VOI table's output in [0, 1]; inputs between two entries go to the nearest."""
    index = np.clip(np.rint(values.astype(np.float64) - table.first), 0, len(table.outputs) - 1)
    return table.outputs[index.astype(np.int64)].astype(np.float64)


def _shown(frame: Frame, window: int | None, range: Range) -> NDArray[np.float64]:
    values = frame.values.astype(np.float64)
    if window is not None and frame.table is not None:
        return apply_table(values, frame.table)
    if window is not None and frame.windows:
        if not 0 <= window < len(frame.windows):
            raise Refused(Reason.RESCALE, f"it has {len(frame.windows)} windows, and number {window} was asked for")
        return apply_window(values, frame.windows[window])
    if range == "stored":
        return _between(values, frame.low, frame.high)
    counted = values if frame.valid is None else values[frame.valid]
    return _between(values, counted.min(), counted.max()) if counted.size else np.zeros_like(values)


def _between(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """A flat picture has no range: it is black."""
    return np.clip((values - low) / (high - low), 0.0, 1.0) if high > low else np.zeros_like(values)


def _linear(values: NDArray[np.float64], centre: float, width: float) -> NDArray[np.float64]:
    if width == 1:
        return (values > centre - 0.5).astype(np.float64)
    return np.clip((values - (centre - 0.5)) / (width - 1) + 0.5, 0.0, 1.0)


def _linear_exact(values: NDArray[np.float64], centre: float, width: float) -> NDArray[np.float64]:
    return np.clip((values - centre) / width + 0.5, 0.0, 1.0)


def _sigmoid(values: NDArray[np.float64], centre: float, width: float) -> NDArray[np.float64]:
    # Beyond this the exponential overflows, and the output has been 0 or 1 for long.
    exponent = np.clip(-4.0 * (values - centre) / width, -60.0, 60.0)
    return 1.0 / (1.0 + np.exp(exponent))


_FUNCTIONS: Mapping[str, Callable[[NDArray[np.float64], float, float], NDArray[np.float64]]] = {
    "LINEAR": _linear,
    "LINEAR_EXACT": _linear_exact,
    "SIGMOID": _sigmoid,
}


def _levels(shown: Values) -> NDArray[np.uint8]:
    levels: NDArray[np.floating[Any]] = np.rint(shown * 255.0)
    return levels.astype(np.uint8)
