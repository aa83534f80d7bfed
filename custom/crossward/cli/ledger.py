"""``crossward ledger``: what a site has spent of its patients' privacy, and whether its record of that is whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from crossward.cli.progress import counting
from crossward.evaluate.ledger_plot import ledger_picture
from crossward.federation.errors import BadInput, CrosswardError
from crossward.federation.storage import atomic_file
from crossward.privacy.dp.accounting import Budget
from crossward.privacy.dp.ledger import FILE, Ledger, anchor_of, cost, key_of, name_of
from crossward.privacy.dp.lines import Entry, Line
from crossward.privacy.dp.signing import verifier

_MILLION = 1e6
_NO_LIMIT = 1e3
"""A budget that large limits nothing: it is what a site writes down that sets none of its own."""

app = typer.Typer(help="Show and check the record of what was spent of patients' privacy.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder of the ledger.", metavar="PATH")]
Key = Annotated[
    Path | None,
    typer.Option(help="The key that signed it, or the site's certificate (client.crt); by default PATH-key.pem."),
]
AnchorFolder = Annotated[Path | None, typer.Option(help="Folder of the anchor; by default PATH-anchor.")]


@app.callback()
def root() -> None:
    """Show and check the record of what was spent of patients' privacy."""


@dataclass(frozen=True)
class _Found:
    """A ledger that holds."""

    name: str
    lines: tuple[Line, ...]

    @property
    def entries(self) -> list[Entry]:
        return [entry for line in self.lines for entry in line.entries]


