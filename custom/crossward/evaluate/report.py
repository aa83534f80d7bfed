"""One self-contained `report.html`: what the run was worth, for readers who never open a console."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.evaluate.facts import checked
from crossward.evaluate.plots import (
    STYLE,
    Html,
    caution,
    interval_bar,
    join,
    legend,
    rounds_chart,
    tag,
    thumbnail,
)
from crossward.evaluate.report_features import feature_pages
from crossward.evaluate.report_flags import flagged_scans
from crossward.evaluate.report_privacy import privacy_page
from crossward.evaluate.report_transfer import transfer_section
from crossward.evaluate.table import AS_RECEIVED, percent, ratio, site_sheet
from crossward.federation.storage import atomic_file

_SAMPLES_SHOWN = 8  # pictures per hospital
_ROUNDS_OPEN = 16  # longer lists of rounds start folded
_TOOK_PART = ("reported", "summed")
_ALL = "all hospitals"

# Inside this page nothing is fetched and nothing runs, even if something slipped through the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(
    path: str | os.PathLike[str],
    result: Mapping[str, Any],
    samples: Mapping[str, npt.NDArray[np.uint8]] | None = None,
    pictures: Mapping[str, npt.NDArray[np.uint8]] | None = None,
) -> None:
    """Writes the report of a run as one HTML file that needs no network.

    Args:
        path: where to write; replaced atomically.
        result: as in `result.json`.
        samples: for a site's name a few of its images, uint8 [k, h, w] or [k, h, w, 3].
        pictures: single images that the result refers to by these names, uint8 [h, w] or [h, w, 3].
    """
    result = checked(result)
    page = tag("main", *_sections(result, samples or {}, pictures or {}))
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", _headline(result)),
        Html(f"<style>{STYLE}</style>"),
    )
    document = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{page}</body></html>\n'
    with atomic_file(Path(path)) as stream:
        stream.write(document.encode("utf-8", errors="replace"))


def _sections(
    result: Mapping[str, Any],
    samples: Mapping[str, npt.NDArray[np.uint8]],
    pictures: Mapping[str, npt.NDArray[np.uint8]],
) -> Iterator[Html]:
    yield _opening(result)
    yield _warnings(result.get("warnings") or [])
    yield _tiles(result)
    yield _hospitals(result)
    yield _alone(result)
    yield flagged_scans(result, pictures)
    yield _progress(result)
    yield transfer_section(result)
    yield feature_pages(result, pictures)
    yield _samples(result, samples)
    yield privacy_page(result)
    yield _rounds(result)
    yield _repeat(result)
    yield tag(
        "footer",
        f"Written by Crossward {result['versions'].get('crossward', '')}. Research software: not for diagnosis.",
    )


def _headline(result: Mapping[str, Any]) -> str:
    count = len(result["sites"])
    return f"{result['method']} across {count} hospital{'' if count == 1 else 's'}"


def _opening(result: Mapping[str, Any]) -> Html:
    data = result["data"]
    facts = [
        f"{len(result['rounds'])} rounds",
        f"classes: {', '.join(map(str, data.get('classes') or ['not recorded']))}",
        *([f"images of {data['size']} × {data['size']} pixels"] if data.get("size") else []),
        f"data: {data.get('path') or 'not recorded'}",
        f"run time {_duration(result['seconds'])}",
    ]
    notice = Html()
    if data.get("phantom"):
        notice = _notice(
            tag("strong", "Computer-drawn phantoms, no patients. "),
            "Every image was drawn by a program. The figures show that the system works from end to end; "
            "they say nothing about how well it reads real scans.",
        )
    return join(tag("h1", _headline(result)), tag("p", " · ".join(facts), class_="soft"), notice)


def _warnings(warnings: Sequence[str]) -> Html:
    if not warnings:
        return Html()
    heading = f"{len(warnings)} warning{'' if len(warnings) == 1 else 's'}"
    return tag(
        "div",
        tag("strong", heading),
        tag("ul", *(tag("li", w) for w in warnings)),
        class_="notice warning",
        role="alert",
    )


def _notice(*children: Any) -> Html:
    return tag("div", tag("p", *children), class_="notice")


def _tiles(result: Mapping[str, Any]) -> Html:
    facts = result["summary"]
    if facts["avg"] is None:
        return _notice("No hospital has a defined accuracy; the table says why.")
    spread = "" if facts["std"] is None else f"± {percent(facts['std'])}"
    tiles = [
        _tile(f"{percent(facts['avg'])} %", "average accuracy over hospitals, ± standard deviation", extra=spread),
        _tile(
            _share(facts.get("worst_accuracy", result["sites"].get(facts["worst_site"], {}).get("accuracy"))),
            f"worst hospital: {facts['worst_site']}",
            class_="tile worst",
        ),
        _tile(_share(facts["all"]), "accuracy over all test images"),
    ]
    if facts.get("avg_auc") is not None:
        tiles.append(_tile(ratio(facts["avg_auc"]), "average area under the ROC curve (0.5 is chance)"))
    return tag("div", *tiles, class_="tiles")


def _tile(figure: str, words: str, *, extra: str = "", class_: str = "tile") -> Html:
    return tag("div", tag("b", figure, " ", tag("small", extra)), tag("span", words), class_=class_)


def _hospitals(result: Mapping[str, Any]) -> Html:
    sheet = site_sheet(result)
    heads = [head.replace("\n", " ") for head in sheet.header]
    heads.insert(2, "0 – 100 %")

    def figures(cells: Sequence[str]) -> Iterator[Html]:
        for head, cell in zip(heads[3:], cells, strict=True):
            yield tag("td", cell, data_label=head, class_="figure" if cell else "blank")

    rows = []
    for (name, scanner, *cells), site in zip(sheet.sites, result["sites"].values(), strict=True):
        machine = tag("td", scanner, class_="words", data_label=heads[1])
        rows.append(_row(name, machine, tag("td", interval_bar(site), data_label=heads[2]), *figures(cells)))
    for index, (label, _, *cells) in enumerate(sheet.summary):
        rows.append(_row(label, *figures(cells), class_="sum first" if index == 0 else "sum", columns=3))
    notes = [*(f"[{number}] {note}" for number, note in enumerate(sheet.notes, start=1)), AS_RECEIVED]
    return join(
        tag("h2", "Each hospital's own test images"),
        tag(
            "p",
            "Measured on images that were kept aside for testing. Brackets give the range that holds the true value "
            "with 95\u00a0% confidence; small hospitals have wide ones.",
        ),
        _table([_column(head, words=index < 3) for index, head in enumerate(heads)], rows, class_="wide cards"),
        legend(own="accuracy with its 95 % interval", ring="as received", tick="always naming the commonest class"),
        tag("ul", *(tag("li", note) for note in notes), class_="notes"),
        _per_class(result),
    )


def _per_class(result: Mapping[str, Any]) -> Html:
    classes = result["data"].get("classes") or []
    if not classes or not all(site.get("per_class") for site in result["sites"].values()):
        return Html()

    def found(entry: Mapping[str, Any]) -> str:
        return "no images" if entry.get("recall") is None else f"{percent(entry['recall'])} % of {entry['n']}"

    rows = [
        _row(name, *(found(site["per_class"].get(label) or {}) for label in classes))
        for name, site in result["sites"].items()
    ]
    heads = [_column("hospital"), *map(_column, classes)]
    return tag("details", tag("summary", "How many images of each class were recognised"), _table(heads, rows))


def _progress(result: Mapping[str, Any]) -> Html:
    if not result["rounds"]:
        return Html()
    summed = any("sums" in entry for entry in result["rounds"])
    shown = _together(result) if summed else result
    charts = [tag("figure", tag("h3", site), rounds_chart(shown, site)) for site in shown["sites"]]
    best = result.get("best_round")
    chosen = f" Round {best} was chosen on these images, never on test images." if best is not None else ""
    measured = (
        "Measured on all hospitals' validation images together after every round: single hospitals' figures do not "
        "leave them under secure aggregation."
        if summed
        else "Measured on each hospital's validation images after every round."
    )
    others = {} if summed else {"grey": "the other hospitals"}
    line = "all hospitals" if summed else "this hospital"
    return join(
        tag("h2", "Accuracy by round"),
        tag("p", measured, chosen, " A gap is a round without a report."),
        legend(line=line, dash="as received", **others, best="chosen round"),
        tag("div", *charts, class_="charts"),
    )


def _together(result: Mapping[str, Any]) -> dict[str, Any]:
    """A run whose rounds are known as sums, as if all hospitals were one."""
    rounds = [{"round": entry["round"], "sites": {_ALL: entry.get("sums") or {}}} for entry in result["rounds"]]
    return {"rounds": rounds, "sites": {_ALL: {}}, "best_round": result.get("best_round")}


def _alone(result: Mapping[str, Any]) -> Html:
    """Together against alone, where both were measured."""
    alone = result.get("alone")
    if not alone:
        return Html()
    pairs = {name: (site["accuracy"], alone["accuracy"].get(name)) for name, site in result["sites"].items()}
    pairs["average"] = (result["summary"]["avg"], alone["avg"])
    rows = [
        _row(name, _share(together), _share(by_itself), _points(together, by_itself))
        for name, (together, by_itself) in pairs.items()
    ]
    return join(
        tag("h2", "Was it worth training together?"),
        tag("p", "Accuracy on each hospital's test images, against a model trained by that hospital alone."),
        _table([_column(head) for head in ("hospital", "together", "alone", "points")], rows, class_="narrow"),
    )


def _points(together: float | None, alone: float | None) -> str:
    return "n/a" if together is None or alone is None else f"{100 * (together - alone):+.1f}"


def _samples(result: Mapping[str, Any], samples: Mapping[str, npt.NDArray[np.uint8]]) -> Html:
    if not samples:
        return Html()
    blocks = []
    for name, images in samples.items():
        scanner = str((result["sites"].get(name) or {}).get("scanner") or "scanner not recorded")
        shown = images[:_SAMPLES_SHOWN]
        pictures = [thumbnail(image, alt=f"Sample {i} of {name}, {scanner}") for i, image in enumerate(shown, start=1)]
        caption = tag("figcaption", tag("h3", scanner), tag("span", name, class_="soft"))
        blocks.append(tag("figure", caption, tag("div", *pictures, class_="strip"), class_="sample"))
    return join(
        tag("h2", "What the scanners deliver"),
        tag("p", "A few images of every hospital. Differences between the rows are what the method has to cope with."),
        caution(result),
        *blocks,
    )


def _rounds(result: Mapping[str, Any]) -> Html:
    if not result["rounds"]:
        return Html()
    rows = []
    for entry in result["rounds"]:
        best = entry["round"] == result["best_round"]
        status = {name: site.get("status") for name, site in entry["sites"].items()}
        missing = ", ".join(f"{name} ({value})" for name, value in status.items() if value not in _TOOK_PART) or "–"
        rows.append(
            _row(
                f"{entry['round']}{' (chosen)' if best else ''}",
                _duration(entry.get("seconds")),
                _size(entry.get("bytes_up")),
                _size(entry.get("bytes_down")),
                f"{sum(value in _TOOK_PART for value in status.values())} of {len(status)}",
                tag("td", missing, class_="words"),
                class_="best" if best else "plain",
            )
        )
    heads = [_column(head) for head in ("round", "time", "sent to the server", "sent to hospitals", "took part")]
    table = _table([*heads, _column("missing", words=True)], rows)
    if len(rows) > _ROUNDS_OPEN:
        table = tag("details", tag("summary", f"All {len(rows)} rounds"), table)
    return join(tag("h2", "The rounds"), table)


def _repeat(result: Mapping[str, Any]) -> Html:
    return join(
        tag("h2", "To repeat this run"),
        tag("details", tag("summary", "Options"), _pairs(_flat(result["options"]))),
        tag("details", tag("summary", "Versions"), _pairs(result["versions"])),
    )


def _pairs(values: Mapping[str, Any]) -> Html:
    rows = [_row(key, tag("td", tag("code", value), class_="words")) for key, value in values.items()]
    return _table([], rows, class_="narrow")


def _table(heads: Sequence[Html], rows: Sequence[Html], *, class_: str = "wide") -> Html:
    head = tag("thead", tag("tr", *heads)) if heads else Html()
    return tag("div", tag("table", head, tag("tbody", *rows), class_=class_), class_="scroll")


def _column(head: str, *, words: bool = False) -> Html:
    return tag("th", head, scope="col", class_="words" if words else "figure")


def _row(label: str, *cells: str, class_: str = "plain", columns: int = 1) -> Html:
    """A row under its label, which spans some columns; a cell that is no Html yet becomes one."""
    shown = (cell if isinstance(cell, Html) else tag("td", cell) for cell in cells)
    return tag("tr", tag("th", label, scope="row", colspan=columns), *shown, class_=class_)


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested options with dotted names."""
    flat: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{percent(value)} %"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _size(count: float | None) -> str:
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
