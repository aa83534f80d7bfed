"""What a method is: a model whose parts carry scopes, per-sample loss terms, and a combining rule per scope."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.algebra import Algebra, Extra
from crossward.federation.contract import Plan, State, Tensors
from crossward.federation.errors import BadInput
from crossward.federation.rules import Rule, SampleMean
from crossward.federation.scopes import Scope, layout_of, mark
from crossward.federation.seeds import derive
from crossward.methods.task import Net as Net
from crossward.methods.task import Task as Task
from crossward.nets import Backbone
from crossward.uncertainty.evidence import Opinion


@dataclass(frozen=True)
class Batch:
    """Images [b,c,h,w] and labels [b] of one step."""

    images: Tensor
    labels: Tensor


@dataclass
class Context:
    """Where training stands; what a method may depend on beside model and batch.

    Attributes:
        site: this site's name.
        round_number: from 1.
        rounds: planned rounds.
        received: the tensors as received this round, on the training device.
        generator: for random numbers of the method; seeded anew for every (seed, site, round, step).
        plan: of the round before, public to all sites; none in the first.
    """

    site: str
    round_number: int
    rounds: int
    received: Tensors
    generator: torch.Generator
    plan: Plan | None = None


@dataclass
class Trace:
    """What the forward pass produced: the pooled features, the logits, and whatever parts noted on the way."""

    pooled: Tensor
    logits: Tensor
    notes: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """A method's answer for a batch of images.

    Attributes:
        probabilities: [b,K], rows sum to 1.
        uncertainty: [b] in [0,1]; for softmax, one minus the largest probability.
        features: [b,d], pooled.
        opinions: of every head by its name, and of the heads together as ``fused``; none without evidence.
        conflict: [b] between the heads' opinions; None where there are not two.
    """

    probabilities: Tensor
    uncertainty: Tensor
    features: Tensor
    opinions: Mapping[str, Opinion] = field(default_factory=dict)
    conflict: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """Put the answers for one or more batches together, in float32 on the CPU."""

        def joint(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([tensor.float().cpu() for tensor in tensors])

        conflicts = [part.conflict for part in parts if part.conflict is not None]
        opinions = {
            name: Opinion(
                joint(part.opinions[name].belief for part in parts),
                joint(part.opinions[name].uncertainty for part in parts),
            )
            for name in parts[0].opinions
        }
        return cls(
            joint(part.probabilities for part in parts),
            joint(part.uncertainty for part in parts),
            joint(part.features for part in parts),
            opinions,
            joint(conflicts) if conflicts else None,
        )


class FeatureBlock(nn.Module):
    """Plug point between the backbone's stages and the pool; this trivial filling changes nothing.

    A filling marks its own scopes when it is built, and brings its own loss terms.
    """

    coupled: frozenset[str] = frozenset()
    """Loss terms that are scalars of the whole batch."""

    def forget_local(self) -> None:
        """Work from now on without tensors that never leave a site, as at a hospital that did not train."""

    def forward(
        self, stage: int, features: Tensor, notes: dict[str, Tensor], generator: torch.Generator | None
    ) -> Tensor:
        """Transform the feature map after ``stage`` (from 0).

        ``notes`` carries tensors to the loss terms. Random numbers come from ``generator``; without one (at
        inference) the same image gives the same answer.
        """
        del stage, notes, generator
        return features

    def terms(self, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        del trace, batch, context
        return {}


class Head(nn.Module, ABC):
    """Plug point from pooled features to an answer. A filling marks its own scopes when it is built."""

    coupled: frozenset[str] = frozenset()
    """Loss terms that are scalars of the whole batch."""

    def forget_local(self) -> None:
        """Answer from now on without tensors that never leave a site, as at a hospital that did not train."""

    @abstractmethod
    def forward(self, pooled: Tensor, notes: dict[str, Tensor]) -> Tensor:
        """Give the logits [b,K]."""

    @abstractmethod
    def terms(self, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Give the head's loss terms."""

    @abstractmethod
    def predict(self, trace: Trace) -> Prediction:
        """Turn a trace into an answer."""


