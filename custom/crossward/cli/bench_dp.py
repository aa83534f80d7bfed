"""``crossward bench dp``: what a step under differential privacy costs, in turns with plain SGD and Opacus."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.methods import Task, create
from crossward.methods.base import Model
from crossward.privacy.dp.clipping import clipper_for
from crossward.privacy.dp.noise import NoiseSource

PLAIN, OURS, HOOKS, GHOST = "plain SGD", "crossward", "Opacus hooks", "Opacus ghost"

_CLIP, _NOISE, _RATE = 1.0, 1.0, 1e-3
_CLASSES = tuple("abcdefg")

Row = dict[str, Any]
Step = Callable[[], object]


class _Logits(nn.Module):
    """A model whose answer is the logits alone, as Opacus wants it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images).logits
        return logits


def measure(depths: Sequence[int], *, width: float, size: int, batch_size: int, repeats: int) -> list[Row]:
    """Measure every way, with noise and without, on nets with GroupNorm; in turns, on one thread.

    Returns:
        For every net and way, the seconds of a step, their ratio to plain SGD (the median of the turns' ratios) with
        the lowest and highest, and by how much the norms of single images differ at most from those of plain
        automatic differentiation, one image at a time; None where there is nothing to clip.
    """
    torch.set_num_threads(1)
    return [
        row
        for depth in depths
        for row in _measure(depth, width=width, size=size, batch_size=batch_size, repeats=repeats)
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The measured rows in a reader's units."""
    return [
        {
            "net": row["net"],
            "step": row["step"],
            "noise": "yes" if row["noise"] else "no",
            "ms": 1e3 * row["seconds"],
            f"time / {PLAIN}": "{:.2f} ({:.2f}–{:.2f})".format(row["time_ratio"], *row["time_ratio_range"]),
            "norms off by": "" if row["norms_off_by"] is None else f"{row['norms_off_by']:.1e}",
        }
        for row in rows
    ]


def _measure(depth: int, *, width: float, size: int, batch_size: int, repeats: int) -> list[Row]:
    task = Task(classes=_CLASSES, channels=3, size=size, rounds=1, depth=depth, width=width, norm="group")
    model = _Logits(create("fedavg").build(task)).train()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, size, size, generator=generator)
    labels = torch.arange(batch_size) % len(_CLASSES)
    truth = _norms_one_by_one(model, images, labels)
    with warnings.catch_warnings():
        # Opacus and PyTorch warn of their own internals.
        warnings.simplefilter("ignore")
        off = {
            way: float(((norms - truth).abs() / truth).max())
            for way, norms in (
                (OURS, _our_norms(model, images, labels)),
                (HOOKS, _hooks_norms(model, images, labels)),
                (GHOST, _ghost_norms(model, images, labels)),
            )
        }
        steps = {
            (way, noise): make(copy.deepcopy(model), images, labels, noise)
            for way, make in _WAYS.items()
            for noise in ((False,) if way == PLAIN else (True, False))
        }
        seconds = _interleaved(steps, repeats)
    rows = []
    for (way, noise), times in seconds.items():
        ratios = [own / plain for own, plain in zip(times, seconds[PLAIN, False], strict=True)]
        rows.append(
            {
                "net": f"ResNet-{depth}",
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "step": way,
                "noise": noise,
                "seconds": statistics.median(times),
                "time_ratio": statistics.median(ratios),
                "time_ratio_range": [min(ratios), max(ratios)],
                "norms_off_by": off.get(way),
            }
        )
    return rows


def _interleaved(steps: Mapping[tuple[str, bool], Step], repeats: int) -> dict[tuple[str, bool], list[float]]:
    """Seconds of the processor, which other programs hardly lengthen; a first turn warms up and is not counted."""
    seconds: dict[tuple[str, bool], list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            elapsed = time.process_time() - began
            if repeat:
                seconds[name].append(elapsed)
    return seconds


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, foreach=True)


def _losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels, reduction="none")


def _plain(model: nn.Module, images: Tensor, labels: Tensor, noise: bool) -> Step:
    del noise
    optimiser = _sgd(model)

    def step() -> None:
        optimiser.zero_grad()
        _losses(model, images, labels).mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _ours(model: nn.Module, images: Tensor, labels: Tensor, noise: bool) -> Step:
    optimiser, clipper, source = _sgd(model), clipper_for(model, clip=_CLIP), NoiseSource()

    def step() -> None:
        clipper.backward(lambda: _losses(model, images, labels))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if noise:
            source.add_to(gradients, scale=_NOISE * _CLIP)
        torch._foreach_div_(gradients, float(len(labels)))
        optimiser.step()

    return step


def _hooks(model: nn.Module, images: Tensor, labels: Tensor, noise: bool) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    hooked = GradSampleModule(model)
    optimiser = DPOptimizer(_sgd(model), **_opacus_settings(labels, noise))

    def step() -> None:
        optimiser.zero_grad()
        _losses(hooked, images, labels).mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _ghost(model: nn.Module, images: Tensor, labels: Tensor, noise: bool) -> Step:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    hooked = GradSampleModuleFastGradientClipping(model, max_grad_norm=_CLIP, use_ghost_clipping=True)
    optimiser = DPOptimizerFastGradientClipping(_sgd(model), **_opacus_settings(labels, noise))
    loss = DPLossFastGradientClipping(hooked, optimiser, nn.CrossEntropyLoss())

    def step() -> None:
        optimiser.zero_grad()
        loss(hooked(images), labels).backward()
        optimiser.step()

    return step


def _opacus_settings(labels: Tensor, noise: bool) -> dict[str, Any]:
    multiplier = _NOISE if noise else 0.0
    return {"noise_multiplier": multiplier, "max_grad_norm": _CLIP, "expected_batch_size": len(labels)}


_WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor, bool], Step]] = {
    PLAIN: _plain,
    OURS: _ours,
    HOOKS: _hooks,
    GHOST: _ghost,
}


def _norms_one_by_one(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Norms by plain automatic differentiation, in micro-batches of one and in double precision.

    Where a ReLU is so near zero that single precision puts it on the other side, every way is off alike.
    """
    model = copy.deepcopy(model).double()
    norms = []
    for image, label in zip(images.double().split(1), labels.split(1), strict=True):  # type: ignore[no-untyped-call]
        model.zero_grad()
        _losses(model, image, label).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(torch.stack(torch._foreach_norm(gradients)).norm())
    return torch.stack(norms)


def _our_norms(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    model = copy.deepcopy(model)
    return clipper_for(model, clip=_CLIP).backward(lambda: _losses(model, images, labels)).norms.double()


def _hooks_norms(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    from opacus.grad_sample import GradSampleModule

    hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    _losses(hooked, images, labels).sum().backward()  # type: ignore[no-untyped-call]
    parts = [parameter.grad_sample.flatten(1).norm(dim=1) for parameter in hooked.parameters()]
    norms: Tensor = torch.stack(parts).double().norm(dim=0)
    return norms


def _ghost_norms(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

    hooked = GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), max_grad_norm=_CLIP, use_ghost_clipping=True, loss_reduction="sum"
    )
    _losses(hooked, images, labels).sum().backward()  # type: ignore[no-untyped-call]
    norms: Tensor = hooked.get_norm_sample()
    return norms.detach().double()
