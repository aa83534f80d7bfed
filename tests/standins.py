"""Rules that need all of the contract, reports made of random numbers, and a server that sees only sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from crossward.federation.algebra import Algebra, Extra
from crossward.federation.combine import next_state
from crossward.federation.contract import ALL, SAMPLES, Needs, Plan, Report, State, Summed, Tally, Tensors, Vector
from crossward.federation.coordinator import Coordinator
from crossward.federation.rules import Rule, SampleMean, divide, per_row
from crossward.federation.scopes import Scope, TensorSpec, tensors_digest
from crossward.site import participant

TAU = 0.5
GROUPS = 2
FEWEST_HOLDERS = 2


def part_of(name: str) -> str:
    """The block of a tensor: the module that it belongs to."""
    return name.rsplit(".", 1)[0]


def parts_of(names: Sequence[str]) -> dict[str, list[str]]:
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(part_of(name), []).append(name)
    return blocks


def softmax(scores: Vector) -> Vector:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normalised: Vector = powers / powers.sum(axis=-1, keepdims=True)
    return normalised


class Consensus(Rule):
    """Unit updates weighted by how far they disagree with the others, scaled by the mean norm, block by block."""

    needs: ClassVar[Needs] = "gram"

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return parts_of(names)

    def measure(self, update: Tensors) -> Tally:
        tally: dict[str, Vector] = {}
        for block, names in parts_of(list(update)).items():
            norm = float(np.sqrt(sum(float(update[name].double().square().sum()) for name in names)))
            tally[f"norm:{block}"] = np.array([norm])
            tally[f"moved:{block}"] = np.array([float(norm > 0)])
        return tally

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        planned: dict[str, Vector] = {}
        for block, cosines in gram.items():
            moved = np.diagonal(cosines) > 0
            scores = np.where(moved, np.exp(-cosines.sum(axis=1)), 0.0)
            planned[f"weight:{block}"] = scores / max(scores.sum(), 1e-300)
            planned[f"norm:{block}"] = totals[f"norm:{block}"] / max(1.0, totals[f"moved:{block}"].item())
        return planned

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        norm = tally[f"norm:{part_of(name)}"].item()
        return {ALL: float(plan[f"weight:{part_of(name)}"][me] / norm) if norm else 0.0}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        return (current.double() + plan[f"norm:{part_of(name)}"].item() * summed.value).to(current.dtype)


class PlainMean(Rule):
    """Every site counts once."""

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {ALL: 1.0}


class Attention(Rule):
    """Every site of the cohort gets its own mixture of all sites' tensors: softmax of cosines, block by block."""

    needs: ClassVar[Needs] = "gram"

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return parts_of(names)

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        return {block: softmax(cosines / TAU) for block, cosines in gram.items()}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {site: float(plan[part_of(name)][row, me]) for row, site in enumerate(cohort)}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        return divide(summed).to(current.dtype)


def replaced_rows(current: Tensor, summed: Summed) -> Tensor:
    """The rows that anybody contributed to become their mean; the others stay as they were."""
    assert not isinstance(summed.coefficient, float)
    known = per_row((summed.coefficient > 0).astype(np.float64), current).bool()
    return torch.where(known, divide(summed).to(current.dtype), current)


class HeldRows(Rule):
    """Class prototypes: the mean over the sites that hold the class, where enough of them do."""

    needs: ClassVar[Needs] = "totals"

    def measure(self, update: Tensors) -> Tally:
        (prototypes,) = update.values()
        return {"present": (prototypes.abs().sum(dim=1) > 0).double().numpy()}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        return {"open": (totals["present"] >= FEWEST_HOLDERS).astype(np.float64)}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {ALL: tally["present"] * plan["open"]}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        return replaced_rows(current, summed)


class Grouped(Rule):
    """Style vectors: the mean of each group of like-minded sites; a site repeats its vector in every group's row."""

    needs: ClassVar[Needs] = "gram"

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {"vector": names}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        return {"group": (gram["vector"][0] < 0).astype(np.float64)}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {ALL: np.eye(GROUPS)[int(plan["group"][me])]}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        return replaced_rows(current, summed)


