"""Gradient inversion: an image that would give the gradient that was seen (Zhu, Liu and Han 2019).

The attacker knows the model, guesses an image, and changes the guess until its gradient points where the one that was
seen points (Geiping et al. 2020: direction alone, so that clipping hides nothing, whatever the norm). Pixels are kept
between 0 and 1, and of guesses that fit alike the smoother one is preferred (total variation). What the noise makes
impossible shows against ``guessed_blindly``: the same attacker without a gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossward.federation.errors import BadInput

Gradient = Sequence[Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""The mean loss of a batch: model, pixels [b,c,h,w] in [0,1], labels [b]."""

_BEST_DB = 99.0
_EVALUATIONS = 20


@dataclass(frozen=True, kw_only=True)
class Attack:
    """How much an attacker tries.

    Attributes:
        restarts: guesses to begin with; the one that fits best in the end counts.
        sweeps: of L-BFGS, each of up to 20 evaluations.
        smooth: weight of the total variation.
        seed: of the first guesses.
        seconds: of the processor; no sweep begins after that many in a restart.
    """

    restarts: int = 2
    sweeps: int = 40
    smooth: float = 1e-4
    seed: int = 0
    seconds: float = math.inf


@dataclass(frozen=True)
class Found:
    """What an attack came to.

    Attributes:
        images: [b,c,h,w] in [0,1].
        misfit: of the directions, from 0 (the same) to 4 (opposite).
    """

    images: Tensor
    misfit: float


def gradient_of(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradient of a batch's loss for all trainable parameters: what one step of plain SGD gives away."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [part.detach() for part in torch.autograd.grad(loss(model, images, labels), parameters)]


def invert(
    model: nn.Module,
    loss: Loss,
    seen: Gradient,
    labels: Tensor,
    *,
    shape: Sequence[int],
    attack: Attack,
    progress: Callable[[], None] = lambda: None,
) -> Found:
    """Look for images whose gradient points where the one that was seen points.

    Args:
        model: as the attacker has it; not changed.
        loss: of the training.
        seen: one tensor for each trainable parameter, in the model's order, of any length together.
        labels: as the attacker knows or recovered them; there are as many images.
        shape: of an image, [c,h,w].
        attack: how much is tried.
        progress: called after every restart.

    Returns:
        Of all restarts the one that fits best, by what the attacker can see.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    length = _length(seen)
    if len(seen) != len(parameters) or not 0 < length < math.inf:
        raise BadInput("an attack takes a finite gradient that is not 0, with a tensor for each trained parameter")
    target = [part.detach() / length for part in seen]

    def misfit(pixels: Tensor) -> Tensor:
        made = torch.autograd.grad(loss(model, pixels, labels), parameters, create_graph=True)
        norm = torch.stack([part.square().sum() for part in made]).sum().sqrt().clamp_min(1e-20)
        return torch.stack([(a / norm - b).square().sum() for a, b in zip(made, target, strict=True)]).sum()

    best = Found(torch.full((len(labels), *shape), 0.5), math.inf)
    for restart in range(attack.restarts):
        generator = torch.Generator().manual_seed(attack.seed + restart)
        pixels = _descended(misfit, (len(labels), *shape), attack, generator)
        found = float(misfit(pixels).detach())
        if found < best.misfit:
            best = Found(pixels.detach(), found)
        progress()
    return best


def guessed_blindly(shape: Sequence[int]) -> Tensor:
    """The best guess without a gradient and without having seen images: grey."""
    return torch.full(tuple(shape), 0.5)


def psnr(guess: Tensor, truth: Tensor) -> float:
    """Likeness in decibel: 20 and more is recognised at once, below 12 little is left but shades."""
    error = float((guess.double() - truth.double()).square().mean())
    return _BEST_DB if error <= 0 else min(_BEST_DB, -10 * math.log10(error))


def best_psnr(guesses: Tensor, truths: Tensor) -> float:
    """The likeness of the image that is recovered best, whichever place it has: [a,c,h,w] against [b,c,h,w]."""
    return max(psnr(guess, truth) for guess in guesses for truth in truths)


def _descended(
    misfit: Callable[[Tensor], Tensor], shape: Sequence[int], attack: Attack, generator: torch.Generator
) -> Tensor:
    """Pixels where the misfit is small. They are squashed numbers, so that none leaves [0,1]."""
    raw = (0.5 * torch.randn(tuple(shape), generator=generator)).requires_grad_()

    def objective() -> Tensor:
        pixels = torch.sigmoid(raw)
        return misfit(pixels) + attack.smooth * _variation(pixels)

    kept = torch.sigmoid(raw).detach()
    optimiser = torch.optim.LBFGS(
        [raw],
        max_iter=_EVALUATIONS,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
    )
    began = time.process_time()

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = objective()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in range(attack.sweeps):
        if time.process_time() - began > attack.seconds:
            break
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        if not torch.isfinite(raw).all():
            return kept
        kept = torch.sigmoid(raw).detach()
    return kept


def _variation(pixels: Tensor) -> Tensor:
    across = (pixels[..., 1:] - pixels[..., :-1]).abs().mean()
    return across + (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean()


def _length(parts: Gradient) -> float:
    return float(torch.stack([part.double().square().sum() for part in parts]).sum().sqrt())
