from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from made_up_sites import WIDE, made_up_split, made_up_task
from torch import Tensor, nn
from torch.nn import functional

from crossward.methods.base import FeatureBlock, Model, SoftmaxHead
from crossward.methods.registry import create
from crossward.nets import Backbone
from crossward.site.gradcam import HEAT, grad_cam, overlay


class Plain(Backbone):
    """A backbone of stages that change nothing: the image is the feature map."""

    def __init__(self, stages: int = 1) -> None:
        super().__init__()
        self.stem = nn.Identity()
        self.stages = nn.ModuleList(nn.Identity() for _ in range(stages))


class Negating(FeatureBlock):
    """Changes the sign after the second stage."""

    def forward(self, stage: int, features: Tensor, notes: Any, generator: Any) -> Tensor:
        return -features if stage == 1 else features


def plain_model(block: FeatureBlock, *, stages: int = 1) -> Model:
    head = SoftmaxHead(2, 2)
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        head.linear.bias.zero_()
    return Model(Plain(stages), block, head)


IMAGE = torch.tensor([[[[4.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]]])


def test_by_hand() -> None:
    """Class 0 is the first channel less the second, [[4, 1], [0, -2]]; class 1 the opposite."""
    heat = grad_cam(plain_model(FeatureBlock()), IMAGE.repeat(2, 1, 1, 1), torch.tensor([0, 1]))
    assert torch.allclose(heat[0], torch.tensor([[1.0, 0.25], [0.0, 0.0]]))
    assert torch.allclose(heat[1], torch.tensor([[0.0, 0.0], [0.0, 1.0]]))


def test_the_map_is_that_of_the_last_stage_behind_the_block() -> None:
    heat = grad_cam(plain_model(Negating(), stages=2), IMAGE, torch.tensor([0]))
    assert torch.allclose(heat[0], torch.tensor([[0.0, 0.0], [0.0, 1.0]]))


def test_nothing_that_speaks_for_a_class_is_no_heat() -> None:
    heat = grad_cam(plain_model(FeatureBlock()), IMAGE * torch.tensor([0.0, 1.0])[:, None, None], torch.tensor([0]))
    assert torch.equal(heat, torch.zeros(1, 2, 2))


@pytest.mark.parametrize("method", ["fedavg", "f2dc", "rfeddis"])
def test_a_real_model_gives_what_full_backpropagation_gives(method: str) -> None:
    model = create(method).build(made_up_task(width=WIDE)).eval()
    images = torch.randn(5, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    classes = torch.tensor([0, 1, 2, 0, 1])
    found = grad_cam(model, images, classes)
    maps: list[Tensor] = []
    twin = copy.deepcopy(model)
    twin.block.register_forward_hook(lambda module, inputs, output: maps.append(output))
    logits = twin(images).logits
    warm = 0
    for row, label in enumerate(classes.tolist()):
        (slope,) = torch.autograd.grad(logits[row, label], maps[-1], retain_graph=True)
        heat = (slope[row].mean(dim=(1, 2))[:, None, None] * maps[-1][row]).sum(0).clamp(min=0).detach()
        assert heat.shape == (4, 4)
        if heat.any():
            warm += 1
            heat = heat / heat.max()
        enlarged = functional.interpolate(heat[None, None], size=(32, 32), mode="bilinear", align_corners=False)
        assert torch.allclose(found[row], enlarged[0, 0], atol=1e-5)
    assert warm


@pytest.mark.parametrize("method", ["fedavg", "f2dc", "rfeddis"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(method: str, training: bool) -> None:
    model = create(method).build(made_up_task()).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images = made_up_split(4, seed=1).images
    grad_cam(model, images, torch.zeros(4, dtype=torch.long))
    assert model.training is training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not model.block._forward_hooks
    assert not images.requires_grad


def test_a_failure_leaves_no_hook_behind() -> None:
    model = plain_model(FeatureBlock()).train()
    with pytest.raises(RuntimeError):
        grad_cam(model, torch.zeros(1, 5, 2, 2), torch.tensor([0]))
    assert not model.block._forward_hooks
    assert model.training


def test_it_works_within_inference_mode_and_with_frozen_parameters() -> None:
    model = plain_model(FeatureBlock()).requires_grad_(False)
    with torch.inference_mode():
        heat = grad_cam(model, IMAGE * 1.0, torch.tensor([0]))
    assert torch.allclose(heat[0], torch.tensor([[1.0, 0.25], [0.0, 0.0]]))


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3)])
def test_the_overlay_leaves_cold_places_and_colours_hot_ones(shape: tuple[int, ...]) -> None:
    image = np.full(shape, 100, np.uint8)
    blended = overlay(image, np.array([[0.0, 1.0], [0.5, 0.0]], np.float32))
    assert blended.shape == (2, 2, 3)
    assert blended.dtype == np.uint8
    assert (blended[0, 0] == 100).all()
    assert (blended[0, 1] == np.rint(0.3 * 100 + 0.7 * HEAT)).all()
    assert (blended[1, 0] == np.rint(0.65 * 100 + 0.35 * HEAT)).all()
