"""What a site has spent of its patients' privacy: append-only, chained, signed, and on disk before it is spent.

The anchor, a second file in another folder, says how long the ledger is at least. It is written after the line. Hence
what a crash leaves behind: a ledger that agrees with its anchor; one line more, which counts as spent; or a part of a
line, whose step was not taken.

What this cannot notice: somebody with the site's rights who deletes ledger and anchor together, or puts both back from
an older state. Keep the anchor on another disk or in the site's backup, and compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from crossward.federation.errors import PrivacyRefusal
from crossward.federation.storage import atomic_file
from crossward.privacy.dp.accounting import Budget, Spending, epsilon, stays_within
from crossward.privacy.dp.ledger_files import append, locked, make_folder, settle
from crossward.privacy.dp.lines import Anchor, Damaged, Entry, Line, first_hash, read_anchor, read_lines, write_anchor
from crossward.privacy.dp.lines import write_line as line_of
from crossward.privacy.dp.signing import Verify

FILE = "ledger.jsonl"
_LOCK = ".lock"
_REMEDY = (
    "Nothing private is computed until it is put right: put ledger and anchor back from the site's backup, never from "
    "an older state than the last round, or ask your privacy officer"
)


class BudgetSpent(PrivacyRefusal):
    """What is asked for would pass the budget.

    Args:
        site: whose ledger it is.
        budget: of the site.
        spent: epsilon so far.
        asked: epsilon with what is asked for.
        entry: the first one that is asked for.

    Attributes:
        site: as above.
        limit: epsilon that the budget allows.
        spent: as above.
        asked: as above.
        left: epsilon that is left.
    """

    def __init__(self, *, site: str, budget: Budget, spent: float, asked: float, entry: Entry) -> None:
        self.site = site
        self.limit = budget.epsilon
        self.spent = spent
        self.asked = asked
        self.left = max(budget.epsilon - spent, 0.0)
        super().__init__(
            f"{site}, round {entry.round} of {entry.run}: the privacy budget is spent. Epsilon {budget.epsilon:g} is "
            f"allowed at delta {budget.delta:g}, {spent:.2f} is spent, and with this round it would be {asked:.2f}. "
            "Stop here and keep the model as it is, or let the site's privacy officer allow more"
        )


class OtherUnit(PrivacyRefusal):
    """Spending that hides another unit than the ledger counts: the two cannot be added up."""


@dataclass(frozen=True)
class _State:
    """A ledger as it was found: what holds, and what a crash left unfinished."""

    lines: tuple[Line, ...]
    anchor: Anchor | None
    whole: int


class Ledger:
    """One site's ledger of one data set.

    Args:
        folder: made with mode 0700 with the first entry.
        sign: signs a message with the site's key.
        verify: checks a message and its signature.
        signer: label of the key, which every line says.
        name: of site and data set; a ledger by another name does not pass for this one.
        anchor: folder for the anchor; by default one beside the ledger's own, with "-anchor" in its name.
        patience: seconds to wait for another process that writes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sign: Callable[[bytes], bytes],
        verify: Verify,
        signer: str,
        name: str,
        anchor: Path | None = None,
        patience: float = 60.0,
    ) -> None:
        self._folder = folder.absolute()
        self._path = self._folder / FILE
        self._anchor_path = anchor_of(folder, anchor)
        if self._anchor_path.parent == self._folder:
            raise PrivacyRefusal("a ledger's anchor belongs into another folder than the ledger; choose another one")
        self._sign = sign
        self._verify = verify
        self._signer = signer
        self._name = name
        self._patience = patience

    def entries(self) -> tuple[Entry, ...]:
        """Everything that was reserved, oldest first.

        Raises:
            PrivacyRefusal: the ledger was changed, cut or replaced, or is missing.
        """
        return _entries(self.lines())

    def lines(self) -> tuple[Line, ...]:
        """All reservations, oldest first, each with the budget of its time.

        Raises:
            PrivacyRefusal: as for ``entries``.
        """
        with self._held(writing=False):
            return self._checked().lines

    def spent(self, *, delta: float, run: str | None = None) -> float:
        """Epsilon of everything in the ledger, or of one run's part in it."""
        return cost([each for each in self.entries() if run is None or each.run == run], delta=delta)

    def reserve(self, entries: Sequence[Entry], *, budget: Budget) -> None:
        """Write down what is about to be spent, all of it or nothing; when this returns it is on disk.

        Raises:
            BudgetSpent: it would pass the budget.
            OtherUnit: it hides another unit than what the ledger has.
            PrivacyRefusal: the ledger does not hold, or the cost cannot be worked out.
            StorageFailure: it could not be written; it must not be spent, but may count as spent all the same.
        """
        if not entries:
            raise PrivacyRefusal("nothing was given to reserve in the ledger; private work names what it costs")
        make_folder(self._folder)
        with self._held(writing=True):
            state = self._checked()
            before = _entries(state.lines)
            check_unit(before, entries, site=self._name)
            check_budget(before, entries, budget=budget, site=self._name)
            self._write(state, entries, budget)

    def _held(self, *, writing: bool) -> AbstractContextManager[None]:
        return locked(self._folder / _LOCK, writing=writing, patience=self._patience)

    def _write(self, state: _State, entries: Sequence[Entry], budget: Budget) -> None:
        count = len(state.lines)
        last = state.lines[-1].hash if state.lines else first_hash(self._name)
        # Before the line: of a line that follows on one without an anchor nobody could say whether it is a crash's.
        here = Anchor(count=count, hash=last)
        if state.anchor != here:
            if count:
                settle(self._path)
            self._write_anchor(here)
        line = line_of(
            entries,
            name=self._name,
            number=count + 1,
            previous=last,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            budget=budget,
            signer=self._signer,
            sign=self._sign,
        )
        # Read as everybody will read it, so that no line is written that would spoil the ledger.
        try:
            (written,) = read_lines([line[:-1]], name=self._name, verify=self._verify, after=state.lines)
        except Damaged as error:
            raise PrivacyRefusal(f"the privacy ledger of {self._name} cannot be continued: its {error}") from error
        append(self._path, line, whole=state.whole)
        self._write_anchor(Anchor(count=count + 1, hash=written.hash))

    def _write_anchor(self, anchor: Anchor) -> None:
        make_folder(self._anchor_path.parent)
        content = write_anchor(anchor, name=self._name, signer=self._signer, sign=self._sign)
        with atomic_file(self._anchor_path) as stream:
            stream.write(content)

    def _checked(self) -> _State:
        """Read ledger and anchor, and hold them against each other."""
        content = self._read(self._path)
        text = self._read(self._anchor_path)
        if text is None:
            if content is not None:
                raise self._refusal(f"has no anchor any more ({self._anchor_path}), so that it may have been cut")
            return _State(lines=(), anchor=None, whole=0)
        try:
            anchor = read_anchor(text, name=self._name, verify=self._verify)
        except Damaged as error:
            raise self._refusal(f"cannot be trusted: its anchor {self._anchor_path} {error}") from error
        if content is None and anchor.count:
            raise self._refusal(f"is missing, but had {anchor.count} lines by its anchor")
        whole, _, rest = (content or b"").rpartition(b"\n")
        try:
            lines = read_lines(whole.split(b"\n") if whole else [], name=self._name, verify=self._verify)
        except Damaged as error:
            raise self._refusal(f"was changed: {error}") from error
        self._hold_against(anchor, lines, cut=bool(rest))
        return _State(lines=lines, anchor=anchor, whole=len(whole) + bool(whole))

    def _hold_against(self, anchor: Anchor, lines: Sequence[Line], *, cut: bool) -> None:
        if len(lines) < anchor.count:
            raise self._refusal(
                f"was cut, or is an older copy: it has {len(lines)} whole lines, and had {anchor.count} by its anchor"
            )
        # A crash leaves at most one line that the anchor does not know of, and after that one no other begins.
        if len(lines) + cut > anchor.count + 1:
            raise self._refusal(
                f"does not fit its anchor, which knows of {anchor.count} lines: the anchor is an older one"
            )
        last = lines[anchor.count - 1].hash if anchor.count else first_hash(self._name)
        if last != anchor.hash:
            raise self._refusal(f"is not the one that its anchor was written for: line {anchor.count} is another one")

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal(f"cannot be read ({path}: {error.strerror})") from error

    def _refusal(self, what: str) -> PrivacyRefusal:
        return PrivacyRefusal(f"the privacy ledger of {self._name} {what}. {_REMEDY}: {self._path}")


