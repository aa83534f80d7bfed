"""F2DC (Wang et al., 2026): local features are decoupled into robust and domain-related ones, and the latter corrected.

After a backbone stage with feature map f, the decoupler A_D scores every unit and a concrete mask M splits the map
(Eq. 3-4); the corrector A_C repairs what is domain-related (Eq. 6), and the sum goes on to the next stage:

    f+ = M f,   f- = (1 - M) f,   f* = f- + (1 - M) A_C(f-),   f~ = f+ + f* = f + (1 - M) A_C(f-)

Decoupler, corrector and the auxiliary classifier m stay at their site; the server weighs sites by size and by their
distance from an even spread over domains (Eq. 10-11). Where paper and released code differ: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.contract import ALL, SAMPLES, Needs, Tally, Vector
from crossward.federation.errors import BadInput
from crossward.federation.rules import Rule, SampleMean, Shown, check_planned, demand
from crossward.federation.scopes import Scope, mark
from crossward.methods.base import BLOCKS, Batch, Context, FeatureBlock, Method, Model, Task, Trace
from crossward.methods.registry import register
from crossward.nets import Backbone
from crossward.nets.layers import Norm, make_norm

REDUCTION = 8
"""Hidden channels of decoupler and corrector are C / 8: the released code's 64 for 512."""

LARGEST_EXPONENT = 10.0

Separation = Literal["mask", "model"]


def gumbel_mask(
    scores: Tensor, sigma: float, uniform_keep: Tensor | None = None, uniform_drop: Tensor | None = None
) -> Tensor:
    """Concrete mask M = sigmoid((S + g_a - g_b) / sigma), g = -log(-log u): Eq. 3 in closed form.

    Args:
        scores: attribution map S, of any shape.
        sigma: temperature; towards 0 the mask becomes binary.
        uniform_keep: u of g_a, in (0,1), shaped as the scores; without either of them the noise-free mask
            sigmoid(S / sigma), as at inference.
        uniform_drop: u of g_b.
    """
    if (uniform_keep is None) != (uniform_drop is None):
        raise ValueError("the mask takes two uniforms, or none")
    if uniform_keep is not None and uniform_drop is not None:
        scores = scores + _gumbel(uniform_keep) - _gumbel(uniform_drop)
    return torch.sigmoid(scores / sigma)


def _gumbel(uniform: Tensor) -> Tensor:
    """Noise -log(-log u); a u that was rounded to 0 or 1 is taken for its neighbour inside, to stay finite."""
    limits = torch.finfo(uniform.dtype)
    return -torch.log(-torch.log(uniform.clamp(limits.tiny, 1 - limits.eps / 2)))


