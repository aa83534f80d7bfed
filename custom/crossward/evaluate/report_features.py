"""The report's sections on what the model learned: collapse, maps of features, masks, uncertainty, attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossward.evaluate.collapse import UNUSED_BELOW
from crossward.evaluate.feature_plots import (
    average_by_round,
    averages,
    densities,
    line_key,
    mark_key,
    scatter,
    spectrum,
)
from crossward.evaluate.plots import Html, caution, join, legend, tag, thumbnail
from crossward.evaluate.table import percent, ratio

_CHANCE = 0.5

_SPACES = {
    "encoder": "Encoder: what the hospitals share",
    "global head": "Global head: shared by all",
    "local head": "Local head: stays at its hospital",
}
_PARTS = {"robust": "f+ robust", "related": "f− domain-related", "corrected": "f* corrected", "fused": "f~ all"}


def feature_pages(result: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]]) -> Html:
    """The average by round, and the diagnostics of a run; nothing where none were worked out."""
    found = result.get("diagnostics") or {}
    return join(
        _average(result["rounds"]),
        _attention(result, found.get("gradcam") or [], pictures),
        _noise(found.get("noise") or {}),
        _map(found.get("map") or {}),
        _collapse(found.get("collapse") or {}),
        _masks(found.get("masks") or {}),
        _left_out(found.get("left_out") or {}),
    )


def _average(rounds: Sequence[Mapping[str, Any]]) -> Html:
    known = [
        (entry["round"], value)
        for entry, value in zip(rounds, averages(rounds, "val_accuracy"), strict=True)
        if value is not None
    ]
    if len(known) < 2:
        return Html()
    number, highest = max(known, key=lambda entry: entry[1])
    last, reached = known[-1]
    words = f"{percent(reached)} % in round {last}, the last and best."
    if number != last:
        words = f"{percent(highest)} % in round {number}, the best; {percent(reached)} % in round {last}, the last."
    return join(
        tag("h2", "How fast it learned"),
        tag(
            "p",
            "Accuracy on validation images after every round, averaged over the hospitals that reported; each counts "
            "the same. A line that still rises at the end might have gained from more rounds. ",
            tag("strong", words),
        ),
        legend(line="average over hospitals", dash="as received"),
        tag("figure", average_by_round(rounds, title=f"Average validation accuracy by round. {words}"), class_="one"),
    )


def _attention(
    result: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], pictures: Mapping[str, npt.NDArray[np.uint8]]
) -> Html:
    shown = [entry for entry in entries if entry["picture"] in pictures and entry["overlay"] in pictures]
    if not shown:
        return Html()
    return join(
        tag("h2", "Where the model looked"),
        tag(
            "p",
            "Left the scan, right the same with the places in orange that spoke most for the model's answer "
            "(Grad-CAM). Orange beside the finding, on a marker or on the border of the film is a reason for doubt, "
            "even where the answer is right. The map is coarse, shows one answer only, and proves nothing by itself.",
        ),
        caution(result),
        tag("div", *(_scan(entry, pictures) for entry in shown), class_="scans"),
    )


def _scan(entry: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]]) -> Html:
    right = entry["truth"] == entry["predicted"]
    verdict = f"{entry['predicted']}, right" if right else f"{entry['predicted']}, but it is {entry['truth']}"
    nothing = "" if entry["warm"] else " Nothing in the image spoke for this answer."
    return tag(
        "figure",
        tag(
            "div",
            thumbnail(pictures[entry["picture"]], alt=f"A scan of {entry['site']}: {entry['truth']}"),
            thumbnail(pictures[entry["overlay"]], alt=f"The same, with what spoke for {entry['predicted']} in orange"),
            class_="pair",
        ),
        tag(
            "figcaption",
            tag("strong", entry["site"]),
            tag("span", f"Answer: {verdict}. Uncertainty {ratio(entry['uncertainty'])}.{nothing}"),
        ),
    )


def _noise(noise: Mapping[str, Any]) -> Html:
    sites = noise.get("sites") or {}
    known = {name: site for name, site in sites.items() if site["clean"] is not None}
    if not known:
        return Html()
    charts = []
    for name, site in known.items():
        title = f"Uncertainty at {name}: mean {ratio(site['mean_clean'])} clean, {ratio(site['mean_noised'])} noised"
        charts.append(tag("figure", tag("h3", name), densities(site["clean"], site["noised"], title=title)))
    rows = [
        (
            name,
            _number(site["mean_clean"]),
            _number(site["mean_noised"]),
            _number(site["noise_auc"]),
            _number(site["error_auc"]) + _why(site, "error_auc"),
        )
        for name, site in sites.items()
    ]
    heads = ("hospital", "uncertainty, clean", "uncertainty, noised", "noise found (AUC)", "own errors found (AUC)")
    return join(
        tag("h2", "Does the model notice when it should not be trusted?"),
        tag(
            "p",
            "Uncertainty of the answers for each hospital's test images, and for the same images under so much noise "
            f"(σ = {noise['sigma']:g} in the model's units) that they should not be read. A model that can be trusted "
            "has the dashed hill far to the right of the other.",
        ),
        tag(
            "p",
            "The numbers say how often uncertainty points the right way: a noised image above a clean one, a wrong "
            "answer above a right one. 1 is always, 0.5 is a coin toss, and below 0.5 it is misleading.",
        ),
        _overconfident([name for name, site in known.items() if site["noise_auc"] < _CHANCE]),
        legend(line="test images", dash="with noise"),
        tag("div", *charts, class_="charts"),
        _table(heads, rows),
    )


def _overconfident(names: Sequence[str]) -> Html:
    if not names:
        return Html()
    words = f"More certain about noise than about scans: {', '.join(names)}. "
    advice = "Uncertainty alone must not decide there which scans a person looks at."
    return tag("div", tag("p", tag("strong", words), advice), class_="notice warning")


def _map(found: Mapping[str, Any]) -> Html:
    spaces = {name: space for name, space in (found.get("spaces") or {}).items() if space["points"]}
    if not spaces:
        return Html()
    rows = [
        (_SPACES.get(name, name), _signed(space["silhouette_class"]), _signed(space["silhouette_site"]))
        for name, space in spaces.items()
    ]
    return join(
        tag("h2", "How the model sorts the scans"),
        tag(
            "p",
            f"Every mark is one of {len(found['labels'])} test images, read by its own hospital's model; images that "
            "the model finds alike are beside each other (t-SNE). Left, marks of one kind in one place mean that the "
            "findings are told apart. Right, they mean that the model still sees which hospital an image came from; "
            "in a good shared model they are mixed.",
        ),
        tag(
            "p",
            "Sizes of clusters and gaps between them mean nothing in such a picture. The numbers are from the "
            "features themselves: 1 is neatly apart, 0 is mixed, and below 0 is nearer to another group.",
        ),
        *(_space(found, name, space) for name, space in spaces.items()),
        _table(("features of", "findings apart (silhouette)", "hospitals apart (silhouette)"), rows),
    )


def _space(found: Mapping[str, Any], name: str, space: Mapping[str, Any]) -> Html:
    heading = _SPACES.get(name, name)
    by_class = scatter(space["points"], found["labels"], title=f"{heading}, by finding")
    by_site = scatter(space["points"], found["site_of"], title=f"{heading}, by hospital")
    return tag(
        "figure",
        tag("h3", heading),
        tag(
            "div",
            tag("div", by_class, mark_key(found["classes"])),
            tag("div", by_site, mark_key(found["sites"])),
            class_="maps",
        ),
    )


def _collapse(found: Mapping[str, Any]) -> Html:
    sites = found.get("sites") or {}
    known = {name: site for name, site in sites.items() if site["singular_values"]}
    if not known:
        return Html()
    lines = [site["singular_values"] for site in known.values()]
    rows = []
    for name, site in sites.items():
        total = f" of {len(site['singular_values'])}" if site["singular_values"] else ""
        rank = "n/a" if site["effective_rank"] is None else f"{site['effective_rank']:.1f}{total}"
        rows.append((name, rank + _why(site, "effective_rank"), _share(site["unused"])))
    few = Html()
    if any(len(site["singular_values"]) < site["features"] for site in known.values()):
        few = tag(
            "p",
            f"{found['images']} images can show {found['images'] - 1} features at most; the figures are of those, "
            "and grow with more images.",
        )
    title = "Singular values of the features' covariance, relative to the largest, one line per hospital"
    return join(
        tag("h2", "How many different things the model looks at"),
        tag(
            "p",
            "A model describes an image by many features, but they may all say much the same; a model that was "
            "trained on one scanner tends to that (dimensional collapse). Each line is one hospital's model on all "
            f"{found['images']} test images: a line that falls late is better. The effective number counts features "
            f"that say something of their own; unused are those below {100 * UNUSED_BELOW:g} % of the strongest, "
            "under the dotted line.",
        ),
        few,
        line_key(list(known)),
        tag("figure", spectrum(lines, title=title, threshold=UNUSED_BELOW), class_="one"),
        _table(("model of", "effective number of features", "unused"), rows),
    )


def _masks(found: Mapping[str, Any]) -> Html:
    sites = found.get("sites") or {}
    if not sites:
        return Html()
    by_m = [part for part in _PARTS if part != "fused"]  # m is not made for all parts together
    heads = ["hospital", "kept as robust", *_PARTS.values(), *(_PARTS[part] for part in by_m)]
    groups = (("", 2), ("accuracy by h", len(_PARTS)), ("accuracy by m", len(by_m)))
    rows = [
        (
            name,
            _share(site["kept"]),
            *(_share(site["head"][part]) for part in _PARTS),
            *(_share(site["auxiliary"][part]) for part in by_m),
        )
        for name, site in sites.items()
    ]
    return join(
        tag("h2", "What the model keeps, and what it corrects"),
        tag(
            "p",
            "F2DC splits what the model sees into a robust part, which should be the same on every scanner, and a "
            "domain-related part, which it then corrects. Accuracy of each part alone on the hospital's own test "
            "images: h is the classifier that gives the answer, m the helper that was used for the splitting. "
            "Robust should beat domain-related, corrected should be better than before it was corrected, and all "
            "together the best. m was taught to be wrong about the domain-related part: low is intended there.",
        ),
        _table(heads, rows, groups),
    )


def _left_out(reasons: Mapping[str, str]) -> Html:
    if not reasons:
        return Html()
    words = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return tag("p", f"Left out of the sections on what the model learned: {words}.", class_="soft")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], groups: Sequence[tuple[str, int]] = ()) -> Html:
    """A table under its heads, over which groups may span some columns each."""
    above = [group for group, columns in groups for _ in range(columns)] or [""] * len(heads)
    labels = [f"{head}, {group}" if group else head for head, group in zip(heads, above, strict=True)]

    def cells(row: Sequence[str]) -> Iterator[Html]:
        yield tag("th", row[0], scope="row")
        yield from (tag("td", cell, data_label=label) for label, cell in zip(labels[1:], row[1:], strict=True))

    spans = tag("tr", *(tag("th", group, scope="colgroup", colspan=columns) for group, columns in groups))
    head = tag("thead", spans if groups else Html(), tag("tr", *(tag("th", head, scope="col") for head in heads)))
    body = tag("tbody", *(tag("tr", *cells(row)) for row in rows))
    return tag("div", tag("table", head, body, class_="wide cards"), class_="scroll")


def _why(entry: Mapping[str, Any], key: str) -> str:
    reason = (entry.get("undefined") or {}).get(key)
    return f" ({reason})" if reason else ""


def _number(value: float | None) -> str:
    return "n/a" if value is None else ratio(value)


def _signed(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.2f}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{percent(value)} %"
