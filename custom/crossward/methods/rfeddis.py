"""RFedDis (Wang et al.): a global and a local evidential head on one encoder, fused by their uncertainty.

The encoder and the global head are averaged; the local head and every normalisation layer stay at their site. Each
head gives evidence for every class (Eq. 4); Dempster's rule fuses the two opinions (Eq. 7-8, uncertainty/evidence.py).
A loss holds the heads' features apart (Eq. 2), so that the local one keeps what is the site's own.
Where paper and released code differ: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.errors import BadInput
from crossward.federation.rules import EqualMean, Rule, SampleMean
from crossward.federation.scopes import Scope, mark, mark_where
from crossward.methods.base import HEADS, Batch, Context, Head, Method, Model, Prediction, Task, Trace
from crossward.methods.registry import register
from crossward.nets.layers import Norm, is_normalisation, make_vector_norm
from crossward.uncertainty.evidence import Opinion, conflict, expected_probabilities, fuse, opinion

Reduction = Literal["sum", "reference"]
"""How the divergence of L_Dis is put together, see ``disentangling``."""


def expected_cross_entropy(alpha: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy expected under the Dirichlet distribution, digamma(S) - digamma(alpha_y) (Eq. 10); [b]."""
    at_label = alpha.gather(1, labels.unsqueeze(1)).squeeze(1)
    return torch.digamma(alpha.sum(dim=1)) - torch.digamma(at_label)


def kl_to_uniform(alpha: Tensor, labels: Tensor) -> Tensor:
    """KL of Dir(alpha~) from the uniform Dirichlet, alpha~ = y + (1 - y) alpha (Eq. 11); [b].

    It is the evidence for wrong classes that is punished. The paper prints a sum of Gammas in the denominator, with
    which it would be no divergence; it is their product. The logarithms of two Gammas nearly cancel, and much
    evidence would leave no digit of their difference in float32.
    """
    wrong = alpha.double().scatter(1, labels.unsqueeze(1), 1.0)
    total = wrong.sum(dim=1)
    normaliser = torch.lgamma(total) - math.lgamma(alpha.shape[1]) - torch.lgamma(wrong).sum(dim=1)
    spread = torch.digamma(wrong) - torch.digamma(total).unsqueeze(1)
    return (normaliser + ((wrong - 1) * spread).sum(dim=1)).to(alpha.dtype)


def disentangling(
    features_global: Tensor, features_local: Tensor, reduction: Reduction | Literal["none"] = "sum"
) -> Tensor:
    """L_Dis = exp(-D) (Eq. 2), D the symmetric KL between the softmaxed features of the two heads (Eq. 3).

    Args:
        features_global: [b,d] of the global head.
        features_local: [b,d] of the local head.
        reduction: ``"sum"`` sums D over the features of a sample and takes the mean of exp(-D) over samples;
            ``"none"`` is the same for each sample, [b]; ``"reference"`` divides D by samples x features first, as the
            released code does, which leaves hardly any gradient.
    """
    log_global, log_local = features_global.log_softmax(dim=1), features_local.log_softmax(dim=1)
    # KL(G|L) + KL(L|G) = sum_d (p_G - p_L) (log p_G - log p_L)
    divergence = ((log_global.exp() - log_local.exp()) * (log_global - log_local)).sum(dim=1)
    if reduction == "reference":
        return torch.exp(-divergence.sum() / max(1, features_global.numel()))
    each = torch.exp(-divergence)
    return each if reduction == "none" else each.sum() / max(1, len(each))


def ramp(context: Context) -> float:
    """lambda(t) = min(1, t / T) with t rounds done of T planned: 0 at the start, and the same after resuming."""
    return min(1.0, (context.round_number - 1) / context.rounds)


