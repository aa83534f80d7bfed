"""How a ledger and its anchor are written: JSON in one form only, each line with the hash of the one before it.

A line is one reservation with all its entries, so that it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from crossward.federation.errors import CrosswardError, PrivacyRefusal
from crossward.privacy.dp.accounting import Budget, Spending
from crossward.privacy.dp.settings import UNITS
from crossward.privacy.dp.signing import Verify

_SAID = ("run", "round", "what", "split", "unit")
_LINE, _ANCHOR = "crossward ledger line 1", "crossward ledger anchor 1"


class Damaged(Exception):
    """A line or an anchor that is not what was written; its text says how."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Noise of which a site brings its share only: what it is accounted for is in sums, and against whom is said here.

    Attributes:
        fewest: sites of any sum that can be opened.
        colluders: how many of them may work together with the server, and take their own noise away.
    """

    fewest: int
    colluders: int

    def __post_init__(self) -> None:
        if {type(self.fewest), type(self.colluders)} != {int} or not 0 <= self.colluders < self.fewest:
            raise PrivacyRefusal(
                f"a share of the noise of sums over {self.fewest} sites, {self.colluders} of which may collude, is none"
            )

    @property
    def honest(self) -> int:
        """How many sites' noise is in every sum, whatever the others take away: each brings one part in so many."""
        return self.fewest - self.colluders


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Something that costs privacy, on disk before it is done.

    Attributes:
        run: of which it is a part.
        round: of the run.
        what: "steps", or a release's name.
        spending: what it costs.
        unit: whose presence it hides: an image's, a patient's or a whole site's.
        split: which division of the patients into parts it was; the run's own where nothing is said.
        shared: with whom the site shares the noise; nobody where it brings all of it.
        number: of the entry in its ledger, from 1.
        previous: hash of the line before the entry's.
        time: when it was reserved, UTC.
    """

    run: str
    round: int
    what: str
    spending: Spending
    unit: str
    split: str = ""
    shared: Shared | None = None
    number: int = 0
    previous: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        if not all(type(text) is str for text in (self.run, self.what, self.split)) or type(self.round) is not int:
            raise PrivacyRefusal("an entry of a ledger names its run, its round, what it is and its split")
        if self.unit not in UNITS:
            raise PrivacyRefusal(f"an entry of a ledger says whose presence it hides, which '{self.unit}' does not")

    @property
    def alone(self) -> Entry:
        """The same against the server alone: nobody takes noise away from the sums."""
        if self.shared is None:
            return self
        more = math.sqrt(self.shared.fewest / self.shared.honest)
        return replace(self, spending=replace(self.spending, noise=more * self.spending.noise))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One reservation.

    Attributes:
        entries: of it.
        budget: that it was held to.
        signer: label of the key that signed it.
        hash: of all that it says.
    """

    entries: tuple[Entry, ...]
    budget: Budget
    signer: str
    hash: str


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """How long a ledger is at least.

    Attributes:
        count: of lines.
        hash: of the last of them.
    """

    count: int
    hash: str


def first_hash(name: str) -> str:
    """What the first line of a ledger says of the one before it."""
    return _digest(_LINE, {"ledger": name})


def write_line(
    entries: Sequence[Entry],
    *,
    name: str,
    number: int,
    previous: str,
    time: str,
    budget: Budget,
    signer: str,
    sign: Callable[[bytes], bytes],
) -> bytes:
    """A reservation as a line, with its end."""
    body = {
        "ledger": name,
        "line": number,
        "previous": previous,
        "time": time,
        "signer": signer,
        "budget": asdict(budget),
        "entries": [_written(each) for each in entries],
    }
    return _signed(_LINE, body, sign) + b"\n"


def read_lines(content: Sequence[bytes], *, name: str, verify: Verify, after: Sequence[Line] = ()) -> tuple[Line, ...]:
    """Read whole lines, every one held against its hash, its signature and the line before it.

    Args:
        content: the lines without their ends.
        name: of the ledger.
        verify: checks a signature.
        after: the lines that stand before these.

    Raises:
        Damaged: with the number of the line.
    """
    lines: list[Line] = []
    previous = after[-1].hash if after else first_hash(name)
    count = sum(len(line.entries) for line in after)
    for number, text in enumerate(content, start=len(after) + 1):
        try:
            body, own = _opened(_LINE, text, verify)
            if body["ledger"] != name:
                raise Damaged("is of another ledger")
            if (body["line"], body["previous"]) != (number, previous):
                raise Damaged("does not follow on the one before it: lines were taken out, put in or swapped")
            entries = tuple(
                replace(_entry(each), number=count + place, previous=previous, time=body["time"])
                for place, each in enumerate(body["entries"], start=1)
            )
            lines.append(Line(entries=entries, budget=Budget(**body["budget"]), signer=body["signer"], hash=own))
        except Damaged as error:
            raise Damaged(f"line {number} {error}") from error
        except (CrosswardError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"line {number} does not say what a line says") from error
        previous, count = own, count + len(entries)
    return tuple(lines)


def write_anchor(anchor: Anchor, *, name: str, signer: str, sign: Callable[[bytes], bytes]) -> bytes:
    """An anchor as text."""
    return (
        _signed(_ANCHOR, {"ledger": name, "signer": signer, "count": anchor.count, "last": anchor.hash}, sign) + b"\n"
    )


def read_anchor(content: bytes, *, name: str, verify: Verify) -> Anchor:
    """Read what ``write_anchor`` wrote.

    Raises:
        Damaged: it was changed, or is of another ledger.
    """
    try:
        body, _ = _opened(_ANCHOR, content.removesuffix(b"\n"), verify)
        if body["ledger"] != name:
            raise Damaged("is of another ledger")
        return Anchor(count=int(body["count"]), hash=str(body["last"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("does not say what an anchor says") from error


def _written(entry: Entry) -> dict[str, Any]:
    """An entry as it stands in a line; those of before there was shared noise look the same."""
    shared = {} if entry.shared is None else {"shared": asdict(entry.shared)}
    return {**{field: getattr(entry, field) for field in _SAID}, **asdict(entry.spending), **shared}


def _entry(values: Mapping[str, Any]) -> Entry:
    spending = Spending(**{field: values[field] for field in ("noise", "rate", "steps", "part")})
    shared = Shared(**values["shared"]) if "shared" in values else None
    return Entry(**{field: values[field] for field in _SAID}, spending=spending, shared=shared)


def _signed(kind: str, body: Mapping[str, Any], sign: Callable[[bytes], bytes]) -> bytes:
    digest = _digest(kind, body)
    return _text({**body, "hash": digest, "signature": sign(f"{kind}: {digest}".encode()).hex()})


def _opened(kind: str, text: bytes, verify: Verify) -> tuple[dict[str, Any], str]:
    """What was signed, and its hash."""
    try:
        whole = dict(json.loads(text))
        body = {name: value for name, value in whole.items() if name not in ("hash", "signature")}
        digest = _digest(kind, body)
        # Other bytes that read the same, for instance with a blank more, were not written here either.
        if whole["hash"] != digest or _text(whole) != text:
            raise Damaged("was changed")
        signed = verify(f"{kind}: {digest}".encode(), bytes.fromhex(whole["signature"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("was changed") from error
    if not signed:
        raise Damaged("is not signed with this site's key: it was changed, or the key is another one")
    return body, digest


def _digest(kind: str, body: Mapping[str, Any]) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + _text(body)).hexdigest()


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
