"""The result per hospital as a sheet of plain text, and as a table for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

_HEADER = ("hospital", "scanner", "train", "test", "accuracy %", "bal.\nacc. %", "AUC", "as\nreceived")
_WIDTH_FOR_NAMES = 76  # room for column heads of the matrix in 100 columns; wider ones become numbers
_MANY_SITES = 10  # from here on the matrix shows whole percents, to stay within 100 columns
AS_RECEIVED = "as received: accuracy before the hospital fits the model's normalisation to its own unlabelled images"


@dataclass
class Sheet:
    """What the console and the report show alike: a row per hospital, summary rows, numbered notes."""

    header: tuple[str, ...]
    sites: list[tuple[str, ...]] = field(default_factory=list)
    summary: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def undefined(self, metric: str, reason: str) -> str:
        """The cell of an undefined metric, with its reason as a note; hospitals with the same reason share one."""
        return f"n/a {self._mark(f'{metric}: {reason}')}"

    def remark(self, cell: str, text: str) -> str:
        """A cell that needs a note."""
        return f"{cell} {self._mark(text)}"

    def _mark(self, note: str) -> str:
        if note not in self.notes:
            self.notes.append(note)
        return f"[{self.notes.index(note) + 1}]"


def percent(share: float, interval: Sequence[float] | None = None) -> str:
    """0.8333 as `83.3`, with its 95 % interval where there is one: `83.3 (70–91)`."""
    bounds = f" ({100 * interval[0]:.0f}–{100 * interval[1]:.0f})" if interval else ""
    return f"{100 * share:.1f}{bounds}"


def ratio(value: float, interval: Sequence[float] | None = None) -> str:
    """An AUC with two digits, with its 95 % interval where there is one: `0.91 (0.85–0.95)`."""
    bounds = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
    return f"{value:.2f}{bounds}"


def site_sheet(result: Mapping[str, Any]) -> Sheet:
    """The rows of a result: every hospital, then average, all images, and the worst hospital by name."""
    sheet = Sheet(_HEADER)
    for name, site in result["sites"].items():
        sheet.sites.append((name, str(site.get("scanner") or "–"), *_counts([site]), *_figures(sheet, site)))
    sheet.summary = _summary(sheet, result)
    return sheet


def site_table(result: Mapping[str, Any]) -> Table:
    """The result per hospital for the console, readable in 100 columns."""
    sheet = site_sheet(result)
    table = Table(
        title=Text(f"{result['method']}: test images of {len(sheet.sites)} hospitals, with 95 % intervals"),
        caption=Text("\n".join([AS_RECEIVED, *(f"[{i}] {note}" for i, note in enumerate(sheet.notes, start=1))])),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, head in enumerate(sheet.header):
        words = index < 2
        table.add_column(head, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in sheet.sites:
        table.add_row(*map(Text, row))
    table.add_section()
    for row in sheet.summary:
        table.add_row(*map(Text, row), style="bold")
    return table


def matrix_table(result: Mapping[str, Any]) -> Table | None:
    """Accuracy of every hospital's model (row) on every hospital's test images (column); None if not measured."""
    matrix = result.get("cross_site")
    if matrix is None:
        return None
    names = [str(name) for name in matrix["sites"]]
    fits = sum(max(len(name), 5) + 1 for name in names) + max(map(len, names), default=0) <= _WIDTH_FOR_NAMES
    heads = names if fits else [str(number) for number in range(1, len(names) + 1)]
    labels = names if fits else [f"{number} {name}" for number, name in enumerate(names, start=1)]
    digits = 1 if len(names) < _MANY_SITES else 0
    table = Table(
        title="accuracy %: the model of a row on the test images of a column",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("model of", overflow="fold")
    for head in heads:
        table.add_column(Text(head), justify="right", no_wrap=True)
    for index, (label, row) in enumerate(zip(labels, matrix["accuracy"], strict=True)):
        cells = [Text("n/a" if value is None else f"{100 * value:.{digits}f}") for value in row]
        cells[index].stylize("bold")
        table.add_row(Text(label), *cells)
    return table


def _counts(sites: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Training and test images of some hospitals together."""

    def total(key: str) -> str:
        known = [site[key] for site in sites if site.get(key) is not None]
        return str(sum(known)) if len(known) == len(sites) else "–"

    return total("n_train"), total("n_test")


def _figures(sheet: Sheet, site: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Accuracy, balanced accuracy, AUC and accuracy as received of one hospital."""
    before = site.get("as_received") or {"undefined": {"accuracy": "not measured"}}
    return (
        _figure(sheet, site, "accuracy", "accuracy", percent),
        _figure(sheet, site, "balanced_accuracy", "balanced accuracy", percent),
        _figure(sheet, site, "auc", "AUC", ratio),
        _figure(sheet, before | {"accuracy_interval": None}, "accuracy", "as received", percent),
    )


def _figure(sheet: Sheet, site: Mapping[str, Any], metric: str, label: str, show: Any) -> str:
    value = site.get(metric)
    if value is None:
        reasons = site.get("undefined") or {}
        return sheet.undefined(label, reasons.get(metric, "no reason was recorded"))
    return str(show(value, site.get(f"{metric}_interval")))


def _summary(sheet: Sheet, result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    facts, sites = result["summary"], result["sites"]
    counts = _counts(list(sites.values()))
    if facts["avg"] is None:
        nothing = sheet.undefined("average", "no hospital has a defined accuracy")
        return [("average", "", *counts, nothing, "", "", "")]
    spread = "" if facts["std"] is None else f" ± {percent(facts['std'])}"
    average, pooled = percent(facts["avg"]) + spread, _optional(facts["all"], percent)
    auc = _optional(facts.get("avg_auc"), ratio)
    if facts.get("left_out"):
        without = f"without {', '.join(facts['left_out'])}, where accuracy is undefined"
        average, pooled = sheet.remark(average, without), sheet.remark(pooled, without)
    if auc and facts.get("auc_left_out"):
        auc = sheet.remark(auc, f"without {', '.join(facts['auc_left_out'])}, where AUC is undefined")
    balanced = _optional(facts.get("avg_balanced_accuracy"), percent)
    received = _optional(facts.get("as_received_avg"), percent)
    worst = sites.get(facts["worst_site"], {})
    return [
        ("average ± std", "", *counts, average, balanced, auc, received),
        ("all images", "", "", "", pooled, "", "", ""),
        (f"worst: {facts['worst_site']}", "", *_counts([worst]), *_figures(sheet, worst)),
    ]


def _optional(value: float | None, show: Any) -> str:
    return "" if value is None else str(show(value))
