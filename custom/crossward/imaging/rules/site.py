"""A hospital's ``site.yaml`` as typed values: where its images and labels are, and how they become pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SITE_FILE = "site.yaml"
DEFAULT_DOMAIN = "default"

Key = Literal["file", "sop_uid", "series_uid", "study_uid", "accession", "patient"]
Frames = Literal["single", "first", "middle", "each", "volume"]


@dataclass(frozen=True, kw_only=True)
class LabelRule:
    """Where labels come from.

    Attributes:
        source: a CSV file, a tag of the image's own header, or structured reports among the files.
        file: the CSV file, absolute.
        key: what a row of the CSV file names: a file, or something that the header says.
        key_column: the column with the key.
        label_column: the column with the label.
        patient_column: the column with the patient, where the header's patient id is not to be used; else None.
        tag: keyword of the header's element, for ``source: tag``.
        concept: code value of the concept whose coded value is the label, for ``source: sr``.
        mapping: from what is written to the class; empty takes what is written as it is.
    """

    source: Literal["csv", "tag", "sr"] = "csv"
    file: Path | None = None
    key: Key = "file"
    key_column: str = "file"
    label_column: str = "label"
    patient_column: str | None = None
    tag: str = ""
    concept: str = ""
    mapping: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DomainRule:
    """How a scanner's domain follows from the header: the first match whose patterns all fit, else joined fields.

    Attributes:
        names: (domain, {header field: shell pattern}); compared without regard to case.
        fields: header fields whose values make up the name where no match fits; empty refuses such files.
    """

    names: tuple[tuple[str, Mapping[str, str]], ...] = ()
    fields: tuple[str, ...] = ("manufacturer", "model")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One transform by name with its options, and the line of ``site.yaml`` that asked for it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class SiteRules:
    """Everything that ``site.yaml`` says.

    Attributes:
        path: of the file itself.
        data: folder with the images, absolute.
        cache: folder for what is prepared, absolute.
        labels: where labels come from.
        fractions: training, validation and test, by patient.
        split_seed: decides who is where.
        frames: how series and multi-frame files become pictures: ``single`` refuses several frames, ``first`` and
            ``middle`` take one of a file or series, ``each`` takes every frame or slice, ``volume`` keeps 3-D arrays.
        domain: how the scanner's domain follows from the header.
        transforms: steps by domain; the ``default`` domain's are for every domain that is not named.
        augment: scanner-style augmentation steps by domain, used in training only.
        burned_in: what to do with files that say they have burned-in text, or that look like it.
    """

    path: Path
    data: Path
    cache: Path
    labels: LabelRule
    fractions: tuple[float, float, float] = (0.7, 0.1, 0.2)
    split_seed: int = 0
    frames: Frames = "single"
    domain: DomainRule = field(default_factory=DomainRule)
    transforms: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    augment: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    burned_in: Literal["refuse", "take"] = "refuse"

    def steps(self, domain: str) -> tuple[Step, ...]:
        """The transforms of a domain."""
        return self.transforms.get(domain, self.transforms.get(DEFAULT_DOMAIN, ()))
