"""FedCode (Zhang et al.): style and semantics are learnt by two encoders and held apart by contrast with prototypes.

The semantic encoder is shared; the style encoder, whose normalisation keeps what instance normalisation would take away
(SAIN, Eq. 5-7), and the classifier stay at their site. Beside its update a site reports the mean semantic feature of
every class (Eq. 2) and its mean style (Eq. 8). The server averages the former (Eq. 4) and clusters the latter by FINCH
(Eq. 9); the loss pulls features to their own prototype and away from all others (Eq. 11, 13) and makes the two kinds
orthogonal (Eq. 14). What the paper leaves open or prints wrongly, and what is done here: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.algebra import Extra
from crossward.federation.contract import ALL, Needs, Summed, Tally, Tensors, Vector
from crossward.federation.errors import BadInput
from crossward.federation.rules import Rule, Shown, check_planned, demand, divide, per_row
from crossward.federation.scopes import Scope, layout_of, mark, mark_where
from crossward.methods.base import (
    Batch,
    BlockFactory,
    Context,
    FeatureBlock,
    Head,
    HeadFactory,
    Method,
    Model,
    SoftmaxHead,
    Task,
    Trace,
)
from crossward.methods.fedcode_losses import cosines
from crossward.methods.fedcode_losses import decoupling as decoupling
from crossward.methods.fedcode_losses import semantic_contrast as semantic_contrast
from crossward.methods.fedcode_losses import style_contrast as style_contrast
from crossward.methods.finch import first_neighbour_groups as first_neighbour_groups
from crossward.methods.finch import groups_by_cosine, join_small
from crossward.methods.registry import register
from crossward.nets import Backbone
from crossward.nets.layers import LayerShape, is_normalisation
from crossward.nets.style_norm import StyleAwareNorm

SEMANTIC, STYLE = "prototypes", "style"
"""Names of the extras: mean semantic features by class [K,d], and the mean style [1,d], received as [J,d]."""

COUNT = "count"
SHARES = {SEMANTIC: math.sqrt(1 / 2), STYLE: 1 / 2, COUNT: 1 / 2}
"""Norms of a sample's parts of the private sums, jointly 1. A class has fewer samples than a style: it gets more."""


class HeldPrototypes(Rule):
    """Class prototypes: the mean over the sites that hold a class (Eq. 4); one with too few keeps its last value."""

    needs: ClassVar[Needs] = "totals"

    def __init__(self, *, classes: int, holders: int) -> None:
        self._classes, self._holders = classes, holders

    def measure(self, update: Tensors) -> Tally:
        (prototypes,) = update.values()
        return {"present": (prototypes.abs().sum(dim=1) > 0).double().numpy()}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        del gram
        return {"held": (totals["present"] >= self._holders).astype(np.float64)}

    def bounded(self, plan: Mapping[str, Vector], totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, float]:
        """Of how many classes no prototype is made, although somebody holds them."""
        del gram
        return {"withheld": float(((totals["present"] > 0) & (plan["held"] == 0)).sum())}

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        check_planned(plan, {"held": (self._classes,)})
        held = plan["held"]
        demand(np.isin(held, (0, 1)).all(), "a class is neither held nor not")
        demand(cohort >= self._holders or not held.any(), f"a class is held by {self._holders}, and sites are fewer")

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del name, cohort, me
        return {ALL: tally["present"] * plan["held"]}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        del name, plan
        assert not isinstance(summed.coefficient, float)
        held = per_row((summed.coefficient > 0).astype(np.float64), current).bool()
        return torch.where(held, divide(summed), current.double()).float()

    def shown(self) -> Shown:
        enough = f"held by {self._holders} or more sites" if self._holders > 1 else "held by any site"
        return Shown(
            reported="mean feature of every class that it holds",
            summed=f"mean feature of every class {enough}",
            server=("how many sites hold each class",),
            planned=(f"which classes are {enough}",),
            received=(f"the mean over sites of the mean feature of every class {enough}",),
        )


