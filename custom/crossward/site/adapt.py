"""A new hospital without labels fits a trained federation's model to its own images, stage by stage.

Every method's model gets the hospital's own statistics. A method with parts made to be fitted without labels (FDSE's
skew erasers, Sec. 5.4) then trains those, and nothing else, on its own label-free loss.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from crossward.federation.contract import Tensors
from crossward.federation.errors import BadInput, SiteFailure
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.federation.seeds import derive
from crossward.federation.storage import read_tensors, write_tensors
from crossward.imaging.data import Split
from crossward.imaging.loading import batches
from crossward.methods.base import Context, Method, Model
from crossward.site.deployed import Deployed
from crossward.site.devices import Device
from crossward.site.handover import Handover
from crossward.site.study import Study
from crossward.site.trainer import refreshed

EPOCHS = 20
LEARNING_RATE = 1e-3
_FORMAT = "crossward.adapted/1"
AS_RECEIVED, OWN_STATISTICS = "as received", "own statistics"
ADAPTED, ADAPTED_OWN = "adapted", "adapted, own statistics"


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What a new hospital made of the federation's model.

    Attributes:
        stages: models by name, from the one as received to the last. "as received" has the federation's statistics
            wherever it shares any, and the hospital's own elsewhere.
        losses: label-free loss by epoch; empty where the method has none.
        distance: the same loss over all images, before and after.
    """

    stages: dict[str, Deployed]
    losses: list[float] = field(default_factory=list)
    distance: tuple[float, float] | None = None

    @property
    def deployed(self) -> Deployed:
        """The model to use: the last stage."""
        return next(reversed(self.stages.values()))


def adapt(
    study: Study,
    received: Tensors,
    images: Split,
    *,
    site: str,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    listen: Callable[[int, float], None] = lambda epoch, loss: None,
) -> Adapted:
    """Fit what the federation hands over to a hospital's images; their labels are not looked at.

    Args:
        study: what was run.
        received: what the federation hands over.
        images: of the hospital.
        site: its name.
        epochs: passes over the images where the method has parts to fit.
        learning_rate: of these.
        listen: called with every epoch's number and mean loss.

    Raises:
        BadInput: the model does not fit the study, or there are fewer than two images.
        SiteFailure: the loss is not finite any more.
    """
    if len(images) < 2:
        raise BadInput(f"{site}: {len(images)} image(s) have no statistics to fit a model to; give two or more")
    if not 0 < learning_rate < math.inf:
        raise BadInput(f"a learning rate of {learning_rate} is not a finite number above 0")
    model, device = welcomed(study, received, site=site)
    method, seed = study.method, study.training.seed
    statistics, shared = any(isinstance(module, _BatchNorm) for module in model.modules()), _shared_statistics(model)

    def stage(fitted: Model, *, own: bool) -> Deployed:
        order = derive(seed, site, "refresh")
        keep = frozenset() if own else shared
        return Deployed(site, refreshed(fitted, images, device=device, seed=order, keep=keep), method, device)

    before = {AS_RECEIVED: stage(model, own=False)} if shared or not statistics else {}
    own = {OWN_STATISTICS: stage(model, own=True)} if statistics else {}
    if not method.adaptable(model):
        return Adapted(stages={**before, **own})
    context = Context(site, study.task.rounds, study.task.rounds, _on(device, received), torch.Generator(device.kind))
    fitting = _Fitting(method, images, context, device, study.training.batch_size, seed)
    distance = fitting.distance(model)
    losses = fitting.run(model, epochs=epochs, learning_rate=learning_rate, listen=listen)
    after = {ADAPTED: stage(model, own=False)} if shared else {}
    stages = {**before, **after, **own, ADAPTED_OWN: stage(model, own=True)}
    last = fitting.distance(model)
    if not math.isfinite(last):
        raise fitting.diverged(epochs)
    return Adapted(stages=stages, losses=losses, distance=(distance, last))


def write_adapted(path: Path, handover: Handover, adapted: Adapted) -> None:
    """Write the deployed model, with the study that it is a model of."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapted.deployed.model.state_dict().items()}
    study = json.dumps(handover.study.options(), allow_nan=False)
    # Extras such as prototypes make the model again when it is read.
    write_tensors(path, {**handover.tensors, **tensors}, {"format": _FORMAT, "study": study})


def read_adapted(path: Path, *, site: str) -> Deployed:
    """Read a model that ``write_adapted`` wrote.

    Raises:
        BadInput: it is of another kind.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != _FORMAT:
        raise BadInput(f"{path} is not an adapted model; crossward adapt writes them")
    study = Study.from_options(json.loads(metadata["study"]))
    model, device = welcomed(study, tensors, site=site)
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    return Deployed(site, model.eval(), study.method, device)