class _TwoConvolutions(nn.Sequential):
    def __init__(self, channels: int, *, hidden: int | None = None, norm: Norm = "batch") -> None:
        hidden = hidden or max(2, channels // REDUCTION)
        super().__init__(
            nn.Conv2d(channels, hidden, 3, padding=1, bias=False),
            make_norm(norm, hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 3, padding=1, bias=False),
        )


class Decoupler(_TwoConvolutions):
    """A_D: feature map -> attribution map S of the same shape, the robustness of every unit (Eq. 3)."""


class Corrector(_TwoConvolutions):
    """A_C: domain-related map f- -> residual correction of the same shape (Eq. 6)."""


def hardest_wrong_label(logits: Tensor, labels: Tensor) -> Tensor:
    """The most confident class that is not the label, y-hat of Eq. 5; [b], without gradient."""
    return logits.detach().scatter(1, labels.unsqueeze(1), -math.inf).argmax(dim=1)


def separation(
    pooled_robust: Tensor, pooled_related: Tensor, tau: float, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Separability of Eq. 5: cosine of the pooled f+ and f- over tau (log exp cancels); a mean, or [b]."""
    cosine = functional.cosine_similarity(pooled_robust, pooled_related, dim=1) / tau
    return cosine.sum() / max(1, len(cosine)) if reduction == "mean" else cosine


def site_weight(
    n: float, total: float, num_domains: int, num_classes: int, alpha: float = 1.0, beta: float = 0.4
) -> float:
    """Numerator e_k of Eq. 11: what a site works out from its own size and the total alone.

    Eq. 10 with B_k = n_k / N for every class gives the discrepancy d_k = sqrt(C / 2) |n_k / N - 1 / Q|.
    """
    part = n / total if total else 0.0
    discrepancy = math.sqrt(num_classes / 2) * abs(part - 1 / num_domains)
    return 1 / (1 + math.exp(-(alpha * part - beta * discrepancy)))


def domain_aware_weights(
    sizes: Sequence[float], num_domains: int, num_classes: int, alpha: float = 1.0, beta: float = 0.4
) -> Vector:
    """Aggregation weights p_k of Eq. 10-11, [K]; they sum to 1."""
    total = float(sum(sizes))
    weights: Vector = np.array([site_weight(n, total, num_domains, num_classes, alpha, beta) for n in sizes])
    weights /= weights.sum()
    return weights


class DomainAware(Rule):
    """Every site adds e_k * update, and the sum is divided by the sum of e_k (Eq. 11)."""

    needs: ClassVar[Needs] = "totals"

    def __init__(self, *, domains: int | None, classes: int, alpha: float, beta: float) -> None:
        self._domains, self._classes, self._alpha, self._beta = domains, classes, alpha, beta

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        del gram
        return {"total": totals[SAMPLES]}

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        del cohort
        check_planned(plan, {"total": (1,)})
        demand(plan["total"].item() > 0, "there are no training images at all")

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del name, me
        n, total = float(tally[SAMPLES].item()), float(plan["total"].item())
        # With a total that is too small, weights would be far apart, and one site's update could stand out of the sum.
        demand(n <= total, "all sites together are said to have fewer training images than this one has")
        domains = self._domains or len(cohort)
        return {ALL: site_weight(n, total, domains, self._classes, self._alpha, self._beta)}

    def shown(self) -> Shown:
        return Shown(
            summed="update times the site's weight e_k (Eq. 11)",
            server=("the sum of the weights e_k",),
            planned=("how many training images all sites have together",),
        )


class DecouplingBlock(FeatureBlock):
    """Decoupler, corrector and auxiliary classifier m after each of the chosen stages.

    Args:
        channels: of every stage of the backbone.
        classes: number of classes.
        stages: after which stages, from 1.
        sigma, tau, lambda1, lambda2: as in Eq. 3, 5 and 9.
        modules: ``"local"`` keeps them at the site; ``"shared"`` averages them with the rest.
        separation: what may move to lower the cosine of Eq. 5, see ``F2DC``.
        norm: of the convolutions inside.
    """

    def __init__(
        self,
        channels: Sequence[int],
        classes: int,
        *,
        stages: Sequence[int] = (4,),
        sigma: float = 0.1,
        tau: float = 0.06,
        lambda1: float = 0.8,
        lambda2: float = 1.0,
        modules: Literal["local", "shared"] = "local",
        separation: Separation = "mask",
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        self._sigma, self._tau, self._lambda1, self._lambda2 = sigma, tau, lambda1, lambda2
        self._only_mask_moves = separation == "mask"
        widths = {str(stage - 1): channels[stage - 1] for stage in stages}
        self.decouplers = nn.ModuleDict({stage: Decoupler(width, norm=norm) for stage, width in widths.items()})
        self.correctors = nn.ModuleDict({stage: Corrector(width, norm=norm) for stage, width in widths.items()})
        self.classifiers = nn.ModuleDict({stage: nn.Linear(width, classes) for stage, width in widths.items()})
        self._modules_are_local = modules == "local"
        self._left_out = False
        if self._modules_are_local:
            mark(self, parameters=Scope.LOCAL, buffers=Scope.LOCAL)
        else:
            mark(self, parameters=Scope.SHARED, buffers=Scope.BUFFER)

    def forget_local(self) -> None:
        """Without decoupler and corrector f~ is f."""
        self._left_out = self._modules_are_local

    def forward(
        self, stage: int, features: Tensor, notes: dict[str, Tensor], generator: torch.Generator | None
    ) -> Tensor:
        key = str(stage)
        if key not in self.decouplers or self._left_out:
            return features
        scores = self.decouplers[key](features)
        uniforms = (
            [torch.rand(scores.shape, generator=generator, device=scores.device) for _ in range(2)] if generator else []
        )
        mask = gumbel_mask(scores.float(), self._sigma, *uniforms).to(features.dtype)
        robust = mask * features
        related = features - robust
        correction = (1 - mask) * self.correctors[key](related)
        # Pooling is linear: three of the four pooled maps follow from two sums and the correction.
        notes[f"robust/{key}"] = robust.mean(dim=(2, 3))
        notes[f"related/{key}"] = related.mean(dim=(2, 3))
        notes[f"corrected/{key}"] = notes[f"related/{key}"] + correction.mean(dim=(2, 3))
        if self._only_mask_moves and torch.is_grad_enabled():
            fixed = features.detach()
            held = mask * fixed
            notes[f"apart/{key}"] = torch.stack([held.mean(dim=(2, 3)), (fixed - held).mean(dim=(2, 3))])
        fused: Tensor = features + correction
        return fused

    def terms(self, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Per-sample L_DFD (Eq. 5) and L_DFC (Eq. 7), weighted and averaged over stages as in Eq. 9."""
        del context
        wrong = hardest_wrong_label(trace.logits, batch.labels)
        decoupling, correction = [], []
        for key, classify in self.classifiers.items():
            robust, related, corrected = (trace.notes[f"{kind}/{key}"] for kind in ("robust", "related", "corrected"))
            apart = trace.notes.get(f"apart/{key}", (robust, related))
            decoupling.append(
                separation(apart[0].float(), apart[1].float(), self._tau, reduction="none")
                + functional.cross_entropy(classify(robust), batch.labels, reduction="none")
                + functional.cross_entropy(classify(related), wrong, reduction="none")
            )
            correction.append(functional.cross_entropy(classify(corrected), batch.labels, reduction="none"))
        return {
            "decoupling": self._lambda1 * torch.stack(decoupling).mean(dim=0),
            "correction": self._lambda2 * torch.stack(correction).mean(dim=0),
        }


@register
@dataclass(frozen=True, kw_only=True)
class F2DC(Method):
    """L = L_CE + mean over stages of (lambda1 L_DFD + lambda2 L_DFC) (Eq. 9), sites weighed by Eq. 10-11.

    Attributes:
        modules: whether decoupler, corrector and m stay at their site (the paper's text) or are averaged (its tables
            of one global model, and a model for a site that did not train).
        stages: after which stages of the backbone they stand, from 1.
        sigma: temperature of the mask (Eq. 3).
        tau: temperature of the separation (Eq. 5).
        separation: what may move to lower the cosine of Eq. 5. ``"mask"``: the mask alone, with the features inside the
            cosine held fixed, so that the backbone hears of it only through what the decoupler reads. ``"model"``: the
            features too, which is Eq. 9 to the letter. At 1 / tau it is by far the steepest term, and in a short run
            the backbone serves it by features that no longer tell classes apart (docs/methods.md).
        lambda1: weight of L_DFD.
        lambda2: weight of L_DFC.
        weights: ``"domain"`` for Eq. 10-11, ``"samples"`` for sample counts as in FedAvg.
        domains: Q of Eq. 10; as many as sites take part if not given.
        alpha: weight of a site's size (Eq. 11).
        beta: weight of its discrepancy (Eq. 11).
    """

    name: ClassVar[str] = "f2dc"
    title: ClassVar[str] = "Feature decoupling and calibration"
    normalisation: ClassVar[str] = "the backbone's averaged with its statistics; the modules' own stays with them"

    modules: Literal["local", "shared"] = "local"
    stages: tuple[int, ...] = (4,)
    sigma: float = 0.1
    tau: float = 0.06
    separation: Separation = "mask"
    lambda1: float = 0.8
    lambda2: float = 1.0
    weights: Literal["domain", "samples"] = "domain"
    domains: int | None = None
    alpha: float = 1.0
    beta: float = 0.4

    def __post_init__(self) -> None:
        if not self.stages or len(set(self.stages)) < len(self.stages) or not set(self.stages) <= {1, 2, 3, 4}:
            raise BadInput(f"f2dc: stages are {list(self.stages)}, and must be different numbers from 1 to 4")
        for option in ("sigma", "tau"):
            if not 0 < getattr(self, option) < math.inf:
                raise BadInput(f"f2dc: {option} is {getattr(self, option)}, and must be a finite number above 0")
        for option in ("lambda1", "lambda2"):
            if not 0 <= getattr(self, option) < math.inf:
                raise BadInput(
                    f"f2dc: {option} is {getattr(self, option)}, and must be a finite number that is not negative"
                )
        for option in ("alpha", "beta"):
            # Far above, some site's weight would vanish in rounding.
            if not 0 <= getattr(self, option) <= LARGEST_EXPONENT:
                raise BadInput(f"f2dc: {option} is {getattr(self, option)}, and must be from 0 to {LARGEST_EXPONENT:g}")
        if self.domains is not None and self.domains < 1:
            raise BadInput(f"f2dc: domains is {self.domains}, and must be at least 1")

    def block(self, task: Task, backbone: Backbone) -> FeatureBlock:
        return DecouplingBlock(
            backbone.stage_channels,
            len(task.classes),
            stages=self.stages,
            sigma=self.sigma,
            tau=self.tau,
            lambda1=self.lambda1,
            lambda2=self.lambda2,
            modules=self.modules,
            separation=self.separation,
            norm=task.norm,
        )

    def rules(self, task: Task, model: Model) -> Mapping[Scope, Rule]:
        del model
        rule: Rule = SampleMean()
        if self.weights == "domain":
            rule = DomainAware(domains=self.domains, classes=len(task.classes), alpha=self.alpha, beta=self.beta)
        return {Scope.SHARED: rule, Scope.BUFFER: rule}


BLOCKS["f2dc"] = F2DC().block
BLOCKS["f2dc-shared"] = F2DC(modules="shared").block