class StyleGroups(Rule):
    """Style prototypes: the mean style of every group of sites (Eq. 9), in as many rows as there are groups.

    Args:
        clusters: ``"finch"`` groups sites by the cosine of their styles; ``"site"`` makes each a group of its own.
        members: groups of fewer sites join the group that is most alike.
    """

    needs: ClassVar[Needs] = "gram"

    def __init__(self, *, clusters: Literal["finch", "site"], members: int) -> None:
        self._clusters, self._members = clusters, members

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {STYLE: names}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        del totals
        return {"group": join_small(self._plain(gram[STYLE]), gram[STYLE], self._members).astype(np.float64)}

    def _plain(self, cosines: Vector) -> npt.NDArray[np.int64]:
        """The groups as they are before any joins another."""
        return groups_by_cosine(cosines) if self._clusters == "finch" else np.arange(len(cosines))

    def bounded(self, plan: Mapping[str, Vector], totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, float]:
        """How many groups there are, and how many there were before small ones joined others."""
        del totals
        plain = self._plain(gram[STYLE])
        return {
            name: float(len(np.unique(each))) for name, each in (("groups", plan["group"]), ("plain_groups", plain))
        }

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        check_planned(plan, {"group": (cohort,)})
        numbers, sizes = np.unique(plan["group"], return_counts=True)
        demand(np.array_equal(numbers, np.arange(len(numbers))), "style groups are not numbered from 0")
        demand(len(numbers) == 1 or sizes.min() >= self._members, f"a style group has less than {self._members} sites")

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del name, tally, cohort
        groups = plan["group"]
        return {ALL: (np.arange(int(groups.max()) + 1) == groups[me]).astype(np.float64)}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        del name, current, plan
        return divide(summed).float()

    def shown(self) -> Shown:
        enough = f", which has {self._members} or more sites or is the only one" if self._members > 1 else ""
        return Shown(
            reported="mean style",
            summed="mean style of every group of sites",
            planned=("which sites are in one style group",),
            received=(f"the mean style of every group{enough}",),
        )


class TwoEncoders(Model):
    """A semantic encoder with the classifier, and a style encoder beside it that only training looks at."""

    def __init__(self, backbone: Backbone, block: FeatureBlock, head: Head, style: Backbone, *, classes: int) -> None:
        super().__init__(backbone, block, head)
        self.style = style
        self.classes = classes
        mark(self.style, parameters=Scope.LOCAL, buffers=Scope.LOCAL)

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Trace:
        trace = super().forward(images, generator)
        if self.training:
            trace.notes[STYLE] = self.style_of(images)
        return trace

    def style_of(self, images: Tensor) -> Tensor:
        """z^s, [b,d]."""
        return self.style.pool(self.style(images))


class PrototypeHead(Head):
    """Answers by the nearest class prototype, as SemCL trains the features to: for a hospital without a classifier."""

    def __init__(self, prototypes: Tensor, *, tau: float) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(prototypes.clone(), requires_grad=False)
        self._tau = tau
        mark(self, parameters=Scope.SHARED, buffers=Scope.BUFFER)

    def forward(self, pooled: Tensor, notes: dict[str, Tensor]) -> Tensor:
        del notes
        known = self.prototypes.abs().sum(dim=1) > 0
        return (cosines(pooled, self.prototypes) / self._tau).masked_fill(~known, -math.inf)

    terms = SoftmaxHead.terms
    predict = SoftmaxHead.predict


