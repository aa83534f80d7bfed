"""From a frame in a scanner's units to a picture in [0, 1], by the steps that a site chose for the scanner's domain.

Where no step brings values onto [0, 1], the range that the stored bits allow does, as for a site without rules; the fit
to the study's size is always the last step. Nothing here is random, and what a step learns from a domain's training
images does not depend on their order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.scans import Frame
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.rules.site import Step
from crossward.imaging.transforms.geometry import fit_square
from crossward.imaging.transforms.options import hint, settled
from crossward.imaging.transforms.steps import STEPS, Kind, Picture, opened

VERSION = 1
"""Of the meaning of the steps: raised when the same steps would give another picture, so that caches are made anew."""

Plan = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Fitted:
    """What a domain's training images decided.

    Attributes:
        step: the step that learned; empty where none does.
        values: what it learned; a standard scale or greys of the domain, never anything of one image.
        images: that it learned from.
    """

    step: str = ""
    values: tuple[float, ...] = ()
    images: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, "values": list(self.values), "images": self.images}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Fitted:
        return cls(str(content["step"]), tuple(float(value) for value in content["values"]), int(content["images"]))


def check_step(step: Step) -> None:
    """Check one step's name and options.

    Raises:
        BadInput: what is wrong and what would do, without the line.
    """
    _settled(step)


def check_steps(steps: Sequence[Step]) -> None:
    """Check every step, and whether they go together in this order.

    Raises:
        BadInput: what is wrong and what would do, without the line.
    """
    _plan(steps)


def learning(steps: Sequence[Step]) -> tuple[str, ...]:
    """The steps that learn from a domain's training images: every picture of it then depends on all of those."""
    _, learns = _split(_plan(steps))
    return () if learns is None else (learns[0],)


def digest(steps: Sequence[Step], fitted: Fitted | None, size: int, channels: int) -> str:
    """A hash of everything that decides the picture: the same for steps that say the same in other words."""
    content = [VERSION, _complete(steps, fitted), size, channels]
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def pipeline(steps: Sequence[Step], fitted: Fitted | None = None, *, size: int, channels: int) -> Pipeline:
    """What turns a frame of a domain into a picture.

    Args:
        steps: of the domain.
        fitted: what its training images decided, where a step learns.
        size: height and width of the picture.
        channels: 1 refuses colour, 3 gives grey pictures three equal channels.

    Raises:
        BadInput: the steps do not do, or they need something learned that is not there.
    """
    if channels not in (1, 3):
        raise BadInput(f"pictures with {channels} channels cannot be made; choose 1 or 3")
    return Pipeline(_complete(steps, fitted), size, channels)


@dataclass(frozen=True)
class Pipeline:
    """Call it with a frame; can be sent to worker processes."""

    plan: Plan
    size: int
    channels: int

    def __call__(self, frame: Frame) -> NDArray[np.float32]:
        """The picture, float32 [channels,size,size] in [0, 1], dark where there is air.

        Raises:
            Refused: it cannot be made without guessing.
        """
        if frame.colour and self.channels == 1:
            raise Refused(Reason.COLOUR)
        # What overflows ends as a value that is not finite, and is refused below.
        with np.errstate(all="ignore"):
            picture = _applied(self.plan, opened(frame))
            square = np.atleast_3d(fit_square(picture.values, self.size)).transpose(2, 0, 1)
        if not np.isfinite(square).all():
            raise Refused(Reason.TRANSFORM)
        # Weights of a mean add up to one only but for rounding.
        square = np.clip(square, 0, 1)
        return np.ascontiguousarray(np.broadcast_to(square, (self.channels, self.size, self.size)))


class Fitter:
    """Learns what a domain's steps need, from its training images one by one.

    Reading can be left to worker processes: ``summary`` there, ``take`` here.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._before, self._learns = _split(_plan(steps))
        self._gathered = self._learns and _learner(self._learns[0]).gather()

    @property
    def needed(self) -> bool:
        """Whether any step learns; where not, no image need be read for it."""
        return self._learns is not None

    def summary(self, frame: Frame) -> Any:
        """What one training image adds: small, and can be sent between processes.

        Raises:
            Refused: the image cannot be used.
        """
        if self._learns is None:
            return None
        name, options = self._learns
        with np.errstate(all="ignore"):
            return _learner(name).summary(_applied(self._before, opened(frame)), options)

    def take(self, summary: Any) -> None:
        """Add what ``summary`` gave."""
        if self._gathered is not None:
            self._gathered.take(summary)

    def add(self, frame: Frame) -> None:
        """Learn from one training image."""
        self.take(self.summary(frame))

    def fitted(self) -> Fitted:
        """What was learned.

        Raises:
            BadInput: there was no image to learn from.
        """
        if self._learns is None or self._gathered is None:
            return Fitted()
        name, options = self._learns
        if not self._gathered.count:
            raise BadInput(f"{name} learns from a domain's training images, and there is none; choose another step")
        return Fitted(name, _learner(name).result(self._gathered, options), self._gathered.count)


def _applied(plan: Plan, picture: Picture) -> Picture:
    for name, options in plan:
        # A crop, or larger pixels, may leave none of the image: then there is nothing that a step could measure.
        if not picture.valid.any():
            raise Refused(Reason.TRANSFORM, "no pixel is left that is not padding")
        picture = STEPS[name].apply(picture, **options)
    return picture


def _settled(step: Step) -> tuple[str, dict[str, Any]]:
    kind = STEPS.get(step.name)
    if kind is None:
        raise BadInput(f"there is no transform {step.name}{hint(step.name, STEPS)}")
    options = settled(step, kind.options)
    wrong = kind.wrong(options)
    if wrong:
        raise BadInput(f"{step.name}: {wrong}")
    return step.name, options


def _plan(steps: Sequence[Step]) -> Plan:
    """The steps with all their options, and with the usual range where none is chosen."""
    plan = tuple(_settled(step) for step in steps)
    ranging = [name for name, _ in plan if STEPS[name].ranging]
    for earlier, name in pairwise(ranging):
        if STEPS[name].file_units:
            raise BadInput(
                f"{name} speaks of the file's own values, which {earlier} has changed; put it before or drop it"
            )
    learning = [name for name, options in plan if _must_learn(STEPS[name], options)]
    if len(learning) > 1:
        raise BadInput(f"{' and '.join(learning)} both learn from the training images; keep one of them")
    return plan if ranging else (*plan, ("stored_range", {}))


def _must_learn(kind: Kind, options: Mapping[str, Any]) -> bool:
    return kind.learner is not None and options.get(kind.learner.argument) is None


def _split(plan: Plan) -> tuple[Plan, tuple[str, dict[str, Any]] | None]:
    """What comes before the step that learns, and that step."""
    for place, (name, options) in enumerate(plan):
        if _must_learn(STEPS[name], options):
            return plan[:place], (name, options)
    return plan, None


def _learner(name: str) -> Any:
    return STEPS[name].learner


def _complete(steps: Sequence[Step], fitted: Fitted | None) -> Plan:
    """The plan with what was learned in its place."""
    plan = _plan(steps)
    before, learns = _split(plan)
    if learns is None:
        return plan
    name, options = learns
    learner = _learner(name)
    if fitted is None or fitted.step != name or len(fitted.values) != learner.length(options):
        raise BadInput(
            f"{name} has not learned from this domain's training images with these options; prepare them anew"
        )
    return (*before, (name, {**options, learner.argument: fitted.values}), *plan[len(before) + 1 :])