def welcomed(study: Study, received: Tensors, *, site: str) -> tuple[Model, Device]:
    """Make the model that a new hospital can use before it has labels, as yet without an image of its own.

    Parts that never leave a site are left out where the method can do without them (RFedDis's local head, F2DC's
    modules, FedCode's classifier); normalisation that stays local is taken from the common start.

    Returns:
        The model, and the device it is on.
    """
    model = study.model()
    layout = layout_of(model)
    names = names_in(layout, *(scope for scope in Scope if scope.leaves))
    if not names:
        raise BadInput(f"{study.method.name} shares no model, so there is none for {site}; choose a federated method")
    for name in names:
        if name not in received or tuple(received[name].shape) != layout[name].shape:
            raise BadInput(
                f"the model for {site} lacks '{name}', or has it in another shape; give the study's own model"
            )
    model.load_state_dict({**model.state_dict(), **{name: received[name] for name in names}})
    study.method.welcome(model, received)
    return model, Device.best().take(model)


@dataclass(frozen=True)
class _Fitting:
    """Trains a method's adaptable parameters on its label-free loss."""

    method: Method
    images: Split
    context: Context
    device: Device
    batch_size: int
    seed: int

    def run(
        self, model: Model, *, epochs: int, learning_rate: float, listen: Callable[[int, float], None]
    ) -> list[float]:
        """Train in place; everything but the adaptable parameters is as before, statistics included."""
        chosen = set(self.method.adaptable(model))
        parameters = [parameter for name, parameter in model.named_parameters() if name in chosen]
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        # The loss is a square of differences that are small to begin with: steps must not depend on its scale.
        optimiser = torch.optim.Adam(parameters, lr=learning_rate)
        losses = []
        with _without_memory(model):
            for epoch in range(1, epochs + 1):
                losses.append(self._epoch(model, optimiser, epoch))
                listen(epoch, losses[-1])
        for parameter, before in trainable.items():
            parameter.requires_grad_(before)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        return losses

    def _epoch(self, model: Model, optimiser: torch.optim.Optimizer, epoch: int) -> float:
        model.train()
        total, count = 0.0, 0
        for images in self._batches(epoch, whole=True):
            optimiser.zero_grad(set_to_none=True)
            # In single precision: half would round the gradients of so small a loss to nothing.
            loss = self.method.adaptation(model, model(images), self.context)
            if not torch.isfinite(loss):
                raise self.diverged(epoch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total, count = total + float(loss.detach()) * len(images), count + len(images)
        return total / count

    def diverged(self, epoch: int) -> SiteFailure:
        """The loss is no number any more."""
        return SiteFailure(
            site=self.context.site,
            round_number=self.context.round_number,
            cause=f"the label-free loss is not a finite number any more in epoch {epoch}",
            remedy="Lower --lr; the federation's model is as it was",
        )

    def distance(self, model: Model) -> float:
        """The loss of every batch, averaged over all images."""
        model = copy.deepcopy(model).train()
        total, count = 0.0, 0
        with _without_memory(model):
            for images in self._batches(0, whole=False):
                total += float(self.method.adaptation(model, model(images), self.context).detach()) * len(images)
                count += len(images)
        return total / count

    def _batches(self, epoch: int, *, whole: bool) -> Iterator[torch.Tensor]:
        """Images in the order of an epoch; only in whole batches, or all of them."""
        size = min(self.batch_size, len(self.images))
        order = derive(self.seed, self.context.site, "adapt", epoch)
        loader = batches(self.images, batch_size=size, seed=order, drop_last=whole)
        return (self.device.images(images) for images, _ in loader)


@contextmanager
def _without_memory(model: Model) -> Iterator[None]:
    """Let running statistics be those of the last batch.

    Averaged over batches they lag behind parameters that move, and a loss on them drives the parameters past their aim.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _shared_statistics(model: Model) -> frozenset[str]:
    """The layers whose statistics come from the federation."""
    layout = layout_of(model)
    return frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and layout[f"{name}.running_mean"].scope is Scope.BUFFER
    )


def _on(device: Device, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device.kind) for name, tensor in tensors.items()}
