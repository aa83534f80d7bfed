"""The report's section on scans that the model should not be trusted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.evaluate.flag_sheet import (
    AUROC_IN_WORDS,
    HEADS_IN_WORDS,
    by_kind,
    by_site,
    decimals,
    in_words,
    name_of,
    newcomer_in_words,
    opinion,
)
from crossward.evaluate.plots import Html, caution, join, tag, thumbnail
from crossward.evaluate.table import Sheet

_PICTURES = 6  # of a hospital and set
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:1rem;margin:.6rem 0 1.4rem"
_CAPTION = "font-size:.8rem;line-height:1.4;margin-top:.3rem;overflow-wrap:anywhere"


def flagged_scans(result: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]]) -> Html:
    """Flagged scans with thumbnails; nothing where no flags were worked out."""
    flags = result.get("flags")
    if not flags or not flags["sites"]:
        return Html()
    overview, kinds = by_site(flags), by_kind(flags)
    lines = [*in_words(flags), *([newcomer_in_words(result["newcomer"])] if result.get("newcomer") else [])]
    notes = [*(f"[{number}] {note}" for number, note in enumerate(overview.notes, start=1)), AUROC_IN_WORDS]
    return join(
        tag("h2", "Scans that the models should not be trusted on"),
        tag(
            "p",
            "Each hospital's deployed model read the hospital's own test scans and scans that belong to no hospital. A "
            f"scan is flagged when the model is more uncertain about it than about {flags['percentile']:g}\u00a0% of "
            "the hospital's own validation scans. The threshold is not calibrated: it promises no share of flags, and "
            "a scan without a flag can still be read wrongly.",
        ),
        tag("div", tag("ul", *(tag("li", line) for line in lines)), class_="notice"),
        _table(overview),
        tag("ul", *(tag("li", note) for note in notes), class_="notes"),
        tag("details", tag("summary", "By kind of scan"), _table(kinds), open="open"),
        _gallery(result, flags["scans"], pictures),
    )


def _table(sheet: Sheet) -> Html:
    words = {"hospital", "scans", "kind", "least often flagged at"}
    heads = [head.replace("\n", " ") for head in sheet.header]

    def row(cells: Sequence[str], class_: str) -> Html:
        columns = [
            tag("td", cell, class_="words" if head in words else "figure")
            for head, cell in zip(heads[1:], cells[1:], strict=True)
        ]
        return tag("tr", tag("th", cells[0], scope="row"), *columns, class_=class_)

    head = tag("tr", *(tag("th", head, scope="col", class_="words" if head in words else "figure") for head in heads))
    rows = [row(cells, "plain") for cells in sheet.sites]
    rows += [row(cells, "sum" if index else "sum first") for index, cells in enumerate(sheet.summary)]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="wide"), class_="scroll")


def _gallery(
    result: Mapping[str, Any], scans: Sequence[Mapping[str, Any]], pictures: Mapping[str, npt.NDArray[np.uint8]]
) -> Html:
    """Some of the flagged scans of every hospital and set; nothing where there are no pictures of them."""
    shown = [scan for scan in scans if scan["picture"] in pictures]
    if not shown:
        return Html()
    blocks = []
    for (site, what), group in groupby(shown, key=lambda scan: (scan["site"], scan["set"])):
        of_set = [scan for scan in scans if (scan["site"], scan["set"]) == (site, what)]
        some = list(group)[:_PICTURES]
        heading = f"{site}, {what}: {len(some)} of {len(of_set)} flagged scans"
        figures = [_figure(scan, pictures[scan["picture"]]) for scan in some]
        blocks.append(join(tag("h3", heading), tag("div", *figures, style=_GRID)))
    return join(caution(result), tag("p", f"{HEADS_IN_WORDS}.", class_="soft"), *blocks)


def _figure(scan: Mapping[str, Any], picture: npt.NDArray[np.uint8]) -> Html:
    lines: list[str] = [
        tag("strong", scan["what"]),
        name_of(scan),
        f"uncertainty {decimals(scan['uncertainty'])}",
        f"limit {decimals(scan['threshold'])}",
        f"model: {scan['predicted'] or 'no answer'}",
    ]
    if scan["uncertainty"] is None or scan["threshold"] is None:
        lines.append(scan["reason"])
    for head in ("global", "local"):
        if scan[head] is not None:
            # Two lines each, so that captions side by side stay in step.
            lines += f"{head}: {opinion(scan[head], between=chr(10))}".splitlines()
    if scan["conflict"] is not None:
        lines.append(f"conflict {decimals(scan['conflict'])}")
    alt = f"Flagged scan {name_of(scan)} of {scan['site']}, {scan['set']}: {scan['what']}"
    image = tag("div", thumbnail(picture, alt=alt), class_="strip", style="grid-template-columns:1fr")
    caption = tag("figcaption", *(tag("div", line) for line in lines), class_="soft", style=_CAPTION)
    return tag("figure", image, caption)
