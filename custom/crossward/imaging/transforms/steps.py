"""The steps that site.yaml may name for a scanner's domain, each from one picture to the next.

Every step sees bright where there is much (bone, dense tissue) and dark where there is air: a MONOCHROME1 frame is
turned before the first of them. Padding takes no part in any statistic and ends as 0. Steps that bring values onto
[0, 1] ("ranging") may follow one another; window and stored_range, which speak of the file's own units, come first of
them. What decides a colour picture's intensities is its luminance, and all three colours are then treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.scans import Frame, Table, Window
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.transforms import correction, geometry, standardise
from crossward.imaging.transforms.options import Option, choice, number, or_auto, pair, rising, whole, yes_or_no

_HUGE = 1e9


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture between two steps.

    Attributes:
        values: float32 [h,w] or [h,w,3], finite, bright where there is much.
        valid: [h,w], False where a pixel is padding.
        spacing: millimetres between rows and between columns.
        frame: as it was read.
        ranged: whether values are in [0, 1] already.
    """

    values: NDArray[np.float32]
    valid: NDArray[np.bool_]
    spacing: tuple[float, float] | None
    frame: Frame
    ranged: bool = False

    @property
    def grey(self) -> NDArray[np.float32]:
        return geometry.luminance(self.values, 2)

    def sample(self, *, foreground: bool = False) -> NDArray[np.float32]:
        """The pixels that count, as a flat array; ``foreground`` leaves out the air around a body."""
        pixels = self.grey[self.valid]
        return standardise.bright(pixels).astype(np.float32) if foreground else pixels

    def by_file(self, unit: Callable[[NDArray[np.floating]], NDArray[np.float32]]) -> Picture:
        """Bring the values onto [0, 1] by a map that speaks of the file's own, unturned units."""
        frame = self.frame
        if not frame.inverted:
            return self.onto_unit(unit(self.values))
        return self.onto_unit(1 - unit(frame.low + frame.high - self.values.astype(np.float64)))

    def onto_unit(self, values: NDArray[np.float32]) -> Picture:
        values[~self.valid] = 0
        return replace(self, values=values, ranged=True)

    def cut(self, box: tuple[slice, ...]) -> Picture:
        return replace(self, values=self.values[box], valid=self.valid[box])


def opened(frame: Frame) -> Picture:
    """A frame before the first step: turned where it is inverted, padding filled with its darkest value.

    Raises:
        Refused: it has no pixel, or one that is not finite.
    """
    values = frame.values
    valid = np.ones(values.shape[:2], dtype=np.bool_) if frame.valid is None else frame.valid
    if values.shape not in (valid.shape, (*valid.shape, 3)) or valid.ndim != 2:
        raise Refused(Reason.TRANSFORM, "is not one picture")
    if not valid.any():
        raise Refused(Reason.TRANSFORM, "has no pixel that is not padding")
    if frame.inverted:
        values = (frame.low + frame.high - values.astype(np.float64)).astype(np.float32)
    if not np.isfinite(values[valid]).all():
        raise Refused(Reason.TRANSFORM, "has values that are not finite")
    if frame.valid is not None:
        values = values.copy()
        values[~valid] = values[valid].min()
    return Picture(values=values, valid=valid, spacing=frame.spacing, frame=frame)


def _stored_range(picture: Picture) -> Picture:
    frame = picture.frame
    if not frame.low < frame.high:
        raise Refused(Reason.RESCALE, "no range of values")
    return picture.by_file(lambda values: standardise.between(values, frame.low, frame.high))


def _window(picture: Picture, *, centre: float | None, width: float | None, file: int | None, function: Any) -> Picture:
    if file is None:
        assert centre is not None
        assert width is not None
        chosen = Window(centre, width, function)
        return picture.by_file(lambda values: standardise.windowed(values, chosen))
    frame = picture.frame
    # As the standard has it, a table comes before windows.
    own: list[Window | Table] = [*([] if frame.table is None else [frame.table]), *frame.windows]
    if file >= len(own):
        raise Refused(Reason.TRANSFORM, f"has no window {file}")
    shown = own[file]
    if isinstance(shown, Window):
        return picture.by_file(lambda values: standardise.windowed(values, shown))
    return picture.by_file(lambda values: standardise.through_table(values, shown))


