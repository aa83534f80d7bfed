"""The one place where sites' tensors are added up.

Contributions are added as they arrive where the plan needs nothing; otherwise reports are spooled to disk and
read back block by block, so that memory does not grow with the number of sites. Sums are kept in float64 and
rounded once, so the order of arrival does not show beyond float64's own rounding.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from crossward.federation.algebra import Algebra, total
from crossward.federation.contract import ALL, Contribution, Plan, Report, State, Summed, Vector
from crossward.federation.rules import per_row
from crossward.federation.storage import TensorFile, write_tensors

PANEL_BYTES = 8 << 20
"""How much of the sites' vectors is in memory while a Gram matrix is computed."""

BLOCK_VALUES = 1 << 20
"""How many values of one report are combined at a time (a larger tensor goes alone)."""

CHUNK_VALUES = 1 << 15
"""How many values are widened to float64 at a time: a chunk that stays in the processor's cache."""


class Sums:
    """Running sums of ``coefficient * value``, per slot and tensor, in float64."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Tensor]] = {}
        self._coefficients: dict[str, dict[str, float | Vector]] = {}
        self._chunk = torch.empty(CHUNK_VALUES, dtype=torch.float64)

    def add(self, contribution: Contribution) -> None:
        """Add one site's contribution, in place and without a copy of it."""
        for slot, shares in contribution.items():
            values = self._values.setdefault(slot, {})
            coefficients = self._coefficients.setdefault(slot, {})
            for name, share in shares.items():
                if isinstance(share.coefficient, float):
                    if name not in values:
                        values[name] = torch.zeros(share.value.shape, dtype=torch.float64)
                    self._add_scaled(values[name], share.value, share.coefficient)
                else:
                    product = share.value * per_row(share.coefficient, share.value)
                    values[name] = values[name] + product if name in values else product
                coefficients[name] = coefficients.get(name, 0.0) + share.coefficient

    def _add_scaled(self, total: Tensor, value: Tensor, coefficient: float) -> None:
        """Add ``coefficient * value`` chunk by chunk: three times as fast as one mixed-precision addition."""
        flat, values = total.view(-1), value.reshape(-1)
        for first in range(0, values.numel(), CHUNK_VALUES):
            part = values[first : first + CHUNK_VALUES]
            chunk = self._chunk[: part.numel()].copy_(part)
            flat[first : first + part.numel()].add_(chunk, alpha=coefficient)

    def drain(self) -> Iterator[tuple[str, str, Summed]]:
        """Give the sums out one by one and forget each, so that the result can take its place in memory."""
        for slot in list(self._values):
            values, coefficients = self._values.pop(slot), self._coefficients.pop(slot)
            for name in list(values):
                yield slot, name, Summed(values.pop(name), coefficients.pop(name))


def advance(algebra: Algebra, state: State, sums: Sums, plan: Plan, after: State) -> None:
    """Move summed tensors from ``sums`` into the state ``after``."""
    for slot, name, summed in sums.drain():
        target = after.tensors if slot == ALL else after.personal.setdefault(slot, {})
        target[name] = algebra.next_value(name, state, slot, summed, plan)


def next_state(state: State, plan: Plan) -> State:
    """Begin the state after a round: what nobody contributes to stays as it was."""
    personal = {site: dict(own) for site, own in state.personal.items()}
    return State(plan.round_number, dict(state.tensors), personal, plan)


@dataclass(frozen=True)
class Spooled:
    """A report whose tensors lie on disk."""

    report: Report
    path: Path


def spool(folder: Path, report: Report) -> Spooled:
    """Put a report's tensors on disk and keep only the rest of it; a second one does not touch the first."""
    path = folder / f"{report.site}-{secrets.token_hex(8)}.safetensors"
    write_tensors(path, {name: tensor.float() for name, tensor in report.update.items()}, {}, durable=False)
    return Spooled(replace(report, update={}), path)


def combine_spooled(algebra: Algebra, state: State, spooled: Sequence[Spooled], round_number: int) -> State:
    """Plan and combine reports that lie on disk, block by block."""
    cohort = [entry.report.site for entry in spooled]
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(entry.path)) for entry in spooled]
        totals = total(entry.report.tally for entry in spooled)
        gram = {key: cosines(files, names, algebra) for key, names in algebra.blocks().items()}
        plan = algebra.plan(round_number, cohort, totals, gram)
        after = next_state(state, plan)
        for names in batches_of_names(algebra):
            sums = Sums()
            for me, (entry, file) in enumerate(zip(spooled, files, strict=True)):
                part = replace(entry.report, update={name: file.read(name) for name in names})
                sums.add(algebra.contribute(part, plan, me))
            advance(algebra, state, sums, plan, after)
        return after


def batches_of_names(algebra: Algebra) -> Iterator[list[str]]:
    """Group the sent tensors, in order, into batches of about BLOCK_VALUES values."""
    batch: list[str] = []
    count = 0
    for name, spec in algebra.sent.items():
        if batch and count + spec.numel > BLOCK_VALUES:
            yield batch
            batch, count = [], 0
        batch.append(name)
        count += spec.numel
    if batch:
        yield batch


def cosines(files: Sequence[TensorFile], names: Sequence[str], algebra: Algebra) -> Vector:
    """Compute the cosines between the sites' blocks, a panel of columns at a time.

    A site whose block is all zero has no direction: its row and column are zero, its diagonal included.
    """
    sites = len(files)
    gram = np.zeros((sites, sites))
    width = max(1, PANEL_BYTES // (12 * sites))
    buffer = np.empty((sites, width), dtype=np.float32)
    for name in names:
        size = algebra.sent[name].numel
        for first in range(0, size, width):
            count = min(width, size - first)
            for row, file in enumerate(files):
                file.read_range(name, first, buffer[row, :count])
            panel = buffer[:, :count].astype(np.float64)
            gram += panel @ panel.T
    return normalise(gram)


def normalise(gram: Vector) -> Vector:
    """Turn inner products into cosines; zero vectors keep zero rows and columns."""
    norms = np.sqrt(np.diagonal(gram))
    safe = np.where(norms > 0, norms, 1.0)
    result: Vector = gram / np.outer(safe, safe)
    np.fill_diagonal(result, (norms > 0).astype(np.float64))
    return result
