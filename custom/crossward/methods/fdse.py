"""FDSE (Wang et al., CVPR 2025): every layer is decomposed into a shared feature extractor and a personal skew eraser.

A layer with T outputs becomes a domain-agnostic feature extractor (DFE), a convolution with T / G outputs, and a
domain-specific skew eraser (DSE), which expands each of them by a cheap depthwise convolution (Eq. 2-3):

    X_DSE = DSE(ReLU(BN_DSE(DFE(X)))),   X_out = ReLU(BN_DFE(X_DSE))

A regularisation pulls the statistics of DSE's output to the global ones (Eq. 4-7). The server combines DFE modules and
the head by the direction that conflicts with nobody (Eq. 8), and gives every site a DSE mixed from those of sites that
resemble it (Eq. 9). Where paper and released code differ: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor, nn

from crossward.federation.blocks import merge_blocks
from crossward.federation.contract import ALL, Needs, Summed, Tally, Tensors, Vector
from crossward.federation.errors import BadInput
from crossward.federation.rules import TOLERANCE, EqualMean, Rule, SampleMean, Shown, check_planned, demand, divide
from crossward.federation.scopes import Scope, layout_of, mark, names_in
from crossward.methods.base import Batch, BlockFactory, Context, HeadFactory, Method, Model, Task, Trace
from crossward.methods.fdse_weights import attention as attention
from crossward.methods.fdse_weights import consensus_weights as consensus_weights
from crossward.methods.fdse_weights import spread_out, weights_of_moved
from crossward.methods.registry import register
from crossward.nets.decomposed import RUNNING, DecomposedConv
from crossward.nets.layers import LayerShape, MapNorm

_STATISTICS = "statistics/"


def consistency(
    batch_mean: Tensor,
    batch_var: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    global_mean: Tensor,
    global_var: Tensor,
    keep: float,
) -> Tensor:
    """L_Con of one layer (Eq. 5-6): distance of the updated running statistics from the global ones.

    Args:
        batch_mean: [d] of the batch (Eq. 4); gradients flow through it.
        batch_var: likewise, biased.
        running_mean: before the batch.
        running_var: before the batch.
        global_mean: as received this round.
        global_var: likewise.
        keep: gamma of Eq. 5, what stays of the old running value.
    """
    mean = keep * running_mean + (1 - keep) * batch_mean
    variance = keep * running_var + (1 - keep) * batch_var
    size = (variance.abs().sum() - global_var.abs().sum()) / variance.numel()
    return (mean - global_mean).square().mean() + size.square()


def depth_weights(layers: int, beta: float) -> Tensor:
    """Weights of the layers in L_Con, softmax of beta * l (Eq. 7)."""
    return (beta * torch.arange(1, layers + 1, dtype=torch.float64)).softmax(dim=0).float()


class _Blockwise(Rule):
    """A rule that treats each block of tensors by itself; the plan's rows are in the blocks' order."""

    needs: ClassVar[Needs] = "gram"

    def __init__(self, blocks: Mapping[str, Sequence[str]]) -> None:
        self._blocks = dict(blocks)
        self._row = {name: row for row, names in enumerate(self._blocks.values()) for name in names}

    def blocks(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        del names
        return self._blocks


class ConsensusMaximisation(_Blockwise):
    """Site k adds u_k * update / norm; the sum is scaled by the mean norm (Eq. 8). Who did not move is left out.

    Args:
        blocks: names of tensors by block.
        cap: largest u_k; a block in which too few moved to keep it stays as it is.
    """

    weighs: ClassVar[str] = "weights"

    def __init__(self, blocks: Mapping[str, Sequence[str]], *, cap: float | None = None) -> None:
        super().__init__(blocks)
        self._cap = cap

    def measure(self, update: Tensors) -> Tally:
        norms = np.array(
            [
                math.hypot(*(float(torch.linalg.vector_norm(update[name], dtype=torch.float64)) for name in names))
                for names in self._blocks.values()
            ]
        )
        return {"norms": norms, "moved": (norms > 0).astype(np.float64)}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        free = np.stack([weights_of_moved(gram[block]) for block in self._blocks])
        planned = {"weights": free, "length": totals["norms"] / np.maximum(1.0, totals["moved"])}
        if self._cap is None:
            return planned
        weights = np.stack([weights_of_moved(gram[block], self._cap) for block in self._blocks])
        return {**planned, "weights": weights, "capped": np.maximum(0.0, free - weights).sum(axis=1)}

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        blocks = len(self._blocks)
        shapes: dict[str, tuple[int, ...]] = {"weights": (blocks, cohort), "length": (blocks,)}
        check_planned(plan, shapes if self._cap is None else {**shapes, "capped": (blocks,)})
        weights = plan["weights"]
        demand(all((value >= 0).all() for value in plan.values()), "a weight or a length is negative")
        whole = np.abs(weights.sum(axis=1) - 1) <= TOLERANCE
        demand((whole | ~weights.any(axis=1)).all(), "the weights of a block do not sum to 1")
        most = 1.0 if self._cap is None else self._cap
        demand(weights.max() <= most + TOLERANCE, f"a site weighs more than {most:g} in a block")

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del cohort
        row, norm = self._row[name], float(tally["norms"][self._row[name]])
        return {ALL: float(plan["weights"][row, me]) / norm if norm else 0.0}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        length = float(plan["length"][self._row[name]])
        return summed.value.mul_(length).add_(current).to(current.dtype)

    def shown(self) -> Shown:
        return Shown(
            summed="update of length 1 times the site's weight u_k (Eq. 8), block by block",
            server=("how many sites moved, block by block",),
            planned=("the weight of every site and the mean length of the updates, block by block",),
        )


class SimilarityAware(_Blockwise):
    """Site j of the cohort gets the sum over k of A_jk * parameters_k, in a slot of its own (Eq. 9).

    Args:
        blocks: names of tensors by block.
        tau: temperature.
        others: from how many others at least a site receives, see ``spread_out``; as it comes if not given.
        averaged: whether the server gets the mean under masks.
    """

    weighs: ClassVar[str] = "attention"

    def __init__(
        self,
        blocks: Mapping[str, Sequence[str]],
        *,
        tau: float,
        others: int | None = None,
        averaged: bool = False,
    ) -> None:
        super().__init__(blocks)
        self._tau, self._others, self.averaged = tau, others, averaged

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        del totals
        free = np.stack([softmax(gram[block] / self._tau, axis=1) for block in self._blocks])
        if self._others is None:
            return {"attention": free}
        mixed = np.stack([spread_out(mixture, self._others) for mixture in free])
        return {"attention": mixed, "capped": np.maximum(0.0, free - mixed).sum(axis=2).mean(axis=1)}

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        blocks = len(self._blocks)
        shapes: dict[str, tuple[int, ...]] = {"attention": (blocks, cohort, cohort)}
        check_planned(plan, shapes if self._others is None else {**shapes, "capped": (blocks,)})
        mixed = plan["attention"]
        demand(all((value >= 0).all() for value in plan.values()), "a part of a mixture is negative")
        demand((np.abs(mixed.sum(axis=2) - 1) <= TOLERANCE).all(), "the parts of a mixture do not sum to 1")
        own = np.diagonal(mixed, axis1=1, axis2=2)
        demand((mixed.max(axis=2) <= own + TOLERANCE).all(), "a site is to receive more of another than of its own")
        given = mixed * (1 - np.eye(cohort))
        most = given.sum(axis=2) / max(1, min(self._others or 1, cohort - 1))
        demand((given.max(axis=2) <= most + TOLERANCE).all(), "one site stands out of what another receives")

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del tally
        column = plan["attention"][self._row[name], :, me]
        return {site: float(weight) for site, weight in zip(cohort, column, strict=True)}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        del name, plan
        return divide(summed).to(current.dtype)

    def shown(self) -> Shown:
        enough = "" if self._others is None else f", in which at least {self._others} others have a part"
        return Shown(
            reported="tensors as they are",
            summed=None,
            server=("the mean over the sites of their new personal tensors",) if self.averaged else (),
            planned=("how much of every site goes into the mixture of which other, block by block",),
            received=(f"its own mixture of the personal tensors of all sites{enough}",),
        )


class DecomposedModel(Model):
    """A model of decomposed layers, whose statistics it notes while training."""

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Trace:
        trace = super().forward(images, generator)
        for name, layer in decomposed_layers(self):
            if layer.statistics is not None:
                # Moved, not copied: a graph that hung on to the module would keep the batch in memory.
                trace.notes[_STATISTICS + name], layer.statistics = layer.statistics, None
        return trace


def decomposed_layers(model: nn.Module) -> list[tuple[str, DecomposedConv]]:
    """The decomposed layers by name, in the order of the model."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, DecomposedConv)]


