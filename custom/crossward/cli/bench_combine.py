"""Memory and time of the combining, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from crossward.federation.algebra import Algebra
from crossward.federation.combine import Sums, advance, combine_spooled, next_state, spool
from crossward.federation.contract import ALL, SAMPLES, Needs, Plan, Report, State, Tally, Vector
from crossward.federation.errors import RunFailure
from crossward.federation.rules import Rule
from crossward.federation.scopes import Scope
from crossward.federation.storage import TensorFile, write_tensors
from crossward.methods import Task, create

SERVER_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""How a server is started: glibc then gives large tensors back to the system when they are freed."""

_DISTINCT_REPORTS = 4


class CosineMean(Rule):
    """The cheapest rule that needs a Gram matrix of every tensor: sites weigh by their mean cosine to all."""

    needs: ClassVar[Needs] = "gram"

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {name: (name,) for name in names}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        del totals
        return {name: np.clip(matrix.mean(axis=1), 1e-3, None) for name, matrix in gram.items()}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del tally, cohort
        return {ALL: float(plan[name][me])}


def in_own_process(sites: int, *, depth: int, gram: bool) -> dict[str, Any]:
    """Run the measurement in a fresh process, so that its peak memory is its own."""
    command = [sys.executable, "-m", "crossward.cli.bench_combine", str(sites), str(depth), str(int(gram))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **SERVER_ALLOCATOR})
    if done.returncode:
        raise RunFailure(f"the measuring process failed: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout))


def measure(sites: int, *, depth: int, gram: bool) -> dict[str, Any]:
    """Combine made-up reports of so many sites; memory is the peak above an idle server that holds the model."""
    torch.set_num_threads(1)
    method = create("fedavg")
    task = Task(classes=("a", "b"), channels=1, size=32, rounds=1, depth=depth, width=1.0)
    model = method.build(task)
    rules = {Scope.SHARED: CosineMean(), Scope.BUFFER: CosineMean()} if gram else dict(method.rules(task, model))
    algebra = Algebra(method.algebra(task, model).layout, rules)
    state = method.start(task, model)
    del model
    size = sum(spec.numel for spec in algebra.sent.values()) * 4
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_reports(folder, algebra)
        idle = _reset_peak()
        seconds = (_spooled if gram else _streamed)(folder, algebra, state, sites)
        peak = _status("VmHWM")
        reference = _plain_sum(folder, algebra, sites)
    return {
        "plan needs": "gram" if gram else "nothing",
        "sites": sites,
        "model MB": size / 1e6,
        "peak in models": (peak - idle) / size,
        "seconds": seconds,
        "numpy seconds": reference,
        "ratio": seconds / reference,
    }


def _write_reports(folder: Path, algebra: Algebra) -> None:
    generator = torch.Generator().manual_seed(0)
    for index in range(_DISTINCT_REPORTS):
        update = {name: torch.randn(spec.shape, generator=generator) for name, spec in algebra.sent.items()}
        write_tensors(folder / f"made-{index}.safetensors", update, {})


def _report(folder: Path, algebra: Algebra, site: int) -> Report:
    with TensorFile(folder / f"made-{site % _DISTINCT_REPORTS}.safetensors") as file:
        update = {name: file.read(name) for name in algebra.sent}
    return Report(f"site-{site}", 1, "", update, {SAMPLES: np.array([100.0 + site])})


def _streamed(folder: Path, algebra: Algebra, state: State, sites: int) -> float:
    """Add each report as it arrives, then advance."""
    ours = 0.0
    sums, plan = Sums(), Plan(1, tuple(f"site-{site}" for site in range(sites)))
    for site in range(sites):
        report = _report(folder, algebra, site)
        began = time.perf_counter()
        sums.add(algebra.contribute(report, plan, site))
        ours += time.perf_counter() - began
        del report
    began = time.perf_counter()
    after = next_state(state, plan)
    advance(algebra, state, sums, plan, after)
    ours += time.perf_counter() - began
    return ours


def _spooled(folder: Path, algebra: Algebra, state: State, sites: int) -> float:
    """Spool every report and combine block by block with a Gram matrix per tensor."""
    ours = 0.0
    spooled = []
    for site in range(sites):
        report = _report(folder, algebra, site)
        began = time.perf_counter()
        spooled.append(spool(folder / "spool", report))
        ours += time.perf_counter() - began
        del report
    began = time.perf_counter()
    combine_spooled(algebra, state, spooled, 1)
    ours += time.perf_counter() - began
    return ours


def _plain_sum(folder: Path, algebra: Algebra, sites: int) -> float:
    """Seconds of the textbook loop: total += n_k * update, per tensor, in float32."""
    total = {name: np.zeros(spec.shape, dtype=np.float32) for name, spec in algebra.sent.items()}
    seconds = 0.0
    for site in range(sites):
        report = _report(folder, algebra, site)
        arrays = {name: tensor.numpy() for name, tensor in report.update.items()}
        began = time.perf_counter()
        for name, array in arrays.items():
            total[name] += np.float32(100 + site) * array
        seconds += time.perf_counter() - began
    return seconds


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
    print(json.dumps(measure(int(sys.argv[1]), depth=int(sys.argv[2]), gram=bool(int(sys.argv[3])))))