def _check_window(options: Mapping[str, Any]) -> str:
    given = [options[name] is not None for name in ("centre", "width")]
    if options["file"] is not None:
        return "give either file, or centre and width" if any(given) else ""
    if not all(given):
        return "give centre and width, or file: 0 for the file's first window"
    if options["function"] == "LINEAR" and options["width"] < 1:
        return "width must be 1 or more with LINEAR; choose LINEAR_EXACT for less"
    return ""


def _percentile(picture: Picture, *, low: float, high: float, foreground: bool) -> Picture:
    sample = picture.sample(foreground=foreground)
    return picture.onto_unit(standardise.percentile(picture.values, sample, low=low, high=high))


def _check_percentile(options: Mapping[str, Any]) -> str:
    return "" if options["low"] < options["high"] else "low must be below high"


def _zscore(picture: Picture, *, spread: float, foreground: bool) -> Picture:
    return picture.onto_unit(standardise.zscore(picture.values, picture.sample(foreground=foreground), spread=spread))


def _nyul(picture: Picture, *, landmarks: Sequence[float], scale: Sequence[float], foreground: bool) -> Picture:
    sample = picture.sample(foreground=foreground)
    return picture.onto_unit(standardise.nyul(picture.values, sample, percentiles=landmarks, scale=scale))


def _check_nyul(options: Mapping[str, Any]) -> str:
    scale, landmarks = options["scale"], options["landmarks"]
    return "scale must have as many numbers as landmarks" if scale and len(scale) != len(landmarks) else ""


def _histogram(picture: Picture, *, bins: int, foreground: bool, knots: Sequence[float]) -> Picture:
    del bins, foreground  # They decided the knots.
    ranged = picture if picture.ranged else _stored_range(picture)
    return ranged.onto_unit(standardise.histogram(ranged.values, knots=knots))


def _resample(picture: Picture, *, spacing: tuple[float, float], anti_alias: bool) -> Picture:
    values, valid = geometry.resample(picture.values, picture.valid, picture.spacing, spacing, anti_alias=anti_alias)
    return replace(picture, values=values, valid=valid, spacing=spacing)


def _crop_body(picture: Picture, *, margin: float, threshold: float | None) -> Picture:
    level = standardise.air(picture.sample()) if threshold is None else threshold
    if threshold is not None and picture.frame.inverted and not picture.ranged:
        level = picture.frame.low + picture.frame.high - threshold
    return picture.cut(geometry.body_box(picture.grey, picture.valid, threshold=level, margin=margin))


def _square(picture: Picture, *, by: str) -> Picture:
    return picture.cut(geometry.middle_square(picture.valid)) if by == "crop" else picture


def _bias_field(picture: Picture, *, order: int) -> Picture:
    bias = correction.bias_field(picture.grey, picture.valid, order=order)
    values = picture.values / (bias if picture.values.ndim == 2 else bias[..., None])
    if picture.ranged:
        return picture.onto_unit(np.minimum(values, np.float32(1)))
    return replace(picture, values=values)


def _denoise(picture: Picture, *, by: Any, pixels: float) -> Picture:
    smooth = correction.denoise(picture.values, by=by, pixels=pixels)
    return picture.onto_unit(np.clip(smooth, 0, 1)) if picture.ranged else replace(picture, values=smooth)


def _check_denoise(options: Mapping[str, Any]) -> str:
    if options["by"] == "median" and not options["pixels"].is_integer():
        return "pixels must be a whole number with median"
    return ""


