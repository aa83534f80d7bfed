"""Memory and time of the server's combining, for each method in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crossward.cli.bench_variants import Variant, parse_variant
from crossward.federation.algebra import Algebra
from crossward.federation.combine import Sums, advance, combine_spooled, next_state, spool
from crossward.federation.contract import SAMPLES, Report, State, Tensors
from crossward.federation.errors import BadInput, RunFailure
from crossward.federation.scopes import Scope
from crossward.methods import Task

SERVER_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""How a server is started: glibc then gives large tensors back to the system when they are freed."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Numpy's products on one thread, as ours and the plain average are compared on one."""

_APART = 64


class MadeReports:
    """Reports of so many sites, in the declared shapes and with the tallies that a site would measure.

    Every site has noise of its own. An update is made when it is asked for: it takes memory as an upload does.
    """

    def __init__(self, algebra: Algebra, sites: int) -> None:
        self._algebra = algebra
        generator = torch.Generator().manual_seed(0)
        # The same noise moved by a few places is other noise for every tensor, and takes no time to draw.
        self._noise = torch.randn(values_sent(algebra) + _APART * sites, generator=generator)
        self._tallies = [
            {SAMPLES: np.array([100.0 + site]), **algebra.measure(self._update(site))} for site in range(sites)
        ]

    def __len__(self) -> int:
        return len(self._tallies)

    def __getitem__(self, site: int) -> Report:
        return Report(f"site-{site}", 1, "", self._update(site), self._tallies[site])

    def _update(self, site: int) -> Tensors:
        update, first = {}, _APART * site
        for name, spec in self._algebra.sent.items():
            update[name] = self._noise[first : first + spec.numel].view(spec.shape).clone()
            first += spec.numel
        return update


def values_sent(algebra: Algebra, *scopes: Scope) -> int:
    """How many values a site sends, of all scopes or of some."""
    return sum(spec.numel for spec in algebra.sent.values() if not scopes or spec.scope in scopes)


def in_own_process(variant: Variant, sites: int, *, depth: int, width: float, repeats: int) -> dict[str, Any]:
    """Run the measurement in a fresh process, so that its peak memory is its own."""
    numbers = (str(number) for number in (sites, depth, width, repeats))
    command = [sys.executable, "-m", "crossward.cli.bench_combine", variant.text, *numbers]
    environment = {**os.environ, **SERVER_ALLOCATOR, **ONE_THREAD}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RunFailure(f"the measuring process failed: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout))


def measure(variant: Variant, sites: int, *, depth: int, width: float, repeats: int) -> dict[str, Any]:
    """Combine made-up reports of so many sites with the method's own rules, in turns with a plain average.

    A first turn gives the memory, the peak above an idle server that holds the model, and its time is not counted: the
    system then finds memory for the spool. The yardstick is FedAvg's model at the same depth and width: its average in
    numpy is that of time, its size one of two units of memory; the other unit is what a site of this method sends.

    Seconds are the processor's, which other programs on a busy machine do not lengthen as they do the time that passes.
    """
    torch.set_num_threads(1)
    task = Task(classes=("a", "b"), channels=1, size=32, rounds=1, depth=depth, width=width)
    algebra, state = _server(variant, task)
    plain, _ = _server(parse_variant("fedavg"), task)
    own, common = 4 * values_sent(algebra), 4 * values_sent(plain)
    if not own:
        raise BadInput(f"{variant.text} sends nothing, so there is nothing to combine")
    reports, plain_reports = MadeReports(algebra, sites), MadeReports(plain, sites)
    combine = _streamed if algebra.streams else _spooled
    idle = _reset_peak()
    combine(algebra, state, reports)
    peak = _status("VmHWM")
    ours, numpys = [], []
    for _ in range(repeats):
        ours.append(combine(algebra, state, reports))
        numpys.append(_plain_average(plain, plain_reports))
    return {
        "method": variant.text,
        "plan needs": algebra.needs,
        "sites": sites,
        "sent MB": own / 1e6,
        "FedAvg's MB": common / 1e6,
        "personal MB, all sites": 4e-6 * sites * values_sent(algebra, Scope.PERSONAL),
        "peak / sent": (peak - idle) / own,
        "peak / FedAvg's": (peak - idle) / common,
        "seconds": statistics.median(ours),
        "numpy seconds": statistics.median(numpys),
        "ratio": statistics.median(one / other for one, other in zip(ours, numpys, strict=True)),
    }


def _server(variant: Variant, task: Task) -> tuple[Algebra, State]:
    model = variant.method.build(task, block=variant.plugs.block, head=variant.plugs.head)
    return variant.method.algebra(task, model), variant.method.start(task, model)


def _streamed(algebra: Algebra, state: State, reports: MadeReports) -> float:
    """Seconds to add each report as it arrives, and to advance."""
    seconds = 0.0
    sums = Sums()
    plan = algebra.plan(1, [f"site-{site}" for site in range(len(reports))], {}, {})
    for site in range(len(reports)):
        report = reports[site]
        began = time.process_time()
        sums.add(algebra.contribute(report, plan, site))
        seconds += time.process_time() - began
        del report
    began = time.process_time()
    after = next_state(state, plan)
    advance(algebra, state, sums, plan, after)
    return seconds + time.process_time() - began


def _spooled(algebra: Algebra, state: State, reports: MadeReports) -> float:
    """Seconds to spool each report, and to combine them block by block."""
    seconds = 0.0
    folder = Path(tempfile.mkdtemp())
    try:
        spooled = []
        for site in range(len(reports)):
            report = reports[site]
            began = time.process_time()
            spooled.append(spool(folder, report))
            seconds += time.process_time() - began
            del report
        began = time.process_time()
        combine_spooled(algebra, state, spooled, 1)
        return seconds + time.process_time() - began
    finally:
        shutil.rmtree(folder)


def _plain_average(algebra: Algebra, reports: MadeReports) -> float:
    """Seconds of the textbook loop: total += n_k * update, per tensor, in float32, and one division."""
    seconds = 0.0
    total = {name: np.zeros(spec.shape, dtype=np.float32) for name, spec in algebra.sent.items()}
    samples = np.float32(0)
    for site in range(len(reports)):
        report = reports[site]
        arrays = {name: tensor.numpy() for name, tensor in report.update.items()}
        count = np.float32(report.tally[SAMPLES].item())
        began = time.process_time()
        for name, array in arrays.items():
            total[name] += count * array
        samples += count
        seconds += time.process_time() - began
        del report, arrays
    began = time.process_time()
    for array in total.values():
        array /= samples
    return seconds + time.process_time() - began


def _reset_peak() -> int:
    """Forget the peak so far and give the memory in use (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RunFailure(f"this system does not tell {key}")


if __name__ == "__main__":
    text, sites, depth, width, repeats = sys.argv[1:]
    row = measure(parse_variant(text), int(sites), depth=int(depth), width=float(width), repeats=int(repeats))
    print(json.dumps(row))
