"""A site's differentially private side of a run: what it may spend, and where that is written down before it is spent.

What is protected, and how: ``record_protection`` (a patient or an image) and ``update_protection`` (a whole site).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from crossward.federation.contract import Payload, Tensors, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.storage import atomic_file, private_folder
from crossward.imaging.data import SiteData, Split
from crossward.methods.base import Context, Method, Model
from crossward.privacy.dp.accounting import Budget, Part, Spending, Unpriceable
from crossward.privacy.dp.ledger import BudgetSpent, Ledger, OtherUnit, check_budget, check_unit, key_of
from crossward.privacy.dp.lines import Entry, Shared
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.dp.signing import Signer, certificate_signer, certificates, local_signer
from crossward.privacy.secagg.identity import Identity
from crossward.site.devices import Device
from crossward.site.trainer import Training


class LedgerRefused(PrivacyRefusal):
    """The ledger does not hold, so that nothing may be spent."""


class NotPrivate(PrivacyRefusal):
    """The study cannot be trained image by image."""


class LearnedPictures(PrivacyRefusal):
    """The site's pictures depend on all its training images, so that nobody's part in them has a limit."""


NO_LIMIT = 1e6
"""Epsilon that no run comes near: the site's ledger is kept, and only a run's own budget ends it."""


@dataclass(frozen=True)
class Book:
    """Where a run at a site is written down.

    Attributes:
        ledger: of the site's images, for all runs.
        run: this one's name.
        budget: of the site, over all runs; only the run's own counts where it is not given.
    """

    ledger: Ledger
    run: str
    budget: Budget | None = None


def certified_ledger(state: Path, *, site: str, identity: Identity) -> Ledger:
    """The ledger of a site with a kit, signed with its certificate.

    The certificates that lines were signed with are kept beside it: with a new kit the site goes on with its ledger,
    and whoever reads it need not look for them.
    """
    path = key_of(state / "ledger")
    own = certificates(identity.certificate)[0]
    known = certificates(path.read_bytes()) if path.exists() else []
    if own not in known:
        private_folder(state)
        with atomic_file(path) as stream:
            stream.write(b"".join([*known, own]))
    return ledger_in(state, site=site, signer=certificate_signer(identity, earlier=known))


def ledger_in(state: Path, *, site: str, signer: Signer) -> Ledger:
    """The ledger among a site's own files, with its anchor in a folder beside it."""
    return Ledger(state / "ledger", sign=signer.sign, verify=signer.verify, signer=signer.label, name=site)


def own_book(folder: Path, *, site: str, run: str) -> Book:
    """A ledger for a run in one process, signed with a key of its own."""
    signer = local_signer(key_of(folder / "ledger"), ledger=folder / "ledger")
    return Book(ledger_in(folder, site=site, signer=signer), run)