class EvidentialHead(nn.Module):
    """Three linear layers d - d/2 - d/4 - K with normalisation and ReLU between them."""

    def __init__(self, features: int, classes: int, *, norm: Norm = "batch") -> None:
        super().__init__()
        first, second = max(2, features // 2), max(2, features // 4)
        self.hidden = nn.Sequential(
            nn.Linear(features, first),
            make_vector_norm(norm, first),
            nn.ReLU(),
            nn.Linear(first, second),
            make_vector_norm(norm, second),
            nn.ReLU(),
        )
        self.logits = nn.Linear(second, classes)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Give the features before the last layer [b,d/4], and the logits [b,K]."""
        hidden = self.hidden(pooled)
        return hidden, self.logits(hidden)


class EvidentialHeads(Head):
    """A shared global head and a local one, fused; usable on any method.

    Args:
        features: of the encoder, pooled.
        classes: number of classes.
        uncertainty, cross_entropy, disentangling: weights of L_Un, L_CE and L_Dis.
        reduction: of L_Dis.
        norm: of the heads' hidden layers, always local.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        uncertainty: float = 1.0,
        cross_entropy: float = 1.0,
        disentangling: float = 1.0,
        reduction: Reduction = "sum",
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        self._uncertainty, self._cross_entropy, self._disentangling = uncertainty, cross_entropy, disentangling
        self._reduction = reduction
        if reduction == "reference":
            self.coupled = frozenset({"disentangling"})
        self._left_out = False
        self.shared = EvidentialHead(features, classes, norm=norm)
        self.local = EvidentialHead(features, classes, norm=norm)
        mark(self.shared, parameters=Scope.SHARED, buffers=Scope.LOCAL)
        mark(self.local, parameters=Scope.LOCAL, buffers=Scope.LOCAL)
        mark_where(self, is_normalisation, parameters=Scope.LOCAL)

    def forget_local(self) -> None:
        """A missing local head has no evidence: the vacuous opinion, which leaves the global head's as it is."""
        self._left_out = True

    def forward(self, pooled: Tensor, notes: dict[str, Tensor]) -> Tensor:
        """Give log(alpha / S) of the fused evidence: its softmax is the mean of the Dirichlet distribution."""
        for name, head in (("global", self.shared), ("local", self.local)):
            notes[f"hidden/{name}"], notes[f"logits/{name}"] = (part.float() for part in head(pooled))
            notes[f"evidence/{name}"] = functional.softplus(notes[f"logits/{name}"])
        if self._left_out:
            notes["evidence/local"] = torch.zeros_like(notes["evidence/global"])
        notes["evidence/fused"] = fuse(notes["evidence/global"], notes["evidence/local"])
        return expected_probabilities(notes["evidence/fused"]).log()

    def terms(self, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """L_Un on both heads and their fusion (Eq. 12), L_CE on both heads (Eq. 9), and L_Dis (Eq. 2), as in Eq. 13."""
        notes, growing = trace.notes, ramp(context)
        alphas = [notes[f"evidence/{name}"] + 1 for name in ("global", "local", "fused")]
        uncertain = [
            expected_cross_entropy(alpha, batch.labels) + growing * kl_to_uniform(alpha, batch.labels)
            for alpha in alphas
        ]
        plain = [
            functional.cross_entropy(notes[f"logits/{name}"], batch.labels, reduction="none")
            for name in ("global", "local")
        ]
        apart = disentangling(
            notes["hidden/global"], notes["hidden/local"], "none" if self._reduction == "sum" else "reference"
        )
        return {
            "uncertainty": self._uncertainty * torch.stack(uncertain).sum(dim=0),
            "cross_entropy": self._cross_entropy * torch.stack(plain).sum(dim=0),
            "disentangling": self._disentangling * growing * apart,
        }

    def predict(self, trace: Trace) -> Prediction:
        evidence = {name: trace.notes[f"evidence/{name}"] for name in ("global", "local", "fused")}
        opinions = {name: Opinion(*opinion(each)) for name, each in evidence.items()}
        return Prediction(
            expected_probabilities(evidence["fused"]),
            opinions["fused"].uncertainty,
            trace.pooled.float(),
            opinions,
            conflict(evidence["global"], evidence["local"]),
        )


@register
@dataclass(frozen=True, kw_only=True)
class RFedDis(Method):
    """L = L_Un + L_CE of both heads + lambda(t) L_Dis (Eq. 13); the weights of the terms are for ablations.

    Attributes:
        uncertainty: weight of L_Un, on the global head, the local head and their fusion.
        cross_entropy: weight of L_CE on both heads.
        disentangling: weight of L_Dis beside its ramp.
        reduction: of the divergence in L_Dis.
        weights: sites by sample counts, or all equal.
    """

    name: ClassVar[str] = "rfeddis"
    title: ClassVar[str] = "Reliable disentangling with evidential heads"
    normalisation: ClassVar[str] = "every normalisation layer stays local, in the encoder and in both heads"
    private_changes: ClassVar[tuple[str, ...]] = (
        "reduction is sum: L_Dis is the mean of exp(-KL) of every sample, not a number of the batch",
    )

    uncertainty: float = 1.0
    cross_entropy: float = 1.0
    disentangling: float = 1.0
    reduction: Reduction = "sum"
    weights: Literal["samples", "equal"] = "samples"

    def __post_init__(self) -> None:
        for option in ("uncertainty", "cross_entropy", "disentangling"):
            if not 0 <= getattr(self, option) < math.inf:
                raise BadInput(
                    f"rfeddis: {option} is {getattr(self, option)}, and must be a finite number that is not negative"
                )

    def under_privacy(self) -> Self:
        """L_Dis sample by sample."""
        return replace(self, reduction="sum")

    def head(self, task: Task, features: int) -> Head:
        return EvidentialHeads(
            features,
            len(task.classes),
            uncertainty=self.uncertainty,
            cross_entropy=self.cross_entropy,
            disentangling=self.disentangling,
            reduction=self.reduction,
            norm=task.norm,
        )

    def place(self, model: Model) -> None:
        mark_where(model, is_normalisation, parameters=Scope.LOCAL)

    def rules(self, task: Task, model: Model) -> Mapping[Scope, Rule]:
        del task, model
        rule = SampleMean() if self.weights == "samples" else EqualMean()
        return {Scope.SHARED: rule, Scope.BUFFER: rule}


HEADS["evidential"] = RFedDis().head
