"""Subjective logic over evidence (RFedDis, Eq. 5-8): beliefs, one uncertainty, and the fusion of two opinions.

Evidence e >= 0 for K classes stands for a Dirichlet distribution with alpha = e + 1 and strength S = sum alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Opinion:
    """What one head says: ``belief`` [b,K] and ``uncertainty`` [b], which sum to 1 for every sample."""

    belief: Tensor
    uncertainty: Tensor


def strength(evidence: Tensor) -> Tensor:
    """Dirichlet strength S = sum_k (e_k + 1) of [b,K] evidence, as [b]."""
    return evidence.sum(dim=-1) + evidence.shape[-1]


def opinion(evidence: Tensor) -> tuple[Tensor, Tensor]:
    """Belief b_k = e_k / S and uncertainty u = K / S (Eq. 6).

    Returns:
        belief [b,K] and uncertainty [b]; they sum to 1. No evidence at all is the vacuous opinion, u = 1.
    """
    total = strength(evidence)
    return evidence / total.unsqueeze(-1), evidence.shape[-1] / total


def fuse(evidence_a: Tensor, evidence_b: Tensor) -> Tensor:
    """Dempster's combination of two opinions (Eq. 7-8), as evidence.

    Inserting Eq. 6 into Eq. 8 gives the closed form e = e_a + e_b + e_a * e_b / K: exact, and free of the
    division by 1 - C, which vanishes when two certain heads contradict each other. Vacuous evidence is neutral.
    The fused uncertainty is never above either head's, even where they contradict each other: look at
    ``conflict`` too.
    """
    return evidence_a + evidence_b + evidence_a * evidence_b / evidence_a.shape[-1]


def conflict(evidence_a: Tensor, evidence_b: Tensor) -> Tensor:
    """Conflict C = sum_{i != j} b_a,i * b_b,j of two opinions (below Eq. 8), [b] in [0,1)."""
    belief_a, uncertainty_a = opinion(evidence_a)
    belief_b, uncertainty_b = opinion(evidence_b)
    agreement = (belief_a * belief_b).sum(dim=-1)
    return ((1 - uncertainty_a) * (1 - uncertainty_b) - agreement).clamp_min(0)


def expected_probabilities(evidence: Tensor) -> Tensor:
    """Mean alpha / S of the Dirichlet distribution, [b,K]; rows sum to 1."""
    return (evidence + 1) / strength(evidence).unsqueeze(-1)
