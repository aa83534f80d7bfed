"""Whether clipped gradients of a batch are those of its images alone: looked at before a round spends anything.

A layer or a loss that mixes images would make a gradient that clipping does not bound. Nothing in a model's code can
prove that there is none, so one batch is held against its images one by one, by plain automatic differentiation.

In single precision the kernels for a batch and for one image differ in the last digit, and now and then a ReLU near
zero falls on the other side, by which a gradient changes in the third digit. What differs by too much is therefore
looked at again in double precision: rounding is gone there, and mixing stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.clipping import clipper_for
from crossward.privacy.dp.clipping_common import NotFinite, countable, factors_of

TOLERANCE = 1e-4
"""Largest relative difference; float32 and kernels for other batch sizes make some 1e-6."""

FLOOR = 0.01
"""Norms below this part of the bound, or of the longest gradient, count as this long: less is hidden by the noise."""


def check_per_sample(
    model: nn.Module,
    losses_of: Callable[[Tensor], Callable[[], Tensor]],
    *,
    count: int,
    clip: float,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare norms and the clipped sum of one batch with those of micro-batches of one.

    Args:
        model: in the mode that it is trained in. Its gradients are taken away.
        losses_of: gives, for some rows of a batch, what runs the forward pass and gives their losses. A row must get
            the same whatever rows come with it: nothing drawn by chance for a whole batch.
        count: rows of the batch.
        clip: largest norm of a sample's gradient.
        tolerance: largest relative difference.

    Returns:
        The largest relative difference: of a norm, and of the sum relative to the lengths that it is made of.

    Raises:
        PrivacyRefusal: they differ by more, or the model cannot be clipped at all.
        NotFinite: no image has a loss and a gradient that are finite, as after training that diverged.
    """
    if count < 2:
        raise PrivacyRefusal(f"{count} images cannot show whether a batch's images are mixed; it takes two or more")
    rows = torch.arange(count)
    difference, where = _difference(model, losses_of, rows, clip)
    if not difference <= tolerance:
        with _in_double_precision(model):
            try:
                difference, where = _difference(model, losses_of, rows, clip)
            except (RuntimeError, TypeError) as cause:
                raise PrivacyRefusal(
                    f"clipped gradients of {count} images together differ by {difference:.1e} from those of each image "
                    "alone, and double precision, which would show whether that is rounding, cannot be used: a tensor "
                    "outside the model has a type of its own"
                ) from cause
    if not difference <= tolerance:
        raise PrivacyRefusal(
            f"clipped gradients of {count} images together differ by {difference:.1e} from those of each image alone, "
            f"most at '{where}', and at most {tolerance:.0e} is allowed: the model or its loss mixes images, so "
            "nobody's part can be limited. Use a method, layers and loss terms that treat every image by itself"
        )
    return difference


def _difference(
    model: nn.Module, losses_of: Callable[[Tensor], Callable[[], Tensor]], rows: Tensor, clip: float
) -> tuple[float, str]:
    """The largest relative difference, and the parameter that is farthest off."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    clipped = clipper_for(model, clip=clip).backward(losses_of(rows))
    if clipped.left_out == len(rows):
        raise NotFinite(
            "the model gives no image a loss with a finite gradient, so that nothing shows whether images are mixed. "
            "Lower the learning rate"
        )
    norms = clipped.norms.double().cpu()
    together = {name: _taken(parameter) for name, parameter in named.items()}
    alone, summed = _one_by_one(named, losses_of, rows, clip)
    floor = max(FLOOR * min(clip, float(alone.max())), torch.finfo(torch.float32).tiny)
    of_norms = float(((norms - alone).abs() / alone.clamp_min(floor)).max())
    apart = {name: float(torch.linalg.vector_norm(together[name].double() - summed[name])) for name in named}
    of_sum = math.hypot(*apart.values()) / max(float(alone.clamp_max(clip).sum()), floor)
    return max(of_norms, of_sum), max(apart, key=lambda name: apart[name])


@contextmanager
def _in_double_precision(model: nn.Module) -> Iterator[None]:
    """Make a model one of float64, and afterwards what it was: the values come back exactly."""
    kinds = {value: value.dtype for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()}

    def doubled(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(_double, inputs)), {name: _double(each) for name, each in named.items()}

    handle = model.register_forward_pre_hook(doubled, with_kwargs=True)
    try:
        for value in kinds:
            value.data = value.data.double()
        yield
    finally:
        handle.remove()
        for value, kind in kinds.items():
            value.grad = None
            value.data = value.data.to(kind)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _one_by_one(
    named: dict[str, nn.Parameter], losses_of: Callable[[Tensor], Callable[[], Tensor]], rows: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms of every row's gradient, and the sum of the clipped ones, in double precision."""
    summed = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in named.items()}
    norms = torch.zeros(len(rows), dtype=torch.float64)
    for row in rows.split(1):  # type: ignore[no-untyped-call]
        losses = losses_of(row)()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: _taken(parameter).double() for name, parameter in named.items()}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        if not countable(losses, norm).all():
            continue
        norms[row] = norm.cpu()
        for name, gradient in gradients.items():
            summed[name] += factors_of(norm, clip) * gradient
    return norms, summed


def _taken(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, which it has no more; zeros where it has none."""
    gradient, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if gradient is None else gradient
