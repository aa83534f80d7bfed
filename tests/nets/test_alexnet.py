from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossward.federation.errors import BadInput
from crossward.imaging.data import Split
from crossward.methods import Task, available
from crossward.methods.base import Context
from crossward.nets import AlexNet, Backbone, ResNet, is_normalisation
from crossward.nets.layers import LayerShape, MapNorm, Norm, make_point_norm, plain_layers
from crossward.site.devices import Device
from crossward.site.trainer import Training, predict, train_round

NORMS: list[Norm] = ["batch", "group"]
TINY = 0.0625
TASK = Task(classes=("a", "b", "c"), channels=3, size=64, rounds=2, width=TINY, net="alexnet")
CPU = Device(torch.device("cpu"), None)


def images_of(count: int, channels: int = 3, size: int = 64, seed: int = 3) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted_by_hand(widths: Sequence[int], hidden: int, channels: int) -> int:
    """Kernels of 11, 5, 3, 3 and 3 and two connected layers, without bias; two numbers per output to normalise it."""
    count = 0
    for kernel, before, after in zip((11, 5, 3, 3, 3), (channels, *widths), widths, strict=False):
        count += kernel * kernel * before * after + 2 * after
    return count + 36 * widths[-1] * hidden + 2 * hidden + hidden * hidden + 2 * hidden


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("width", "channels", "widths", "hidden"),
    [
        (1.0, 3, (64, 192, 384, 256, 256), 1024),
        (1.0, 1, (64, 192, 384, 256, 256), 1024),
        (0.25, 3, (16, 48, 96, 64, 64), 256),
        (TINY, 1, (4, 12, 24, 16, 16), 64),
        (0.001, 3, (1, 1, 1, 1, 1), 1),
    ],
)
def test_parameter_counts(width: float, channels: int, widths: tuple[int, ...], hidden: int, norm: Norm) -> None:
    with torch.device("meta"):
        model = AlexNet(width=width, norm=norm, channels=channels)
    assert parameters(model) == counted_by_hand(widths, hidden, channels)
    assert model.stage_channels == widths[1:]
    assert model.out_channels == hidden


def test_parameter_count_of_the_full_net_in_figures() -> None:
    convolutions = 23_232 + 307_200 + 663_552 + 884_736 + 589_824
    connected = 9_437_184 + 1_048_576
    normalisation = 2 * (64 + 192 + 384 + 256 + 256 + 1024 + 1024)
    assert convolutions + connected + normalisation == 12_960_704
    with torch.device("meta"):
        assert parameters(AlexNet()) == 12_960_704


