"""The report's section on hospitals' models at other hospitals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossward.evaluate.plots import Html, heat_map, join, tag
from crossward.evaluate.transfer import CPRR_IN_WORDS, DOMAINS_IN_WORDS, transfer_of, transfer_sheet


def transfer_section(result: Mapping[str, Any]) -> Html:
    """The matrix of models by test images and what it comes to; nothing where it was not measured."""
    facts = transfer_of(result)
    if facts is None:
        return Html()
    return join(
        tag("h2", "Would one hospital's model work at another?"),
        tag(
            "p",
            "Accuracy in per cent. Row: the hospital whose model it is. Column: the hospital whose test images it "
            "reads. Darker is better; the framed cells are hospitals reading their own images.",
        ),
        tag("div", heat_map(facts), class_="scroll"),
        tag("p", CPRR_IN_WORDS, " ", DOMAINS_IN_WORDS),
        _figures(facts),
    )


def _figures(facts: Mapping[str, Any]) -> Html:
    sheet = transfer_sheet(facts)
    rows = [tag("tr", tag("th", words, scope="row"), tag("td", figure)) for words, figure in sheet.sites]
    head = tag("tr", *(tag("th", head, scope="col") for head in sheet.header))
    notes = [tag("li", f"[{number}] {note}") for number, note in enumerate(sheet.notes, start=1)]
    return join(
        tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="narrow"), class_="scroll"),
        tag("ul", *notes, class_="notes") if notes else Html(),
    )
