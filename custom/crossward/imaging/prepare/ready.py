"""A prepared site as training sees it: its cached pictures and nothing else; no DICOM file is opened.

Who is in training, validation and test was decided by ``site.yaml`` when the site was prepared, and not by the seed
of a study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from crossward.federation.names import check_site_name
from crossward.imaging.pictures import normalised, pixels_of
from crossward.imaging.prepare.cache import Kept, NotPrepared, Pages, places
from crossward.imaging.prepare.levels import pixels_in
from crossward.imaging.prepare.manifest import Manifest, asked_digests, folder_of
from crossward.imaging.refusals import Reason
from crossward.imaging.rules.config import read_site_rules
from crossward.imaging.rules.site import DEFAULT_DOMAIN, SITE_FILE, SiteRules, Step
from crossward.imaging.splits import Listing, Progress
from crossward.imaging.transforms.pipeline import learning
from crossward.imaging.transforms.statistics import DomainStatistics
from crossward.imaging.transforms.style import learning as ranging
from crossward.imaging.transforms.style import style


class Images(Protocol):
    """Images [n,c,h,w] as a tensor has them, in memory or not."""

    @property
    def shape(self) -> torch.Size: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...

    def numpy(self) -> Any: ...


@dataclass(frozen=True)
class StoredImages:
    """Cached pictures that are read when they are asked for.

    Attributes:
        pages: the file with them.
        records: of these pictures, in order.
        checksums: of these records.
        channels: to normalise for, as a model takes images; None gives pixels in [0, 1].
    """

    pages: Pages
    records: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    channels: int | None = None

    @property
    def shape(self) -> torch.Size:
        channels, height, width = self.pages.shape
        return torch.Size((len(self), self.channels or channels, height, width))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """What a tensor would give; what is not asked for by the first index is not read.

        Raises:
            NotPrepared: a picture is not as it was written.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        chosen = np.arange(len(self))[np.asarray(first) if isinstance(first, (torch.Tensor, list)) else first]
        images = self._read(np.atleast_1d(chosen))
        return (images if chosen.ndim else images[0])[(slice(None),) * chosen.ndim + tuple(rest)]

    def rows(self, chosen: NDArray[np.integer[Any]]) -> StoredImages:
        """Some of the images, still on disk."""
        return replace(self, records=self.records[chosen], checksums=self.checksums[chosen])

    def normalised(self, channels: int) -> StoredImages:
        """The same images as a model takes them."""
        return replace(self, channels=channels)

    def numpy(self) -> NDArray[np.float32]:
        """All of them, in memory."""
        values: NDArray[np.float32] = self[:].numpy()
        return values

    def _read(self, chosen: NDArray[np.integer[Any]]) -> torch.Tensor:
        levels = self.pages.take(self.records[chosen], self.checksums[chosen])
        pixels = torch.from_numpy(pixels_in(levels))
        return pixels if self.channels is None else normalised(pixels, self.channels)


def rows_of(images: Images, chosen: NDArray[np.integer[Any]]) -> Images:
    """Some of the images by their numbers, on disk where they are."""
    return images.rows(chosen) if isinstance(images, StoredImages) else images[torch.from_numpy(chosen)]


def for_model(images: Images, channels: int) -> Images:
    """Pixels in [0, 1] as a model takes them, on disk where they are."""
    return images.normalised(channels) if isinstance(images, StoredImages) else normalised(images[:], channels)


Style = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]
"""Changes normalised images, of the rows that are given beside them, by what a generator draws."""