@pytest.mark.parametrize(
    ("size", "sides"),
    [
        # A stem of stride 4 and three pools of stride 2, each rounded down.
        (63, [7, 3, 3, 3, 1]),
        (64, [7, 3, 3, 3, 1]),
        (96, [11, 5, 5, 5, 2]),
        (224, [27, 13, 13, 13, 6]),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
def test_sides_and_channels_of_the_maps_and_of_the_pooled_features(size: int, sides: list[int], norm: Norm) -> None:
    model = AlexNet(width=TINY, norm=norm).eval()
    shapes = []
    with torch.no_grad():
        features = model.stem(images_of(2, size=size))
        shapes.append(tuple(features.shape))
        for stage in model.stages:
            features = stage(features)
            shapes.append(tuple(features.shape))
        assert torch.equal(model(images_of(2, size=size)), features)
        assert model.pool(features).shape == (2, 64)
    assert shapes == [(2, channels, side, side) for channels, side in zip((4, 12, 24, 16, 16), sides, strict=True)]
    assert [shape[1] for shape in shapes[1:]] == list(model.stage_channels)


@pytest.mark.parametrize("size", [8, 32, 62])
def test_smaller_images_are_refused_in_words_and_would_not_get_through(size: int) -> None:
    with pytest.raises(BadInput, match=f"AlexNet needs images of 63 px or more, not {size}; use --size 64 or more"):
        replace(TASK, size=size)
    with pytest.raises(RuntimeError, match=r"(?i)output size is too small|kernel size can't be greater"):
        AlexNet(width=TINY)(images_of(1, size=size))
    assert Task(classes=("a",), channels=1, size=size, rounds=1).net == "resnet"


def test_the_smallest_image_gets_through() -> None:
    task = replace(TASK, size=63)
    model = available()["fedavg"]().build(task).eval()
    with torch.no_grad():
        assert model(images_of(2, size=63)).pooled.shape == (2, 64)


@pytest.mark.parametrize("norm", NORMS)
def test_the_pool_averages_to_a_grid_and_connects_it_twice(norm: Norm) -> None:
    model = AlexNet(width=TINY, norm=norm).double().eval()
    generator = np.random.default_rng(2)
    with torch.no_grad():
        for tensor in model.connected.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.copy_(torch.from_numpy(generator.uniform(0.5, 1.5, size=tuple(tensor.shape))))
        maps = generator.normal(size=(3, 16, 12, 12))
        result = model.pool(torch.from_numpy(maps)).numpy()
    # Of 12 x 12 points each cell of the 6 x 6 grid takes four.
    vectors = maps.reshape(3, 16, 6, 2, 6, 2).mean(axis=(3, 5)).reshape(3, -1)
    state = {name: tensor.numpy() for name, tensor in model.connected.state_dict().items()}
    for weight, scaling in (("0", "1"), ("3", "4")):
        vectors = vectors @ state[f"{weight}.weight"][:, :, 0, 0].T
        if norm == "batch":
            centre, spread = state[f"{scaling}.running_mean"], state[f"{scaling}.running_var"]
        else:
            centre, spread = vectors.mean(axis=1, keepdims=True), vectors.var(axis=1, keepdims=True)
        vectors = (vectors - centre) / np.sqrt(spread + 1e-5)
        vectors = np.maximum(vectors * state[f"{scaling}.weight"] + state[f"{scaling}.bias"], 0)
    np.testing.assert_allclose(result, vectors, rtol=1e-10, atol=1e-12)
    assert (vectors > 0).any()


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_reach_every_parameter(norm: Norm) -> None:
    torch.manual_seed(0)
    model = AlexNet(width=TINY, norm=norm)
    images = images_of(4).requires_grad_()
    (model.pool(model(images)) * torch.randn(4, 64)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
    assert images.grad is not None
    assert images.grad.abs().max() > 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [63, 96])
def test_a_batch_of_one_trains(norm: Norm, size: int) -> None:
    model = AlexNet(width=TINY, norm=norm).train()
    model.pool(model(images_of(1, size=size))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_group_norm_has_no_batch_norm_and_treats_each_image_alone() -> None:
    torch.manual_seed(1)
    model = AlexNet(width=TINY, norm="group").double().train()
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())
    assert not list(model.buffers())
    images = images_of(4).double()
    together = model.pool(model(images))
    alone = torch.cat([model.pool(model(image.unsqueeze(0))) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)


def test_under_group_norm_connected_layers_are_one_group_and_tell_images_apart() -> None:
    # Groups of two numbers without an extent could only be +1 and -1, whatever the image.
    torch.manual_seed(1)
    model = AlexNet(width=0.25, norm="group").eval()
    groups = [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert groups == [8, 16, 32, 32, 32, 1, 1]
    with torch.no_grad():
        pooled = model.pool(model(images_of(5)))
    assert len(pooled.round(decimals=5).unique()) > 5 * 20


@pytest.mark.parametrize("norm", NORMS)
def test_every_layer_is_normalised_and_none_has_a_bias_of_its_own(norm: Norm) -> None:
    leaves = [module for module in AlexNet(width=TINY, norm=norm).modules() if not list(module.children())]
    convolutions = [place for place, module in enumerate(leaves) if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 7
    for place in convolutions:
        convolution, normalisation, activation = leaves[place : place + 3]
        assert convolution.bias is None
        assert is_normalisation(normalisation)
        assert isinstance(activation, nn.ReLU)
    assert sum(is_normalisation(module) for module in leaves) == 7


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="batchnorm"):
        AlexNet(width=TINY, norm="batchnorm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer"):
        make_point_norm("layer", 4)  # type: ignore[arg-type]


# Layers that a method replaces


class Marked(nn.Identity):
    """Stands where a method's own layer would."""


def recorded(shapes: list[LayerShape], shape: LayerShape) -> Sequence[nn.Module]:
    shapes.append(shape)
    return shape.convolution(), Marked()


def test_a_method_can_replace_all_seven_layers() -> None:
    shapes: list[LayerShape] = []
    model = AlexNet(width=TINY, layer=lambda shape: recorded(shapes, shape))
    assert shapes == [
        LayerShape(3, 4, 11, stride=4, padding=2),
        LayerShape(4, 12, 5, padding=2),
        LayerShape(12, 24, 3, padding=1),
        LayerShape(24, 16, 3, padding=1),
        LayerShape(16, 16, 3, padding=1),
        LayerShape(16 * 36, 64, 1, point=True),
        LayerShape(64, 64, 1, point=True),
    ]
    assert sum(isinstance(module, Marked) for module in model.modules()) == 7
    assert not any(is_normalisation(module) for module in model.modules())
    assert model.pool(model(images_of(2))).shape == (2, 64)


def test_and_all_twelve_of_a_resnet_none_of_which_is_a_point() -> None:
    shapes: list[LayerShape] = []
    model = ResNet(width=TINY, layer=lambda shape: recorded(shapes, shape))
    assert len(shapes) == 12
    assert not any(shape.point for shape in shapes)
    assert sorted({(shape.kernel, shape.stride, shape.padding) for shape in shapes}) == [
        (1, 2, 0),
        (3, 1, 1),
        (3, 2, 1),
    ]
    assert sum(isinstance(module, Marked) for module in model.modules()) == 12
    assert not any(is_normalisation(module) for module in model.modules())


def test_a_layers_convolution_is_the_stated_one() -> None:
    convolution = LayerShape(3, 5, 7, stride=2, padding=4).convolution()
    assert (convolution.in_channels, convolution.out_channels) == (3, 5)
    assert (convolution.kernel_size, convolution.stride, convolution.padding) == ((7, 7), (2, 2), (4, 4))
    assert convolution.bias is None
    plain = LayerShape(3, 5, 7).convolution()
    assert (plain.stride, plain.padding) == ((1, 1), (0, 0))


@pytest.mark.parametrize(("point", "groups"), [(False, 32), (True, 1)])
def test_a_plain_layer_normalises_a_map_in_groups_and_a_point_in_one(point: bool, groups: int) -> None:
    convolution, normalisation = plain_layers("group")(LayerShape(3, 64, 1, point=point))
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(normalisation, nn.GroupNorm)
    assert (normalisation.num_groups, normalisation.num_channels) == (groups, 64)
    _, normalisation = plain_layers("batch")(LayerShape(3, 64, 1, point=point))
    assert isinstance(normalisation, MapNorm)
    assert normalisation.num_features == 64


def test_a_backbone_without_a_pool_of_its_own_averages_its_map() -> None:
    maps = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 2.0]]]])
    assert torch.equal(Backbone().pool(maps), torch.tensor([[3.0, 0.5]]))
    assert torch.equal(ResNet(width=TINY).pool(maps), torch.tensor([[3.0, 0.5]]))