@dataclass(frozen=True)
class Shapes:
    """The sizes of a made-up model: everything that the contract can carry, in one layout."""

    outputs: int
    inputs: int
    kernel: int
    classes: int
    features: int

    def layout(self) -> dict[str, TensorSpec]:
        return {
            "conv.weight": TensorSpec(Scope.SHARED, (self.outputs, self.inputs, self.kernel, self.kernel)),
            "conv.bias": TensorSpec(Scope.SHARED, (self.outputs,)),
            "scale.value": TensorSpec(Scope.SHARED, ()),
            "norm.running_mean": TensorSpec(Scope.BUFFER, (self.outputs,)),
            "norm.num_batches_tracked": TensorSpec(Scope.LOCAL, ()),
            "dse.weight": TensorSpec(Scope.PERSONAL, (self.outputs, 1, self.kernel)),
            "dse.bias": TensorSpec(Scope.PERSONAL, (self.outputs,)),
            "own.weight": TensorSpec(Scope.LOCAL, (self.features,)),
        }

    def algebra(self) -> Algebra:
        rules = {Scope.SHARED: Consensus(), Scope.BUFFER: PlainMean(), Scope.PERSONAL: Attention()}
        extras = {
            "prototypes": Extra((self.classes, self.features), HeldRows()),
            "style": Extra((GROUPS, self.features), Grouped()),
        }
        return Algebra(self.layout(), rules, extras)


def mean_algebra(shapes: Mapping[str, tuple[int, ...]]) -> Algebra:
    """Shared tensors of these shapes, combined by the mean weighted by sample counts."""
    return Algebra(
        {name: TensorSpec(Scope.SHARED, shape) for name, shape in shapes.items()}, {Scope.SHARED: SampleMean()}
    )


