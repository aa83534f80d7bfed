"""The trainer's speed against the loop one would write by hand."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from crossward.imaging.data import Split
from crossward.methods import Task, create
from crossward.methods.base import Context, Model
from crossward.site.devices import Device
from crossward.site.trainer import Training, train_round

_IMAGES = 512
_CLASSES = 4


def against_bare_loop(*, width: float, size: int, repeats: int) -> list[dict[str, Any]]:
    """Train the same net on the same images with the trainer and with a bare loop, in turns."""
    torch.set_num_threads(1)
    device = Device.best()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_IMAGES, 1, size, size, generator=generator)
    labels = torch.randint(0, _CLASSES, (_IMAGES,), generator=generator)
    names = tuple(str(index) for index in range(_IMAGES))
    split = Split(images, labels, names, names)
    task = Task(classes=("a", "b", "c", "d"), channels=1, size=size, rounds=1, width=width)
    training = Training(epochs=1)
    seconds: dict[str, list[float]] = {"crossward": [], "bare": []}
    for repeat in range(repeats + 1):
        for name, run in (("crossward", _trainer), ("bare", _bare)):
            model = create("fedavg").build(task)
            elapsed = run(model, split, training, device.take(model))
            if repeat:
                seconds[name].append(elapsed)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [bare / ours for ours, bare in zip(seconds["crossward"], seconds["bare"], strict=True)]
    return [
        {
            "device": str(device),
            "net": f"ResNet-10 width {width:g}, {size} px",
            "images/s": _IMAGES / medians["crossward"],
            "bare images/s": _IMAGES / medians["bare"],
            "ratio": statistics.median(ratios),
        }
    ]


def _trainer(model: Model, split: Split, training: Training, device: Device) -> float:
    context = Context("bench", 1, 1, {}, torch.Generator(device.kind))
    began = time.perf_counter()
    train_round(model, create("fedavg"), split, context, training=training, device=device)
    return time.perf_counter() - began


def _bare(model: Model, split: Split, training: Training, device: Device) -> float:
    optimiser = torch.optim.SGD(
        model.parameters(), lr=training.learning_rate, momentum=training.momentum, weight_decay=training.weight_decay
    )
    model.train()
    began = time.perf_counter()
    for rows in torch.chunk(torch.randperm(len(split)), len(split) // training.batch_size):
        optimiser.zero_grad()
        with device.autocast():
            logits = model(device.images(split.images[rows])).logits
            loss = nn.functional.cross_entropy(logits, split.labels[rows].to(device.kind))
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    if device.kind.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
