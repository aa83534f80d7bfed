"""Methods as a benchmark's command names them: a name, and options, plugs and training settings in brackets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossward.cli.study_options import check_choices, parse_options
from crossward.federation.errors import BadInput
from crossward.imaging.data import Cohort
from crossward.methods import Method, create
from crossward.methods.registry import fits
from crossward.privacy.dp.settings import Privacy
from crossward.site.augment import Augmentation
from crossward.site.participant import Plugs
from crossward.site.study import Study
from crossward.site.trainer import Training

_PLUGS = ("block", "head")
_TRAINING: Mapping[str, tuple[str, type]] = {
    "lr": ("learning_rate", float),
    "clip": ("clip", float),
    "epochs": ("epochs", int),
    "augment": ("augment", str),
    "batch": ("batch_size", int),
    "steps": ("steps", int),
    "momentum": ("momentum", float),
}
_TASK: Mapping[str, tuple[str, type]] = {"width": ("width", float), "depth": ("depth", int), "norm": ("norm", str)}
_PRIVACY: Mapping[str, tuple[str, type]] = {
    "dp": ("epsilon", float),
    "dp_noise": ("noise", float),
    "dp_clip": ("clip", float),
}
_SHAPE = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<options>.*)\])?")
_UNSAFE = re.compile(r"[^A-Za-z0-9=._-]+")


@dataclass(frozen=True)
class Variant:
    """One method with its settings.

    Attributes:
        text: as it was given.
        method: with its options.
        plugs: feature block and head, where they are not the method's own.
        training: fields of ``Training`` that differ from the usual ones.
        task: fields of ``Task`` that do.
        privacy: differential privacy, where it is asked for.
    """

    text: str
    method: Method
    plugs: Plugs
    training: Mapping[str, Any]
    task: Mapping[str, Any]
    privacy: Privacy | None = None

    @property
    def folder(self) -> str:
        """The text as a name of a folder: the method's name where nothing else is said."""
        return _UNSAFE.sub("-", self.text).strip("-")

    def study(self, cohort: Cohort, *, rounds: int, seed: int, augment: Augmentation = "none") -> Study:
        """The usual study of a cohort with these settings."""
        usual = Study.usual(self.method, cohort, rounds=rounds, seed=seed)
        training = replace(usual.training, **{"augment": augment, **self.training})
        study = replace(usual, training=training, plugs=self.plugs, task=replace(usual.task, **self.task))
        return study.private(self.privacy) if self.privacy else study


def parse_variants(text: str) -> list[Variant]:
    """Read variants with commas between them, such as ``fedavg,f2dc[lambda1=0;block=none]``.

    Raises:
        BadInput: a method, option, plug or value that is not there, or two variants that would share a folder.
    """
    variants = [parse_variant(part.strip()) for part in _split(text) if part.strip()]
    if not variants:
        raise BadInput("no method is named; give one or more with commas, such as fedavg,f2dc")
    seen: dict[str, str] = {}
    for variant in variants:
        if variant.folder in seen:
            raise BadInput(f"'{seen[variant.folder]}' and '{variant.text}' would share a folder; leave one of them out")
        seen[variant.folder] = variant.text
    return variants


def parse_variant(text: str) -> Variant:
    """Read one variant, such as ``f2dc[weights=samples;lr=0.01]``."""
    shape = _SHAPE.fullmatch(text)
    if shape is None:
        raise BadInput(f"'{text}' is not a method; write it as name or name[option=value;option=value]")
    pairs = [pair.strip() for pair in (shape["options"] or "").split(";") if pair.strip()]
    options = parse_options(pairs)
    plugs = {name: options.pop(name) for name in _PLUGS if name in options}
    training, task, private = (_taken(text, options, known) for known in (_TRAINING, _TASK, _PRIVACY))
    method = create(shape["name"].strip(), **options)
    block, head = plugs.get("block"), plugs.get("head")
    check_choices(block=block, head=head, **task)
    Training(**training)
    return Variant(text, method, Plugs(block, head), training, task, Privacy(**private) if private else None)


def _split(text: str) -> Sequence[str]:
    """Split at the commas that are in no bracket; that of ``f2dc[stages=[3,4]]`` is in two."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _taken(text: str, options: dict[str, Any], known: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    """Take what is known out of the options, under the names of fields."""
    return {
        field: _of_kind(text, name, options.pop(name), kind) for name, (field, kind) in known.items() if name in options
    }


def _of_kind(text: str, name: str, value: Any, kind: type) -> Any:
    if not fits(value, kind):
        raise BadInput(f"{text}: '{name}' takes {kind.__name__}, not {value!r}")
    return value