def cost(entries: Sequence[Entry], *, delta: float) -> float:
    """Epsilon of entries together.

    Parts count side by side only where all entries divide the patients alike. Otherwise a patient may have been in
    each of them, and everything adds up.
    """
    return epsilon(_spendings(entries), delta=delta)


def check_unit(before: Sequence[Entry], asked: Sequence[Entry], *, site: str) -> None:
    """Hold what is asked for against the unit that a ledger counts.

    Raises:
        OtherUnit: it hides another one.
    """
    units = list(dict.fromkeys(each.unit for each in (*before, *asked)))
    if len(units) > 1:
        # No word of another ledger: it would begin at nothing spent, of the same patients.
        raise OtherUnit(
            f"the privacy ledger of {site} counts what hides a {units[0]}, and this hides a {units[-1]}: the two "
            f"cannot be added up. Use --dp-unit {units[0]}; anything else is for the site's privacy officer to decide"
        )


def check_budget(before: Sequence[Entry], asked: Sequence[Entry], *, budget: Budget, site: str) -> None:
    """Hold what was spent and what is asked for against a budget.

    Raises:
        BudgetSpent: it would pass the budget.
        PrivacyRefusal: the cost cannot be worked out.
    """
    together = [*before, *asked]
    if not stays_within(_spendings(together), budget):
        spent, more = (cost(entries, delta=budget.delta) for entries in (before, together))
        raise BudgetSpent(site=site, budget=budget, spent=spent, asked=more, entry=asked[0])


def _spendings(entries: Sequence[Entry]) -> list[Spending]:
    splits = {(each.split or None, None if each.split else each.run) for each in entries}
    spendings = [each.spending for each in entries]
    if len(splits) > 1:
        spendings = [Spending(each.noise, each.rate, each.steps) for each in spendings]
    return spendings


def anchor_of(folder: Path, anchor: Path | None = None) -> Path:
    """The file that is the anchor of the ledger in a folder."""
    folder = folder.absolute()
    return (anchor or folder.parent / f"{folder.name}-anchor").absolute() / f"{folder.name}.json"


def key_of(folder: Path) -> Path:
    """Where the key of the ledger in a folder is, for a site that signs with one of its own."""
    folder = folder.absolute()
    return folder.parent / f"{folder.name}-key.pem"


def name_of(folder: Path, anchor: Path | None = None) -> str | None:
    """The name that a ledger gives itself, unproven; None where there is none that could be read."""
    for path in (anchor_of(folder, anchor), folder / FILE):
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            return str(json.loads(path.read_bytes().splitlines()[0])["ledger"])
    return None


def _entries(lines: Sequence[Line]) -> tuple[Entry, ...]:
    return tuple(entry for line in lines for entry in line.entries)