@dataclass(frozen=True)
class PreparedListing(Listing):
    """A listing whose pictures need not be in memory.

    Attributes:
        stored: the pictures, one per entry.
        domains: the scanner's domain of each.
        styles: scanner-style augmentation by domain, as far as it is asked for.
        phantom: whether the images are made up.
        learned: what of their making was learned from all training images of a domain together; one line each.
    """

    stored: StoredImages
    domains: tuple[str, ...]
    styles: Mapping[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]]
    phantom: bool
    learned: tuple[str, ...]

    @property
    def scanner(self) -> str:
        return ", ".join(sorted(set(self.domains)))

    def style(self, rows: NDArray[np.intp]) -> Style | None:
        """Augmentation for training on these rows, each image in the style of its own domain."""
        known = list(self.styles)
        if not known:
            return None
        codes = torch.tensor([known.index(name) if (name := self.domains[row]) in known else -1 for row in rows])

        def styled(images: torch.Tensor, some: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            found = codes[some].to(images.device)
            changed = images.clone()
            for code, name in enumerate(known):
                own = found == code
                pixels = self.styles[name](pixels_of(images[own]), generator)
                changed[own] = normalised(pixels, images.shape[1])
            return changed

        return styled


def augmentation(rules: SiteRules, domain: str) -> tuple[Step, ...]:
    """The steps of scanner-style augmentation of a domain."""
    return rules.augment.get(domain, rules.augment.get(DEFAULT_DOMAIN, ()))


def is_site(folder: Path) -> bool:
    """Whether the folder is a hospital's with a ``site.yaml``."""
    return (folder / SITE_FILE).is_file()


def listing(folder: Path, site: str, *, size: int | None, channels: int | None) -> PreparedListing:
    """What was prepared for a site.

    Args:
        folder: with its ``site.yaml``.
        site: its name.
        size: of the study's images; any that was prepared when not given.
        channels: of the study's images; likewise. Grey pictures serve a study in colour.

    Raises:
        NotPrepared: nothing was prepared for this, or ``site.yaml``, the labels or the version changed since.
    """
    check_site_name(site)
    rules = read_site_rules(folder / SITE_FILE, must_exist=False)
    cache = _cache_for(rules, size=size, channels=channels)
    manifest = _up_to_date(rules, cache, colour=channels == 3)
    pictures = manifest.pictures
    pages = Pages(cache / manifest.pixels, channels=manifest.channels, size=manifest.size)
    stored = StoredImages(pages, *places([Kept(picture.record, picture.checksum) for picture in pictures]))
    domains = tuple(picture.domain for picture in pictures)
    return PreparedListing(
        site=site,
        classes=manifest.classes,
        labels=tuple(picture.label for picture in pictures),
        patients=tuple(picture.patient for picture in pictures),
        ids=tuple(picture.name for picture in pictures),
        parts=np.array([picture.part for picture in pictures], dtype=np.uint8),
        read=partial(_read_pictures, stored, ", ".join(sorted(set(domains)))),
        stored=stored,
        domains=domains,
        styles={
            domain: style(DomainStatistics.from_json(statistics), augmentation(rules, domain))
            for domain, statistics in manifest.styles.items()
        },
        phantom=manifest.phantom,
        learned=tuple(line for domain in sorted(set(domains)) for line in _learned(rules, domain)),
    )


def _learned(rules: SiteRules, domain: str) -> Iterator[str]:
    """From the rules, as the pictures were made by none but these."""
    yield from (f"domain {domain}: '{name}'" for name in learning(rules.steps(domain)))
    yield from (f"domain {domain}: the range of '{name}' in augment" for name in ranging(augmentation(rules, domain)))


def _cache_for(rules: SiteRules, *, size: int | None, channels: int | None) -> Path:
    wanted = [folder_of(rules.cache, size=size, channels=each) for each in _serving(channels)] if size else _any(rules)
    for folder in wanted:
        if folder.is_dir():
            return folder
    what = f"images of {size} x {size} pixels{f', {channels} channel(s)' if channels else ''}" if size else "images"
    options = f"--size {size}{f' --channels {channels}' if channels else ''}" if size else "--size 32"
    raise NotPrepared(f"no {what} were prepared; {_remedy(rules, options)}")


def _serving(channels: int | None) -> Sequence[int]:
    """Colour before grey: it was asked for, where it was prepared."""
    return {1: (1,), 3: (3, 1), None: (3, 1)}.get(channels, ())


def _any(rules: SiteRules) -> list[Path]:
    return sorted(rules.cache.glob("*x*x[13]"), key=lambda folder: folder.stat().st_mtime, reverse=True)


def _up_to_date(rules: SiteRules, cache: Path, *, colour: bool) -> Manifest:
    options = "--size {} --channels {}".format(*cache.name.split("x")[1:])
    try:
        manifest = Manifest.read(cache)
        now = asked_digests(rules.path, rules.labels.file)
    except NotPrepared as error:
        raise NotPrepared(f"{error}; {_remedy(rules, options)}") from None
    # A table of labels that is out of reach here cannot have been changed here.
    changed = sorted(what for what, digest in now.items() if manifest.asked.get(what) != digest)
    if changed:
        raise NotPrepared(f"changed since the images were prepared: {', '.join(changed)}; {_remedy(rules, options)}")
    if colour and manifest.channels == 1 and any(row.reason is Reason.COLOUR for row in manifest.rejected):
        options = f"--size {manifest.size} --channels 3"
        raise NotPrepared(f"images in colour were left out, and the study's are in colour; {_remedy(rules, options)}")
    return manifest


def _remedy(rules: SiteRules, options: str) -> str:
    return f"run: crossward data prepare {rules.path} {options}"


def _read_pictures(
    stored: StoredImages, scanner: str, rows: NDArray[np.intp], *, size: int, progress: Progress | None
) -> tuple[torch.Tensor, str]:
    if size != stored.pages.shape[1]:
        raise NotPrepared(f"the pictures were prepared with {stored.pages.shape[1]} pixels, not {size}")
    pictures = stored[rows]
    if progress is not None:
        progress(scanner, len(rows), len(rows))
    return pictures, scanner