@register
@dataclass(frozen=True, kw_only=True)
class FDSE(Method):
    """L = L_task + consistency * L_Con (Algorithm 1), DFE and head combined by Eq. 8, DSE by Eq. 9.

    Attributes:
        consistency: lambda, weight of L_Con; there is none in the first round, nor with GroupNorm.
        beta: how much more the deeper layers count in L_Con (Eq. 7).
        tau: temperature of the similarity between sites; smaller is more personal (Eq. 9).
        factor: G, how many channels DSE makes of one (Eq. 2-3).
        shared: how DFE and head are combined: ``"consensus"`` by Eq. 8, ``"samples"`` by sample counts.
        personal: ``"attention"`` mixes DSE modules by Eq. 9, ``"local"`` keeps each at its site.
        layers: what counts as a layer in Eq. 8-9: every tensor by itself, a whole decomposed layer, or as many of
            those in a row as a sketch can hide (``"merged"``).
        heard: how many sites count at least. In Eq. 8 none weighs more than one part in as many; of what a site gets
            from others in Eq. 9, none gives more than one part in one fewer, for the site itself counts. The paper has
            no such bound.
        ghost: DSE as in the released code's last version, see ``DecomposedConv``.
        newcomers: whether the server gets the mean of all DSE modules under secure aggregation too, for hospitals that
            join without having trained; they begin with the untrained ones otherwise. A site that works together
            with the server has an equation more with it.
    """

    name: ClassVar[str] = "fdse"
    title: ClassVar[str] = "Domain shift eraser"
    normalisation: ClassVar[str] = "after DSE averaged with its statistics; before it personal, with local statistics"
    coupled: ClassVar[frozenset[str]] = frozenset({"consistency"})
    clip: ClassVar[float] = 10.0
    # With three, what a site receives of others would be a sum of two.
    fewest_masked: ClassVar[int] = 4
    # Two have two mixtures, and a server that makes the one without a third site reads its erasers in the difference.
    most_colluders: ClassVar[float] = 1
    private_changes: ClassVar[tuple[str, ...]] = (
        "consistency is 0: L_Con is a statistic of the batch, and GroupNorm has no running statistics to pull to",
        "noise turns updates to nearly right angles, and the weights of Eq. 8 come close to even ones",
    )

    consistency: float = 0.1
    beta: float = 0.001
    tau: float = 0.5
    factor: int = 2
    shared: Literal["consensus", "samples"] = "consensus"
    personal: Literal["attention", "local"] = "attention"
    layers: Literal["tensor", "layer", "merged"] = "tensor"
    heard: int | None = None
    ghost: bool = False
    newcomers: bool = False

    def __post_init__(self) -> None:
        for option, fits, wanted in (
            ("consistency", 0 <= self.consistency < math.inf, "a finite number that is not negative"),
            ("beta", abs(self.beta) <= 100, "from -100 to 100"),
            ("tau", 1e-6 <= self.tau < math.inf, "a finite number of at least 0.000001"),
            ("factor", self.factor >= 2, "at least 2"),
            ("heard", self.heard is None or self.heard >= 2, "at least 2"),
        ):
            if not fits:
                raise BadInput(f"fdse: {option} is {getattr(self, option)}, and must be {wanted}")

    def under_masks(self, fewest: int) -> Self:
        """Blocks that a sketch does not give away, and weights by which at most one of so many sites goes unheard.

        Without the part of one that works together with the server, no other site is more than one in
        ``heard - 1`` of the rest: a half, where three are heard.
        """
        heard = max(fewest, self.fewest_masked) - 1
        return replace(self, layers="merged", heard=max(heard, self.heard or 0))

    def under_privacy(self) -> Self:
        """Without L_Con, which is a statistic of the batch."""
        return replace(self, consistency=0.0)

    def couples(self, model: Model) -> frozenset[str]:
        """L_Con has a weight to be switched off by, and needs layers that have statistics."""
        pulled = self.consistency and any(isinstance(layer.norm_dfe, MapNorm) for _, layer in decomposed_layers(model))
        return super().couples(model) - (frozenset() if pulled else self.coupled)

    def assemble(self, task: Task, block: BlockFactory, head: HeadFactory) -> Model:
        personal = Scope.PERSONAL if self.personal == "attention" else Scope.LOCAL

        def layer(shape: LayerShape) -> Sequence[nn.Module]:
            halves = DecomposedConv(
                **asdict(shape), factor=self.factor, norm=task.norm, activation=False, ghost=self.ghost
            )
            mark(halves, parameters=Scope.SHARED, buffers=Scope.BUFFER)
            mark(halves.norm_dse, parameters=personal, buffers=Scope.LOCAL)
            mark(halves.dse, parameters=personal, buffers=personal)
            return (halves,)

        backbone = task.backbone(layer)
        mark(backbone, parameters=Scope.SHARED, buffers=Scope.BUFFER)
        return DecomposedModel(backbone, block(task, backbone), head(task, backbone.out_channels))

    def rules(self, task: Task, model: Model) -> Mapping[Scope, Rule]:
        del task
        cap, others = (None, None) if self.heard is None else (1 / self.heard, self.heard - 1)
        shared = ConsensusMaximisation(self._blocks(model, Scope.SHARED), cap=cap)
        return {
            Scope.SHARED: shared if self.shared == "consensus" else SampleMean(),
            Scope.BUFFER: EqualMean(),
            Scope.PERSONAL: SimilarityAware(
                self._blocks(model, Scope.PERSONAL), tau=self.tau, others=others, averaged=self.newcomers
            ),
        }

    def _blocks(self, model: Model, scope: Scope) -> dict[str, list[str]]:
        """The tensors of a scope by what counts as a layer; outside the decomposed layers that is a module."""
        layout = layout_of(model)
        names = names_in(layout, scope)
        if self.layers == "tensor":
            return {name: [name] for name in names}
        owners = [f"{name}." for name, _ in decomposed_layers(model)]
        blocks: dict[str, list[str]] = {}
        for name in names:
            owner = next((owner for owner in owners if name.startswith(owner)), name.rpartition(".")[0])
            blocks.setdefault(owner, []).append(name)
        return blocks if self.layers == "layer" else merge_blocks(blocks, {name: layout[name].numel for name in names})

    def terms(self, model: Model, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The head's and the block's terms and L_Con, which the first round's statistics are not worth pulling to."""
        terms = super().terms(model, trace, batch, context)
        if self.consistency and context.round_number > 1 and _statistics_of(trace):
            terms["consistency"] = self.consistency * self.adaptation(model, trace, context)
        return terms

    def welcome(self, model: Model, received: Tensors) -> None:
        """A new hospital needs erasers to begin with."""
        super().welcome(model, received)
        if self.personal == "local":
            raise BadInput("fdse with personal=local keeps every skew eraser at its site: there is none for a newcomer")

    def adaptable(self, model: Model) -> Sequence[str]:
        """The DSE modules (Sec. 5.4) of layers that have statistics."""
        fitted = [name for name, layer in decomposed_layers(model) if isinstance(layer.norm_dfe, MapNorm)]
        owners = tuple(f"{name}.{part}." for name in fitted for part in ("norm_dse", "dse"))
        return [name for name, _ in model.named_parameters() if name.startswith(owners)]

    def adaptation(self, model: Model, trace: Trace, context: Context) -> Tensor:
        """L_Con over all layers (Eq. 7)."""
        statistics, layers, losses = _statistics_of(trace), dict(decomposed_layers(model)), []
        for name, (mean, variance, running_mean, running_var) in statistics.items():
            global_mean, global_var = (context.received[f"{name}.norm_dfe.{kind}"] for kind in RUNNING)
            keep = 1 - float(layers[name].norm_dfe.momentum)  # type: ignore[arg-type]
            losses.append(consistency(mean, variance, running_mean, running_var, global_mean, global_var, keep))
        return (depth_weights(len(losses), self.beta).to(trace.pooled.device) * torch.stack(losses)).sum()


def _statistics_of(trace: Trace) -> dict[str, Tensor]:
    noted = {name: tensor for name, tensor in trace.notes.items() if name.startswith(_STATISTICS)}
    return {name.removeprefix(_STATISTICS): tensor for name, tensor in noted.items()}
