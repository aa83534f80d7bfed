"""Two systems of secure aggregation in turns: a worker process for each, and the figures of both."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crossward.cli import bench_secagg_flower
from crossward.federation.errors import BadInput, RunFailure
from crossward.privacy.secagg.masks import WORD

OURS, FLOWER = "ours", "flower"

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


class Worker:
    """A process that does one piece of work a request; ``bench_secagg_flower.serve`` is its other end.

    Attributes:
        about: versions by name, where nothing is missing.
        missing: what its interpreter has not installed.
    """

    def __init__(self, command: Sequence[str], *, threads: int = 1) -> None:
        self._name = command[0]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "FLWR_TELEMETRY_ENABLED": "0"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise BadInput(f"{self._name} cannot be started: {error.strerror}") from error
        try:
            first = self._hear()
        except BaseException:
            self.close()
            raise
        self.about: dict[str, str] = first.get("about", {})
        self.missing: str = first.get("missing", "")

    def ask(self, what: str, **details: Any) -> Row:
        """Have one piece of work done.

        Raises:
            RunFailure: the process ended; with the last thing that it said.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        answer: Row = self._hear()["answer"]
        return answer

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            return dict(json.loads(self._process.stdout.readline()))
        except ValueError:
            raise self._failure() from None

    def _failure(self) -> RunFailure:
        # It may be waiting for a request, and would never end by itself.
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        return RunFailure(f"the measuring process of {self._name} failed: {said[-1] if said else 'it said nothing'}")

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextmanager
def working(command: Sequence[str], *, threads: int = 1) -> Iterator[Worker]:
    """A worker for as long as it is needed."""
    worker = Worker(command, threads=threads)
    try:
        yield worker
    finally:
        worker.close()


def our_command(threads: int) -> list[str]:
    """How our worker is started."""
    return [sys.executable, "-m", "crossward.cli.bench_secagg_ours", str(threads)]


def flower_command(python: Path | None) -> list[str]:
    """How Flower's worker is started: isolated, so that no neighbour of its file is taken for a library."""
    return [str(python or sys.executable), "-I", bench_secagg_flower.__file__]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        parameters: of the model that is compared.
        peers: numbers of other sites with which sites and servers are compared.
        more_peers: further numbers, for the picture.
        more_parameters: further models, for the picture, with ``usual`` peers.
        usual: see there.
        large: the largest model and its peers.
        error_sites: numbers of sites for the error.
        error_parameters: models for the error.
        flower_parameters: the largest model that Flower is measured with.
        flower_peers: the most peers that Flower is measured with.
    """

    parameters: int
    peers: tuple[int, ...]
    more_peers: tuple[int, ...]
    more_parameters: tuple[int, ...]
    usual: int
    large: tuple[int, int]
    error_sites: tuple[int, ...]
    error_parameters: tuple[int, ...]
    flower_parameters: int
    flower_peers: int

    def sites(self) -> list[tuple[int, int]]:
        """Models and numbers of peers with which a site's work is measured."""
        by_peers = {(self.parameters, peers) for peers in (*self.peers, *self.more_peers)}
        return sorted(by_peers | {(each, self.usual) for each in self.more_parameters} | {self.large})

    def errors(self) -> list[tuple[int, int]]:
        """Models and numbers of sites of which the error is measured."""
        return [(parameters, sites) for parameters in self.error_parameters for sites in self.error_sites]

    def with_flower(self, parameters: int, peers: int) -> bool:
        """Whether Flower takes its turn too."""
        return parameters <= self.flower_parameters and peers <= self.flower_peers


