"""FedCode's losses: contrast with prototypes (Eq. 11, 13), and features of two kinds held orthogonal (Eq. 14)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def semantic_contrast(
    semantic: Tensor, style: Tensor, labels: Tensor, class_prototypes: Tensor, style_prototypes: Tensor, tau: float
) -> Tensor:
    """SemCL (Eq. 11), per sample: near the prototype of its class, far from all others, its style, and the mean style.

    Args:
        semantic: z^c, [b,d].
        style: z^s of the same images, [b,d].
        labels: [b].
        class_prototypes: G, [K,d]; a row of zeros is a class that no site holds, left out. Its samples lose nothing.
        style_prototypes: P, [J,d].
        tau: temperature.
    """
    known = class_prototypes.abs().sum(dim=1) > 0
    near = cosines(semantic, class_prototypes).masked_fill(~known, -math.inf)
    return _contrast(near, semantic, style, style_prototypes, tau, labels, counts=known[labels])


def style_contrast(
    style: Tensor, semantic: Tensor, group: int, style_prototypes: Tensor, class_prototypes: Tensor, tau: float
) -> Tensor:
    """StyCL (Eq. 13), per sample: near its group's style, far from the others', its semantics, and the mean class.

    Args:
        style: z^s, [b,d].
        semantic: z^c of the same images, [b,d].
        group: j, the site's style group.
        style_prototypes: P, [J,d].
        class_prototypes: G, [K,d]; rows of zeros are left out of the mean.
        tau: temperature.
    """
    labels = torch.full((len(style),), group, device=style.device)
    near = cosines(style, style_prototypes)
    return _contrast(near, style, semantic, class_prototypes, tau, labels, counts=torch.ones_like(labels) > 0)


def decoupling(semantic: Tensor, style: Tensor) -> Tensor:
    """FDR, sum_d |z^s_d z^c_d| / (|z^s| |z^c|), per sample.

    Eq. 14 prints the norm of every component, with which it would be the constant d; these are the vectors' norms.
    """
    one, other = functional.normalize(semantic, dim=1), functional.normalize(style, dim=1)
    return (one * other).abs().sum(dim=1)


def _centre(prototypes: Tensor) -> Tensor:
    """The mean of the prototypes that are known, [1,d]."""
    known = (prototypes.abs().sum(dim=1, keepdim=True) > 0).to(prototypes.dtype)
    return (known * prototypes).sum(dim=0, keepdim=True) / known.sum().clamp_min(1)


def _contrast(
    near: Tensor, own: Tensor, other: Tensor, others: Tensor, tau: float, labels: Tensor, *, counts: Tensor
) -> Tensor:
    """Cross-entropy against prototypes, the sample's feature of the other kind, and the centre of that kind.

    Args:
        near: cosines to the prototypes of the same kind.
        own: features.
        other: features of the other kind.
        others: prototypes of the other kind.
        tau: temperature.
        labels: the prototype that each sample belongs to.
        counts: samples that have one; the others lose nothing.
    """
    between = functional.cosine_similarity(own, other, dim=1).unsqueeze(1)
    logits = torch.cat([near, between, cosines(own, _centre(others))], dim=1) / tau
    loss = torch.logsumexp(logits, dim=1) - logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return torch.where(counts, loss, torch.zeros_like(loss))


def cosines(vectors: Tensor, prototypes: Tensor) -> Tensor:
    """Cosine of every vector and every prototype, [b,K]."""
    with torch.autocast(vectors.device.type, enabled=False):
        return functional.normalize(vectors, dim=1) @ functional.normalize(prototypes, dim=1).T
