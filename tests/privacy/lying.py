"""A server that lies, and sites that collude with it: random runs of SA-1 with lies in them, watched by the observer.

``python -m tests.privacy.lying --runs 10000 --seed 0`` prints how the runs ended: first those of the state machines,
then a quarter as many over sites as they are wired. Honest sites may refuse whatever they like; what may not happen is
that a property of ``observer`` breaks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from unittest.mock import patch

from crossward.privacy.secagg import roster
from crossward.privacy.secagg.identity import check_signed
from tests.privacy.lying_server import STAGES, Run
from tests.privacy.lying_wired import WiredRun

_WIRED = 4
"""One wired run to so many of the state machines."""


@dataclass
class Tally:
    """How runs ended."""

    stages: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str]] = field(default_factory=list)

    def properties(self) -> set[str]:
        """Those that were broken."""
        return {what.split()[0] for _, what in self.broken}


def play(runs: int, *, seed: int = 0, until: str | None = None, kind: type[Run] | type[WiredRun] = Run) -> Tally:
    """Play runs; with ``until``, only up to the first that breaks the property of this name."""
    tally = Tally()
    for number in range(seed, seed + runs):
        run = kind(number)
        # Every site of a run checks the same certificates in the same way: once is enough.
        with patch.object(roster, "check_signed", lru_cache(maxsize=64)(check_signed)):
            tally.broken += [(number, what) for what in run.go()]
        tally.stages[STAGES[run.stage]] += 1
        tally.told += run.told
        tally.refused += run.refused
        if until is not None and until in tally.properties():
            break
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    broken = [
        _tell("State machines", play(options.runs, seed=options.seed), options.runs),
        _tell("Wired", play(options.runs // _WIRED, seed=options.seed, kind=WiredRun), max(1, options.runs // _WIRED)),
    ]
    raise SystemExit(any(broken))


def _tell(what: str, tally: Tally, runs: int) -> bool:
    print(f"\n{what}: {runs} runs")
    for title, counted in (("How far", tally.stages), ("Lies and accidents", tally.told), ("Refusals", tally.refused)):
        print(f"\n{title}")
        for trick, count in counted.most_common():
            print(f"  {count:8d}  {100 * count / runs:6.2f} %  {trick}")
    print(f"\nBroken: {len(tally.broken)}")
    for name, count in sorted(Counter(each.split()[0] for _, each in tally.broken).items()):
        print(f"  {count:8d}  {name}")
    for number, each in tally.broken[:20]:
        print(f"  seed {number}: {each}")
    return bool(tally.broken)


if __name__ == "__main__":
    main()
