from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.standins import (
    TAU,
    Attention,
    Shapes,
    assert_close,
    assert_identical,
    mean_algebra,
    random_report,
    random_start,
    random_tensor,
    report_of,
    run_round,
    softmax,
)

from crossward.federation import combine
from crossward.federation.algebra import Algebra, total
from crossward.federation.combine import Sums, batches_of_names, combine_spooled, cosines, normalise, spool
from crossward.federation.contract import ALL, SAMPLES, Needs, Report, Share, State, Tally, Vector
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import StorageFailure
from crossward.federation.rules import Rule, SampleMean
from crossward.federation.scopes import Scope, TensorSpec
from crossward.federation.storage import TensorFile, write_tensors

pytestmark = pytest.mark.usefixtures("without_fsync")

tensor_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
layouts = st.dictionaries(st.sampled_from(["a", "b.weight", "b.bias", "c"]), tensor_shapes, min_size=1)
seeds = st.integers(0, 2**32 - 1)


def a_coordinator(folder: str | Path, algebra: Algebra, start: State, sites: Sequence[str]) -> Coordinator:
    return Coordinator(Path(folder), algebra, start, sites=sites, rounds=9, seed=0)


class SpooledMean(SampleMean):
    """The sample mean, but made to wait for totals: the same numbers through the other door."""

    needs: ClassVar[Needs] = "totals"


def spooled_twin(algebra: Algebra) -> Algebra:
    return Algebra(algebra.layout, {Scope.SHARED: SpooledMean(), Scope.BUFFER: SpooledMean()})