@app.command()
def show(
    path: Folder,
    key: Key = None,
    anchor: AnchorFolder = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Budget to compare with; by default that of the last entry.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta to work out epsilon for; by default that of the last entry.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw epsilon over the rounds into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Check a ledger, and print every entry, what all of them cost, and what is left.

    Example: crossward ledger show state/ledger --key startup/client.crt --plot spent.png
    """
    found = _read(path, key=key, anchor=anchor)
    if not found.lines:
        typer.echo(
            json.dumps({"ledger": found.name, "spent": 0.0, "unit": None, "entries": []})
            if as_json
            else _nothing(found.name)
        )
        return
    last = found.lines[-1].budget
    budget = Budget(last.epsilon if epsilon is None else epsilon, last.delta if delta is None else delta)
    rows = _rows(found, budget.delta)
    spent = rows[-1]["epsilon"]
    against = _against(found.entries, budget.delta)
    meaning = _meaning(spent, budget.delta, rows[0]["unit"], against)
    if plot is not None:
        points = [list(group)[-1] for _, group in groupby(rows, key=lambda row: (row["run"], row["round"]))]
        with atomic_file(plot) as stream:
            limit = budget.epsilon if budget.epsilon < _NO_LIMIT else None
            stream.write(ledger_picture(points, name=found.name, budget=limit, delta=budget.delta))
    if as_json:
        facts = {
            "ledger": found.name,
            "spent": spent,
            "budget": asdict(budget),
            "left": max(budget.epsilon - spent, 0.0),
            "unit": rows[0]["unit"],
            "against": against,
            "meaning": meaning,
            "entries": rows,
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(highlight=False, markup=False)
    console.print(_table(found.name, rows))
    console.print(_balance(spent, budget), soft_wrap=True)
    for sentence in meaning:
        console.print(sentence, soft_wrap=True)
    if plot is not None:
        console.print(f"Plot: {plot}", soft_wrap=True)


@app.command()
def verify(path: Folder, key: Key = None, anchor: AnchorFolder = None) -> None:
    """Check that a ledger is whole, unchanged and signed; the exit code is 0 if it is, and 1 if not.

    Example: crossward ledger verify state/ledger --key startup/client.crt
    """
    try:
        found = _read(path, key=key, anchor=anchor)
    except CrosswardError as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error: {error}")
        raise typer.Exit(1) from None
    signers = ", ".join(dict.fromkeys(line.signer for line in found.lines)) or "nobody yet"
    last = f", the last of {found.entries[-1].time}" if found.lines else ""
    Console(soft_wrap=True, highlight=False, markup=False).print(
        f"{found.name}: whole and unchanged, {len(found.lines)} lines with {len(found.entries)} entries{last}, "
        f"signed by {signers}"
    )


def _read(path: Path, *, key: Path | None, anchor: Path | None) -> _Found:
    folder = path.parent if path.name == FILE else path
    name = name_of(folder, anchor)
    if name is None:
        raise BadInput(f"there is no privacy ledger in {folder}, and no anchor of one at {anchor_of(folder, anchor)}")
    ledger = Ledger(
        folder, sign=_no_signing, verify=verifier(key or key_of(folder)), signer="", name=name, anchor=anchor
    )
    return _Found(name, ledger.lines())


def _no_signing(_message: bytes) -> bytes:
    raise BadInput("a ledger is only read here")


def _rows(found: _Found, delta: float) -> list[dict[str, Any]]:
    """Entries as they are printed; entries of one round share what was spent after it."""
    entries = found.entries
    signers = [line.signer for line in found.lines for _ in line.entries]
    rounds = [len(list(group)) for _, group in groupby(entries, key=lambda entry: (entry.run, entry.round))]
    rows: list[dict[str, Any]] = []
    with counting(Console(stderr=True)) as progress:
        for done, count in enumerate(rounds, start=1):
            first = len(rows)
            after = cost(entries[: first + count], delta=delta)
            rows += [
                {
                    **{
                        name: getattr(entry, name)
                        for name in ("number", "time", "run", "round", "what", "split", "unit")
                    },
                    **asdict(entry.spending),
                    "shared": entry.shared and asdict(entry.shared),
                    "epsilon": after,
                    "signer": signer,
                }
                for entry, signer in zip(entries[first : first + count], signers[first:], strict=False)
            ]
            progress("rounds", done, len(rounds))
    return rows


def _table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"Privacy ledger of {name}", title_justify="left", expand=False)
    for heading in ("run", "round", "what", "part", "hides", "noise", "rate", "steps", "epsilon after"):
        table.add_column(heading, justify="left" if heading in ("run", "what", "part", "hides") else "right")
    for row in rows:
        shown = f"{row['epsilon']:.3f}"
        figures = (f"{row['noise']:g}", f"{row['rate']:.4g}", str(row["steps"]), shown)
        table.add_row(row["run"], str(row["round"]), row["what"], row["part"], row["unit"], *figures)
    return table


def _nothing(name: str) -> str:
    return f"{name}: nothing was spent so far"


def _balance(spent: float, budget: Budget) -> str:
    if budget.epsilon >= _NO_LIMIT:
        return (
            f"Spent: epsilon {spent:.2f} at delta {budget.delta:g}. This site has set no budget for all runs together; "
            "every run has its own."
        )
    left = budget.epsilon - spent
    rest = f"{left:.2f} is left" if left >= 0 else f"that is {-left:.2f} more than allowed"
    return f"Spent: epsilon {spent:.2f} of {budget.epsilon:g} at delta {budget.delta:g}; {rest}."


_PRESENCE = {
    "image": (
        "one given image was among those trained on",
        "Single images are protected here: a patient with several of them is protected less than the figure says.",
    ),
    "patient": (
        "one given patient was among those trained on",
        "A patient counts with all images. No figure here hides that this site took part.",
    ),
    "site": (
        "this site's data were trained on at all",
        "A single patient is protected as well, but by a larger epsilon: that of half the noise.",
    ),
}


def _against(entries: Sequence[Entry], delta: float) -> dict[str, Any] | None:
    """Whom shared noise protects from, and epsilon against the server alone; None where a site brought all noise."""
    shared = [entry.shared for entry in entries if entry.shared is not None]
    if not shared:
        return None
    # What holds of every entry: the smallest sums, and no more colluders than any of them reckons with.
    return {
        "fewest": min(each.fewest for each in shared),
        "colluders": min(each.colluders for each in shared),
        "epsilon_server_alone": cost([entry.alone for entry in entries], delta=delta),
    }


def _meaning(spent: float, delta: float, unit: str, against: Mapping[str, Any] | None) -> list[str]:
    """What the figures say, for somebody who answers for patients' privacy."""
    factor = math.exp(spent) if spent < math.log(_MILLION) else _MILLION
    much = f"{factor:,.2f}" if factor < _MILLION else "more than a million"
    presence, beside = _PRESENCE[unit]
    who, alone = "whoever sees everything that left this site so far", []
    if against is not None:
        others = against["colluders"]
        who = (
            f"the server, together with up to {others} other site{'' if others == 1 else 's'}, who sees all sums so far"
        )
        alone = [
            f"Against the server alone it is {against['epsilon_server_alone']:.2f}. Sites share the noise of sums over "
            f"{against['fewest']} or more of them: an update by itself, without its masks, has less of it than the "
            "figures say."
        ]
    return [
        f"Epsilon: {who}, and knows all other data, can multiply the odds "
        f"that {presence} by {much} at most. 0 would tell nothing; it only grows, over all runs on this data, and the "
        "site stops by itself before a budget is passed.",
        f"Delta: the chance that this promise fails; {delta:g} is 1 in {1 / delta:,.0f}.",
        beside,
        *alone,
    ]
