"""Local training of one round, and the two label-aware questions about a model: how well, and what does it say."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, Vector
from crossward.federation.errors import BadInput, SiteFailure
from crossward.federation.seeds import derive
from crossward.imaging.data import Split
from crossward.imaging.loading import batches
from crossward.methods.base import Batch, Context, Method, Model, Prediction
from crossward.site.augment import Augmentation, augmented
from crossward.site.devices import Device

EVALUATION_BATCH = 256
REFRESH_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a site trains in a round.

    Attributes:
        epochs: passes over the site's images per round, where ``steps`` is not given.
        steps: a fixed number of steps per round, the same for a small and a large site.
        batch_size: images per step.
        learning_rate: of the first round.
        schedule: how the learning rate changes from round to round; ``cosine`` ends at a tenth.
        momentum: of SGD, which starts anew every round.
        weight_decay: of SGD.
        clip: largest norm of a step's gradient; the method's own if 0, which for most is none.
        augment: random changes to training images, see site/augment.py.
        seed: decides the order of images and what methods draw.
    """

    epochs: int = 2
    steps: int = 0
    batch_size: int = 32
    learning_rate: float = 0.03
    schedule: Literal["constant", "cosine"] = "cosine"
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 0.0
    augment: Augmentation = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, and must be at least 1")
        for name in ("steps", "learning_rate", "momentum", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BadInput(f"{name} is {value}, and must be a number that is not negative")
        for name, known in (("schedule", ("constant", "cosine")), ("augment", get_args(Augmentation))):
            if getattr(self, name) not in known:
                raise BadInput(f"{name} '{getattr(self, name)}' is not there; there is: {', '.join(known)}")

    def rate(self, round_number: int, rounds: int) -> float:
        """The learning rate of a round, from 1; it depends on planned rounds only, so resuming does not change it."""
        if self.schedule == "constant":
            return self.learning_rate
        progress = (round_number - 1) / max(1, rounds - 1)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train_round(
    model: Model, method: Method, split: Split, context: Context, *, training: Training, device: Device
) -> dict[str, Vector]:
    """Train a model in place for one round.

    Returns:
        The tally: number of samples, and sums of loss and of correct answers over the images seen.

    Raises:
        SiteFailure: the loss is not finite any more.
    """
    if len(split) < 2:
        raise SiteFailure(
            site=context.site,
            round_number=context.round_number,
            cause=f"there are too few training images ({len(split)})",
            remedy="Add images, or leave the site out",
        )
    model.train()
    optimiser = torch.optim.SGD(
        model.parameters(),
        lr=training.rate(context.round_number, context.rounds),
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        foreach=True,
    )
    scaler = device.scaler()
    clip = training.clip or method.clip
    counts = torch.zeros(3, dtype=torch.float64, device=device.kind)
    for step, (images, rows) in enumerate(_steps(split, context, training, device)):
        context.generator.manual_seed(derive(training.seed, context.site, context.round_number, step))
        if split.style is not None:
            images = split.style(images, rows, context.generator)
        labels = split.labels[rows].to(device.kind, non_blocking=True)
        batch = Batch(augmented(images, training.augment, context.generator), labels)
        optimiser.zero_grad(set_to_none=True)
        with device.autocast():
            trace = model(batch.images, context.generator)
            terms = method.terms(model, trace, batch, context)
            loss = torch.stack([_mean(term.float()) for term in terms.values()]).sum()
            penalties = method.penalty(model, context)
        objective = loss + sum(penalties.values(), start=loss.new_zeros(())) if penalties else loss
        if device.kind.type == "cpu" and not torch.isfinite(objective):
            raise _diverged(context, step)
        scaler.scale(objective).backward()  # type: ignore[no-untyped-call]
        if clip:
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        scaler.step(optimiser)
        scaler.update()
        with torch.no_grad():
            size = len(batch.labels)
            counts += torch.stack(
                [
                    objective.detach().double() * size,
                    (trace.logits.argmax(1) == batch.labels).sum().double(),
                    counts.new_tensor(size),
                ]
            )
    if not torch.isfinite(counts).all() or not all(
        torch.isfinite(tensor).all() for tensor in model.state_dict().values()
    ):
        raise _diverged(context, None)
    loss_sum, correct, seen = counts.cpu().numpy()
    return {
        SAMPLES: np.array([float(len(split))]),
        LOSS: np.array([loss_sum]),
        CORRECT: np.array([correct]),
        SEEN: np.array([seen]),
    }


def _mean(term: Tensor) -> Tensor:
    """The mean over a batch; nothing was lost on an empty one."""
    return term.mean() if term.numel() else term.sum()


def _diverged(context: Context, step: int | None) -> SiteFailure:
    what = "the model has values that are not finite" if step is None else "the loss is not a finite number any more"
    where = "" if step is None else f" at step {step + 1}"
    return SiteFailure(
        site=context.site,
        round_number=context.round_number,
        cause=f"{what}{where}, so the site's update is not used",
        remedy="Lower the learning rate or set a gradient clip (--clip 1.0) in a new run; "
        "if the site's images are at fault, repair them and go on with --resume",
    )


def _steps(split: Split, context: Context, training: Training, device: Device) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the round's batches, images and their rows; whole ones only, unless the site has fewer than a batch."""
    size = min(training.batch_size, len(split))
    numbered = replace(split, labels=torch.arange(len(split)))
    epochs = (
        batches(
            numbered,
            batch_size=size,
            seed=derive(training.seed, context.site, context.round_number, "order", epoch),
            drop_last=True,
        )
        for epoch in (range(training.epochs) if not training.steps else count())
    )
    endless = ((device.images(images), rows) for epoch in epochs for images, rows in epoch)
    return islice(endless, training.steps) if training.steps else endless


def refreshed(model: Model, split: Split, *, device: Device, seed: int, keep: Collection[str] = frozenset()) -> Model:
    """Copy a model and estimate its BatchNorm statistics anew from a site's own images, without labels.

    Averaged weights fit nobody's running statistics. One pass with cumulative averages gives the site statistics
    of the very weights it received. A model without BatchNorm, or a site with less than two images, gets a plain copy.

    Args:
        model: to copy.
        split: the site's images.
        device: where to compute.
        seed: decides the order of the images.
        keep: names of layers whose statistics stay as they are.
    """
    model = copy.deepcopy(model).eval()
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats and name not in keep
    ]
    if not layers or len(split) < 2:
        return model
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    size = min(REFRESH_BATCH, len(split))
    with torch.inference_mode(), device.autocast():
        for images, _ in batches(split, batch_size=size, seed=seed, drop_last=True):
            model(device.images(images))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return model.eval()


def predict(model: Model, method: Method, split: Split, *, device: Device) -> Prediction:
    """Answer for a split's images, in order."""
    model.eval()
    with torch.inference_mode(), device.autocast():
        answers = [
            method.predict(model, device.images(images))
            for images, _ in batches(split, batch_size=EVALUATION_BATCH, seed=None, drop_last=False)
        ] or [method.predict(model, device.images(split.images[:]))]
    return Prediction.joined(answers)


def correct_count(model: Model, method: Method, split: Split, *, device: Device) -> int:
    """Count a split's images that the model answers correctly."""
    if not len(split):
        return 0
    return int((predict(model, method, split, device=device).probabilities.argmax(1) == split.labels).sum())
