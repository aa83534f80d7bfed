"""Sees everything: what a lying server and the sites that collude with it hold after a run, and whether it is too much.

It follows no message of the server. Sites report their own secrets to it, and from these it works out which masks the
adversary can make, and by linear algebra every combination of uploaded vectors whose other masks cancel.

P1  Nobody opens both the self mask and the sealed pair masks of an honest site in one attempt.
P2  Every sum that can be opened has enough parties, and two honest ones among them.
P3  No combination of sums that can be opened is about one honest site alone: neither its update nor how it changed.
P4  No key of a site was used for two contents, be it a mask or a sealed box.
P5  All honest sites of a sum had the same model, plan, layout and cohort in mind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from crossward.privacy.secagg.binding import Binding
from crossward.privacy.secagg.canonical import decode
from crossward.privacy.secagg.masks import Words, keystream
from crossward.privacy.secagg.site import SecureSite

PRIME = 2**61 - 1
Row = dict[Any, int]
"""A sparse row modulo a prime."""


@dataclass(eq=False)
class Begun:
    """A site's secrets of one begin."""

    site: str
    about: Binding
    context: bytes
    threshold: int
    self_seed: bytes
    pair_seeds: dict[str, bytes]
    commitments: dict[str, bytes]


@dataclass(eq=False)
class Upload:
    """A vector as the adversary has it, and as it was."""

    begun: Begun
    sharers: tuple[str, ...]
    update: str
    coefficient: int
    plain: Words
    masked: Words

    def masks(self) -> dict[bytes, int]:
        site, seeds = self.begun.site, self.begun.pair_seeds
        pairs = {seeds[peer]: 1 if site < peer else -1 for peer in self.sharers if peer != site}
        return {**pairs, self.begun.self_seed: 1}


@dataclass
class Observer:
    """Collects what sites do.

    Attributes:
        colluding: sites that tell the adversary everything.
        fewest: parties of a sum, as the settings have it.
    """

    colluding: Collection[str]
    fewest: int
    begun: list[Begun] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    shown: dict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))
    contents: dict[tuple[str, bytes], set[bytes]] = field(default_factory=lambda: defaultdict(set))

    def sums(self) -> list[list[Upload]]:
        """The smallest sums that can be opened."""
        known = self._known()
        honest = [upload for upload in self.uploads if upload.begun.site not in self.colluding]
        rows = {
            number: {key: sign % PRIME for key, sign in upload.masks().items() if key not in known}
            for number, upload in enumerate(honest)
        }
        found = []
        for combination in _cancelling(rows):
            chosen = [honest[number] for number in combination]
            if set(combination.values()) == {1}:
                _check_opens(chosen, known)
            found.append(chosen)
        return found

    def broken(self) -> list[str]:
        """Every property that does not hold, its name first."""
        sums = self.sums()
        return [
            *self._both_secrets(),
            *(
                f"P4 {key[0]} used a key for {len(each)} contents"
                for key, each in self.contents.items()
                if len(each) > 1
            ),
            *(trouble for uploads in sums for trouble in self._troubles(uploads)),
            *self._shown_alone(sums),
        ]

    def _open(self, begun: Begun, which: str) -> bool:
        holders = self.shown[begun.commitments[which]] | (set(self.colluding) & set(begun.about.cohort))
        return len(holders) >= begun.threshold

    def _known(self) -> set[bytes]:
        known: set[bytes] = set()
        for begun in self.begun:
            mine = begun.site in self.colluding
            if mine or self._open(begun, "wrap"):
                known |= set(begun.pair_seeds.values())
            if mine or self._open(begun, "self"):
                known.add(begun.self_seed)
        return known | {
            seed for begun in self.begun for peer, seed in begun.pair_seeds.items() if peer in self.colluding
        }

    def _both_secrets(self) -> Iterator[str]:
        opened = defaultdict(set)
        for begun in self.begun:
            if begun.site not in self.colluding:
                opened[begun.site, begun.context] |= {which for which in ("self", "wrap") if self._open(begun, which)}
        for (site, _), which in opened.items():
            if len(which) == 2:
                yield f"P1 both secrets of {site} can be opened"

    def _troubles(self, uploads: Sequence[Upload]) -> Iterator[str]:
        honest = {upload.begun.site for upload in uploads}
        colluding = set(self.colluding) & {site for upload in uploads for site in upload.sharers}
        if len(honest) < 2 or len(honest | colluding) < self.fewest:
            yield f"P2 a sum over {sorted(honest)} and {len(colluding)} that collude can be opened"
        bindings = [upload.begun.about for upload in uploads]
        if len({(each.model, each.plan, each.layout, each.cohort) for each in bindings}) > 1:
            yield f"P5 the sites {sorted(honest)} of one sum did not have the same in mind"

    def _shown_alone(self, sums: Sequence[Sequence[Upload]]) -> Iterator[str]:
        rows = []
        for uploads in sums:
            row: Row = defaultdict(int)
            for upload in uploads:
                about = upload.begun.about
                row[upload.begun.site, about.study, about.model, upload.update] += upload.coefficient
            rows.append(dict(row))
        whole = _rank(rows)
        for site in sorted({column[0] for row in rows for column in row}):
            others = [{column: value for column, value in row.items() if column[0] != site} for row in rows]
            if _rank(others) < whole:
                yield f"P3 sums that can be opened show something of {site} alone"


