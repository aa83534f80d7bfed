"""Grad-CAM (Selvaraju et al., 2017): which part of an image spoke for the class that the model named."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from crossward.methods.base import Model

HEAT = np.array([230.0, 159.0, 0.0])
"""Orange, which stands out from grey with every colour blindness."""

_STRONGEST = 0.7  # how much of the image the strongest heat covers


def grad_cam(model: Model, images: Tensor, classes: Tensor) -> Tensor:
    """Heat [b,h,w] in [0,1] on images [b,c,h,w] for one class each [b]; all zero where nothing spoke for the class.

    The map is the one that is pooled: of the last stage, behind the feature block. Its channels are weighted with
    the spatial mean of the class's gradient and summed, negative heat is dropped, and the map is divided by its largest
    value. The model is left as it was: its mode, its parameters, and their gradients.
    """
    pooled_map: list[Tensor] = []

    def cut(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        # Behind the cut only pool and head are differentiated, with respect to the map and to no parameter.
        del module, inputs
        pooled_map[:] = [output.detach().requires_grad_()]
        return pooled_map[0]

    was_training = model.training
    hook = model.block.register_forward_hook(cut)
    try:
        model.eval()
        with torch.inference_mode(False), torch.enable_grad():
            logits = model(images.clone()).logits
            (slopes,) = torch.autograd.grad(logits.gather(1, classes.clone().unsqueeze(1)).sum(), pooled_map)
    finally:
        hook.remove()
        model.train(was_training)
    weights = slopes.mean(dim=(2, 3), keepdim=True)
    heat = (weights * pooled_map[0].detach()).sum(dim=1, keepdim=True).relu()
    heat = heat / heat.amax(dim=(2, 3), keepdim=True).clamp_min(torch.finfo(heat.dtype).tiny)
    return functional.interpolate(heat, size=images.shape[2:], mode="bilinear", align_corners=False)[:, 0]


def overlay(image: npt.NDArray[np.uint8], heat: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """A picture [h,w] or [h,w,3] with heat [h,w] in [0,1] blended over it; [h,w,3]."""
    cover = _STRONGEST * heat[..., None].astype(np.float64)
    colours = image if image.ndim == 3 else image[..., None]
    blended: npt.NDArray[np.uint8] = np.rint((1 - cover) * colours + cover * HEAT).astype(np.uint8)
    return blended
