"""The images of all sites as tensors, checked before a round is spent on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from crossward.federation.errors import BadInput
from crossward.imaging import folder, pack
from crossward.imaging.prepare import ready as prepared
from crossward.imaging.prepare.ready import Images, PreparedListing, Style, for_model, rows_of
from crossward.imaging.splits import TEST, TRAIN, VAL, Listing, Progress, choose_sites, keep_patients

SMALLEST_SIZE = 8
Kind = Literal["dicom hospitals", "pack"]


class TooFewImages(BadInput):
    """A site that cannot be trained on or tested: no images in a part, one class only, or less than a batch."""


@dataclass(frozen=True)
class Split:
    """The images of one part of a site.

    Attributes:
        images: float32 [n,c,h,w], normalised to (x - 0.5) / 0.25; of a prepared site they stay on disk until they are
            asked for.
        labels: int64 [n], index into the cohort's classes.
        patients: the patient (or group of images) each image belongs to.
        ids: what names the image within its site.
        style: scanner-style augmentation of training images, where ``site.yaml`` asks for it.
    """

    images: Images
    labels: torch.Tensor
    patients: tuple[str, ...]
    ids: tuple[str, ...]
    style: Style | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, where: Sequence[int] | NDArray[np.bool_] | NDArray[np.integer[Any]]) -> Split:
        """Some of the images, in the order of their numbers in ``where``, or those that it marks."""
        chosen = np.arange(len(self))[where if isinstance(where, np.ndarray) else list(where)]
        patients, ids = (tuple(names[row] for row in chosen) for names in (self.patients, self.ids))
        return Split(rows_of(self.images, chosen), self.labels[torch.from_numpy(chosen)], patients, ids)


@dataclass(frozen=True)
class SiteData:
    """One site; no patient is in two of its splits.

    Attributes:
        name: of the site.
        classes: label names; a label is an index into them.
        train: images to train on.
        val: to choose the best round with.
        test: to score the deployed model on.
        scanner: what they come from.
        learned: what of the pictures' making was learned from all training images together; one line each.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split
    scanner: str
    learned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cohort:
    """All sites, with the same classes, image size and number of channels.

    Attributes:
        sites: by name, in alphabetical order.
        classes: label names; a label is an index into them.
        kind: what the folder was found to be.
        channels: 1 (grey) or 3 (colour).
        size: height and width in pixels.
        phantom: whether the images are made up.
        source: the folder that was read, as it was given.
        warnings: what would have been refused without `lenient`, and what is worth knowing; one line each.
    """

    sites: dict[str, SiteData]
    classes: tuple[str, ...]
    kind: Kind
    channels: int
    size: int
    phantom: bool
    source: str
    warnings: tuple[str, ...]


def load(
    path: Path,
    *,
    size: int = 32,
    classes: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    seed: int = 0,
    fraction: float = 1.0,
    lenient: bool = False,
    batch_size: int = 32,
    channels: int | None = None,
    progress: Progress | None = None,
) -> Cohort:
    """Reads a folder of hospitals or a pack. Lists and labels are checked before the first picture is read.

    Of a hospital with a ``site.yaml`` only what `crossward data prepare` made is read, and ``site.yaml`` decides which
    patients are in which split.

    Args:
        path: a folder with one sub-folder of DICOM per hospital, one such hospital, or one .npz file per site.
        size: height and width of the images.
        classes: the labels to keep, in this order; all of them when not given.
        sites: the sites to keep; all of them when not given.
        seed: decides which patients are in which split, and which are kept by `fraction`.
        fraction: the part of the training patients to keep; validation and test stay whole.
        lenient: warn about sites that can hardly be trained on instead of refusing them.
        batch_size: a site needs at least so many training images.
        channels: how many the images get, where a study says so; as many as the site with the most when not given.
        progress: called as progress(site, images read, images to read).

    Raises:
        BadInput: with what is wrong, where, and what to do.
    """
    _check_options(size=size, fraction=fraction, batch_size=batch_size)
    kind = _kind(path)
    listings = _listings(path, kind, sites=sites, seed=seed, size=size, channels=channels)
    chosen = _chosen_classes(listings, classes, declared=kind == "pack")
    warnings = _absent_classes(listings, chosen)
    rows = {}
    for listing in listings:
        kept = _kept_rows(listing, chosen, seed=seed, fraction=fraction)
        warnings += _check_site(listing, kept, lenient=lenient, batch_size=batch_size)
        rows[listing.site] = kept
    pictures = {listing.site: _read(listing, rows[listing.site], size=size, progress=progress) for listing in listings}
    most = max(images.shape[1] for images, _ in pictures.values())
    if channels is not None and most > channels:
        raise BadInput("the images are in colour, and the study's are grey; export the study with --channels 3")
    channels = channels or most
    return Cohort(
        sites={
            listing.site: _site_data(listing, rows[listing.site], *pictures.pop(listing.site), chosen, channels)
            for listing in listings
        },
        classes=chosen,
        kind=kind,
        channels=channels,
        size=size,
        phantom=kind == "dicom hospitals" and (folder.is_phantom(path) or any(map(_made_up, listings))),
        source=str(path),
        warnings=tuple(warnings),
    )