def random_tensor(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(np.asarray(rng.normal(size=shape), dtype=np.float32))


def random_start(algebra: Algebra, rng: np.random.Generator) -> State:
    return State(
        0, {name: random_tensor(spec.shape, rng) for name, spec in algebra.sent.items() if name in algebra.layout}
    )


def random_update(algebra: Algebra, rng: np.random.Generator) -> dict[str, Tensor]:
    """Any numbers in the declared shapes, with the awkward cases among them: blocks and rows of zeros."""
    update = {name: random_tensor(spec.shape, rng) for name, spec in algebra.sent.items()}
    if "prototypes" in update:
        held = rng.random(update["prototypes"].shape[0]) < 0.6
        update["prototypes"] *= torch.from_numpy(held.astype(np.float32)).unsqueeze(1)
    if "style" in update:
        update["style"] = update["style"][:1].repeat(len(update["style"]), 1)
    for block in ("conv", "dse"):
        if rng.random() < 0.2:
            update = {name: value * 0 if part_of(name) == block else value for name, value in update.items()}
    return update


def report_of(
    algebra: Algebra, state: State, site: str, update: Mapping[str, Tensor], *, samples: float = 1.0
) -> Report:
    """The report of a site that trained from the current state."""
    tally = {SAMPLES: np.array([samples]), **algebra.measure(update)}
    model = tensors_digest(state.payload(site).tensors)
    return Report(site, state.round_number + 1, model, update, tally)


def random_report(algebra: Algebra, state: State, site: str, rng: np.random.Generator) -> Report:
    samples = float(rng.integers(1, 500))
    return report_of(algebra, state, site, random_update(algebra, rng), samples=samples)


def run_round(coordinator: Coordinator, reports: Sequence[Report]) -> State:
    for report in reports:
        coordinator.accept(report)
    return coordinator.close_round({"round": reports[0].round_number})


class SecureSum:
    """Adds what exactly the named parties hand in, once each, and then gives out the sum and nothing else."""

    def __init__(self, parties: Sequence[str]) -> None:
        self.__waiting = set(parties)
        self.__sum: dict[tuple[str, ...], Vector] = {}

    def add(self, party: str, values: Mapping[tuple[str, ...], Vector]) -> None:
        self.__waiting.remove(party)
        for key, value in values.items():
            self.__sum[key] = self.__sum[key] + value if key in self.__sum else np.array(value, dtype=np.float64)

    def total(self) -> dict[tuple[str, ...], Vector]:
        if self.__waiting:
            raise PermissionError("a partial sum is not given out")
        return dict(self.__sum)


class SecureCosines:
    """Takes vectors and gives out the matrix of their cosines, never a vector."""

    def __init__(self, parties: Sequence[str]) -> None:
        self.__parties = tuple(parties)
        self.__vectors: dict[tuple[str, str], Vector] = {}

    def deposit(self, party: str, block: str, vector: Vector) -> None:
        norm = np.linalg.norm(vector)
        self.__vectors[party, block] = vector / norm if norm else vector

    def matrix(self, block: str) -> Vector:
        vectors = [self.__vectors[party, block] for party in self.__parties]
        return np.array([[float(np.sum(one * other)) for other in vectors] for one in vectors])


@dataclass(frozen=True)
class MaskedSite:
    """What a server can reach of a site under masks: three requests, all answered into something that only sums."""

    name: str
    send_tally: Callable[[SecureSum], None]
    send_sketches: Callable[[SecureCosines], None]
    send_contribution: Callable[[SecureSum, Plan], None]


def masked_site(algebra: Algebra, report: Report) -> MaskedSite:
    """Close a site around its report: nobody outside can get at it."""

    def send_tally(into: SecureSum) -> None:
        into.add(report.site, {(key,): value for key, value in report.tally.items()})

    def send_sketches(into: SecureCosines) -> None:
        for block, names in algebra.blocks().items():
            flat = [report.update[name].double().reshape(-1).numpy() for name in names]
            into.deposit(report.site, block, np.concatenate(flat))

    def send_contribution(into: SecureSum, plan: Plan) -> None:
        products: dict[tuple[str, ...], Vector] = {}
        for slot, shares in algebra.contribute(report, plan, plan.cohort.index(report.site)).items():
            for name, share in shares.items():
                value = share.value.double().numpy()
                coefficient = np.asarray(share.coefficient, dtype=np.float64)
                rows = coefficient.reshape(-1, *[1] * (value.ndim - 1)) if coefficient.ndim else coefficient
                products["value", slot, name] = rows * value
                products["coefficient", slot, name] = coefficient
        into.add(report.site, products)

    return MaskedSite(report.site, send_tally, send_sketches, send_contribution)


def masked_plan(algebra: Algebra, round_number: int, sites: Sequence[MaskedSite]) -> Plan:
    """The server's plan where it sees summed tallies and cosines only."""
    cohort = [site.name for site in sites]
    tallies, sketches = SecureSum(cohort), SecureCosines(cohort)
    for site in sites:
        site.send_tally(tallies)
        site.send_sketches(sketches)
    totals = {key: value for (key,), value in tallies.total().items()}
    gram = {block: sketches.matrix(block) for block in algebra.blocks()}
    return algebra.plan(round_number, cohort, totals, gram)


def masked_sums(algebra: Algebra, state: State, plan: Plan, sites: Sequence[MaskedSite]) -> State:
    """The server's next state where it sees summed contributions only."""
    contributions = SecureSum(plan.cohort)
    for site in sites:
        site.send_contribution(contributions, plan)
    sums = contributions.total()
    after = next_state(state, plan)
    for kind, slot, name in [key for key in sums if key[0] == "value"]:
        coefficient = sums["coefficient", slot, name]
        summed = Summed(
            torch.from_numpy(np.asarray(sums[kind, slot, name])),
            coefficient if coefficient.ndim else float(coefficient),
        )
        target = after.tensors if slot == ALL else after.personal.setdefault(slot, {})
        target[name] = algebra.next_value(name, state, slot, summed, plan)
    return after


def masked_round(algebra: Algebra, state: State, sites: Sequence[MaskedSite]) -> State:
    plan = masked_plan(algebra, state.round_number + 1, sites)
    return masked_sums(algebra, state, plan, sites)


def slots_of(state: State) -> dict[tuple[str, str], Vector]:
    """All tensors of a state as float64 arrays, by slot and name."""
    everything = {ALL: state.tensors, **state.personal}
    return {(slot, name): tensor.double().numpy() for slot, own in everything.items() for name, tensor in own.items()}


def assert_close(one: State, other: State, *, relative: float) -> None:
    """Equal slots and names, and values equal relative to the largest value of the tensor."""
    left, right = slots_of(one), slots_of(other)
    assert left.keys() == right.keys()
    for key, value in left.items():
        scale = max(1e-30, float(np.abs(value).max(initial=0.0)))
        np.testing.assert_allclose(right[key], value, rtol=0, atol=relative * scale, err_msg=str(key))


def assert_identical(one: State, other: State) -> None:
    left, right = slots_of(one), slots_of(other)
    assert left.keys() == right.keys()
    assert one.round_number == other.round_number
    for key, value in left.items():
        assert value.tobytes() == right[key].tobytes(), key


def federated(
    algebra: Algebra, start: State, sizes: Mapping[str, float], folder: Path, *, reporting: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The server's tensors after a round of the real algebra, and the models that the reporting sites had trained."""
    rng = np.random.default_rng(0)
    trained = {
        site: {
            name: tensor + torch.from_numpy(rng.normal(size=tuple(tensor.shape)).astype(np.float32))
            for name, tensor in start.tensors.items()
        }
        for site in reporting
    }
    coordinator = Coordinator(folder, algebra, start, sites=list(sizes), rounds=2, seed=0, quorum=1)
    reports = []
    for site, tensors in trained.items():
        update = {name: tensor - start.tensors[name] for name, tensor in tensors.items()}
        reports.append(report_of(algebra, start, site, update, samples=sizes[site]))
    return run_round(coordinator, reports).tensors, trained


def counted_trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The (site, round) of every local training in this process from now on."""
    calls: list[tuple[str, int]] = []
    original = participant.train_round

    def counted(model: Any, method: Any, split: Any, context: Any, **options: Any) -> Any:
        calls.append((context.site, context.round_number))
        return original(model, method, split, context, **options)

    monkeypatch.setattr(participant, "train_round", counted)
    return calls
