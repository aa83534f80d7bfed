from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from crossward.cli import bench_efficiency
from crossward.cli.bench_efficiency import flops, measure
from crossward.cli.bench_variants import parse_variant, parse_variants
from crossward.methods import Task, create
from tests.cli.conftest import Command
from tests.cli.test_bad_input import one_line

TINY = {"width": 0.0625, "size": 16, "repeats": 3, "batch_size": 4}
TASK = Task(classes=tuple("abcdefg"), channels=3, size=16, rounds=1, width=0.0625)


def flops_by_hand(task: Task) -> int:
    """Two per product, for outputs, for gradients of weights, and for those of inputs where these are no images."""
    model = create("fedavg").build(task)
    total = 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal total
        weights = module.weight.numel()
        places = output[0, 0].numel() if isinstance(module, nn.Conv2d) else 1
        total += 2 * weights * places * (2 if inputs[0].shape[1] == task.channels else 3)

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model.eval()(torch.zeros(1, task.channels, task.size, task.size))
    return total


def test_flops_of_a_step_are_those_of_every_product_and_grow_with_the_batch() -> None:
    fedavg = parse_variant("fedavg")
    assert flops(fedavg, TASK, batch_size=4) == 4 * flops_by_hand(TASK)
    assert flops(parse_variant("f2dc"), TASK, batch_size=4) > flops(fedavg, TASK, batch_size=4)


def test_every_method_is_timed_in_turns_and_the_first_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = iter([9.0, 9.0, 2.0, 3.0, 4.0, 4.0, 1.0, 3.0])
    order = []

    def train(variant, task, split, *, batch_size):
        order.append(variant.text)
        return next(epochs)

    monkeypatch.setattr(bench_efficiency, "_train", train)
    monkeypatch.setattr(bench_efficiency, "flops", lambda variant, task, *, batch_size: 8)
    first, second = measure(parse_variants("fedavg,fedbn"), **TINY)
    assert order == ["fedavg", "fedbn"] * 4
    assert (first["seconds_per_epoch"], first["time_ratio"], first["time_ratio_range"]) == (2.0, 1.0, [1.0, 1.0])
    # 3/2, 4/4 and 3/1: the ratio of the medians would be 3/2 too, their mean not.
    assert (second["seconds_per_epoch"], second["time_ratio"], second["time_ratio_range"]) == (3.0, 1.5, [1.0, 3.0])
    assert second["flops_per_image"] == 2


def test_what_is_sent_and_what_stays() -> None:
    fedavg, fedbn, rfeddis, local = measure(
        parse_variants("fedavg,fedbn,rfeddis,local"), width=0.0625, size=8, repeats=1, batch_size=32
    )
    model = create("fedavg").build(TASK)
    sent = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert (fedavg["values_up"], fedavg["bytes_up"]) == (sent, 4 * sent)
    assert (fedavg["parameters"], fedavg["shared"], fedavg["local"]) == (trained, trained, 0)
    normalisation = sum(
        parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
        for parameter in module.parameters()
    )
    assert (fedbn["shared"], fedbn["local"]) == (trained - normalisation, normalisation)
    assert fedbn["bytes_up_against_fedavg"] == (sent - 2 * normalisation) / sent
    assert rfeddis["shared"] + rfeddis["local"] == rfeddis["parameters"] > fedavg["parameters"]
    assert (local["values_up"], local["bytes_up_against_fedavg"], local["shared"]) == (0, 0, 0)


def test_the_command_prints_a_table_and_json(crossward: Command) -> None:
    base = (
        "bench",
        "efficiency",
        "--methods",
        "fedavg,f2dc[stages=[4]]",
        "--width",
        0.0625,
        "--size",
        8,
        "--repeats",
        1,
    )
    shown = crossward(*base, "--markdown")
    assert shown.code == 0, shown.err
    assert "time / fedavg" in shown.out
    assert "| f2dc[stages=[4]] |" in shown.out
    rows = json.loads(crossward(*base, "--json").out)
    assert rows[1]["bytes_up_against_fedavg"] == 1
    assert rows[1]["seconds_per_epoch"] > 0
    assert "Example:" in crossward("bench", "efficiency", "--help").out


def test_bad_input(crossward: Command) -> None:
    assert "fedavgg" in one_line(crossward("bench", "efficiency", "--methods", "fedavgg"))
    assert "width" in one_line(crossward("bench", "efficiency", "--methods", "fedavg", "--width", 0))
    assert crossward("bench", "efficiency", "--methods", "fedavg", "--repeats", 0).code == 2
