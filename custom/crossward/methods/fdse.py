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
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize
from scipy.special import softmax
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.combine import normalise
from crossward.federation.contract import ALL, Needs, Summed, Tally, Tensors, Vector
from crossward.federation.errors import BadInput
from crossward.federation.rules import EqualMean, Rule, SampleMean, divide
from crossward.federation.scopes import Scope, layout_of, mark, names_in
from crossward.methods.base import Batch, BlockFactory, Context, HeadFactory, Method, Model, Task, Trace
from crossward.methods.registry import register
from crossward.nets.layers import LayerShape, MapNorm, Norm, at_least_single, make_norm, make_point_norm

FLATTEST = 1e-10
"""Directions flatter than this count as this steep, so that sites with equal updates share their weight evenly."""
_STATISTICS, _RUNNING = "statistics/", ("running_mean", "running_var")


class Expansion(nn.Conv2d):
    """DSE's linear operation: a convolution that makes ``factor`` channels of each, from that channel alone.

    Processors have a fast path for one output per channel and none for several, so it goes one output at a time.
    """

    def __init__(self, channels: int, factor: int, *, kernel: int) -> None:
        super().__init__(channels, factor * channels, kernel, padding=kernel // 2, groups=channels, bias=False)
        self._factor = factor

    def forward(self, features: Tensor) -> Tensor:
        outputs = [
            functional.conv2d(features, self.weight[first :: self._factor], padding=self.padding, groups=self.groups)
            for first in range(self._factor)
        ]
        return torch.stack(outputs, dim=2).flatten(start_dim=1, end_dim=2)


class DecomposedConv(nn.Module):
    """A convolution or fully connected layer in two: DFE, then DSE (Eq. 2-3).

    Args:
        channels_in, channels_out, kernel, stride, padding: of the layer that is decomposed.
        factor: G, how many channels DSE makes of one.
        norm: of both halves.
        activation: whether ReLU ends it; a residual block brings its own.
        ghost: DSE adds G - 1 channels beside each one instead, without ReLU between (the released code's last version).
        point: a fully connected layer, on maps of a single point.
        personal: scope of DSE.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        factor: int = 2,
        norm: Norm = "batch",
        activation: bool = True,
        ghost: bool = False,
        point: bool = False,
        personal: Scope = Scope.PERSONAL,
    ) -> None:
        super().__init__()
        inner = math.ceil(channels_out / factor)
        cheap = 3 if kernel > 1 else 1
        normalisation = partial(make_point_norm if point else make_norm, norm)
        self.channels_out = channels_out
        self.dfe = nn.Conv2d(channels_in, inner, kernel, stride=stride, padding=padding, bias=False)
        self.norm_dse = normalisation(inner)
        self.between: nn.Module = nn.Identity() if ghost else nn.ReLU()
        self.dse = Expansion(inner, factor - 1 if ghost else factor, kernel=cheap)
        self.norm_dfe = normalisation(channels_out)
        self.activation: nn.Module = nn.ReLU() if activation else nn.Identity()
        self._ghost = ghost
        self.statistics: Tensor | None = None
        mark(self, parameters=Scope.SHARED, buffers=Scope.BUFFER)
        mark(self.norm_dse, parameters=personal, buffers=Scope.LOCAL)
        mark(self.dse, parameters=personal, buffers=personal)

    def forward(self, features: Tensor) -> Tensor:
        extracted = self.between(self.norm_dse(self.dfe(features)))
        erased = self.dse(extracted)
        if self._ghost:
            erased = torch.cat([extracted, erased], dim=1)
        erased = erased[:, : self.channels_out]
        if self.training and torch.is_grad_enabled() and isinstance(self.norm_dfe, MapNorm) and erased.numel():
            # Mean and biased variance of the batch (Eq. 4), and the running ones before it.
            variance, mean = torch.var_mean(at_least_single(erased), dim=(0, 2, 3), correction=0)
            self.statistics = torch.stack([mean, variance, *(self.norm_dfe.get_buffer(name) for name in _RUNNING)])
        out: Tensor = self.activation(self.norm_dfe(erased))
        return out


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


def consensus_weights(gram: npt.ArrayLike, cap: float | None = None) -> Vector:
    """Weights u of the unit updates whose combination has the smallest norm (Eq. 8), on the simplex.

    The combination has a non-negative inner product with every update. It is found exactly: the nonnegative least
    squares problem min |R u|^2 + (1'u - 1)^2 with R'R = G is solved by a multiple of the wanted u.

    Args:
        gram: [N,N] inner products of unit updates; a site that did not move is left out by the caller.
        cap: largest weight of a site. Where it binds, the combination may conflict with somebody.
    """
    inner = np.asarray(gram, dtype=np.float64)
    count = len(inner)
    if inner.shape != (count, count) or not count or not np.isfinite(inner).all():
        raise ValueError(f"a Gram matrix is square and finite, not of shape {inner.shape} or with other numbers")
    if cap is not None and not cap * count >= 1 - 1e-12:
        raise ValueError(f"{count} weights of at most {cap} cannot sum to 1")
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    root = np.sqrt(np.maximum(values, FLATTEST))[:, None] * vectors.T
    target = np.append(np.zeros(count), 1.0)
    solution, _ = optimize.nnls(np.vstack([root, np.ones(count)]), target, maxiter=100 * count)
    weights: Vector = solution / solution.sum()
    return weights if cap is None or weights.max() <= cap else _capped(root, cap)


def _capped(root: Vector, cap: float) -> Vector:
    """The same under an upper bound, for which there is no shortcut: a small quadratic programme."""
    count, inner = len(root), root.T @ root
    found = optimize.minimize(
        lambda u: u @ inner @ u,
        np.full(count, 1 / count),
        jac=lambda u: 2 * inner @ u,
        bounds=[(0.0, cap)] * count,
        constraints={"type": "eq", "fun": lambda u: u.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    weights: Vector = np.clip(found.x, 0.0, cap)
    return weights


def attention(parameters: npt.ArrayLike, tau: float) -> Vector:
    """Mixture of every site, softmax of the cosines over tau (Eq. 9); [N,P] -> [N,N], rows sum to 1.

    All-zero parameters have no direction: their cosine with anything counts as 0.
    """
    rows = np.asarray(parameters, dtype=np.float64)
    mixture: Vector = softmax(normalise(rows @ rows.T) / tau, axis=1)
    return mixture


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
    """Site k adds u_k * update / norm; the sum is scaled by the mean norm (Eq. 8). Who did not move is left out."""

    def measure(self, update: Tensors) -> Tally:
        norms = np.array(
            [
                math.hypot(*(float(torch.linalg.vector_norm(update[name], dtype=torch.float64)) for name in names))
                for names in self._blocks.values()
            ]
        )
        return {"norms": norms, "moved": (norms > 0).astype(np.float64)}

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        weights = np.stack([_weights_of_moved(gram[block]) for block in self._blocks])
        return {"weights": weights, "length": totals["norms"] / np.maximum(1.0, totals["moved"])}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del cohort
        row, norm = self._row[name], float(tally["norms"][self._row[name]])
        return {ALL: float(plan["weights"][row, me]) / norm if norm else 0.0}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        length = float(plan["length"][self._row[name]])
        return summed.value.mul_(length).add_(current).to(current.dtype)


def _weights_of_moved(cosines: Vector) -> Vector:
    weights, moved = np.zeros(len(cosines)), np.flatnonzero(np.diagonal(cosines))
    weights[moved] = consensus_weights(cosines[np.ix_(moved, moved)]) if len(moved) else 0.0
    return weights


class SimilarityAware(_Blockwise):
    """Site j of the cohort gets the sum over k of A_jk * parameters_k, in a slot of its own (Eq. 9)."""

    def __init__(self, blocks: Mapping[str, Sequence[str]], *, tau: float) -> None:
        super().__init__(blocks)
        self._tau = tau

    def plan(self, totals: Tally, gram: Mapping[str, Vector]) -> Mapping[str, Vector]:
        del totals
        return {"attention": np.stack([softmax(gram[block] / self._tau, axis=1) for block in self._blocks])}

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        del tally
        column = plan["attention"][self._row[name], :, me]
        return {site: float(weight) for site, weight in zip(cohort, column, strict=True)}

    def advance(self, name: str, current: Tensor, summed: Summed, plan: Mapping[str, Vector]) -> Tensor:
        del name, plan
        return divide(summed).to(current.dtype)


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
        layers: what counts as a layer in Eq. 8-9: every tensor by itself, or a whole decomposed layer.
        ghost: DSE as in the released code's last version, see ``DecomposedConv``.
    """

    name: ClassVar[str] = "fdse"
    title: ClassVar[str] = "Domain shift eraser"
    normalisation: ClassVar[str] = "after DSE averaged with its statistics; before it personal, with local statistics"
    coupled: ClassVar[frozenset[str]] = frozenset({"consistency"})
    clip: ClassVar[float] = 10.0

    consistency: float = 0.1
    beta: float = 0.001
    tau: float = 0.5
    factor: int = 2
    shared: Literal["consensus", "samples"] = "consensus"
    personal: Literal["attention", "local"] = "attention"
    layers: Literal["tensor", "layer"] = "tensor"
    ghost: bool = False

    def __post_init__(self) -> None:
        for option, fits, wanted in (
            ("consistency", 0 <= self.consistency < math.inf, "a finite number that is not negative"),
            ("beta", abs(self.beta) <= 100, "from -100 to 100"),
            ("tau", 1e-6 <= self.tau < math.inf, "a finite number of at least 0.000001"),
            ("factor", self.factor >= 2, "at least 2"),
        ):
            if not fits:
                raise BadInput(f"fdse: {option} is {getattr(self, option)}, and must be {wanted}")

    def assemble(self, task: Task, block: BlockFactory, head: HeadFactory) -> Model:
        def layer(shape: LayerShape) -> Sequence[nn.Module]:
            return (
                DecomposedConv(
                    **asdict(shape),
                    factor=self.factor,
                    norm=task.norm,
                    activation=False,
                    ghost=self.ghost,
                    personal=Scope.PERSONAL if self.personal == "attention" else Scope.LOCAL,
                ),
            )

        backbone = task.backbone(layer)
        mark(backbone, parameters=Scope.SHARED, buffers=Scope.BUFFER)
        return DecomposedModel(backbone, block(task, backbone), head(task, backbone.out_channels))

    def rules(self, task: Task, model: Model) -> Mapping[Scope, Rule]:
        del task
        shared = ConsensusMaximisation(self._blocks(model, Scope.SHARED))
        return {
            Scope.SHARED: shared if self.shared == "consensus" else SampleMean(),
            Scope.BUFFER: EqualMean(),
            Scope.PERSONAL: SimilarityAware(self._blocks(model, Scope.PERSONAL), tau=self.tau),
        }

    def _blocks(self, model: Model, scope: Scope) -> dict[str, list[str]]:
        """The tensors of a scope by what counts as a layer; outside the decomposed layers that is a module."""
        names = names_in(layout_of(model), scope)
        if self.layers == "tensor":
            return {name: [name] for name in names}
        owners = [f"{name}." for name, _ in decomposed_layers(model)]
        blocks: dict[str, list[str]] = {}
        for name in names:
            owner = next((owner for owner in owners if name.startswith(owner)), name.rpartition(".")[0])
            blocks.setdefault(owner, []).append(name)
        return blocks

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
            global_mean, global_var = (context.received[f"{name}.norm_dfe.{kind}"] for kind in _RUNNING)
            keep = 1 - float(layers[name].norm_dfe.momentum)  # type: ignore[arg-type]
            losses.append(consistency(mean, variance, running_mean, running_var, global_mean, global_var, keep))
        return (depth_weights(len(losses), self.beta).to(trace.pooled.device) * torch.stack(losses)).sum()


def _statistics_of(trace: Trace) -> dict[str, Tensor]:
    noted = {name: tensor for name, tensor in trace.notes.items() if name.startswith(_STATISTICS)}
    return {name.removeprefix(_STATISTICS): tensor for name, tensor in noted.items()}