def labels_of(path: Path, name: str, *, size: int | None = None, channels: int | None = None) -> Counter[str]:
    """How many images of each label one site has; no image is opened.

    Args:
        path: as for `load_site`.
        name: of the site in the study.
        size: of the study's images, where the site has them prepared.
        channels: likewise.
    """
    site = _site_in(path, name)
    return Counter(_listings(path, _kind(path), sites=[site], seed=0, size=size, channels=channels)[0].labels)


def _hospitals(path: Path) -> dict[str, Path]:
    """The hospitals of a folder; itself, where it is a hospital's."""
    return {path.absolute().name: path} if prepared.is_site(path) else folder.hospitals(path)


def _listings(
    path: Path, kind: Kind, *, sites: Sequence[str] | None, seed: int, size: int | None, channels: int | None
) -> list[Listing]:
    if kind == "pack":
        return pack.listings(path, sites=sites)
    found = _hospitals(path)
    chosen = choose_sites(found, sites)
    ready = {name for name in chosen if prepared.is_site(found[name])}
    plain = [name for name in chosen if name not in ready]
    listings: list[Listing] = [prepared.listing(found[name], name, size=size, channels=channels) for name in ready]
    if plain:
        listings += folder.listings(path, sites=plain, seed=seed)
    return sorted(listings, key=lambda listing: listing.site)


def _made_up(listing: Listing) -> bool:
    return isinstance(listing, PreparedListing) and listing.phantom


def _read(listing: Listing, rows: NDArray[np.intp], *, size: int, progress: Progress | None) -> tuple[Images, str]:
    if isinstance(listing, PreparedListing):
        return listing.stored.rows(rows), listing.scanner
    return listing.read(rows, size=size, progress=progress)


def load_site(
    path: Path, *, name: str, classes: Sequence[str], size: int, channels: int, seed: int, batch_size: int
) -> Cohort:
    """Reads one site's own data, as a cohort of that site alone under the name that the study knows it by.

    Args:
        path: this site's folder of DICOM with its labels, or a folder in which the site is found by its name.
        name: of the site in the study.
        classes: of the study, in its order.
        size: height and width of the study's images.
        channels: of the study's images.
        seed: of the study; decides which patients are in which split.
        batch_size: the site needs at least so many training images.

    Raises:
        BadInput: with what is wrong, where, and what to do.
    """
    site = _site_in(path, name)
    cohort = load(path, size=size, classes=classes, sites=[site], seed=seed, batch_size=batch_size, channels=channels)
    return replace(cohort, sites={name: replace(cohort.sites[site], name=name)})


def site_names(path: Path) -> list[str]:
    """The sites of a folder of hospitals or a pack; nothing is opened."""
    return sorted(_hospitals(path) if _kind(path) == "dicom hospitals" else pack.files_of(path))


def _site_in(path: Path, name: str) -> str:
    """The only site of a folder, whatever it is called there, or the one with this name."""
    found = site_names(path)
    if name in found or len(found) > 1:
        return name
    return found[0]


def _check_options(*, size: int, fraction: float, batch_size: int) -> None:
    if size < SMALLEST_SIZE:
        raise BadInput(f"images of {size} pixels are too small to learn from; choose a size of {SMALLEST_SIZE} or more")
    if not 0 < fraction <= 1:
        raise BadInput(f"a fraction of {fraction} of the training patients cannot be kept; choose one in (0, 1]")
    if batch_size < 1:
        raise BadInput(f"a batch of {batch_size} images cannot be trained on; choose a batch size of 1 or more")


def _kind(path: Path) -> Kind:
    if not path.exists():
        raise BadInput(f"{path}: no such folder; check the path")
    if not path.is_dir():
        raise BadInput(f"{path}: a file, not a folder; give the folder of hospitals or the pack that holds it")
    try:
        packed, folders = pack.is_pack(path), _hospitals(path)
        labelled = folder.has_labels(path) or any(map(prepared.is_site, folders.values()))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); check the folder's permissions") from None
    if packed and labelled:
        raise BadInput(f"{path}: has both hospitals and .npz files; keep them in separate folders")
    if not packed and not folders:
        raise BadInput(
            f"{path}: neither a folder of hospitals (sub-folders with labels.csv and DICOM images) nor a pack "
            "(one .npz file per site); check the path"
        )
    return "pack" if packed else "dicom hospitals"