def _check_opens(uploads: Sequence[Upload], known: Collection[bytes]) -> None:
    """The observer's own arithmetic: with the known masks off, the masked vectors add up to the plain ones."""
    total = np.zeros_like(uploads[0].plain)
    for upload in uploads:
        total += upload.masked - upload.plain
        for key, sign in upload.masks().items():
            if key in known:
                total -= np.uint32(sign % 2**32) * keystream(key, len(total))
    assert not total.any(), "the observer is wrong about what can be opened"


def _cancelling(rows: Mapping[int, Row]) -> list[dict[int, int]]:
    """A reduced basis of the combinations of rows that are zero in every column."""
    rows = dict(rows)
    while True:
        uses: dict[Any, list[int]] = defaultdict(list)
        for number, row in rows.items():
            for column in row:
                uses[column].append(number)
        # A column of a single row cannot cancel: most rows are gone before any arithmetic.
        alone = {numbers[0] for numbers in uses.values() if len(numbers) == 1}
        if not alone:
            break
        rows = {number: row for number, row in rows.items() if number not in alone}
    tagged = [{**row, ("row", number): 1} for number, row in rows.items()]
    columns = sorted({column for row in rows.values() for column in row})
    left = _eliminate(tagged, columns)
    reduced = _reduce(left)
    return [{number: value for (_, number), value in row.items()} for row in reduced]


def _eliminate(rows: list[Row], columns: Sequence[Any]) -> list[Row]:
    """The rows that are left with none of the columns."""
    rows = list(rows)
    for column in columns:
        pivot = next((row for row in rows if row.get(column)), None)
        if pivot is not None:
            rows = [_without(row, pivot, column) for row in rows if row is not pivot]
    return rows


def _reduce(rows: list[Row]) -> list[Row]:
    done: list[Row] = []
    waiting = [row for row in rows if row]
    while waiting:
        pivot = waiting.pop()
        column = min(pivot)
        inverse = pow(pivot[column], -1, PRIME)
        pivot = {each: value * inverse % PRIME for each, value in pivot.items()}
        done = [_without(row, pivot, column) for row in done] + [pivot]
        waiting = [row for row in (_without(row, pivot, column) for row in waiting) if row]
    return done


def _rank(rows: Sequence[Row]) -> int:
    return len(_reduce([{column: value % PRIME for column, value in row.items() if value % PRIME} for row in rows]))


def _without(row: Row, pivot: Row, column: Any) -> Row:
    """The row with the pivot taken away as often as it takes to clear a column."""
    if not row.get(column):
        return row
    factor = row[column] * pow(pivot[column], -1, PRIME)
    found = {each: (row.get(each, 0) - factor * pivot.get(each, 0)) % PRIME for each in row.keys() | pivot.keys()}
    return {each: value for each, value in found.items() if value}


class WatchedSite(SecureSite):
    """A site that tells the observer what it does; otherwise as it is."""

    observer: Observer
    watched_begun: Begun
    watched_holds: Mapping[str, Mapping[str, bytes]]

    def begin(self, binding: Binding, *, note: bytes = b"") -> bytes:
        message = super().begin(binding, note=note)
        attempt = self._attempt
        assert attempt is not None
        bodies = {peer: decode(decode(box)["body"]) for peer, box in decode(message)["boxes"].items()}
        commitments = next(iter(bodies.values()))
        self.watched_begun = Begun(
            self.name,
            binding,
            attempt.context,
            attempt.threshold,
            attempt.self_seed,
            dict(attempt.pair_seeds),
            {which: commitments[which] for which in ("self", "wrap")},
        )
        self.observer.begun.append(self.watched_begun)
        for peer, body in bodies.items():
            key = self._share_key(attempt.context, self.name, peer)
            self.observer.contents[self.name, key].add(body["box"])
        return message

    def watched_contribute(self, inbox: Mapping[str, bytes], words: Words, *, update: str, coefficient: int) -> bytes:
        plain = words.copy()
        message = self.contribute(inbox, words, update=update)
        self.note_holds(inbox)
        upload = Upload(
            self.watched_begun, tuple(sorted([*inbox, self.name])), update, coefficient, plain, words.copy()
        )
        self.observer.uploads.append(upload)
        for key in upload.masks():
            self.observer.contents[self.name, key].add(sha256(plain.tobytes()).digest())
        return message

    def note_holds(self, inbox: Mapping[str, bytes]) -> None:
        """Whose shares this site has, by what their owners committed to."""
        bodies = {peer: decode(decode(box)["body"]) for peer, box in inbox.items()}
        self.watched_holds = {**bodies, self.name: self.watched_begun.commitments}

    def survivors(self, uploads: Mapping[str, bytes]) -> bytes:
        return self._told(super().survivors(uploads))

    def reveal(self, agreements: Mapping[str, bytes]) -> bytes:
        return self._told(super().reveal(agreements))

    def _told(self, message: bytes) -> bytes:
        body = decode(decode(message)["body"])
        for which in ("self", "wrap"):
            for owner in body.get(which, ()):
                self.observer.shown[self.watched_holds[owner][which]].add(self.name)
        return message
