"""Clipped gradients by the long way: plain automatic differentiation, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Losses = Callable[[slice], Tensor]


def one_by_one(model: nn.Module, losses: Losses, count: int, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms [b] and the clipped sum by name; ``losses`` gives those of some rows."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms, sums = [], {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for row in range(count):
        (loss,) = losses(slice(row, row + 1))
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
        norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
        norms.append(norm)
        for name, gradient in gradients.items():
            sums[name] += gradient * (min(1.0, clip / norm) if norm else 1.0)
    return torch.tensor(norms, dtype=torch.float64), sums


def assert_as_one_by_one(
    clipper_of: Callable[..., object], model: nn.Module, losses: Losses, count: int, clip: float, tolerance: float
) -> None:
    """Norms and sums of a batch are those of its samples, relative to the lengths that they are made of."""
    norms, sums = one_by_one(model, losses, count, clip)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0) if parameter.requires_grad else None
    clipped = clipper_of(model, clip=clip).backward(lambda: losses(slice(None)))
    assert clipped.losses.shape == clipped.norms.shape == (count,)
    torch.testing.assert_close(clipped.norms.double(), norms, rtol=tolerance, atol=1e-12)
    length = float(norms.clamp_max(clip).sum())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        assert float((parameter.grad - sums[name]).norm()) <= tolerance * length + 1e-12, name
    together = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert together <= count * clip * (1 + tolerance) + 1e-12