class Bench:
    """Measures ours, and Flower where it is there.

    Args:
        workers: ours first.
        repetitions: turns that count, after one that does not.
        threads: of ours.
    """

    def __init__(self, workers: Mapping[str, Worker], *, repetitions: int, threads: int) -> None:
        self._workers = workers
        self._ours = workers[OURS]
        self._repetitions = repetitions
        self._threads = threads

    def run(self, sizes: Sizes, progress: Progress) -> dict[str, list[Row]]:
        """All sizes: rows of a site's work, of the server's, and of errors."""
        steps: list[tuple[str, Callable[[], Row]]] = [
            *(("site", partial(self.site, *each, flower=sizes.with_flower(*each))) for each in sizes.sites()),
            *(("server", partial(self.server, sizes.parameters, peers + 1)) for peers in sizes.peers),
            *(("error", partial(self.error, *each)) for each in sizes.errors()),
        ]
        found: dict[str, list[Row]] = {kind: [] for kind, _ in steps}
        for done, (kind, step) in enumerate(steps):
            progress("measuring", done, len(steps))
            found[kind].append(step())
        return found

    def site(self, parameters: int, peers: int, *, flower: bool) -> Row:
        """A site's work from its update to what it sends; the first turn gives the memory and is not timed."""
        workers = {name: worker for name, worker in self._workers.items() if flower or name == OURS}
        ready = {name: each.ask("prepare", parameters=parameters, sites=peers + 1) for name, each in workers.items()}
        first = {name: worker.ask("client", memory=True) for name, worker in workers.items()}
        turns: dict[str, list[Row]] = {name: [] for name in (*workers, "limit")}
        for _ in range(self._repetitions):
            for name, worker in workers.items():
                turns[name].append(worker.ask("client"))
            turns["limit"].append(self._limit(parameters, masks=peers + 1))
        figures = {
            name: {"seconds": _median(turns[name]), **{key: first[name][key] for key in ("bytes", "memory")}}
            for name in workers
        }
        return {
            "parameters": parameters,
            "peers": peers,
            **figures,
            "limit seconds": _median(turns["limit"]),
            "keys once a job, seconds": ready[OURS]["seconds"],
            "ours / limit": _ratio(turns[OURS], turns["limit"]),
            **({"flower / ours": _ratio(turns[FLOWER], turns[OURS])} if FLOWER in workers else {}),
        }

    def _limit(self, parameters: int, *, masks: int) -> Row:
        """The least time that masks can take: the cipher's, and that of adding, and nothing else."""
        rates = self._ours.ask("limit")
        processor = WORD * parameters * masks * (1 / rates["aes"] + 1 / rates["add"])
        return {"seconds": processor / self._threads, "processor": processor}

    def server(self, parameters: int, sites: int) -> Row:
        """The server's work once all vectors are there, in turns with a plain sum; the first turn is not counted."""
        for worker in self._workers.values():
            worker.ask("prepare", parameters=parameters, sites=sites)
        turns: dict[str, list[Row]] = {name: [] for name in (*self._workers, "plain")}
        for _ in range(self._repetitions + 1):
            for name, worker in self._workers.items():
                turns[name].append(worker.ask("server"))
            turns["plain"].append(self._ours.ask("plain"))
        turns = {name: each[1:] for name, each in turns.items()}
        figures = {name: {"seconds": _median(turns[name]), "error": turns[name][-1]["error"]} for name in self._workers}
        steps = {step: _median([turn["steps"][step] for turn in turns[OURS]]) for step in turns[OURS][0]["steps"]}
        row: Row = {
            "parameters": parameters,
            "sites": sites,
            **figures,
            "steps": steps,
            "plain seconds": _median(turns["plain"]),
            "ours / plain": _ratio(turns[OURS], turns["plain"]),
        }
        if FLOWER in self._workers:
            flower = self._workers[FLOWER]
            flower.ask("prepare", parameters=parameters, sites=sites, fitted=True)
            row["flower"]["error, fitted"] = flower.ask("server")["error"]
            row["flower / ours"] = _ratio(turns[FLOWER], turns[OURS])
        return row

    def error(self, parameters: int, sites: int) -> Row:
        """How wrong the average is, of ours and of FedAvg in float32."""
        return {"parameters": parameters, "sites": sites, **self._ours.ask("error", parameters=parameters, sites=sites)}


def _median(turns: Sequence[Row]) -> float:
    return statistics.median(float(turn["seconds"]) for turn in turns)


def _ratio(above: Sequence[Row], below: Sequence[Row]) -> Row:
    """Of the time that passes: the median of the turns' ratios, the lowest and the highest; and of the processor's."""
    turns = list(zip(above, below, strict=True))
    ratios = [one["seconds"] / other["seconds"] for one, other in turns]
    return {
        "median": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "processor": statistics.median(one["processor"] / other["processor"] for one, other in turns),
    }
