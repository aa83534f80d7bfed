"""What several commands show: a cohort before training, a result after it, and samples for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossward.evaluate.flag_sheet import (
    AUROC_IN_WORDS,
    HEADS_IN_WORDS,
    SCANS,
    by_kind,
    by_site,
    in_words,
    newcomer_in_words,
    scan_row,
    some_scans,
)
from crossward.evaluate.report_dp import against_in_words, spent_in_words
from crossward.evaluate.table import Sheet, matrix_table, percent, site_table
from crossward.evaluate.transfer import CPRR_IN_WORDS, DOMAINS_IN_WORDS, transfer_of, transfer_sheet
from crossward.federation.turns import in_turn
from crossward.imaging.data import Cohort, SiteData
from crossward.imaging.pictures import pictures_of

_SCANS_SHOWN = 12


def show_cohort(console: Console, cohort: Cohort) -> None:
    """Say what was found in the data folder, before a round is spent on it."""
    nature = "computer-drawn phantoms, " if cohort.phantom else ""
    console.print(
        f"Found {len(cohort.sites)} sites in {cohort.source} ({nature}{cohort.kind}), "
        f"{cohort.size} px, classes: {', '.join(cohort.classes)}",
        soft_wrap=True,
        highlight=False,
    )
    table = Table()
    for heading in ("site", "scanner"):
        table.add_column(heading)
    for heading in ("train", "validation", "test", "patients"):
        table.add_column(heading, justify="right")
    for name, site in cohort.sites.items():
        patients = len({*site.train.patients, *site.val.patients, *site.test.patients})
        table.add_row(name, site.scanner, str(len(site.train)), str(len(site.val)), str(len(site.test)), str(patients))
    console.print(table)
    for warning in cohort.warnings:
        console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True, highlight=False)


def show_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table per site, the train-site by test-site matrix, and what it comes to."""
    console.print(site_table(result))
    console.print(f"Deployed: every hospital's model of round {result['best_round']}, chosen on validation images.")
    tested = (result.get("privacy") or {}).get("test") or {}
    if tested.get("n"):
        share = percent(tested["accuracy"], tested["interval"])
        console.print(
            f"Summed under masks: {share} % right on all hospitals' {tested['n']:.0f} test images together.",
            soft_wrap=True,
            highlight=False,
        )
    _show_privacy(console, result.get("privacy") or {})
    if (matrix := matrix_table(result)) is not None:
        console.print(matrix)
    if (transfer := transfer_of(result)) is not None:
        sheet = transfer_sheet(transfer)
        words = [CPRR_IN_WORDS, DOMAINS_IN_WORDS, *_numbered(sheet.notes)]
        console.print(_sheet_table(sheet, title="accuracy % at home and elsewhere", caption="\n".join(words)))


def _show_privacy(console: Console, privacy: Mapping[str, Any]) -> None:
    """Say what was spent of patients' privacy, where that was limited."""
    settings = privacy.get("dp")
    if not settings:
        return
    about = f"at delta {settings['delta']:g}, for every {settings['unit']}"
    told = f"Differential privacy, epsilon {about}: {spent_in_words(privacy)} Against: {against_in_words(settings)}"
    console.print(told, soft_wrap=True, highlight=False, markup=False)


def show_personal(console: Console, result: Mapping[str, Any]) -> None:
    """Say which personal tensors every hospital was sent and received; nothing where the method has none."""
    sent: Mapping[str, str] = result.get("personal") or {}
    if not sent:
        return
    sealed = bool((result.get("privacy") or {}).get("secagg"))
    what = "sealed at the server, read at the hospital" if sealed else "every hospital its own"
    table = Table(title=f"personal tensors, by their SHA-256: {what}", box=box.SIMPLE_HEAD)
    for heading in ("hospital", "sent by the server", "read as" if sealed else "received"):
        table.add_column(heading)
    for name, site in result["sites"].items():
        got = site.get("personal")
        if sealed:
            table.add_row(Text(name), sent.get(name, "")[:16], (got or "")[:16])
            continue
        same = "not told" if got is None else "the same" if got == sent.get(name, got) else f"other: {got[:16]}"
        table.add_row(Text(name), sent[name][:16] if name in sent else "the common start", same)
    console.print(table)


def show_comparison(console: Console, result: Mapping[str, Any]) -> None:
    """Say how the hospitals do together and alone, where both were measured."""
    alone, together = result.get("alone"), result["summary"]
    if not alone or alone["avg"] is None or together["avg"] is None:
        return
    gains = [
        f"{name} {100 * (site['accuracy'] - alone['accuracy'][name]):+.1f}"
        for name, site in result["sites"].items()
        if site["accuracy"] is not None and alone["accuracy"].get(name) is not None
    ]
    console.print(
        f"Together {100 * together['avg']:.1f} % on average, each hospital alone {100 * alone['avg']:.1f} % "
        f"(points: {', '.join(gains)})",
        soft_wrap=True,
        highlight=False,
    )


def show_flags(console: Console, result: Mapping[str, Any]) -> None:
    """Say which scans the deployed models should not be trusted on, and how well that worked; nothing without flags."""
    flags = result.get("flags")
    if not flags or not flags["sites"]:
        return
    overview = by_site(flags)
    notes = [AUROC_IN_WORDS, *_numbered(overview.notes)]
    title = f"flags: more uncertain than {flags['percentile']:g} % of the hospital's own validation scans"
    console.print(_sheet_table(overview, title=title, caption="\n".join(notes)))
    console.print(_sheet_table(by_kind(flags), title="flags by kind of scan"))
    chosen = some_scans(flags, _SCANS_SHOWN)
    if chosen:
        listed = Sheet(SCANS, sites=[scan_row(scan) for scan in chosen])
        evidence = any(scan["global"] for scan in chosen)
        title = f"flagged scans: {len(chosen)} of {len(flags['scans'])}, the most uncertain of each set"
        console.print(_sheet_table(listed, title=title, caption=HEADS_IN_WORDS if evidence else ""))
    for line in (*in_words(flags), "The threshold is not calibrated: a scan without a flag can still be read wrongly."):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def show_newcomer(console: Console, result: Mapping[str, Any]) -> None:
    """Say how a hospital without labels would do; nothing where none was tried."""
    if result.get("newcomer"):
        console.print(newcomer_in_words(result["newcomer"]), soft_wrap=True, highlight=False)


def _numbered(notes: Sequence[str]) -> list[str]:
    return [f"[{number}] {note}" for number, note in enumerate(notes, start=1)]


def _sheet_table(sheet: Sheet, *, title: str, caption: str = "") -> Table:
    table = Table(
        title=Text(title),
        caption=Text(caption) if caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for head in sheet.header:
        figure = head.split("\n")[0] in ("flagged", "AUROC", "accuracy %", "uncer-", "conflict", "threshold", "%")
        table.add_column(head, justify="right" if figure else "left", overflow="fold")
    for row in sheet.sites:
        table.add_row(*map(Text, row))
    if sheet.summary:
        table.add_section()
    for row in sheet.summary:
        table.add_row(*map(Text, row), style="bold")
    return table


def sample_images(cohort: Cohort, *, per_site: int = 6) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Pick a few training images of every site for the report, classes in turn."""
    return {name: _samples(site, per_site) for name, site in cohort.sites.items()}


def _samples(site: SiteData, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    by_class = [
        [i for i, label in enumerate(site.train.labels.tolist()) if label == k] for k in range(len(site.classes))
    ]
    return pictures_of(site.train.images[in_turn(by_class)[:count]])
