from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.standins import report_of, run_round
from torch import Tensor

from crossward.federation.coordinator import Coordinator
from crossward.federation.scopes import Scope, layout_of
from crossward.methods import Task
from crossward.methods.fedavg import FedAvg

TASK = Task(classes=("a", "b"), channels=1, size=8, rounds=2, width=0.0625)
SIZES = {"large": 700.0, "small": 11.0, "middle": 93.0}


def trained_copies(model: torch.nn.Module) -> dict[str, dict[str, Tensor]]:
    """What the sites end up with: their own weights, statistics and counters."""
    rng = np.random.default_rng(0)
    copies = {}
    for place, site in enumerate(SIZES):
        copies[site] = {
            name: tensor + torch.from_numpy(np.asarray(rng.normal(size=tuple(tensor.shape)), dtype=np.float32))
            if tensor.is_floating_point()
            else tensor + 10 * (place + 1)
            for name, tensor in model.state_dict().items()
        }
    return copies


@pytest.fixture
def federated(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The server's tensors after a round, and the sites' trained models."""
    method = FedAvg()
    model = method.build(TASK)
    algebra, start = method.algebra(TASK, model), method.start(TASK, model)
    trained = trained_copies(model)
    coordinator = Coordinator(tmp_path, algebra, start, sites=list(SIZES), rounds=2, seed=0)
    reports = [
        report_of(
            algebra,
            start,
            site,
            {name: tensors[name] - start.tensors[name] for name in algebra.sent},
            samples=SIZES[site],
        )
        for site, tensors in trained.items()
    ]
    return run_round(coordinator, reports).tensors, trained


def test_the_model_is_the_mean_of_the_trained_models_weighted_by_sample_counts(
    federated: tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]],
) -> None:
    result, trained = federated
    assert any(name.endswith("running_var") for name in result)
    for name, tensor in result.items():
        stack = np.stack([tensors[name].numpy().astype(np.float64) for tensors in trained.values()])
        expected = np.average(stack, axis=0, weights=list(SIZES.values()))
        # The update is rounded once when the site subtracts, the result once more: two units in the last place.
        bound = 2 * np.finfo(np.float32).eps * np.abs(stack).max()
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=0, atol=bound, err_msg=name)
        assert tensor.dtype == torch.float32


def test_running_statistics_have_the_weights_of_the_parameters(
    federated: tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]],
) -> None:
    result, trained = federated
    for name in ("backbone.stem.1.running_mean", "backbone.stem.1.running_var", "backbone.stem.1.weight"):
        shares = [SIZES[site] / 804 for site in SIZES]
        expected = sum(share * trained[site][name].double() for share, site in zip(shares, SIZES, strict=True))
        torch.testing.assert_close(result[name].double(), expected, rtol=0, atol=2e-6)


def test_the_batch_counter_never_leaves() -> None:
    model = FedAvg().build(TASK)
    layout = layout_of(model)
    counters = {name for name in layout if name.endswith("num_batches_tracked")}
    assert len(counters) == 12
    assert {name for name, spec in layout.items() if spec.scope is Scope.LOCAL} == counters
    sent = FedAvg().algebra(TASK, model).sent
    assert set(sent) == set(layout) - counters
    assert counters.isdisjoint(FedAvg().start(TASK, model).tensors)


def test_parameters_are_shared_and_statistics_are_buffers() -> None:
    model = FedAvg().build(TASK)
    layout = layout_of(model)
    assert {name for name, spec in layout.items() if spec.scope is Scope.SHARED} == dict(
        model.named_parameters()
    ).keys()
    buffers = {name for name, spec in layout.items() if spec.scope is Scope.BUFFER}
    assert {name.rsplit(".", 1)[1] for name in buffers} == {"running_mean", "running_var"}
    assert len(buffers) == 24
    assert FedAvg().algebra(TASK, model).needs == "nothing"
