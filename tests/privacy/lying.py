"""A server that lies, and sites that collude with it: random runs of SA-1 with lies in them, watched by the observer.

``python -m tests.privacy.lying --runs 10000 --seed 0`` prints how the runs ended. Honest sites may refuse whatever they
like; what may not happen is that a property of ``observer`` breaks.
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


def play(runs: int, *, seed: int = 0, until: str | None = None) -> Tally:
    """Play runs; with ``until``, only up to the first that breaks the property of this name."""
    tally = Tally()
    for number in range(seed, seed + runs):
        run = Run(number)
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
    tally = play(options.runs, seed=options.seed)
    for title, counted in (("How far", tally.stages), ("Lies and accidents", tally.told), ("Refusals", tally.refused)):
        print(f"\n{title}")
        for what, count in counted.most_common():
            print(f"  {count:8d}  {100 * count / options.runs:6.2f} %  {what}")
    print(f"\nBroken: {len(tally.broken)}")
    for name, count in sorted(Counter(what.split()[0] for _, what in tally.broken).items()):
        print(f"  {count:8d}  {name}")
    for number, what in tally.broken[:20]:
        print(f"  seed {number}: {what}")
    raise SystemExit(bool(tally.broken))


if __name__ == "__main__":
    main()
