"""From home to elsewhere: how the sites' models do on other domains' images, in the figures of FedCode's paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossward.evaluate.metrics import cross_site
from crossward.evaluate.table import Sheet, percent

UNKNOWN_SCANNER = "unknown scanner"  # what imaging/dicom/film.py says of a file that names none
DOMAINS_IN_WORDS = "A domain is a scanner; a hospital whose scanner is not known is a domain of its own."
CPRR_IN_WORDS = "CPRR: of what models reach on scanners like their own, this share is left on the others'."


def measured(
    sites: Sequence[str], accuracy: Sequence[Sequence[float | None]], scanners: Sequence[str | None]
) -> dict[str, Any]:
    """What a result says under `cross_site`.

    Args:
        sites: names, in the order of rows and columns.
        accuracy: row i, column j: the model of site i on the test images of site j; None where undefined.
        scanners: of every site, where it is known; sites with the same one are one domain.
    """
    known = (None if scanner == UNKNOWN_SCANNER else scanner for scanner in scanners)
    domains = [scanner or site for site, scanner in zip(sites, known, strict=True)]
    return {"sites": list(sites), "accuracy": accuracy, "domains": domains, **cross_site(accuracy, domains)}


def transfer_of(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What `measured` gave, also for a result of an earlier version, which has the matrix alone; None without one."""
    matrix: Mapping[str, Any] | None = result.get("cross_site")
    if matrix is None or "domains" in matrix:
        return matrix
    scanners = [(result["sites"].get(site) or {}).get("scanner") for site in matrix["sites"]]
    return measured(matrix["sites"], matrix["accuracy"], scanners)


def transfer_sheet(facts: Mapping[str, Any]) -> Sheet:
    """What `measured` gave, a row per figure, for the console and the report alike."""
    sheet = Sheet(("models", "%"))
    rows = [
        ("at home: each hospital's own test images (LTA)", "LTA", facts["LTA"]),
        ("at home: all test images of their own domain (GASA)", "GASA", facts["GASA"]),
        *((f"elsewhere: models of {name} (ATA)", f"ATA[{name}]", value) for name, value in facts["ATA"].items()),
        ("elsewhere: mean of these domains (GATA)", "GATA", facts["GATA"]),
        ("kept elsewhere: GATA as a share of GASA (CPRR)", "CPRR", facts["CPRR"]),
    ]
    incomplete, reasons = _incomplete(facts), facts.get("undefined") or {}
    for words, figure, value in rows:
        if value is None:
            shown = sheet.undefined(figure.partition("[")[0], reasons.get(figure, "no reason was recorded"))
        else:
            shown = percent(value)
            if figure in incomplete:
                shown = sheet.remark(shown, "without the undefined cells of the matrix")
        sheet.sites.append((words, shown))
    return sheet


def _incomplete(facts: Mapping[str, Any]) -> set[str]:
    """The figures from which undefined cells of the matrix are left out."""
    domains, found = facts["domains"], set()
    for i, row in enumerate(facts["accuracy"]):
        for j in (column for column, value in enumerate(row) if value is None):
            found |= {"GASA", "CPRR"} if domains[i] == domains[j] else {f"ATA[{domains[i]}]", "GATA", "CPRR"}
            found |= {"LTA"} if i == j else set()
    return found