# The methods on it


def a_split(count: int) -> Split:
    names = tuple(map(str, range(count)))
    return Split(images_of(count), torch.arange(count) % 3, names, names)


@pytest.mark.parametrize("name", sorted(available()))
@pytest.mark.parametrize("norm", NORMS)
def test_every_method_takes_a_step_on_it_and_answers(name: str, norm: Norm) -> None:
    method = available()[name]()
    task = replace(TASK, norm=norm)
    model = method.build(task)
    assert isinstance(model.backbone, AlexNet)
    assert model.backbone.out_channels == 64
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    received = method.start(task, model).tensors
    context = Context("a", 1, 2, received, torch.Generator())
    training = Training(steps=1, batch_size=4)
    tally = train_round(model, method, a_split(6), context, training=training, device=CPU)
    assert (tally["n"].item(), tally["train/seen"].item()) == (6, 4)
    state = model.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    # Every convolution and connected layer of the encoder was trained.
    for key, tensor in state.items():
        if key.startswith("backbone.") and tensor.dim() == 4:
            assert not torch.equal(tensor, start[key]), key
    answer = predict(model, method, a_split(5), device=CPU)
    assert answer.probabilities.shape == (5, 3)
    torch.testing.assert_close(answer.probabilities.sum(1), torch.ones(5))
    assert answer.features.shape == (5, 64)


def test_on_grey_images_too() -> None:
    method = available()["fedcode"]()
    model = method.build(replace(TASK, channels=1)).eval()
    with torch.no_grad():
        assert method.predict(model, images_of(2, channels=1)).probabilities.shape == (2, 3)
