"""The page of scanner domains for a prepared site: some of its training images, before and after their transforms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crossward.imaging.dicom.files import read_scan
from crossward.imaging.prepare.cache import Kept, Pages, places
from crossward.imaging.prepare.levels import pixels_in
from crossward.imaging.prepare.manifest import Manifest, Picture, folder_of
from crossward.imaging.refusals import Refused
from crossward.imaging.rules.site import SiteRules
from crossward.imaging.splits import TRAIN, Progress
from crossward.imaging.transforms.report import SAMPLES, Domain, Sample, domain_report
from crossward.imaging.transforms.statistics import DomainStatistics, Measured, measure, measure_picture
from crossward.imaging.transforms.steps import opened
from crossward.imaging.workers import work

PICTURES_OF_A_DOMAIN: Final = 60
_SHOWN_PIXELS: Final = 256


@dataclass(frozen=True)
class _Look:
    """Reads one frame once more: its figures, and a small copy of it to show."""

    folder: Path

    def __call__(self, picture: Picture) -> tuple[Measured, NDArray[np.float32]]:
        frame = opened(read_scan(self.folder / picture.file, frames=[picture.frame]).frames[0])
        step = -(-max(frame.values.shape[:2]) // _SHOWN_PIXELS)
        return measure(frame.values, valid=frame.valid, spacing=frame.spacing), frame.values[::step, ::step].copy()


def write_report(
    rules: SiteRules,
    manifest: Manifest,
    folder: Path,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes the page of a site that has just been prepared.

    Args:
        rules: of the site.
        manifest: what was prepared.
        folder: for the page, which its owner alone can read: it shows images of patients.
        processes: workers.
        progress: called as progress(what, done, in all).
    """
    cache = folder_of(rules.cache, size=manifest.size, channels=manifest.channels)
    pages = Pages(cache / manifest.pixels, channels=manifest.channels, size=manifest.size)
    chosen = list(_chosen(manifest.pictures))
    statistics = {each.domain: (DomainStatistics(), DomainStatistics()) for each in chosen}
    samples: dict[str, list[Sample]] = {domain: [] for domain in statistics}
    for done, (number, seen) in enumerate(work(_Look(rules.data), chosen, processes=processes), start=1):
        picture = chosen[number]
        if not isinstance(seen, Refused):
            levels = pages.take(*places([Kept(picture.record, picture.checksum)]))[0]
            after = pixels_in(levels)
            measured, before = seen
            statistics[picture.domain][0].take(measured)
            statistics[picture.domain][1].take(measure_picture(after))
            if len(samples[picture.domain]) < SAMPLES:
                samples[picture.domain].append(Sample(before, after))
        if progress is not None:
            progress("report", done, len(chosen))
    domains = {name: Domain(before, after, samples[name]) for name, (before, after) in statistics.items()}
    return domain_report(folder, domains)


def _chosen(pictures: Sequence[Picture]) -> Iterator[Picture]:
    """Training pictures, evenly over the files of every domain."""
    for domain in sorted({picture.domain for picture in pictures}):
        own = [picture for picture in pictures if picture.domain == domain and picture.part == TRAIN]
        yield from own[:: -(-len(own) // PICTURES_OF_A_DOMAIN) or 1]
