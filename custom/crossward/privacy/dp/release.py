"""Noisy sums over patients: what a release beside the training steps is made of, such as class prototypes.

Addition is in fixed point. Each sample is clipped and cut to multiples of a power of two, towards zero, which makes
nothing longer: sums are exact in whatever order, and a patient moves them by at most 1, not by 1 and rounding errors
(Casacuberta et al. 2022). The noise comes in whole parts of the same power of two (noise.py), so that a noisy sum has
no digits but its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.noise import NoiseSource

CUT_BITS = 22
"""Samples are cut to multiples of 2^-22 of the noise or a little less. The noise's own step divides it."""


def noisy_sums(
    parts: Iterable[tuple[Mapping[str, Tensor], Tensor]], *, noise: float, source: NoiseSource
) -> dict[str, Tensor]:
    """Add up what samples bring, clipped and weighed, with Gaussian noise.

    With weights of one over the number of a patient's images, one patient more or less moves the sums jointly by at
    most 1 (L2), which is the sensitivity that ``noise`` is a multiple of. Who weighs has to see to that: patients are
    not known here.

    Args:
        parts: batches, each of tensors by name [b, ...], the same in every batch, and weights [b] from 0 to 1.
        noise: standard deviation of the noise of every coordinate.
        source: of the noise.

    Returns:
        The noisy sums by name, float64.

    Raises:
        PrivacyRefusal: the sums would not be what is accounted for.
    """
    if not 0 < noise < math.inf:
        raise _refused(f"its noise is {noise}, and must be a finite number above 0")
    grid = 2.0 ** (math.floor(math.log2(noise)) - CUT_BITS)
    sums: dict[str, Tensor] | None = None
    for batch, weights in parts:
        added = {name: part.sum(dim=0) for name, part in _bounded(batch, weights, grid).items()}
        if sums is None:
            sums = added
        elif {name: part.shape for name, part in added.items()} != {name: part.shape for name, part in sums.items()}:
            raise _refused("batches have different parts")
        else:
            sums = {name: part + added[name] for name, part in sums.items()}
    if sums is None:
        raise _refused("there is not one batch to make it of")
    source.add_to(list(sums.values()), scale=noise)
    return sums


def _bounded(batch: Mapping[str, Tensor], weights: Tensor, grid: float) -> dict[str, Tensor]:
    """Every sample's parts with a joint norm of at most its weight, in multiples of the grid.

    A sample with values that are not finite counts as nothing: a refusal would show that it is there.
    """
    weights = weights.double()
    if weights.dim() != 1 or any(part.dim() < 1 or len(part) != len(weights) for part in batch.values()):
        raise _refused("there is not one weight for each sample")
    if not ((weights >= 0) & (weights <= 1)).all():
        raise _refused("a weight is not from 0 to 1")
    exact = {name: part.double() for name, part in batch.items()}
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in exact.values()]
    out = ~torch.isfinite(torch.cat([weights.new_zeros(len(weights), 1), *rows], dim=1)).all(dim=1)
    exact = {name: part.masked_fill(_by_row(out, part), 0.0) for name, part in exact.items()}
    rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in exact.values()]
    norm = torch.linalg.vector_norm(torch.cat([weights.new_zeros(len(weights), 1), *rows], dim=1), dim=1)
    share = weights / norm.clamp_min(1)
    return {name: grid * torch.trunc(_by_row(share, part) * part / grid) for name, part in exact.items()}


def _by_row(values: Tensor, part: Tensor) -> Tensor:
    return values.view(-1, *[1] * (part.dim() - 1))


def _refused(cause: str) -> PrivacyRefusal:
    return PrivacyRefusal(f"a release of noisy sums was not made: {cause}. Nothing of it left the site")
