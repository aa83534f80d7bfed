"""The one place where sites' tensors are added up.

Contributions are added as they arrive where the plan needs nothing; otherwise reports are spooled to disk and
read back block by block, so that memory does not grow with the number of sites. Sums are kept in float64 and
rounded once, so the order of arrival does not show beyond float64's own rounding.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
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
        self._stacks: dict[str, _Stack] = {}
        self._by_row: dict[tuple[str, str], Summed] = {}
        self._chunk = torch.empty(CHUNK_VALUES, dtype=torch.float64)

    def add(self, contribution: Contribution) -> None:
        """Add one site's contribution, in place and without a copy of it."""
        together: dict[tuple[str, int], tuple[Tensor, dict[str, float]]] = {}
        for slot, shares in contribution.items():
            for name, share in shares.items():
                if isinstance(share.coefficient, float):
                    _, coefficients = together.setdefault((name, id(share.value)), (share.value, {}))
                    coefficients[slot] = share.coefficient
                else:
                    self._add_by_row(slot, name, share.value, share.coefficient)
        for (name, _), (value, coefficients) in together.items():
            if name not in self._stacks:
                self._stacks[name] = _Stack(value.shape)
            self._stacks[name].add(value, coefficients, self._chunk)

    def _add_by_row(self, slot: str, name: str, value: Tensor, coefficient: Vector) -> None:
        product = value * per_row(coefficient, value)
        before = self._by_row.get((slot, name))
        if before is not None:
            product, coefficient = before.value + product, before.coefficient + coefficient
        self._by_row[slot, name] = Summed(product, coefficient)

    def drain(self) -> Iterator[tuple[str, str, Summed]]:
        """Give the sums out one by one and forget each tensor's, so that the result can take their place in memory."""
        for name in list(self._stacks):
            for slot, summed in self._stacks.pop(name).items():
                yield slot, name, summed
        for slot, name in list(self._by_row):
            yield slot, name, self._by_row.pop((slot, name))


class _Stack:
    """The sums of one tensor for all its slots, a row each.

    What a site adds to them is one outer product, however many slots there are: with a slot per site they are as many
    as there are pairs of sites.
    """

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        self._coefficients: dict[str, float] = {}
        self._values = torch.empty(0, shape.numel(), dtype=torch.float64)

    def add(self, value: Tensor, coefficients: Mapping[str, float], chunk: Tensor) -> None:
        """Add ``coefficient * value`` to every slot, widened chunk by chunk: faster than in mixed precision."""
        for slot, coefficient in coefficients.items():
            self._coefficients[slot] = self._coefficients.get(slot, 0.0) + coefficient
        slots, (rows, size) = len(self._coefficients), self._values.shape
        if slots > rows:
            before, self._values = self._values, torch.zeros(slots, size, dtype=torch.float64)
            self._values[:rows] = before
        weights = [coefficients.get(slot, 0.0) for slot in self._coefficients]
        values, width = value.reshape(-1), chunk.numel()
        for first in range(0, values.numel(), width):
            part = values[first : first + width]
            widened = chunk[: part.numel()].copy_(part)
            into = self._values[:, first : first + width]
            if len(weights) == 1:
                into.add_(widened, alpha=weights[0])
            else:
                into.addr_(torch.tensor(weights, dtype=torch.float64), widened)

    def items(self) -> Iterator[tuple[str, Summed]]:
        """The sum of every slot."""
        for row, (slot, coefficient) in enumerate(self._coefficients.items()):
            yield slot, Summed(self._values[row].view(self._shape), coefficient)


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
            advance(algebra, state, _sums_of(names, algebra, plan, spooled, files), plan, after)
        return after


def _sums_of(
    names: Sequence[str], algebra: Algebra, plan: Plan, spooled: Sequence[Spooled], files: Sequence[TensorFile]
) -> Sums:
    """Add up some tensors of all sites."""
    sums = Sums()
    # One site after the other is read into the same tensors: fresh memory costs more than the reading.
    part = {name: torch.empty(algebra.sent[name].shape) for name in names}
    for me, (entry, file) in enumerate(zip(spooled, files, strict=True)):
        for name, tensor in part.items():
            file.read_into(name, tensor)
        sums.add(algebra.contribute(replace(entry.report, update=part), plan, me))
    return sums


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
    width = max(1, PANEL_BYTES // (8 * sites))
    narrow, wide = np.empty(width, dtype=np.float32), np.empty((sites, width))
    for name in names:
        size = algebra.sent[name].numel
        for first in range(0, size, width):
            count = min(width, size - first)
            for row, file in enumerate(files):
                file.read_range(name, first, narrow[:count])
                wide[row, :count] = narrow[:count]
            panel = wide[:, :count]
            gram += panel @ panel.T
    return normalise(gram)


def normalise(gram: Vector) -> Vector:
    """Turn inner products into cosines; zero vectors keep zero rows and columns."""
    norms = np.sqrt(np.diagonal(gram))
    safe = np.where(norms > 0, norms, 1.0)
    result: Vector = gram / np.outer(safe, safe)
    np.fill_diagonal(result, (norms > 0).astype(np.float64))
    return result