def _chosen_classes(listings: list[Listing], wanted: Sequence[str] | None, *, declared: bool) -> tuple[str, ...]:
    """The classes asked for; otherwise all that have images, in the pack's order where it declares one."""
    known = list(dict.fromkeys(name for listing in listings for name in listing.classes))
    if not declared:
        known.sort()
    if wanted is None:
        present = {label for listing in listings for label in listing.labels}
        _refuse_lonely_labels(listings)
        chosen = tuple(name for name in known if name in present)
    else:
        chosen = tuple(wanted)
        # One hospital alone may lack a class that its partners have; several together, or a pack, know them all.
        unknown = [name for name in chosen if name not in known]
        if unknown and (declared or len(listings) > 1):
            raise BadInput(f"no site has a class named {', '.join(unknown)}; choose from {', '.join(known)}")
        if len(set(chosen)) < len(chosen):
            raise BadInput(f"classes {', '.join(chosen)}: one is named twice; name each class once")
    if len(chosen) < 2:
        raise BadInput(
            f"only one class ({', '.join(chosen) or 'none'}): there is nothing to tell apart; give two or more"
        )
    return chosen


def _refuse_lonely_labels(listings: list[Listing]) -> None:
    if len(listings) == 1:
        return
    for listing in listings:
        elsewhere = {label for other in listings if other is not listing for label in other.labels}
        for label in dict.fromkeys(listing.labels):
            if label not in elsewhere:
                raise BadInput(
                    f"{listing.site}: {listing.labels.count(label)} image(s) have the label '{label}', which no other "
                    "site has; correct labels.csv, or choose the classes with --classes"
                )


def _absent_classes(listings: list[Listing], chosen: tuple[str, ...]) -> list[str]:
    present = {label for listing in listings for label in listing.labels}
    return [f"no image has the class '{name}'" for name in chosen if name not in present]


def _kept_rows(listing: Listing, chosen: tuple[str, ...], *, seed: int, fraction: float) -> NDArray[np.intp]:
    """Rows with a chosen class; of the training patients only the fraction asked for."""
    code = {name: index for index, name in enumerate(chosen)}
    rows = np.array([row for row, label in enumerate(listing.labels) if label in code], dtype=np.intp)
    if fraction == 1:
        return rows
    training = listing.parts[rows] == TRAIN
    candidates = rows[training]
    kept = keep_patients(
        [listing.patients[row] for row in candidates],
        [code[listing.labels[row]] for row in candidates],
        seed=seed,
        fraction=fraction,
    )
    return np.sort(np.concatenate([candidates[kept], rows[~training]]))


def _check_site(listing: Listing, rows: NDArray[np.intp], *, lenient: bool, batch_size: int) -> list[str]:
    """Refuses a site that cannot be trained on or tested; what `lenient` allows comes back as warnings."""
    counts = np.bincount(listing.parts[rows], minlength=3)
    site = listing.site
    for part, name in ((TRAIN, "training"), (TEST, "test")):
        if counts[part] == 0:
            raise TooFewImages(f"{site}: no {name} images; add patients or leave the site out with --sites")
    in_training = {listing.labels[row] for row in rows if listing.parts[row] == TRAIN}
    doubts = []
    remedy = "leave the site out with --sites, or go on with --lenient"
    if len(in_training) == 1:
        doubts.append(f"{site}: all training images have the one label '{in_training.pop()}'")
    if counts[TRAIN] < batch_size:
        doubts.append(f"{site}: {counts[TRAIN]} training images are fewer than a batch of {batch_size}")
        remedy = f"use a smaller --batch-size, {remedy}"
    if doubts and not lenient:
        raise TooFewImages(f"{'; '.join(doubts)}; {remedy}")
    if counts[VAL] == 0:
        doubts.append(f"{site}: no validation images, so the best round cannot be chosen on this site")
    return doubts


def _site_data(
    listing: Listing,
    rows: NDArray[np.intp],
    images: Images,
    scanner: str,
    classes: tuple[str, ...],
    channels: int,
) -> SiteData:
    code = {name: index for index, name in enumerate(classes)}
    as_read = Split(
        images=images,
        labels=torch.tensor([code[listing.labels[row]] for row in rows], dtype=torch.int64),
        patients=tuple(listing.patients[row] for row in rows),
        ids=tuple(listing.ids[row] for row in rows),
    )

    def part(number: int) -> Split:
        # Normalised only now: colour made of grey would fill the memory three times over.
        some = as_read.rows(listing.parts[rows] == number)
        return replace(some, images=for_model(some.images, channels))

    site = SiteData(
        name=listing.site, classes=classes, train=part(TRAIN), val=part(VAL), test=part(TEST), scanner=scanner
    )
    if not isinstance(listing, PreparedListing):
        return site
    styled = replace(site.train, style=listing.style(rows[listing.parts[rows] == TRAIN]))
    return replace(site, train=styled, learned=listing.learned)
