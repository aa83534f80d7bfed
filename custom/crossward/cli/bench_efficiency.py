"""What a round of a method costs one site: upload, parameters, FLOPs and time, as in F2DC's Table 4."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from crossward.cli.bench_variants import Variant
from crossward.federation.algebra import Algebra
from crossward.imaging.data import Split
from crossward.methods import Task, create
from crossward.methods.base import Context, Model
from crossward.site.devices import Device
from crossward.site.trainer import Training, train_round

EPOCH = 96
"""Images of an epoch that is timed, in whole batches; at full width and 64 px some ten seconds on one core."""

_BYTES = 4  # only float32 may leave a site
_CLASSES = tuple("abcdefg")  # as many as PACS has


def measure(
    variants: Sequence[Variant], *, width: float, size: int, repeats: int, batch_size: int
) -> list[dict[str, Any]]:
    """Measure every variant; the seconds in turns, so that what else the machine does hits all alike."""
    torch.set_num_threads(1)
    task = Task(classes=_CLASSES, channels=3, size=size, rounds=1, width=width)
    fedavg = create("fedavg")
    upload_of_fedavg = _values_sent(fedavg.algebra(task, fedavg.build(task)))
    seconds = _interleaved(variants, task, repeats=repeats, batch_size=batch_size)
    rows = []
    for variant, times in zip(variants, seconds, strict=True):
        model = _build(variant, task)
        algebra = variant.method.algebra(task, model)
        values = _values_sent(algebra)
        ratios = [own / first for own, first in zip(times, seconds[0], strict=True)]
        rows.append(
            {
                "method": variant.text,
                "values_up": values,
                "bytes_up": _BYTES * values,
                "bytes_up_against_fedavg": values / upload_of_fedavg,
                **parameters(model, algebra),
                "flops_per_image": flops(variant, task, batch_size=batch_size) / batch_size,
                "seconds_per_epoch": statistics.median(times),
                "against": variants[0].text,
                "time_ratio": statistics.median(ratios),
                "time_ratio_range": [min(ratios), max(ratios)],
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The measured rows in a reader's units."""
    return [
        {
            "method": row["method"],
            "values up": row["values_up"],
            "MB up": row["bytes_up"] / 1e6,
            "up / fedavg": row["bytes_up_against_fedavg"],
            "parameters": row["parameters"],
            "shared": row["shared"],
            "local": row["local"],
            "GFLOPs/image": row["flops_per_image"] / 1e9,
            "s/epoch": row["seconds_per_epoch"],
            f"time / {row['against']}": "{:.2f} ({:.2f}–{:.2f})".format(row["time_ratio"], *row["time_ratio_range"]),
        }
        for row in rows
    ]


def parameters(model: Model, algebra: Algebra) -> dict[str, int]:
    """Count the trainable parameters, and which of them leave a site."""
    counts = {"parameters": 0, "shared": 0, "local": 0}
    for name, parameter in model.named_parameters():
        counts["parameters"] += parameter.numel()
        counts["shared" if algebra.layout[name].scope.leaves else "local"] += parameter.numel()
    return counts


def flops(variant: Variant, task: Task, *, batch_size: int) -> int:
    """FLOPs of one training step, forward and backward, of the products and convolutions that PyTorch counts."""
    with FlopCounterMode(display=False) as counter:
        _train(variant, task, _random_images(batch_size, task), batch_size=batch_size)
    return int(counter.get_total_flops())


def _interleaved(variants: Sequence[Variant], task: Task, *, repeats: int, batch_size: int) -> list[list[float]]:
    """Seconds of an epoch per variant and repeat; a first turn warms up and is not counted."""
    split = _random_images(max(1, EPOCH // batch_size) * batch_size, task)
    seconds: list[list[float]] = [[] for _ in variants]
    for repeat in range(repeats + 1):
        for variant, times in zip(variants, seconds, strict=True):
            elapsed = _train(variant, task, split, batch_size=batch_size)
            if repeat:
                times.append(elapsed)
    return seconds


def _train(variant: Variant, task: Task, split: Split, *, batch_size: int) -> float:
    """Train a fresh model for one epoch with the site's own trainer, and give the seconds that took.

    On a CPU these are seconds of the processor, which other programs on a busy machine do not lengthen as they do
    the time that passes; with one thread the two are the same on an idle one.
    """
    model = _build(variant, task)
    device = Device.best().take(model)
    received = variant.method.start(task, model).tensors
    context = Context("bench", 1, task.rounds, received, torch.Generator(device.kind))
    training = Training(**{**variant.training, "epochs": 1, "batch_size": batch_size})
    clock = time.process_time if device.kind.type == "cpu" else time.perf_counter
    began = clock()
    # The tally that it returns is on the CPU, so that a graphics card has finished too.
    train_round(model, variant.method, split, context, training=training, device=device)
    return clock() - began


def _build(variant: Variant, task: Task) -> Model:
    return variant.method.build(task, block=variant.plugs.block, head=variant.plugs.head)


def _values_sent(algebra: Algebra) -> int:
    return sum(spec.numel for spec in algebra.sent.values())


def _random_images(count: int, task: Task) -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, task.channels, task.size, task.size, generator=generator)
    names = tuple(str(index) for index in range(count))
    return Split(images, torch.arange(count) % len(task.classes), names, names)
