"""The flags of a run as rows of plain text, which the console and the report show alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from crossward.evaluate.table import Sheet, percent
from crossward.federation.turns import in_turn

BY_SITE = ("hospital", "scans", "flagged", "AUROC", "accuracy %\nflagged", "accuracy %\nnot flagged", "threshold")
BY_KIND = ("scans", "kind", "flagged", "least often flagged at", "AUROC")
SCANS = ("hospital", "scan", "model says", "uncer-\ntainty\n/ limit", "global head", "local head", "conflict")
AUROC_IN_WORDS = (
    "AUROC: how often a scan of this set is more uncertain than one of the hospital's own test scans; 0.5 is chance, "
    "and below it the uncertainty points the wrong way"
)
HEADS_IN_WORDS = "heads: the class believed in most, the belief in it, and u, what the head does not know (0 to 1)"


def sets_of(flags: Mapping[str, Any]) -> list[str]:
    """The sets of scans that were read, in order."""
    return list(dict.fromkeys(what for site in flags["sites"].values() for what in site["sets"]))


def by_site(flags: Mapping[str, Any]) -> Sheet:
    """For every hospital and set: how many were flagged, and whether uncertainty told them from the own ones."""
    sheet = Sheet(BY_SITE)
    for name, site in flags["sites"].items():
        for index, (what, counts) in enumerate(site["sets"].items()):
            line = f"{decimals(site['threshold'])} (n={site['n_validation']})" if index == 0 else ""
            if line and site.get("note"):
                line = sheet.remark(line, site["note"])
            sheet.sites.append(
                (
                    name if index == 0 else "",
                    what,
                    _share(counts),
                    "" if what not in site["auroc"] else decimals(site["auroc"][what]),
                    _accuracy(counts["accuracy_flagged"]),
                    _accuracy(counts["accuracy_rest"]),
                    line,
                )
            )
    for what in sets_of(flags):
        counts = _sum(_at_sites(flags, what))
        sheet.summary.append(("all hospitals" if not sheet.summary else "", what, _share(counts), "", "", "", ""))
    return sheet


def by_kind(flags: Mapping[str, Any]) -> Sheet:
    """For every kind of scan: how many were flagged at all hospitals, and where the fewest were."""
    sheet = Sheet(BY_KIND)
    for what in sets_of(flags):
        for index, kind in enumerate(_kinds(flags, what)):
            least, counts = _least(flags, what, kind)
            total = _sum(list(_of_kind(flags, what, kind).values()))
            worst = f"{least}: {counts['flagged']} of {counts['n']}"
            aurocs = [entry["auroc"] for entry in _of_kind(flags, what, kind).values()]
            sheet.sites.append((what if index == 0 else "", kind, _share(total), worst, _range(aurocs)))
    return sheet


def in_words(flags: Mapping[str, Any]) -> list[str]:
    """What came of it: shares, how the rest was read, whether uncertainty works, and what mostly went unnoticed."""
    totals = {what: _sum(_at_sites(flags, what)) for what in sets_of(flags)}
    if not totals:
        return []
    lines = [f"Flagged: {', '.join(f'{what} {_share(counts)}' for what, counts in totals.items())}."]
    read = {what: _accuracy_of_rest(_at_sites(flags, what)) for what in totals}
    if known := [f"{what} {percent(share)} %" for what, share in read.items() if share is not None]:
        lines.append(f"Read correctly among those without a flag: {', '.join(known)}.")
    aurocs = {what: _range(site["auroc"].get(what) for site in flags["sites"].values()) for what in totals}
    if ranges := [f"{what} {span}" for what, span in aurocs.items() if span]:
        lines.append(f"More uncertain than own test scans, as AUROC (0.5 is chance): {', '.join(ranges)}.")
    for what in totals:
        kinds = {kind: _sum(list(_of_kind(flags, what, kind).values())) for kind in _kinds(flags, what)}
        missed = [kind for kind, counts in kinds.items() if 2 * counts["flagged"] < counts["n"]]
        # Where scans have classes, the share read correctly says more.
        if missed and read[what] is None:
            shares = ", ".join(f"{kind} {kinds[kind]['flagged']} of {kinds[kind]['n']}" for kind in missed)
            lines.append(f"Less than half flagged, so do not rely on it for: {what} ({shares}).")
    return lines


def some_scans(flags: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """The most uncertain flagged scans, about as many of every set, hospitals in turn; in the order of the sets."""
    scans, sets = flags["scans"], sets_of(flags)
    sites = dict.fromkeys(scan["site"] for scan in scans)

    def queue(what: str) -> list[Mapping[str, Any]]:
        return in_turn([scan for scan in scans if (scan["set"], scan["site"]) == (what, site)] for site in sites)

    return sorted(in_turn(map(queue, sets))[:count], key=lambda scan: sets.index(scan["set"]))


def scan_row(scan: Mapping[str, Any]) -> tuple[str, ...]:
    """One flagged scan."""
    return (
        scan["site"],
        f"{scan['set']}\n{name_of(scan)}, {scan['what']}",
        scan["predicted"] or "no answer",
        f"{decimals(scan['uncertainty'])}\n/ {decimals(scan['threshold'])}",
        opinion(scan["global"], between="\n"),
        opinion(scan["local"], between="\n"),
        "" if scan["conflict"] is None else decimals(scan["conflict"]),
    )


def name_of(scan: Mapping[str, Any]) -> str:
    """What names a scan: its short id where that may be shown, otherwise its number in the set."""
    return str(scan.get("id") or f"no. {scan['number']}")


def opinion(head: Mapping[str, Any] | None, *, between: str = " ") -> str:
    """`nodule 0.62, u 0.30`; nothing where there is no such head."""
    if head is None:
        return ""
    return f"{head['class']}{between}{decimals(head['belief'])}, u {decimals(head['uncertainty'])}"


def decimals(value: float | None) -> str:
    """Two of them; `n/a` where there is no number."""
    return "n/a" if value is None else f"{value:.2f}"


def _at_sites(flags: Mapping[str, Any], what: str) -> list[Mapping[str, Any]]:
    return [site["sets"][what] for site in flags["sites"].values() if what in site["sets"]]


def _accuracy_of_rest(counts: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of all scans without a flag that was read correctly; None where they have no classes."""
    known = [entry for entry in counts if entry["accuracy_rest"] is not None]
    rest = [entry["n"] - entry["flagged"] for entry in known]
    right = sum(entry["accuracy_rest"] * n for entry, n in zip(known, rest, strict=True))
    return right / sum(rest) if sum(rest) else None


