"""Local training of one round under differential privacy (DP-SGD, Abadi et al. 2016), for any method.

A step draws patients by chance, clips what each adds to the gradient, of all trainable tensors together, and adds
noise. Local tensors are among them: they are in every later gradient, so a patient who moved them freely would show in
what leaves the site.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, Vector
from crossward.federation.errors import PrivacyRefusal, SiteFailure
from crossward.imaging.data import Split
from crossward.methods.base import Batch, Context, Method, Model
from crossward.nets.layers import at_least_single
from crossward.privacy.dp.checking import check_per_sample
from crossward.privacy.dp.clipping import clipper_for
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler
from crossward.site.augment import augmented
from crossward.site.devices import Device
from crossward.site.trainer import Training

CHECKED = 8
"""Images of the batch that is held against micro-batches of one."""


def train_privately(
    model: Model,
    method: Method,
    split: Split,
    context: Context,
    *,
    training: Training,
    sampler: PatientSampler,
    source: NoiseSource,
    steps: int,
    noise: float,
    clip: float,
    expected: float,
    device: Device,
    note: Callable[[int, int], None] = lambda drawn, left_out: None,
) -> dict[str, Vector]:
    """Train a model in place for one round.

    Args:
        model: to train.
        method: whose loss terms are used.
        split: the site's training images.
        context: of the round.
        training: rate and momentum.
        sampler: draws the images of a step.
        source: of the noise.
        steps: how many, whatever the data are like.
        noise: standard deviation, as a multiple of ``clip``.
        clip: largest norm of what one image adds to a step.
        expected: how many images a step has on average.
        device: where to compute.
        note: is told at the end how many images were drawn, and how many of them counted as nothing because their loss
            or gradient was not finite. That is for the site alone.

    Returns:
        The tally: the number of patients (of images, where they are the unit), which counts as public. Loss and right
        answers would tell of the images without noise: they are not counted, and none were seen.

    Raises:
        SiteFailure: training diverged.
        PrivacyRefusal: the model cannot be clipped image by image.
    """
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    clipper = clipper_for(model, clip=clip)
    optimiser = torch.optim.SGD(
        parameters,
        lr=training.rate(context.round_number, context.rounds),
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        foreach=True,
    )
    drawn, left_out = 0, 0
    for _ in range(steps):
        # Draws go by place in the batch: under a known seed, one patient fewer would change what all later images get.
        context.generator.manual_seed(secrets.randbits(63))
        batch = _batch(split, torch.from_numpy(sampler.draw()), training, context, device)
        clipped = clipper.backward(partial(_losses, model, method, batch, context, device, context.generator))
        drawn, left_out = drawn + len(clipped.losses), left_out + clipped.left_out
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(gradients) < len(parameters):
            raise PrivacyRefusal(f"{context.site}: a tensor was trained without a clipped gradient; nothing was sent")
        source.add_to(gradients, scale=noise * clip)
        # By the expected number: the number that was drawn tells who was.
        torch._foreach_div_(gradients, expected)
        _add_penalty(method, model, context, parameters)
        optimiser.step()
    note(drawn, left_out)
    if not all(torch.isfinite(tensor).all() for tensor in model.state_dict().values()):
        raise SiteFailure(
            site=context.site,
            round_number=context.round_number,
            cause="the model has values that are not finite, so the site's update is not used",
            remedy="Lower the learning rate in a new run; what was spent on this round stays spent",
        )
    return {SAMPLES: np.array([float(sampler.units)]), **{key: np.zeros(1) for key in (LOSS, SEEN, CORRECT)}}


def check_training(
    model: Model, method: Method, context: Context, *, shape: Sequence[int], classes: int, clip: float, device: Device
) -> float:
    """Hold one batch's clipped gradients against those of each image alone, before anything is spent.

    The images are drawn by chance: nothing is paid for the site's own here, and a refusal would tell of them.

    Args:
        model: as it was received.
        method: whose loss terms are used.
        context: of the round that is about to be trained.
        shape: of an image.
        classes: how many there are.
        clip: largest norm of what one image adds to a step.
        device: where to compute.

    Returns:
        The largest relative difference.

    Raises:
        PrivacyRefusal: loss terms couple images, or the gradients are not those of the images alone.
    """
    coupled = sorted(method.couples(model))
    if coupled:
        raise PrivacyRefusal(
            f"{context.site}: the loss term '{coupled[0]}' depends on all images of a batch together, so nobody's part "
            "in it can be limited. Choose a method or a head without it"
        )
    model.train()
    # Half precision would differ by more than is allowed.
    device = replace(device, half=None)
    images = device.images(torch.randn(CHECKED, *shape, generator=torch.Generator().manual_seed(0)))
    labels = (torch.arange(CHECKED) % classes).to(device.kind)

    def losses_of(chosen: Tensor) -> Callable[[], Tensor]:
        # Without chance, so that an image gets by itself what it gets in a batch.
        return partial(_losses, model, method, Batch(images[chosen], labels[chosen]), context, device, None)

    return check_per_sample(model, losses_of, count=CHECKED, clip=clip)


def _batch(split: Split, rows: Tensor, training: Training, context: Context, device: Device) -> Batch:
    images = split.images[rows] if len(rows) else torch.empty(0, *split.images.shape[1:])
    images = device.images(images)
    if split.style is not None and len(rows):
        images = split.style(images, rows, context.generator)
    return Batch(augmented(images, training.augment, context.generator), split.labels[rows].to(device.kind))


def _losses(
    model: Model, method: Method, batch: Batch, context: Context, device: Device, chance: torch.Generator | None
) -> Tensor:
    """The loss of every image, [b]."""
    with device.autocast():
        trace = model(batch.images, chance)
        terms = method.terms(model, trace, batch, context)
    return torch.stack([at_least_single(term) for term in terms.values()]).sum(dim=0)


def _add_penalty(method: Method, model: Model, context: Context, parameters: Sequence[Tensor]) -> None:
    """Add the gradient of what does not depend on data: it tells nothing, and needs neither limit nor noise."""
    penalties = method.penalty(model, context)
    if not penalties:
        return
    found = torch.autograd.grad(torch.stack(list(penalties.values())).sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None and parameter.grad is not None:
            parameter.grad.add_(gradient)