@given(layout=layouts, count=st.integers(1, 6), seed=seeds, data=st.data())
@settings(max_examples=40)
def test_the_order_of_arrival_does_not_change_a_bit(
    layout: dict[str, tuple[int, ...]], count: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    algebra = mean_algebra(layout)
    start = random_start(algebra, rng)
    sites = [f"s{number}" for number in range(count)]
    reports = [random_report(algebra, start, site, rng) for site in sites]
    shuffled = data.draw(st.permutations(reports))
    results = []
    for arrival in (reports, shuffled):
        for variant in (algebra, spooled_twin(algebra)):
            with tempfile.TemporaryDirectory() as folder:
                results.append(run_round(a_coordinator(folder, variant, start, sites), arrival))
    streamed, spooled, streamed_shuffled, spooled_shuffled = results
    assert_identical(streamed, streamed_shuffled)
    assert_identical(spooled, spooled_shuffled)
    assert_close(streamed, spooled, relative=1e-7)


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    weights=st.lists(st.integers(1, 10_000), min_size=8, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_sums_of_any_values_are_right_to_float64_in_any_order(
    values: list[float], weights: list[int], order: random.Random
) -> None:
    terms = list(zip(weights, values, strict=False))
    exact = sum((Fraction(weight) * Fraction(value) for weight, value in terms), start=Fraction(0))
    size = sum(Fraction(weight) * abs(Fraction(value)) for weight, value in terms)
    order.shuffle(terms)
    sums = Sums()
    for weight, value in terms:
        sums.add({ALL: {"x": Share(float(weight), torch.tensor([value], dtype=torch.float32))}})
    ((_, _, summed),) = sums.drain()
    assert summed.value.dtype == torch.float64
    assert abs(Fraction(summed.value.item()) - exact) <= size * Fraction(2) ** -49
    assert summed.coefficient == sum(weight for weight, _ in terms)


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    chunk=st.integers(1, 300),
    seed=seeds,
)
@settings(max_examples=40)
def test_sums_do_not_depend_on_chunks_or_on_the_order_in_memory(
    shape: tuple[int, int, int, int], chunk: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors = [random_tensor(shape, rng) for _ in range(3)]
    expected = 2.0 * tensors[0].double() + 3.0 * tensors[1].double() + 5.0 * tensors[2].double()
    laid_out = [
        tensors[0].to(memory_format=torch.channels_last),
        tensors[1].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        tensors[2].clone(),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "CHUNK_VALUES", chunk)
        sums = Sums()
        for coefficient, tensor in zip((2.0, 3.0, 5.0), laid_out, strict=True):
            sums.add({ALL: {"x": Share(coefficient, tensor)}})
    ((_, _, summed),) = sums.drain()
    np.testing.assert_allclose(summed.value.numpy(), expected.numpy(), rtol=0, atol=1e-13)
    assert summed.coefficient == 10.0


def test_threads_may_report_at_the_same_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    layout = {"w": (64, 33), "b": (33,)}
    sites = [f"s{number:02d}" for number in range(16)]
    for number, algebra in enumerate((mean_algebra(layout), spooled_twin(mean_algebra(layout)))):
        start = random_start(algebra, rng)
        reports = [random_report(algebra, start, site, rng) for site in sites]
        coordinator = a_coordinator(tmp_path / f"threads-{number}", algebra, start, sites)
        barrier = threading.Barrier(len(sites))

        def send(report: Report, barrier: threading.Barrier = barrier, to: Coordinator = coordinator) -> None:
            barrier.wait(timeout=30)
            to.accept(report)

        with ThreadPoolExecutor(len(sites)) as pool:
            list(pool.map(send, reports))
        together = coordinator.close_round({})
        alone = run_round(a_coordinator(tmp_path / f"alone-{number}", algebra, start, sites), reports)
        assert_identical(together, alone)


class Scaled(SampleMean):
    """A mean with a factor that the plan publishes, although it waits for nothing."""

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        return {"factor": np.array([0.5])}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {ALL: float(plan["factor"].item())}


def test_a_rule_that_waits_for_nothing_still_gets_its_plan(tmp_path: Path) -> None:
    # `needs` says what plan() waits for; masked mode publishes the plan, so adding on arrival must use the same one.
    algebra = Algebra({"w": TensorSpec(Scope.SHARED, (2,))}, {Scope.SHARED: Scaled()})
    start = State(0, {"w": torch.zeros(2)})
    coordinator = a_coordinator(tmp_path, algebra, start, ["a"])
    after = run_round(coordinator, [report_of(algebra, start, "a", {"w": torch.tensor([1.0, 3.0])})])
    assert after.tensors["w"].tolist() == [1.0, 3.0]


class ToEverySite(Rule):
    """Every site of the cohort is given the plain sum as a tensor of its own."""

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return dict.fromkeys(cohort, 1.0)


def test_the_cohort_is_who_reported_whatever_the_rule_waits_for(tmp_path: Path) -> None:
    # Plan.cohort: "the sites whose contributions are summed". An invited site that stayed away is not among them.
    algebra = Algebra({"w": TensorSpec(Scope.PERSONAL, (1,))}, {Scope.PERSONAL: ToEverySite()})
    start = State(0, {"w": torch.zeros(1)})
    coordinator = Coordinator(tmp_path, algebra, start, sites=["a", "b", "c"], rounds=2, seed=0, quorum=2)
    after = run_round(coordinator, [report_of(algebra, start, site, {"w": torch.ones(1)}) for site in ("a", "b")])
    assert set(after.personal) == {"a", "b"}


@given(
    sizes=st.lists(tensor_shapes, min_size=1, max_size=4),
    count=st.integers(1, 6),
    panel=st.integers(1, 400),
    seed=seeds,
    idle=st.integers(0, 6),
)
@settings(max_examples=60)
def test_cosines_equal_plain_numpy_however_small_the_panel(
    sizes: list[tuple[int, ...]], count: int, panel: int, seed: int, idle: int
) -> None:
    rng = np.random.default_rng(seed)
    names = [f"t{number}" for number in range(len(sizes))]
    algebra = mean_algebra(dict(zip(names, sizes, strict=True)))
    sites = [{name: random_tensor(size, rng) for name, size in zip(names, sizes, strict=True)} for _ in range(count)]
    for site in sites[idle:]:
        for tensor in site.values():
            tensor.zero_()
    flat = np.stack([np.concatenate([site[name].double().numpy().ravel() for name in names]) for site in sites])
    expected = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            lengths = np.linalg.norm(flat[i]) * np.linalg.norm(flat[j])
            expected[i, j] = flat[i] @ flat[j] / lengths if lengths else 0.0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "PANEL_BYTES", panel)
        files = []
        for number, site in enumerate(sites):
            path = Path(folder) / f"{number}.safetensors"
            write_tensors(path, site, {})
            files.append(TensorFile(path))
        gram = cosines(files, names, algebra)
        for file in files:
            file.close()
    np.testing.assert_allclose(gram, expected, atol=1e-12)
    assert not gram[idle:].any()
    assert not gram[:, idle:].any()
    assert np.diagonal(gram).tolist() == [1.0] * min(idle, count) + [0.0] * max(0, count - idle)


def test_cosines_of_a_tensor_of_many_panels_do_not_show_what_was_in_the_panel_before(tmp_path: Path) -> None:
    # One buffer serves all panels and tensors: a short panel must not see the end of a long one.
    rng = np.random.default_rng(4)
    algebra = mean_algebra({"long": (103,), "short": (3,)})
    reports = [random_report(algebra, random_start(algebra, rng), f"s{number}", rng) for number in range(7)]
    files = [TensorFile(spool(tmp_path, report).path) for report in reports]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "PANEL_BYTES", 8 * 7 * 10)
        for names in (["long"], ["short"], ["long", "short"], ["short", "long"]):
            rows = np.stack([np.concatenate([report.update[name].double() for name in names]) for report in reports])
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            np.testing.assert_allclose(cosines(files, names, algebra), rows @ rows.T, atol=1e-14)
    for file in files:
        file.close()


