from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossward.nets import ResNet, is_normalisation
from crossward.nets.resnet import BasicBlock, Norm, make_norm

NORMS: list[Norm] = ["batch", "group"]
TINY = 0.0625


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted_by_hand(widths: list[int], blocks: int, channels: int) -> int:
    """3x3 and 1x1 convolutions without bias, and two numbers per channel for every normalisation layer."""
    count = 9 * channels * widths[0] + 2 * widths[0]
    before = widths[0]
    for stage, after in enumerate(widths):
        for block in range(blocks):
            into = before if block == 0 else after
            count += 9 * into * after + 2 * after + 9 * after * after + 2 * after
            if block == 0 and (stage > 0 or before != after):
                count += into * after + 2 * after
        before = after
    return count


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("depth", "width", "channels", "widths", "blocks"),
    [
        (10, 1.0, 1, [64, 128, 256, 512], 1),
        (10, 1.0, 3, [64, 128, 256, 512], 1),
        (18, 1.0, 1, [64, 128, 256, 512], 2),
        (10, 0.25, 1, [16, 32, 64, 128], 1),
        (18, TINY, 3, [4, 8, 16, 32], 2),
    ],
)
def test_parameter_counts(depth: int, width: float, channels: int, widths: list[int], blocks: int, norm: Norm) -> None:
    model = ResNet(depth=depth, width=width, channels=channels, norm=norm)
    assert parameters(model) == counted_by_hand(widths, blocks, channels)
    assert model.stage_channels == tuple(widths)
    assert model.out_channels == widths[-1]


def test_parameter_count_of_the_full_resnet_10_in_figures() -> None:
    # Stem 576 + 128; stages 73,984; 230,144; 919,040; 3,673,088.
    assert 576 + 128 + 73_984 + 230_144 + 919_040 + 3_673_088 == 4_896_960
    assert parameters(ResNet(depth=10, channels=1)) == 4_896_960


@given(
    depth=st.sampled_from([10, 18]),
    norm=st.sampled_from(NORMS),
    channels=st.sampled_from([1, 3]),
    height=st.integers(2, 40),
    width=st.integers(2, 40),
    batch=st.integers(1, 3),
)
@settings(max_examples=25)
def test_the_feature_map_is_an_eighth_of_the_image(
    depth: int, norm: Norm, channels: int, height: int, width: int, batch: int
) -> None:
    model = ResNet(depth=depth, width=TINY, norm=norm, channels=channels).eval()
    with torch.no_grad():
        features = model(torch.zeros(batch, channels, height, width))
    assert features.shape == (batch, 32, math.ceil(height / 8), math.ceil(width / 8))


@pytest.mark.parametrize("depth", [10, 18])
def test_32_pixels_give_4_by_4_and_each_stage_halves(depth: int) -> None:
    model = ResNet(depth=depth, width=TINY)
    features = model.stem(torch.zeros(2, 1, 32, 32))
    sides = []
    for stage in model.stages:
        features = stage(features)
        sides.append(tuple(features.shape[1:]))
    assert sides == [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]
    assert [len(stage) for stage in model.stages] == [1 if depth == 10 else 2] * 4


@pytest.mark.parametrize("depth", [10, 18])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_reach_every_parameter(depth: int, norm: Norm) -> None:
    torch.manual_seed(0)
    model = ResNet(depth=depth, width=TINY, norm=norm, channels=3)
    images = torch.randn(4, 3, 16, 16, requires_grad=True)
    (model(images) * torch.randn(4, 32, 2, 2)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
    assert images.grad is not None
    assert images.grad.abs().max() > 0


@pytest.mark.parametrize("depth", [10, 18])
def test_group_norm_has_no_batch_norm_and_treats_each_image_alone(depth: int) -> None:
    torch.manual_seed(1)
    model = ResNet(depth=depth, width=TINY, norm="group").double().train()
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())
    assert not list(model.buffers())
    images = torch.randn(5, 1, 16, 16, dtype=torch.float64)
    together = model(images)
    alone = torch.cat([model(image.unsqueeze(0)) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    changed = images.clone()
    changed[0] = 100.0
    torch.testing.assert_close(model(changed)[1:], together[1:], rtol=0, atol=1e-10)


def test_batch_norm_does_not_treat_each_image_alone() -> None:
    torch.manual_seed(1)
    model = ResNet(width=TINY).train()
    images = torch.randn(5, 1, 16, 16)
    together = model(images)
    changed = images.clone()
    changed[0] = 100.0
    assert not torch.allclose(model(changed)[1:], together[1:], atol=1e-3)


@pytest.mark.parametrize("channels", range(1, 65))
def test_groups_divide_the_channels_and_have_at_least_two(channels: int) -> None:
    norm = make_norm("group", channels)
    assert isinstance(norm, nn.GroupNorm)
    assert channels % norm.num_groups == 0
    assert channels // norm.num_groups >= min(2, channels)


def test_the_number_of_groups_is_the_stated_one() -> None:
    # "GroupNorm takes gcd(32, channels) groups of at least two channels."
    stated = {channels: math.gcd(32, channels) for channels in (6, 20, 48, 64, 128, 256, 512)}
    assert {channels: make_norm("group", channels).num_groups for channels in stated} == stated  # type: ignore[union-attr]


def test_the_shortcut_is_there_only_where_shapes_differ() -> None:
    assert isinstance(BasicBlock(4, 4, stride=1, norm="batch").shortcut, nn.Identity)
    for block in (BasicBlock(4, 8, stride=1, norm="batch"), BasicBlock(4, 4, stride=2, norm="batch")):
        assert isinstance(block.shortcut, nn.Sequential)


def test_a_block_by_hand() -> None:
    # Identity kernels and an untrained normalisation in evaluation: relu(relu(x) + x) / (1 + eps) once per layer.
    block = BasicBlock(1, 1, stride=1, norm="batch").eval()
    kernel = torch.zeros(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 1.0
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.copy_(kernel)
        result = block(torch.tensor([[[[2.0, -3.0]]]]))
    torch.testing.assert_close(result, torch.tensor([[[[4.0, 0.0]]]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [0, 9, 34, 50])
def test_an_unknown_depth_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth {depth} is not one of"):
        ResNet(depth=depth)


def test_an_unknown_norm_is_refused() -> None:
    # A misspelt 'batchnorm' must not silently become GroupNorm.
    with pytest.raises(ValueError, match="batchnorm"):
        ResNet(width=TINY, norm="batchnorm")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2, affine=False),
        nn.BatchNorm3d(2),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm2d(2, affine=True),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.LocalResponseNorm(2),
        nn.RMSNorm(2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_normalisation_layers_are_known_by_their_type(layer: nn.Module) -> None:
    assert is_normalisation(layer)


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 1, 1), nn.Linear(1, 1), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(2))])
def test_other_layers_are_not(layer: nn.Module) -> None:
    assert not is_normalisation(layer)
