"""Ledgers for tests, whose entries are releases without sampling: those cost no time to account for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crossward.privacy.dp.accounting import Budget, Spending
from crossward.privacy.dp.ledger import Ledger, key_of
from crossward.privacy.dp.lines import Entry
from crossward.privacy.dp.signing import Signer, local_signer

NAME = "alder/chest"
BUDGET = Budget(8.0, 1e-5)
NOISE = 10.0


def signer_of(folder: Path) -> Signer:
    return local_signer(key_of(folder), ledger=folder)


def ledger_in(folder: Path, *, signer: Signer | None = None, name: str = NAME, **more: Any) -> Ledger:
    signer = signer or signer_of(folder)
    return Ledger(folder, sign=signer.sign, verify=signer.verify, signer=signer.label, name=name, **more)


def entry(round_number: int, *, noise: float = NOISE, run: str = "first", what: str = "steps", **more: Any) -> Entry:
    part, unit = more.pop("part", "train"), more.pop("unit", "patient")
    return Entry(run=run, round=round_number, what=what, spending=Spending(noise, 1.0, 1, part), unit=unit, **more)


def filled(folder: Path, lines: int) -> Ledger:
    """A ledger with so many lines of two entries each."""
    ledger = ledger_in(folder)
    for number in range(1, lines + 1):
        ledger.reserve([entry(number), entry(number, what="prototypes", noise=20.0)], budget=BUDGET)
    return ledger