@dataclass(frozen=True)
class Learner:
    """What a step learns from a domain's training images.

    Attributes:
        argument: of the step, that takes what was learned.
        summary: of one picture; small, so that it can travel from a worker.
        gather: a new, empty gatherer of summaries.
        result: of all that was gathered, and of the options.
        length: how many numbers that is.
    """

    argument: str
    summary: Callable[[Picture, Mapping[str, Any]], Any]
    gather: Callable[[], Any]
    result: Callable[[Any, Mapping[str, Any]], tuple[float, ...]]
    length: Callable[[Mapping[str, Any]], int]


def _landmarks(picture: Picture, options: Mapping[str, Any]) -> Any:
    return standardise.landmarks_of(picture.sample(foreground=options["foreground"]), options["landmarks"])


def _shares(picture: Picture, options: Mapping[str, Any]) -> Any:
    ranged = picture if picture.ranged else _stored_range(picture)
    return standardise.shares_of(ranged.sample(foreground=options["foreground"]))


_SCALE = Learner(
    "scale",
    _landmarks,
    standardise.Mean,
    lambda mean, options: mean.value(),
    lambda options: len(options["landmarks"]),
)
_KNOTS = Learner(
    "knots",
    _shares,
    standardise.Histogram,
    lambda histogram, options: histogram.knots(options["bins"]),
    lambda options: int(options["bins"]) + 1,
)


@dataclass(frozen=True)
class Kind:
    """A kind of step.

    Attributes:
        apply: the step itself, with its options by name.
        options: that site.yaml may give.
        ranging: it brings values onto [0, 1].
        file_units: it speaks of the file's own units, so it must be the first that ranges.
        learner: of the argument that comes from a domain's training images unless an option gives it.
        wrong: what is wrong with options that do not go together; empty where nothing is.
    """

    apply: Callable[..., Picture]
    options: Mapping[str, Option] = field(default_factory=dict)
    ranging: bool = False
    file_units: bool = False
    learner: Learner | None = None
    wrong: Callable[[Mapping[str, Any]], str] = lambda options: ""


_FOREGROUND = {"foreground": yes_or_no(False)}
STEPS: dict[str, Kind] = {
    "stored_range": Kind(_stored_range, ranging=True, file_units=True),
    "window": Kind(
        _window,
        {
            "centre": number(None, -_HUGE, _HUGE),
            "width": number(None, 0, _HUGE, above=True),
            "file": whole(None, 0, 99),
            "function": choice("LINEAR", "LINEAR_EXACT", "SIGMOID"),
        },
        ranging=True,
        file_units=True,
        wrong=_check_window,
    ),
    "percentile": Kind(
        _percentile,
        {"low": number(1.0, 0, 100), "high": number(99.0, 0, 100), **_FOREGROUND},
        ranging=True,
        wrong=_check_percentile,
    ),
    "nyul": Kind(
        _nyul,
        {
            "landmarks": rising(standardise.LANDMARKS, 0, 100),
            "scale": rising(None, 0, 1, level=True),
            **_FOREGROUND,
        },
        ranging=True,
        learner=_SCALE,
        wrong=_check_nyul,
    ),
    "histogram": Kind(_histogram, {"bins": whole(256, 2, 4096), **_FOREGROUND}, ranging=True, learner=_KNOTS),
    "zscore": Kind(_zscore, {"spread": number(3.0, 0, 100, above=True), **_FOREGROUND}, ranging=True),
    "resample": Kind(
        _resample,
        {"spacing": pair(None, 0.01, 100), "anti_alias": yes_or_no(True)},
        wrong=lambda options: (
            "" if options["spacing"] else "give spacing, the millimetres between rows and between columns"
        ),
    ),
    "crop_body": Kind(_crop_body, {"margin": number(0.05, 0, 1), "threshold": or_auto(number(None, -_HUGE, _HUGE))}),
    "square": Kind(_square, {"by": choice("pad", "crop")}),
    "bias_field": Kind(_bias_field, {"order": whole(3, 1, 5)}),
    "denoise": Kind(
        _denoise, {"by": choice("median", "gaussian"), "pixels": number(1.0, 0, 10, above=True)}, wrong=_check_denoise
    ),
}
