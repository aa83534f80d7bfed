"""The page of an audit: what was tried, what came of it, and pictures of what attackers saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crossward.evaluate.plots import STYLE, Html, caution, join, tag, thumbnail
from crossward.federation.storage import atomic_file
from crossward.privacy.audit.findings import Pictured, Setting, shown

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STATES = {True: "pass", False: "FAIL", None: "–"}
_LARGER = 6  # times, as pixels, for pictures of a few pixels
_SMALL = 64

_KNOWS = (
    ("gradient inversion", "The model, the update of one step on one image, its label, and the norm of clipping."),
    ("inversion of all", "The sum of all sites' gradients, how many images are in it, and all their labels."),
    ("masked vector", "One site's vector as it arrives at the server, and the site's true update to compare with."),
    (
        "label",
        "The gradient of the last layer's bias; of a run, its model and the public start it moved from.",
    ),
    ("membership", "The finished model (of a run, of the best and of the last round), and an image with its label."),
    ("epsilon at least", "The model and the update of every round, and canaries with their labels."),
    ("check", "Nothing is attacked: the part is used, and what it gives out is looked at."),
)
_LIMITS = (
    "An attack that failed says little of a better one. What differential privacy promises holds for every attack; the "
    "audit shows whether the promise is kept, as far as its attacks can see.",
    "The bound on epsilon is one with 95 % confidence, and never above what its number of guesses can show.",
    "Secure aggregation hides whose an update is and what is in it beside the others'; what a model learnt by heart is "
    "in the sum as well, and a sum of few images can be taken apart. Only noise is a limit there.",
    "Timing, memory, the hospital's own files and people are not part of it.",
)


def write_page(out: Path, facts: Mapping[str, Any], pictures: Sequence[Pictured]) -> None:
    """Write ``audit.html`` and every picture as a PNG beside it.

    Args:
        out: folder of the audit.
        facts: as in ``audit.json``.
        pictures: originals, and what attackers made of them.
    """
    for number, pictured in enumerate(pictures, start=1):
        _save(out / f"{number}-original.png", pictured.original)
        for setting, (picture, _) in pictured.rebuilt.items():
            _save(out / f"{number}-{setting.name.lower()}.png", picture)
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", "Leakage audit"),
        Html(f"<style>{STYLE}</style>"),
    )
    body = tag("main", *_sections(facts, pictures))
    document = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'
    with atomic_file(out / "audit.html") as stream:
        stream.write(document.encode("utf-8", errors="replace"))


def _sections(facts: Mapping[str, Any], pictures: Sequence[Pictured]) -> Iterator[Html]:
    yield tag("h1", "Leakage audit")
    what = "the built-in set-up" if facts["run"] is None else f"{facts['run']} and the built-in set-up"
    yield tag("p", f"{what} · {facts['seconds'] / 60:.1f} minutes{' · quick' if facts['quick'] else ''}", class_="soft")
    failed = [row for row in facts["findings"] if row["passed"] is False]
    verdict = "Every rule holds." if not failed else f"{len(failed)} rules are broken: the rows marked FAIL."
    yield tag("div", tag("p", tag("strong", verdict)), class_="notice" if not failed else "notice warning")
    yield tag("h2", "What an attacker reconstructs")
    yield caution({"data": facts})
    for pictured in pictures:
        yield _pictures(pictured)
    yield tag("h2", "What was tried")
    yield _table(facts["findings"])
    yield tag("h2", "What each attack knows")
    yield tag("dl", *(part for name, words in _KNOWS for part in (tag("dt", name), tag("dd", words))))
    yield tag("h2", "What this does not show")
    yield tag("ul", *(tag("li", words) for words in _LIMITS))
    yield tag("footer", f"Written by Crossward {facts['versions'].get('crossward', '')}. Research software.")


def _pictures(pictured: Pictured) -> Html:
    figures = [_figure(pictured.original, "original", pictured.subject)]
    for setting in Setting:
        if setting in pictured.rebuilt:
            picture, likeness = pictured.rebuilt[setting]
            figures.append(_figure(picture, f"{setting}: {likeness:.1f} dB", pictured.subject))
    return join(tag("h3", pictured.subject), tag("div", *figures, class_="charts"))


def _figure(picture: np.ndarray[Any, np.dtype[np.uint8]], words: str, subject: str) -> Html:
    image = thumbnail(_larger(picture), alt=f"{subject}, {words}")
    return tag("figure", image, tag("figcaption", words))


def _table(rows: Sequence[Mapping[str, Any]]) -> Html:
    heads = ("attacked", "attack", "setting", "figure", "rule", "", "in words", "minutes")
    head = tag("thead", tag("tr", *(tag("th", text, scope="col", class_="words") for text in heads)))
    lines = []
    for row in rows:
        cells = (
            row["attack"],
            row["setting"],
            shown(row["figure"], row["unit"]),
            row["rule"] or "–",
            _STATES[row["passed"]],
            row["words"],
            f"{row['seconds'] / 60:.2f}",
        )
        lines.append(
            tag("tr", tag("th", row["subject"], scope="row"), *(tag("td", cell, class_="words") for cell in cells))
        )
    return tag("div", tag("table", head, tag("tbody", *lines), class_="wide"), class_="scroll")


def _larger(picture: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pixels as squares that can be seen."""
    times = _LARGER if max(picture.shape[:2]) < _SMALL else 1
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def _save(path: Path, picture: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    with atomic_file(path) as stream:
        Image.fromarray(np.ascontiguousarray(_larger(picture))).save(stream, format="PNG")