class SoftmaxHead(Head):
    """The trivial filling: one linear layer with cross-entropy."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        mark(self, parameters=Scope.SHARED, buffers=Scope.BUFFER)

    def forward(self, pooled: Tensor, notes: dict[str, Tensor]) -> Tensor:
        del notes
        logits: Tensor = self.linear(pooled)
        return logits

    def terms(self, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Per-sample cross-entropy."""
        del context
        return {"cross_entropy": functional.cross_entropy(trace.logits, batch.labels, reduction="none")}

    def predict(self, trace: Trace) -> Prediction:
        probabilities = trace.logits.float().softmax(dim=1)
        return Prediction(probabilities, 1 - probabilities.amax(dim=1), trace.pooled.float())


class Model(nn.Module):
    """A backbone with a feature block and a head plugged in."""

    def __init__(self, backbone: Backbone, block: FeatureBlock, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.block = block
        self.head = head

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Trace:
        notes: dict[str, Tensor] = {}
        features = self.backbone.stem(images)
        for index, stage in enumerate(self.backbone.stages):
            features = self.block(index, stage(features), notes, generator)
        pooled = self.backbone.pool(features)
        return Trace(pooled, self.head(pooled, notes), notes)

    def forget_local(self) -> None:
        """Answer from now on as at a hospital that did not train, which has only what was shared."""
        self.block.forget_local()
        self.head.forget_local()

    @property
    def coupled(self) -> frozenset[str]:
        """The loss terms of block and head whose value depends on the whole batch."""
        return self.block.coupled | self.head.coupled


BlockFactory = Callable[[Task, Backbone], FeatureBlock]
HeadFactory = Callable[[Task, int], Head]

BLOCKS: dict[str, BlockFactory] = {"none": lambda task, backbone: FeatureBlock()}
HEADS: dict[str, HeadFactory] = {"softmax": lambda task, features: SoftmaxHead(features, len(task.classes))}
"""What a study can plug into any method, by name; a method's file adds its own when it is imported."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods: federated averaging, from which each method overrides what its paper changes.

    Fields of a subclass are its options: typed, keyword-only, with the paper's defaults.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    normalisation: ClassVar[str]
    """The stated policy for normalisation layers, in a few words."""

    coupled: ClassVar[frozenset[str]] = frozenset()
    """The method's own loss terms whose value depends on the whole batch; a block or head declares its own."""

    clip: ClassVar[float] = 0.0
    """Largest norm of a step's gradient where the study does not say; none if 0."""

    fewest_masked: ClassVar[int] = 2
    """The fewest sites of a round under masks. With two each knows the other's part, which both have to allow; where
    the settings do not say so, a sum is over three at least, whatever the method."""

    most_colluders: ClassVar[float] = math.inf
    """With how many sites a server may work together and still read no other's part, however many take part."""

    private_changes: ClassVar[tuple[str, ...]] = ()
    """What is other than in the paper under differential privacy, beside the swap to GroupNorm; short sentences."""

    def under_masks(self, fewest: int) -> Self:
        """The same method with the options that a run under masks demands.

        Args:
            fewest: sites that every sum is over at least.
        """
        del fewest
        return self

    def under_privacy(self) -> Self:
        """The same method with the options that differential privacy demands: no loss term that couples samples."""
        return self

    def couples(self, model: Model) -> frozenset[str]:
        """The loss terms by which samples of a batch move each other, with these options and this model."""
        return self.coupled | model.coupled

    def block(self, task: Task, backbone: Backbone) -> FeatureBlock:
        """The feature block of this method, where the study does not say."""
        del task, backbone
        return FeatureBlock()

    def head(self, task: Task, features: int) -> Head:
        """The head of this method, where the study does not say."""
        return SoftmaxHead(features, len(task.classes))

    def build(self, task: Task, *, block: str | None = None, head: str | None = None) -> Model:
        """Build the model, scopes included; the same task gives the same start at every site.

        Args:
            task: of the study.
            block: plug in this block of ``BLOCKS`` instead of the method's own.
            head: plug in this head of ``HEADS`` instead of the method's own.
        """
        for plug, known in ((block, BLOCKS), (head, HEADS)):
            if plug is not None and plug not in known:
                raise BadInput(f"there is no '{plug}' to plug in; there is: {', '.join(known)}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(task.seed, "start"))
            model = self.assemble(
                task, self.block if block is None else BLOCKS[block], self.head if head is None else HEADS[head]
            )
            self.place(model)
        return model

    def assemble(self, task: Task, block: BlockFactory, head: HeadFactory) -> Model:
        """Put the parts together, each with its scopes; random numbers drawn here are the same at every site."""
        backbone = task.backbone()
        mark(backbone, parameters=Scope.SHARED, buffers=Scope.BUFFER)
        return Model(backbone, block(task, backbone), head(task, backbone.out_channels))

    def place(self, model: Model) -> None:
        """Change scopes where this method differs from sharing everything."""

    def rules(self, task: Task, model: Model) -> Mapping[Scope, Rule]:
        """The combining rule of each scope that leaves a site."""
        del task, model
        return {Scope.SHARED: SampleMean(), Scope.BUFFER: SampleMean()}

    def extras(self, task: Task, model: Model) -> Mapping[str, Extra]:
        """Tensors that sites report beside the model."""
        del task, model
        return {}

    def algebra(self, task: Task, model: Model) -> Algebra:
        """Bind the model's layout to this method's rules."""
        return Algebra(layout_of(model), self.rules(task, model), self.extras(task, model))

    def start(self, task: Task, model: Model) -> State:
        """The common start, as the server holds it: round 0."""
        algebra = self.algebra(task, model)
        tensors = model.state_dict()
        return State(0, {name: tensors[name].detach().clone() for name in algebra.sent if name in tensors})

    def terms(self, model: Model, trace: Trace, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Loss terms: per sample [b], already weighted; those named in ``coupled`` are scalars."""
        return {**model.head.terms(trace, batch, context), **model.block.terms(trace, batch, context)}

    def penalty(self, model: Model, context: Context) -> dict[str, Tensor]:
        """Loss terms that do not depend on data, already weighted scalars."""
        del model, context
        return {}

    def describe(self, model: Model, batches: Iterable[Batch], context: Context) -> Tensors:
        """Compute the extras after training, from one pass over the site's training batches in evaluation mode."""
        del model, batches, context
        return {}

    def private_parts(self, model: Model, batch: Batch, context: Context) -> dict[str, Tensor]:
        """What each sample adds to the sums that private extras are made of, [b, ...]; in evaluation mode.

        A sample's parts have a joint norm of at most 1. A method with extras has parts too, or none of it can leave.
        """
        del model, batch, context
        return {}

    def extras_of(self, sums: Tensors, context: Context) -> Tensors:
        """Compute the extras from noisy sums of private parts, and from nothing else that depends on data."""
        del sums, context
        return {}

    def predict(self, model: Model, images: Tensor) -> Prediction:
        """Answer for a batch of images."""
        return model.head.predict(model(images))

    def welcome(self, model: Model, received: Tensors) -> None:
        """Make a model that holds what was shared answer at a hospital that did not train.

        Args:
            model: with every tensor that leaves a site installed, personal ones as the mean over the sites.
            received: what the federation sends, extras included.
        """
        del received
        model.forget_local()

    def welcomes(self, model: Model) -> frozenset[str]:
        """Extras that such a hospital needs beside the shared model."""
        del model
        return frozenset()

    def adaptable(self, model: Model) -> Sequence[str]:
        """The parameters that such a hospital fits to its images without labels; none unless the method has a way."""
        del model
        return ()

    def adaptation(self, model: Model, trace: Trace, context: Context) -> Tensor:
        """The loss, without labels, that it fits them by; a scalar."""
        del model, context
        return trace.pooled.new_zeros(())
