from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossward.nets import ResNet, is_normalisation
from crossward.nets.layers import MapNorm, Norm, VectorNorm, make_norm, make_vector_norm, plain_layers
from crossward.nets.resnet import BasicBlock

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
    assert isinstance(BasicBlock(4, 4, stride=1, layer=plain_layers("batch")).shortcut, nn.Identity)
    for block in (
        BasicBlock(4, 8, stride=1, layer=plain_layers("batch")),
        BasicBlock(4, 4, stride=2, layer=plain_layers("batch")),
    ):
        assert isinstance(block.shortcut, nn.Sequential)


def test_a_block_by_hand() -> None:
    # Identity kernels and an untrained normalisation in evaluation: relu(relu(x) + x) / (1 + eps) once per layer.
    block = BasicBlock(1, 1, stride=1, layer=plain_layers("batch")).eval()
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


LONE = [(MapNorm, nn.BatchNorm2d, (1, 3, 1, 1)), (VectorNorm, nn.BatchNorm1d, (1, 3))]
SEVERAL = [
    (MapNorm, nn.BatchNorm2d, (2, 3, 1, 1)),
    (MapNorm, nn.BatchNorm2d, (1, 3, 2, 1)),
    (MapNorm, nn.BatchNorm2d, (5, 3, 4, 4)),
    (VectorNorm, nn.BatchNorm1d, (2, 3)),
    (VectorNorm, nn.BatchNorm1d, (5, 3)),
]


def statistics_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize(("own", "plain", "shape"), SEVERAL)
@pytest.mark.parametrize("training", [True, False])
def test_with_two_values_or_more_it_is_batch_norm_to_the_last_bit(
    own: type[nn.Module], plain: type[nn.Module], shape: tuple[int, ...], training: bool
) -> None:
    layers = [kind(3).train(training) for kind in (own, plain)]
    assert isinstance(layers[0], plain)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        features = torch.randn(shape, generator=generator)
        assert torch.equal(layers[0](features), layers[1](features))
    one, other = (statistics_of(layer) for layer in layers)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert layers[0].state_dict().keys() == layers[1].state_dict().keys()


@pytest.mark.parametrize(("own", "plain", "shape"), LONE)
def test_a_lone_value_is_normalised_by_the_running_statistics_and_leaves_them_alone(
    own: type[nn.Module], plain: type[nn.Module], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        plain(3).train()(torch.zeros(shape))
    layer = own(3).train()
    state = layer.state_dict()
    state["running_mean"].copy_(torch.tensor([1.0, 2.0, 3.0]))
    state["running_var"].copy_(torch.tensor([4.0, 9.0, 16.0]) - 1e-5)
    state["weight"].copy_(torch.tensor([1.0, 2.0, 1.0]))
    state["bias"].copy_(torch.tensor([0.0, 0.0, 5.0]))
    before = statistics_of(layer)
    features = torch.tensor([5.0, 5.0, 5.0]).reshape(shape).requires_grad_()
    result = layer(features)
    # (5 - 1) / 2, 2 (5 - 2) / 3 and (5 - 3) / 4 + 5.
    torch.testing.assert_close(result.flatten(), torch.tensor([2.0, 2.0, 5.5]))
    result.sum().backward()
    assert features.grad is not None
    torch.testing.assert_close(features.grad.flatten(), torch.tensor([1 / 2, 2 / 3, 1 / 4]))
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


@pytest.mark.parametrize(("own", "shape"), [(MapNorm, (0, 3, 2, 2)), (VectorNorm, (0, 3))])
def test_no_value_at_all_leaves_the_statistics_finite(own: type[nn.Module], shape: tuple[int, ...]) -> None:
    layer = own(3).train()
    layer(torch.randn(4, *shape[1:], generator=torch.Generator().manual_seed(1)))
    layer(torch.zeros(shape)).sum().backward()
    assert all(torch.isfinite(tensor).all() for tensor in layer.state_dict().values())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("norm", NORMS)
def test_a_backbone_trains_on_one_image_of_8_pixels(norm: Norm) -> None:
    model = ResNet(width=TINY, norm=norm).train()
    images = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    model(images).square().sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_layers_for_maps_and_for_vectors_are_known_as_normalisation() -> None:
    for layer in (make_norm("batch", 4), make_vector_norm("batch", 4), make_vector_norm("group", 4)):
        assert is_normalisation(layer)
    assert isinstance(make_norm("batch", 4), MapNorm)
    assert isinstance(make_vector_norm("batch", 4), VectorNorm)


@pytest.mark.parametrize("channels", [3, 4, 32, 128])
def test_a_vector_is_normalised_as_one_group(channels: int) -> None:
    layer = make_vector_norm("group", channels)
    assert isinstance(layer, nn.GroupNorm)
    vectors = torch.randn(6, channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = layer.double()(vectors)
    # By hand: the mean over a sample's own channels, and their variance divided by the number of them.
    centred = vectors - vectors.mean(dim=1, keepdim=True)
    torch.testing.assert_close(result, centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt())
    assert len(result.detach().round(decimals=6).unique()) > 6