def _range(values: Iterable[float | None]) -> str:
    """The lowest and the highest; nothing where none is defined."""
    known = [value for value in values if value is not None]
    return f"{min(known):.2f}–{max(known):.2f}" if known else ""


def _kinds(flags: Mapping[str, Any], what: str) -> list[str]:
    found = (site["sets"].get(what, {}).get("kinds", {}) for site in flags["sites"].values())
    return sorted({kind for kinds in found for kind in kinds})


def _of_kind(flags: Mapping[str, Any], what: str, kind: str) -> dict[str, Mapping[str, Any]]:
    """The counts of one kind of scan at every hospital that read some."""
    return {
        name: site["sets"][what]["kinds"][kind]
        for name, site in flags["sites"].items()
        if kind in site["sets"].get(what, {}).get("kinds", {})
    }


def _least(flags: Mapping[str, Any], what: str, kind: str) -> tuple[str, Mapping[str, Any]]:
    counts = _of_kind(flags, what, kind)
    least = min(counts, key=lambda name: counts[name]["flagged"] / counts[name]["n"])
    return least, counts[least]


def _sum(counts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {key: sum(entry[key] for entry in counts) for key in ("n", "flagged")}


def _share(counts: Mapping[str, int]) -> str:
    n, flagged = counts["n"], counts["flagged"]
    return f"{flagged} of {n} ({100 * flagged / n:.0f} %)" if n else "no scans"


def _accuracy(value: float | None) -> str:
    return "" if value is None else percent(value)


def newcomer_in_words(newcomer: Mapping[str, Any]) -> str:
    """How a hospital that joins without labels would do, against the partners' own models on its scans."""
    partners = [value for value in newcomer["partners"].values() if value is not None]
    span = f"{percent(min(partners))} to {percent(max(partners))} %" if partners else "n/a"
    right = percent(newcomer["accuracy"], newcomer["accuracy_interval"])
    stages = newcomer.get("stages") or {}
    by_stage = ", ".join(f"{name} {percent(value)} %" for name, value in stages.items() if value is not None)
    return (
        f"A hospital with the {newcomer['set']} that joins without labels: {right} % right on {newcomer['n_test']} "
        f"scans, with what is shared alone, fitted to {newcomer['n_fitting']} other scans of its own; "
        f"the partners' models as they are: {span}.{f' Step by step: {by_stage}.' if by_stage else ''}"
    )
