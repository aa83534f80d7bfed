"""Membership inference: was this image trained on? By the loss of the finished model, or by all updates on the way.

A model fits what it was trained on, and mislabelled images ("canaries") it can only fit by heart. Who has the finished
model ranks images by their loss (Yeom et al. 2018). The server of a federation has every round's update as well: it
asks how much of each update points along the image's own gradient (Nasr, Shokri and Houmansadr 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from crossward.federation.contract import Vector
from crossward.federation.errors import BadInput
from crossward.privacy.dp.clipping import clipper_for

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A model's loss of every image: model, images [b,c,h,w], labels [b] -> [b]."""

_AT_ONCE = 128
_STEP = 1e-6  # of the difference quotient; in double precision, short of most kinks of a ReLU
_LOW = 0.01


@dataclass(frozen=True)
class Membership:
    """How well members were told from others.

    Attributes:
        auc: the chance that a member is ranked above one who is none; 0.5 is guessing.
        tpr: members found, where the threshold names 1 % of the others wrongly.
        members: how many there were.
        others: likewise.
    """

    auc: float
    tpr: float
    members: int
    others: int


@dataclass(frozen=True)
class Seen:
    """What an attacker has of one round.

    Attributes:
        model: the parameters that training started from, by name.
        update: what the attacker saw of the change, by name; of one site, or the sum over several.
    """

    model: Mapping[str, Tensor]
    update: Mapping[str, Tensor]


def membership(scores: Vector, members: NDArray[np.bool_]) -> Membership:
    """How well scores, high for a member, tell who is one.

    Raises:
        BadInput: there are no members, or nobody else.
    """
    inside, outside = np.sort(scores[members]), np.sort(scores[~members])
    if not len(inside) or not len(outside):
        raise BadInput("membership inference takes images that were trained on and images that were not")
    ranks = stats.rankdata(scores)
    auc = (ranks[members].sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside))
    # Beaten by at most 1 % of the others; of fewer than a hundred, by none.
    threshold = outside[len(outside) - 1 - int(_LOW * len(outside))]
    return Membership(float(auc), float((inside > threshold).mean()), len(inside), len(outside))


def by_loss(model: nn.Module, losses: Losses, images: Tensor, labels: Tensor) -> Vector:
    """Scores from the finished model alone: minus the loss."""
    with torch.no_grad():
        found = [losses(model, *batch) for batch in _batches(images, labels)]
    return -torch.cat(found).double().numpy()


def by_updates(
    model: nn.Module, losses: Losses, images: Tensor, labels: Tensor, seen: Sequence[Seen], *, clip: float
) -> Vector:
    """Scores from every round: how far its update goes along the image's clipped gradient, downhill.

    The inner product with an update is the slope of the image's loss along it: two forward passes in double precision
    give it for all images at once, and no gradient has to be kept.

    Args:
        model: of the architecture that was trained; left as it is.
        losses: of the training.
        images: to be ranked.
        labels: that they were, or would have been, trained with.
        seen: what the attacker has.
        clip: the norm that the training clips to, which is public.
    """
    own = copy.deepcopy(model)
    fine = copy.deepcopy(model).double()
    scores: Vector = np.zeros(len(images))
    for each in seen:
        own.load_state_dict(dict(each.model), strict=False)
        fine.load_state_dict(dict(each.model), strict=False)
        length = float(torch.stack([part.double().square().sum() for part in each.update.values()]).sum().sqrt())
        if length:
            norms = _norms(own, losses, images, labels, clip)
            slopes = _slopes(fine, losses, images, labels, {k: v.double() / length for k, v in each.update.items()})
            scores -= length * slopes * np.minimum(1.0, clip / np.maximum(norms, 1e-12))
    return scores


def _norms(model: nn.Module, losses: Losses, images: Tensor, labels: Tensor, clip: float) -> Vector:
    """The norm of every image's gradient."""
    clipper = clipper_for(model, clip=clip)
    found = [clipper.backward(partial(losses, model, *batch)).norms for batch in _batches(images, labels)]
    return torch.cat(found).double().numpy()


@torch.no_grad()
def _slopes(
    model: nn.Module, losses: Losses, images: Tensor, labels: Tensor, direction: Mapping[str, Tensor]
) -> Vector:
    """How fast every image's loss rises along a direction of length 1."""
    parameters = dict(model.named_parameters())

    def moved(by: float) -> Tensor:
        for name, part in direction.items():
            parameters[name].add_(part, alpha=by)
        return torch.cat([losses(model, *batch) for batch in _batches(images.double(), labels)])

    ahead, behind = moved(_STEP), moved(-2 * _STEP)
    return ((ahead - behind) / (2 * _STEP)).numpy()


def _batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(images), _AT_ONCE):
        yield images[first : first + _AT_ONCE], labels[first : first + _AT_ONCE]