def test_cosines_by_hand() -> None:
    inner = np.array([[4.0, 3.0, 0.0], [3.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    assert normalise(inner).tolist() == [[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]


@given(block=st.integers(1, 200), seed=seeds, count=st.integers(2, 5))
@settings(max_examples=25)
def test_the_result_does_not_depend_on_the_size_of_blocks(block: int, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    algebra = Shapes(4, 2, 3, 3, 5).algebra()
    start = random_start(algebra, rng)
    with tempfile.TemporaryDirectory() as folder:
        spooled = [spool(Path(folder), random_report(algebra, start, f"s{number}", rng)) for number in range(count)]
        whole = combine_spooled(algebra, start, spooled, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(combine, "BLOCK_VALUES", block)
            blocked = combine_spooled(algebra, start, spooled, 1)
            batches = list(batches_of_names(algebra))
    assert_identical(whole, blocked)
    assert whole.plan is not None
    assert blocked.plan is not None
    assert whole.plan.digest() == blocked.plan.digest()
    assert [name for batch in batches for name in batch] == list(algebra.sent)
    for batch in batches:
        assert len(batch) == 1 or sum(algebra.sent[name].numel for name in batch) <= block


def test_combining_leaves_the_state_before_as_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    algebra = Shapes(3, 2, 1, 3, 4).algebra()
    start = random_start(algebra, rng)
    copy = State(0, {name: tensor.clone() for name, tensor in start.tensors.items()})
    first = combine_spooled(algebra, start, [spool(tmp_path, random_report(algebra, start, "a", rng))], 1)
    assert_identical(start, copy)
    kept = {name: tensor.clone() for name, tensor in first.personal["a"].items()}
    combine_spooled(algebra, first, [spool(tmp_path, random_report(algebra, first, "a", rng))], 2)
    assert all(torch.equal(first.personal["a"][name], tensor) for name, tensor in kept.items())


def test_coefficients_per_row_are_summed_per_row() -> None:
    sums = Sums()
    sums.add({ALL: {"p": Share(np.array([1.0, 0.0]), torch.tensor([[2.0, 4.0], [7.0, 7.0]]))}})
    sums.add({ALL: {"p": Share(np.array([3.0, 0.0]), torch.tensor([[6.0, 0.0], [9.0, 9.0]]))}})
    ((slot, name, summed),) = sums.drain()
    assert (slot, name) == (ALL, "p")
    assert summed.value.tolist() == [[20.0, 4.0], [0.0, 0.0]]
    assert np.asarray(summed.coefficient).tolist() == [4.0, 0.0]
    assert list(sums.drain()) == []


@given(
    slots=st.integers(1, 12),
    sites=st.integers(1, 12),
    shape=tensor_shapes,
    chunk=st.integers(1, 40),
    part=st.floats(0, 1),
    seed=seeds,
)
@settings(max_examples=60)
def test_slots_of_their_own_equal_a_matrix_product(
    slots: int, sites: int, shape: tuple[int, ...], chunk: int, part: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    coefficients = rng.normal(size=(slots, sites)) * (rng.random((slots, sites)) < part)
    values = [random_tensor(shape, rng) for _ in range(sites)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "CHUNK_VALUES", chunk)
        sums = Sums()
        for column, value in zip(coefficients.T, values, strict=True):
            # A site adds to some slots only, and a slot may turn up late.
            sums.add({f"s{row}": {"w": Share(float(c), value)} for row, c in enumerate(column) if c})
    drained = {slot: summed for slot, name, summed in sums.drain() if name == "w"}
    flat = np.stack([value.double().numpy() for value in values])
    assert drained.keys() == {f"s{row}" for row in range(slots) if coefficients[row].any()}
    for slot, summed in drained.items():
        weights = coefficients[int(slot[1:])]
        expected = np.tensordot(weights, flat, axes=1)
        np.testing.assert_allclose(summed.value.numpy(), expected, rtol=0, atol=1e-13)
        assert summed.value.shape == shape
        assert summed.coefficient == pytest.approx(weights.sum(), abs=1e-14)


def test_slots_may_get_different_tensors_under_one_name() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    sums = Sums()
    sums.add({"a": {"w": Share(2.0, one)}, "b": {"w": Share(3.0, other)}, "c": {"w": Share(1.0, one)}})
    drained = {slot: (summed.value.tolist(), summed.coefficient) for slot, _, summed in sums.drain()}
    assert drained == {"a": ([2.0, 4.0], 2.0), "b": ([30.0, 60.0], 3.0), "c": ([1.0, 2.0], 1.0)}
    assert list(sums.drain()) == []


def test_what_is_added_may_be_overwritten_afterwards() -> None:
    # combine_spooled reads every site into the same memory.
    value, prototypes = torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [2.0]])
    sums = Sums()
    for _ in range(2):
        sums.add({ALL: {"w": Share(1.0, value), "p": Share(np.array([1.0, 0.5]), prototypes)}})
        value.fill_(100.0)
        prototypes.fill_(100.0)
    drained = {name: summed.value.tolist() for _, name, summed in sums.drain()}
    assert drained == {"w": [101.0, 102.0], "p": [[101.0], [51.0]]}


def test_a_mixture_of_many_sites_in_many_blocks_equals_plain_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    layout = {f"d{number}.w": TensorSpec(Scope.PERSONAL, (3, number + 1)) for number in range(6)}
    algebra = Algebra(
        layout | {"w": TensorSpec(Scope.SHARED, (17, 5))}, {Scope.PERSONAL: Attention(), Scope.SHARED: SampleMean()}
    )
    start = random_start(algebra, rng)
    reports = [random_report(algebra, start, f"s{number}", rng) for number in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "PANEL_BYTES", 2000)
        patch.setattr(combine, "BLOCK_VALUES", 20)
        patch.setattr(combine, "CHUNK_VALUES", 7)
        after = combine_spooled(algebra, start, [spool(tmp_path, report) for report in reports], 1)
    for name in layout:
        rows = np.stack([report.update[name].double().numpy().ravel() for report in reports])
        units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        mixtures = softmax(units @ units.T / TAU) @ rows
        got = np.stack([after.personal[report.site][name].numpy().ravel() for report in reports])
        np.testing.assert_allclose(got, mixtures, rtol=1e-6, atol=1e-7)
    counts = np.array([report.tally[SAMPLES].item() for report in reports])
    mean = np.average([report.update["w"].double().numpy() for report in reports], axis=0, weights=counts)
    np.testing.assert_allclose(after.tensors["w"].numpy(), start.tensors["w"].numpy() + mean, rtol=0, atol=1e-6)


def test_a_spooled_report_of_another_shape_is_refused_and_not_cut(tmp_path: Path) -> None:
    algebra = spooled_twin(mean_algebra({"w": (4,), "v": (4,)}))
    start = State(0, {"w": torch.zeros(4), "v": torch.zeros(4)})
    update = {"w": torch.ones(6), "v": torch.ones(4)}
    entry = spool(tmp_path, Report("a", 1, "", update, {SAMPLES: np.ones(1)}))
    with pytest.raises(StorageFailure, match=r"'w' is F32 of shape \[6\], not F32 of shape \[4\]"):
        combine_spooled(algebra, start, [entry], 1)


def test_totals_add_key_by_key_and_leave_the_tallies_alone() -> None:
    first = {"n": np.array([2.0]), "held": np.array([1.0, 0.0])}
    second = {"n": np.array([5.0]), "held": np.array([1.0, 1.0])}
    sums = total([first, second])
    assert {key: value.tolist() for key, value in sums.items()} == {"n": [7.0], "held": [2.0, 1.0]}
    assert first["n"].tolist() == [2.0]
    assert total([]) == {}