@register
@dataclass(frozen=True, kw_only=True)
class FedCode(Method):
    """L = L_CE + alpha (semantic * SemCL + style * StyCL) + beta FDR (Eq. 16).

    Attributes:
        alpha: weight of both contrasts.
        beta: weight of the orthogonality.
        tau: temperature of the contrasts (Eq. 10).
        semantic: weight of SemCL inside the bracket, for ablations.
        style: weight of StyCL inside the bracket, for ablations.
        clusters: style groups by FINCH, or one per site, for sites that are known to be different domains.
        holders: how many sites must hold a class before its prototype is made.
        members: style groups of fewer sites join the group that is most alike to them.
        share_head: average the classifier too, for one complete global model.
        local_norm: keep the semantic encoder's normalisation at its site, as FedBN does.
        style_norm: ``"sain"``, or ``"batch"`` for a style encoder like the semantic one.
        floor: under differential privacy, the smallest noisy number of patients of a class that has a prototype.
    """

    name: ClassVar[str] = "fedcode"
    title: ClassVar[str] = "Contrastive feature decoupling"
    normalisation: ClassVar[str] = "the semantic encoder's averaged with its statistics; the style encoder's local"
    clip: ClassVar[float] = 10.0
    fewest_masked: ClassVar[int] = 3
    private_changes: ClassVar[tuple[str, ...]] = (
        "prototypes are made of noisy sums of features of length 1, in which every patient counts once; they cost "
        "budget beside the steps",
        "a class with a noisy number of patients below floor has no prototype of this site",
    )

    alpha: float = 20.0
    beta: float = 1.0
    tau: float = 0.5
    semantic: float = 1.0
    style: float = 1.0
    clusters: Literal["finch", "site"] = "finch"
    holders: int = 1
    members: int = 1
    share_head: bool = False
    local_norm: bool = False
    style_norm: Literal["sain", "batch"] = "sain"
    floor: int = 20

    def __post_init__(self) -> None:
        for option in ("alpha", "beta", "semantic", "style"):
            value = getattr(self, option)
            if not 0 <= value < math.inf:
                raise BadInput(f"fedcode: {option} is {value}, and must be a finite number that is not negative")
        if not 0 < self.tau < math.inf:
            raise BadInput(f"fedcode: tau is {self.tau}, and must be a finite number above 0")
        for option in ("holders", "members", "floor"):
            if getattr(self, option) < 1:
                raise BadInput(f"fedcode: {option} is {getattr(self, option)}, and must be at least 1")

    def under_masks(self, fewest: int) -> Self:
        """No prototype of fewer sites than that: whoever is in the mean of two knows the other's part."""
        return replace(self, holders=max(self.holders, fewest), members=max(self.members, fewest))

    def assemble(self, task: Task, block: BlockFactory, head: HeadFactory) -> Model:
        plain = super().assemble(task, block, head)
        style = task.backbone(_style_layer if self.style_norm == "sain" else None)
        return TwoEncoders(plain.backbone, plain.block, plain.head, style, classes=len(task.classes))

    def place(self, model: Model) -> None:
        if isinstance(model.head, SoftmaxHead) and not self.share_head:
            mark(model.head, parameters=Scope.LOCAL, buffers=Scope.LOCAL)
        if self.local_norm:
            mark_where(model, is_normalisation, parameters=Scope.LOCAL)

    def extras(self, task: Task, model: Model) -> Mapping[str, Extra]:
        classes, features = len(task.classes), model.backbone.out_channels
        return {
            SEMANTIC: Extra((classes, features), HeldPrototypes(classes=classes, holders=self.holders)),
            STYLE: Extra((1, features), StyleGroups(clusters=self.clusters, members=self.members)),
        }

    def terms(self, model: Model, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The head's and the block's terms, FDR, and the contrasts as soon as there are prototypes."""
        semantic, style = trace.pooled.float(), trace.notes[STYLE].float()
        terms = super().terms(model, trace, batch, context)
        terms["orthogonality"] = self.beta * decoupling(semantic, style)
        if SEMANTIC not in context.received:
            return terms
        classes, styles = context.received[SEMANTIC], context.received[STYLE]
        near = semantic_contrast(semantic, style, batch.labels, classes, styles, self.tau)
        terms["semantic_contrast"] = self.alpha * self.semantic * near
        group = _group_of(context)
        if group is not None:
            near = style_contrast(style, semantic, group, styles, classes, self.tau)
            terms["style_contrast"] = self.alpha * self.style * near
        return terms

    def describe(self, model: Model, batches: Iterable[Batch], context: Context) -> Tensors:
        """Client prototypes: mean semantic feature by class (Eq. 2; zeros for an absent class), mean style (Eq. 8)."""
        del context
        assert isinstance(model, TwoEncoders)
        sums = torch.zeros(model.classes + 1, model.backbone.out_channels, dtype=torch.float64)
        counts = torch.zeros(model.classes, dtype=torch.float64)
        for batch in batches:
            semantic, style = model(batch.images).pooled.double(), model.style_of(batch.images).double()
            member = functional.one_hot(batch.labels, model.classes).double()
            sums += torch.cat([member.T @ semantic, style.sum(dim=0, keepdim=True)]).cpu()
            counts += member.sum(dim=0).cpu()
        means = sums / torch.cat([counts, counts.sum().view(1)]).clamp_min(1).unsqueeze(1)
        return {SEMANTIC: means[:-1].float(), STYLE: means[-1:].float()}

    def private_parts(self, model: Model, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Every sample's features, of length 1, and its class."""
        del context
        assert isinstance(model, TwoEncoders)
        semantic, style = model(batch.images).pooled, model.style_of(batch.images)
        member = functional.one_hot(batch.labels, model.classes).double()
        parts = {
            SEMANTIC: member.unsqueeze(2) * functional.normalize(semantic.double(), dim=1).unsqueeze(1),
            STYLE: functional.normalize(style.double(), dim=1),
            COUNT: member,
        }
        return {name: SHARES[name] * part for name, part in parts.items()}

    def extras_of(self, sums: Tensors, context: Context) -> Tensors:
        """Client prototypes (Eq. 2, 8) from noisy sums; a class whose noisy count is below ``floor`` is absent."""
        del context
        semantic, style, count = (sums[name].double() / SHARES[name] for name in (SEMANTIC, STYLE, COUNT))
        means = semantic / count.clamp_min(self.floor).unsqueeze(1)
        # No mean of vectors of length 1 is longer: what is, is noise, and would weigh more among the sites' means.
        inside = means / torch.linalg.vector_norm(means, dim=1, keepdim=True).clamp_min(1)
        held = (count >= self.floor).unsqueeze(1)
        return {
            SEMANTIC: torch.where(held, inside, torch.zeros_like(inside)).float(),
            STYLE: functional.normalize(style.unsqueeze(0), dim=1).float(),
        }

    def welcomes(self, model: Model) -> frozenset[str]:
        leaves = any(spec.scope.leaves for spec in layout_of(model.head).values())
        return frozenset() if leaves else frozenset({SEMANTIC})

    def welcome(self, model: Model, received: Tensors) -> None:
        """Without a classifier of its own a new hospital answers by the class prototypes."""
        super().welcome(model, received)
        if SEMANTIC not in self.welcomes(model):
            return
        prototypes = received.get(SEMANTIC)
        if prototypes is None or not prototypes.any():
            raise BadInput(
                "fedcode keeps classifiers at their sites, and there are no class prototypes yet to answer by; "
                "train at least one round, lower holders, or use share_head"
            )
        model.head = PrototypeHead(prototypes, tau=self.tau)


def _style_layer(shape: LayerShape) -> Sequence[nn.Module]:
    """A layer of the style encoder: a convolution and SAIN."""
    return shape.convolution(), StyleAwareNorm(shape.channels_out)


def _group_of(context: Context) -> int | None:
    """The style group of this site; none where it took no part in the round before."""
    if context.plan is None or context.site not in context.plan.cohort:
        return None
    return int(context.plan.values[STYLE]["group"][context.plan.cohort.index(context.site)])