class Protection(ABC):
    """Trains, releases and counts under differential privacy.

    Args:
        data: the site's images.
        privacy: of the study.
        training: likewise.
        rounds: planned.
        releases: whether the method reports something beside its update.
        shared: with whom the site shares the noise; nobody where it brings all of it.
        book: where spending is written down first.
        folder: of this run at this site.
        device: where to compute.

    Attributes:
        units: how many patients or images there are to train on, or 1 for the site as a whole.
        noise: of what trains the model, as a multiple of what one unit adds to it at most.
        reach: where sites share the noise, how far a released value can be from 0; it does not depend on data.
    """

    units: int
    noise: float
    reach: float | None = None

    def __init__(
        self,
        data: SiteData,
        privacy: Privacy,
        training: Training,
        *,
        rounds: int,
        releases: bool,
        shared: Shared | None,
        book: Book,
        folder: Path,
        device: Device,
    ) -> None:
        self._data, self._privacy, self._training, self._device = data, privacy, training, device
        self._rounds, self._releases, self._shared = rounds, releases, shared
        self._book, self._folder = book, folder
        self._source = NoiseSource()
        self._split = _split_of(data)

    @abstractmethod
    def planned(self) -> dict[str, Spending]:
        """What the whole run will spend, where nothing goes wrong."""

    @abstractmethod
    def train(self, model: Model, method: Method, context: Context) -> dict[str, Vector]:
        """Train a round; what it costs is on disk before an image is looked at. Gives the tally.

        Raises:
            PrivacyRefusal: the budget would be passed, or the model cannot be protected.
        """

    @abstractmethod
    def extras(self, model: Model, method: Method, context: Context) -> Tensors:
        """What the method reports beside its update; it was paid for with the round's training."""

    @abstractmethod
    def released(
        self, update: Mapping[str, Tensor], payload: Payload, *, personal: Collection[str]
    ) -> dict[str, Tensor]:
        """The update and extras as they may leave the site.

        Args:
            update: as they were trained.
            payload: what the site received, which is no secret.
            personal: names of tensors that are reported as they are instead of as what changed.
        """

    @abstractmethod
    def units_in(self, split: Split) -> int:
        """How many units a part has, as may be told to others."""

    @abstractmethod
    def counted(self, part: Part, split: Split, right: Tensor, round_number: int) -> tuple[float, float]:
        """How many units a part has, and of how many the model is right.

        Args:
            part: validation or test.
            split: its images.
            right: [n], whether the answer to each is.
            round_number: of the model.
        """

    def spent(self) -> float:
        """Epsilon of this run so far, with what crashes wasted."""
        with _the_ledgers_own():
            return self._book.ledger.spent(delta=self._privacy.delta, run=self._book.run)

    def check_planned(self) -> None:
        """Hold the run as a whole against what the site lets all runs together spend, before any of it is spent.

        A run that has begun is held against it round by round: what a crash wasted does not end it here.

        Raises:
            BudgetSpent: it would pass the site's budget before its last round.
            OtherUnit: the ledger counts another unit.
            LedgerRefused: the ledger does not hold.
        """
        book = self._book
        with _the_ledgers_own():
            before = book.ledger.entries()
            if any(entry.run == book.run for entry in before):
                return
            entries = self._entries(1, self.planned())
            check_unit(before, entries, site=self._data.name)
            if book.budget is not None:
                check_budget(before, entries, budget=book.budget, site=self._data.name)

    def _entries(self, round_number: int, spendings: Mapping[str, Spending]) -> list[Entry]:
        return [
            Entry(
                run=self._book.run,
                round=round_number,
                what=what,
                spending=spending,
                split=self._split,
                unit=self._privacy.unit,
                shared=self._shared,
            )
            for what, spending in spendings.items()
        ]

    def _reserve(self, round_number: int, spendings: Mapping[str, Spending]) -> None:
        """Write down what is about to be spent: within what the run may, and what the site lets all runs together."""
        book, delta = self._book, self._privacy.delta
        entries = self._entries(round_number, spendings)
        with _the_ledgers_own():
            self._check_own(entries)
            book.ledger.reserve(entries, budget=book.budget or Budget(NO_LIMIT, delta))

    def _check_own(self, entries: Sequence[Entry]) -> None:
        if self._privacy.epsilon is None:
            return
        own, run = Budget(self._privacy.epsilon, self._privacy.delta), self._book.run
        before = [entry for entry in self._book.ledger.entries() if entry.run == run]
        check_budget(before, entries, budget=own, site=self._data.name)


@contextmanager
def _the_ledgers_own() -> Iterator[None]:
    """What is refused for the ledger's own sake, and not for what is asked of it, has a name of its own."""
    try:
        yield
    except (BudgetSpent, OtherUnit, Unpriceable):
        raise
    except PrivacyRefusal as refusal:
        raise LedgerRefused(str(refusal)) from refusal


def _split_of(data: SiteData) -> str:
    """A name for who is in which part: with other parts, a patient may pay in two of them."""
    parts = [sorted(set(part.patients)) for part in (data.train, data.val, data.test)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
