"""A page that shows what the transforms do to each scanner domain: figures and greys before and after, and samples.

The page is one file without scripts or anything from elsewhere. It shows patients' images, so it is written for its
owner alone and stays inside the site; it names domains (scanners), and nobody.
"""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossward.federation.storage import atomic_file
from crossward.imaging.transforms.standardise import percentile
from crossward.imaging.transforms.statistics import DomainStatistics, centres

PAGE, SHEET = "domains.html", "domains.png"
SAMPLES = 6
_ACROSS = 4
_FIGURES = {
    "mean": "mean",
    "contrast": "contrast (standard deviation)",
    "sharpness": "sharpness (slope per pixel over contrast)",
    "noise": "noise (standard deviation)",
    "shading": "shading (slope over the picture, over its mean)",
    "row_mm": "mm between rows",
    "column_mm": "mm between columns",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
table { border-collapse: collapse; margin: 0.5rem 0 1rem; }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; }
h2 { margin-top: 2rem; border-top: 2px solid #1a1a1a; padding-top: 0.5rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Sample:
    """One training image.

    Attributes:
        before: [h,w] or [h,w,3] in any units, bright where there is much.
        after: [c,size,size] in [0, 1].
    """

    before: NDArray[np.float32]
    after: NDArray[np.float32]


@dataclass(frozen=True)
class Domain:
    """What the report shows of a domain.

    Attributes:
        before: statistics of its training images in the units of the modality.
        after: of the finished pictures.
        samples: to look at; the first few are shown.
    """

    before: DomainStatistics
    after: DomainStatistics
    samples: Sequence[Sample] = ()


def domain_report(folder: Path, domains: Mapping[str, Domain]) -> Path:
    """Write ``domains.html`` and ``domains.png`` for the owner's eyes only.

    Returns:
        The page.

    Raises:
        StorageFailure: they cannot be written.
    """
    greys = _png(_greys(domains))
    _write_private(folder / SHEET, _png(_sheet(domains)))
    sections = "".join(_section(name, domain) for name, domain in sorted(domains.items()))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Scanner domains</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body><h1>Scanner domains before and after their transforms</h1>"
        "<p>Made from training images only. It shows images of patients: keep it inside the hospital.</p>"
        f"{_image(greys, 'Share of pixels by grey for every domain, before and after the transforms')}"
        f"{sections}</body></html>\n"
    )
    _write_private(folder / PAGE, page.encode())
    return folder / PAGE


def _write_private(path: Path, content: bytes) -> None:
    with atomic_file(path) as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(content)


def _section(name: str, domain: Domain) -> str:
    rows = "".join(
        f"<tr><td>{said}</td>{_cells(domain.before, figure)}{_cells(domain.after, figure)}</tr>"
        for figure, said in _FIGURES.items()
        if domain.before.figures[figure].total or domain.after.figures[figure].total
    )
    shown = len(domain.samples[:SAMPLES])
    strip = _image(_png(_strip(domain)), f"{shown} samples, before above and after below") if shown else ""
    return (
        f"<h2>{html.escape(name)}</h2><p>{domain.before.images} training images; half of them lie between the quarters."
        "</p><table><thead><tr><th>of an image</th><th>before: lower quarter</th><th>middle</th><th>upper quarter</th>"
        "<th>after: lower quarter</th><th>middle</th><th>upper quarter</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{strip}"
    )


def _cells(statistics: DomainStatistics, figure: str) -> str:
    found = [statistics.figures[figure].quantile(part) for part in (0.25, 0.5, 0.75)]
    return "".join(f"<td>{_shown(value)}</td>" for value in found)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return format(value, ".0f" if abs(value) >= 1000 else ".3g")


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _figure(width: float, height: float) -> Any:
    # Takes a second to import, and only the report needs it.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _greys(domains: Mapping[str, Domain]) -> Any:
    rows = _rows(domains)
    figure = _figure(11, 1.6 * rows + 3)
    _draw_greys(figure, domains)
    return figure


def _rows(domains: Mapping[str, Domain]) -> int:
    return -(-len(domains) // _ACROSS)


def _draw_greys(figure: Any, domains: Mapping[str, Domain]) -> None:
    """Before: every domain by itself, for units differ. After: all together, for that is what they are compared by."""
    rows = _rows(domains)
    grid = figure.add_gridspec(rows + 1, _ACROSS, height_ratios=[*[1.6] * rows, 3])
    after = figure.add_subplot(grid[rows, :])
    for place, (name, domain) in enumerate(sorted(domains.items())):
        before = figure.add_subplot(grid[place // _ACROSS, place % _ACROSS])
        colour = f"C{place % 10}"
        before.fill_between(*_density(domain.before), color=colour, linewidth=0)
        after.plot(*_density(domain.after), color=colour, label=_plain(name), linewidth=1.4)
        _plot_title(before, f"before: {_plain(name)}")
        before.tick_params(labelsize=7)
    _plot_title(after, "after: pictures of all domains")
    if domains:
        after.legend(fontsize=8, frameon=False)


def _plot_title(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _plain(name: str) -> str:
    """Without what means something to matplotlib: dollar signs, a leading underscore."""
    return "".join(letter if letter.isprintable() else " " for letter in name).replace("$", r"\$").lstrip("_") or " "


def _density(statistics: DomainStatistics) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pixels per grey over 80 equal steps from the 0.5th to the 99.5th of a hundred, the highest at 1."""
    low, high = (statistics.pixels.quantile(part) for part in (0.005, 0.995))
    if low is None or high is None or low >= high:
        return np.empty(0), np.empty(0)
    edges = np.linspace(low, high, 81)
    middles = centres()
    # Bins are not equally wide: what lies below an edge is read between their borders, so that none is torn.
    counts = np.diff(np.interp(edges, (middles[:-1] + middles[1:]) / 2, np.cumsum(statistics.pixels.counts)[:-1]))
    return (edges[:-1] + edges[1:]) / 2, counts / max(counts.max(), 1)


def _strip(domain: Domain) -> Any:
    samples = domain.samples[:SAMPLES]
    figure = _figure(1.8 * len(samples) + 0.4, 3.8)
    _draw_samples(figure.subplots(2, len(samples), squeeze=False), samples)
    return figure


def _draw_samples(axes: Any, samples: Sequence[Sample]) -> None:
    for place in axes.flat:
        place.axis("off")
    for column, sample in enumerate(samples):
        before, after = sample.before, sample.after.transpose(1, 2, 0)
        if before.ndim == 2 and before.max() > before.min():
            # Only to be looked at: what units allow is mostly far wider than what a picture holds.
            before = percentile(before, before, low=0, high=100)
        for place, picture in zip(axes[:, column], (before, after), strict=True):
            place.imshow(np.squeeze(picture), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _sheet(domains: Mapping[str, Domain]) -> Any:
    """Everything on one picture: greys, then two rows of samples for every domain that has some."""
    shown = {name: domain for name, domain in sorted(domains.items()) if domain.samples}
    heights = [1.6 * _rows(domains) + 3, *[3.6] * len(shown)]
    figure = _figure(11, sum(heights))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_greys(parts[0], domains)
    for part, (name, domain) in zip(parts[1:], shown.items(), strict=True):
        part.suptitle(
            f"{_plain(name)}: {domain.before.images} training images, before and after", fontsize=10, x=0.01, ha="left"
        )
        _draw_samples(part.subplots(2, SAMPLES, squeeze=False), domain.samples[:SAMPLES])
    return figure
