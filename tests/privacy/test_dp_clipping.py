"""Clipped sums: the fast way, in all its ways, gives what one sample at a time gives, and refuses what it cannot."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from crossward.federation.errors import PrivacyRefusal
from crossward.methods import Task, create
from crossward.methods.base import Batch, Context
from crossward.methods.registry import available
from crossward.nets.decomposed import Expansion
from crossward.privacy.dp import clipping, clipping_layers
from crossward.privacy.dp.clipping import Clipper, OpacusClipper, clipper_for
from crossward.privacy.dp.clipping_common import Clipped
from tests.privacy.clipped import assert_as_one_by_one

EXACT = 1e-9
WAYS = {
    "as it chooses": {},
    "direct and kept": {"DIRECT_PER_WEIGHT": 0},
    "direct and worked out twice": {"DIRECT_PER_WEIGHT": 0, "KEPT_BYTES": 0},
    "Gram": {"DIRECT_PER_WEIGHT": 10**9},
    "Gram, a sample at a time": {"DIRECT_PER_WEIGHT": 10**9, "GRAM_BYTES": 1},
}
THOROUGH = settings(deadline=None, max_examples=25)
way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def forced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the clipper take one of its ways, where a test asks for one."""
    chosen = WAYS[request.node.callspec.params["way"]] if "way" in request.fixturenames else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in chosen.items():
            patch.setattr(clipping if hasattr(clipping, name) else clipping_layers, name, value)
        yield


class Several(nn.Module):
    """A layer that is called more than once, on inputs that differ; a call may come to nothing."""

    def __init__(self, layer: nn.Module, calls: int = 1, *, dropped: bool = False) -> None:
        super().__init__()
        self.layer, self.calls, self.dropped = layer, calls, dropped

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = [torch.tanh(self.layer((1 + call) * inputs + 0.1 * call)) for call in range(self.calls)]
        if self.dropped:
            self.layer(3 * inputs)
        return torch.cat([output.flatten(1) for output in outputs], dim=1)


def losses_of(model: nn.Module, inputs: Tensor) -> Callable[[slice], Tensor]:
    """Losses that every output has a part in, and every sample a different one."""

    def losses(rows: slice) -> Tensor:
        outputs = model(inputs[rows]).flatten(1)
        weights = torch.linspace(0.5, 2, outputs.shape[1], dtype=outputs.dtype) if outputs.shape[1] else 1.0
        return (weights * (outputs - 0.3).square()).sum(dim=1)

    return losses


def check_layer(layer: nn.Module, shape: tuple[int, ...], calls: int = 1, *, dropped: bool = False) -> None:
    torch.manual_seed(0)
    model = Several(layer, calls, dropped=dropped).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.9)
    inputs = torch.randn(shape, dtype=torch.float64)
    # Norms are around this, so that some are clipped and some are not.
    assert_as_one_by_one(Clipper, model, losses_of(model, inputs), shape[0], 2.0, EXACT)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, tuple[int, ...]]:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    same = draw(st.booleans())
    conv = nn.Conv2d(
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=1 if same else (draw(st.integers(1, 3)), draw(st.integers(1, 2))),
        padding="same" if same else (draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"])),
    )
    return conv, (draw(st.integers(0, 4)), conv.in_channels, draw(st.integers(5, 8)), draw(st.integers(5, 8)))


@way
@THOROUGH
@given(drawn=convolutions(), calls=st.integers(1, 3), dropped=st.booleans())
def test_convolutions(way: str, drawn: tuple[nn.Conv2d, tuple[int, ...]], calls: int, dropped: bool) -> None:
    check_layer(*drawn, calls, dropped=dropped)


@way
@THOROUGH
@given(
    samples=st.integers(0, 4),
    between=st.lists(st.integers(1, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bias=st.booleans(),
    calls=st.integers(1, 3),
    dropped=st.booleans(),
)
def test_linear_layers(
    way: str, samples: int, between: list[int], sizes: tuple[int, int], bias: bool, calls: int, dropped: bool
) -> None:
    check_layer(nn.Linear(*sizes, bias=bias), (samples, *between, sizes[0]), calls, dropped=dropped)


@THOROUGH
@given(
    samples=st.integers(1, 4),
    groups=st.integers(1, 3),
    per_group=st.integers(2, 3),
    places=st.lists(st.integers(1, 4), max_size=3),
    calls=st.integers(1, 3),
)
def test_group_norm(samples: int, groups: int, per_group: int, places: list[int], calls: int) -> None:
    check_layer(nn.GroupNorm(groups, groups * per_group), (samples, groups * per_group, *places), calls)


@THOROUGH
@given(
    samples=st.integers(0, 4),
    between=st.lists(st.integers(1, 3), max_size=2),
    normalised=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    bias=st.booleans(),
    calls=st.integers(1, 3),
)
def test_layer_norm(samples: int, between: list[int], normalised: list[int], bias: bool, calls: int) -> None:
    check_layer(nn.LayerNorm(normalised, bias=bias), (samples, *between, *normalised), calls)


@way
@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_subclass_whose_result_is_the_grouped_convolution(way: str, factor: int, kernel: int) -> None:
    check_layer(Expansion(3, factor, kernel=kernel), (3, 3, 5, 4), 2)


class Net(nn.Module):
    """Layers of every kind, with a bias here and there, ReLU in place, and something that comes to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.middle = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, groups=3, bias=False), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)
        )
        self.norm, self.head, self.unused = nn.LayerNorm(6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, images: Tensor) -> Tensor:
        features = self.first(images)
        features = features + self.middle(features)
        return self.head(self.norm(features.flatten(2).transpose(1, 2)).mean(dim=1))


def net_and_losses(samples: int = 5) -> tuple[Net, Callable[[slice], Tensor]]:
    torch.manual_seed(1)
    model = Net().double()
    images, labels = torch.randn(samples, 2, 9, 8, dtype=torch.float64), torch.arange(samples) % 3
    return model, lambda rows: 3 * functional.cross_entropy(model(images[rows]), labels[rows], reduction="none")


@way
@pytest.mark.parametrize("clip", [0.01, 2.0, 1e6])
def test_a_net_is_clipped_jointly_over_all_its_layers(way: str, clip: float) -> None:
    model, losses = net_and_losses()
    assert_as_one_by_one(Clipper, model, losses, 5, clip, EXACT)


@pytest.mark.parametrize("clipper", [Clipper, OpacusClipper])
@pytest.mark.parametrize("frozen", [("first.0.weight",), ("first.0.bias", "norm.weight", "head.weight"), ("middle.1",)])
def test_frozen_parameters_have_no_part(clipper: type, frozen: tuple[str, ...]) -> None:
    model, losses = net_and_losses()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    assert_as_one_by_one(clipper, model, losses, 5, 0.7, EXACT)


@pytest.mark.parametrize("clipper", [Clipper, OpacusClipper])
def test_no_samples_give_zeros(clipper: type) -> None:
    model, losses = net_and_losses(samples=0)
    clipped = clipper(model, clip=1.0).backward(lambda: losses(slice(None)))
    assert clipped.losses.shape == clipped.norms.shape == (0,)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("clipper", [Clipper, OpacusClipper])
def test_step_after_step_is_the_same_and_nothing_is_left_on_the_model(clipper: type) -> None:
    model, losses = net_and_losses()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    clips = clipper(model, clip=1.0)
    found = []
    for _ in range(3):
        norms = clips.backward(lambda: losses(slice(None))).norms
        found.append([norms, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(not module._forward_hooks and not module._backward_hooks for module in model.modules())
    assert all(not hasattr(parameter, "grad_sample") for parameter in model.parameters())
    losses(slice(None)).sum().backward()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_clipping_by_hand() -> None:
    """Gradients (3, 4) and (0.3, 0.4) clipped to 1: (0.6, 0.8) + (0.3, 0.4)."""
    model = nn.Linear(2, 1, bias=False)
    inputs = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    clipped = Clipper(model, clip=1.0).backward(lambda: model(inputs).squeeze(1))
    assert clipped.norms.tolist() == pytest.approx([5.0, 0.5])
    assert model.weight.grad is not None
    assert model.weight.grad.tolist()[0] == pytest.approx([0.9, 1.2])


def test_gram_matrices_that_cancel_are_not_relied_on() -> None:
    """Single precision: positions are alike but for the sixth digit, and their gradients add up to nearly nothing."""
    torch.manual_seed(0)
    layer = nn.Conv2d(32, 32, 3, padding=1, bias=False)
    inputs = 1 + 1e-6 * torch.randn(3, 32, 4, 4)
    apart = torch.randn(3, 32, 4, 4)
    apart -= apart.mean(dim=(2, 3), keepdim=True)

    def losses(rows: slice) -> Tensor:
        padded = functional.pad(inputs[rows], (1, 1, 1, 1), mode="replicate")
        return (apart[rows] * layer(padded)[:, :, 1:-1, 1:-1]).sum(dim=(1, 2, 3))

    expected = []
    for row in range(3):
        losses(slice(row, row + 1)).sum().backward()
        expected.append(float(layer.weight.grad.double().norm()))
        layer.weight.grad = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping_layers, "DIRECT_PER_WEIGHT", 10**9)
        assert Clipper(layer, clip=1.0).backward(lambda: losses(slice(None))).norms.tolist() == pytest.approx(
            expected, rel=1e-4
        )
        patch.setattr(clipping_layers, "CANCELLED", 0.0)
        wrong = Clipper(layer, clip=1.0).backward(lambda: losses(slice(None))).norms.tolist()
        assert wrong != pytest.approx(expected, rel=1e-2), "the case is too easy to tell anything"


@pytest.mark.parametrize("net", ["resnet", "alexnet"])
@pytest.mark.parametrize("name", available())
def test_the_model_of_every_method(name: str, net: str) -> None:
    method = create(name).under_privacy()
    task = Task(classes=("a", "b", "c"), channels=2, size=64, rounds=4, width=0.0625, norm="group", net=net)
    model = method.build(task).double().train()
    generator = torch.Generator().manual_seed(0)
    size = 64 if net == "alexnet" else 16
    images = torch.randn(3, 2, size, size, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1])
    context = Context("a", 2, 4, dict(model.state_dict()), torch.Generator())

    def losses(rows: slice) -> Tensor:
        batch = Batch(images[rows], labels[rows])
        return torch.stack(list(method.terms(model, model(batch.images), batch, context).values())).sum(dim=0)

    assert isinstance(clipper_for(model, clip=1.0), Clipper)
    # Methods go over to single precision behind the net.
    assert_as_one_by_one(Clipper, model, losses, 3, 1.0, 1e-5)


class Scaled(nn.Module):
    """A parameter of a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def other_models() -> dict[str, nn.Module]:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    return {
        "PReLU": nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)),
        "own parameter": nn.Sequential(nn.Linear(3, 3), Scaled(), nn.LayerNorm(3)),
        "embedding of positions": nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten()),
        "one weight twice": tied,
    }


@pytest.mark.parametrize("kind", other_models())
def test_other_layers_go_to_opacus(kind: str) -> None:
    torch.manual_seed(0)
    model = other_models()[kind].double()
    inputs = torch.randn(4, 3, dtype=torch.float64)
    clipper = clipper_for(model, clip=0.5)
    assert isinstance(clipper, OpacusClipper)
    assert clipper.way == "opacus"
    assert_as_one_by_one(clipper_for, model, losses_of(model, inputs), 4, 0.5, EXACT)


def test_opacus_gives_the_same_as_the_fast_way() -> None:
    model, losses = net_and_losses()
    assert_as_one_by_one(OpacusClipper, model, losses, 5, 0.5, EXACT)
    check = Several(nn.Conv2d(2, 3, 2), 2).double()
    assert_as_one_by_one(
        OpacusClipper, check, losses_of(check, torch.randn(3, 2, 4, 4, dtype=torch.float64)), 3, 0.5, EXACT
    )


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "'1' is a BatchNorm.*GroupNorm"),
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2, affine=False)), "'1' is a BatchNorm"),
        (nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True)), "'0' keeps running statistics"),
    ],
)
def test_modules_that_mix_images_are_refused_by_every_way(model: nn.Module, told: str) -> None:
    for way_to_clip in (Clipper, OpacusClipper, clipper_for):
        with pytest.raises(PrivacyRefusal, match=told):
            way_to_clip(model, clip=1.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("clipper", [Clipper, OpacusClipper])
def test_a_bound_that_is_none_is_refused(clipper: type, clip: float) -> None:
    with pytest.raises(PrivacyRefusal, match="bound"):
        clipper(nn.Linear(2, 2), clip=clip)


def test_the_first_layer_that_is_not_known_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.PReLU(), nn.Bilinear(2, 2, 2))
    with pytest.raises(clipping.UnknownLayer, match=r"'1\.weight' belongs to a PReLU"):
        Clipper(model, clip=1.0)


def test_parametrised_weights_are_not_taken_for_plain_ones() -> None:
    with pytest.raises(clipping.UnknownLayer, match="ParametrizedLinear"):
        Clipper(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), clip=1.0)


def test_a_weight_that_two_modules_share_is_named() -> None:
    with pytest.raises(clipping.UnknownLayer, match=r"'2\.weight' is also '0\.weight'"):
        Clipper(other_models()["one weight twice"], clip=1.0)


class Other(nn.Linear):
    """Looks like a linear layer and is none."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight**2, self.bias)


class Changing(nn.Module):
    """Changes what a layer has seen already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        seen = hidden.detach().clone()
        return self.second(seen) + hidden + seen.mul_(2)


class Views(nn.Module):
    """Two rows of each image for one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(torch.cat([inputs, -inputs])).view(2, len(inputs), 2).sum(dim=0)


class Penalised(nn.Module):
    """Takes a gradient inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layer(inputs)
        torch.autograd.grad(output.square().sum(), [output], retain_graph=True)
        return output


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Sequential(Other(2, 2)), "'0' (Other) computes something else"),
        (Changing(), "changed in place"),
        (Views(), "'layer' got 6 rows for 3 images"),
        (Penalised(), "gradients of its own"),
    ],
)
def test_what_would_make_gradients_wrong_is_refused(model: nn.Module, told: str) -> None:
    inputs = torch.randn(3, 2)
    with pytest.raises(PrivacyRefusal, match=re.escape(told)):
        Clipper(model, clip=1.0).backward(lambda: model(inputs).square().sum(dim=1))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())


def test_an_input_without_rows_for_images_is_refused() -> None:
    model = nn.Conv2d(1, 1, 1)
    with pytest.raises(PrivacyRefusal, match="row for every image"):
        Clipper(model, clip=1.0).backward(lambda: model(torch.ones(1, 2, 2)).flatten())


@pytest.mark.parametrize("clipper", [Clipper, OpacusClipper])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda losses: losses.mean(), "one number for each image"),
        (lambda losses: losses[:, None], "one number for each image"),
    ],
)
def test_losses_that_cannot_be_clipped_are_refused(clipper: type, change: Callable, told: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inputs = torch.ones(3, 2)
    with pytest.raises(PrivacyRefusal, match=told):
        clipper(model, clip=1.0).backward(lambda: change(model(inputs).sum(dim=1)))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())


POISON = {
    "an image of nan": lambda inputs, row: inputs[row].fill_(math.nan),
    "an infinite pixel": lambda inputs, row: inputs[row, 0, 0].fill_(math.inf),
}


@way
@pytest.mark.parametrize("kind", POISON)
@pytest.mark.parametrize("rows", [[0], [1, 3], [0, 1, 2, 3]])
def test_an_image_without_a_finite_gradient_counts_as_nothing(kind: str, rows: list[int], way: str) -> None:
    """And no other one is moved by it: a refusal would tell everybody that the image is there, noise or no noise."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    )
    inputs = torch.randn(4, 2, 4, 4)
    others = [row for row in range(4) if row not in rows]
    expected, _ = gradients_and_clipped(Clipper, model, inputs[others])
    for row in rows:
        POISON[kind](inputs, row)
    for clipper in (Clipper, OpacusClipper):
        found, clipped = gradients_and_clipped(clipper, model, inputs)
        assert clipped.left_out == len(rows)
        assert clipped.norms[rows].tolist() == [0.0] * len(rows)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clipper", [Clipper, OpacusClipper])
@pytest.mark.parametrize(
    "change",
    [
        lambda losses: losses * torch.tensor([1.0, math.nan, 1]),
        lambda losses: losses + torch.tensor([0.0, math.inf, 0]),
        lambda losses: torch.stack([losses[0], (losses[1] - losses[1].detach()).abs().sqrt(), losses[2]]),
    ],
)
def test_neither_does_one_whose_loss_or_norm_alone_is_not_finite(clipper: type, change: Callable) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(3, 2)
    expected, _ = gradients_and_clipped(clipper, model, inputs[[0, 2]])
    clipped = clipper(model, clip=1.0).backward(lambda: change(model(inputs).sum(dim=1)))
    assert clipped.left_out == 1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_layer_is_not_held_to_be_another_one_for_an_image_without_numbers() -> None:
    class Same(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.weight.T + self.bias

    model, inputs = nn.Sequential(Same(2, 2)), torch.tensor([[1.0, 2.0], [math.nan, 1.0]])
    assert Clipper(model, clip=1.0).backward(lambda: model(inputs).sum(dim=1)).left_out == 1


def gradients_and_clipped(clipper: type, model: nn.Module, inputs: Tensor) -> tuple[dict[str, Tensor], Clipped]:
    clipped = clipper(model, clip=1.0).backward(lambda: model(inputs).sum(dim=1))
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}, clipped


def test_parameters_that_were_frozen_meanwhile_are_noticed() -> None:
    model = nn.Linear(2, 2)
    clipper = Clipper(model, clip=1.0)
    model.bias.requires_grad_(False)
    with pytest.raises(PrivacyRefusal, match="make a new Clipper"):
        clipper.backward(lambda: model(torch.ones(1, 2)).sum(dim=1))


def test_opacus_is_not_trusted_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.PReLU()).eval()
    with pytest.raises(PrivacyRefusal, match=r"train\(\)"):
        OpacusClipper(model, clip=1.0).backward(lambda: model(torch.ones(1, 2)).sum(dim=1))


def test_gradients_of_a_few_samples_only_are_in_memory_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room no two samples' gradients of a layer are alive at the same time."""
    model, losses = net_and_losses()
    alive, most = 0, 0
    plain = clipping_layers.Matrix.each

    def counted(self: clipping_layers.Matrix, *arguments: object) -> Iterator[Tensor]:
        nonlocal alive, most
        for gradient in plain(self, *arguments):
            alive += 1
            most = max(most, alive)
            yield gradient
            alive -= 1

    monkeypatch.setattr(clipping_layers.Matrix, "each", counted)
    monkeypatch.setattr(clipping, "KEPT_BYTES", 0)
    monkeypatch.setattr(clipping_layers, "DIRECT_PER_WEIGHT", 0)
    Clipper(model, clip=1.0).backward(lambda: losses(slice(None)))
    assert most == 1


def test_room_for_kept_gradients_is_shared_by_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    kept = []
    plain = clipping._Share.add_up
    monkeypatch.setattr(
        clipping._Share, "add_up", lambda self, factors: (kept.append(self.kept is not None), plain(self, factors))
    )
    monkeypatch.setattr(clipping_layers, "DIRECT_PER_WEIGHT", 0)
    inputs = torch.randn(3, 4, dtype=torch.float64)
    for room, expected in ((3 * 16 * 8 - 1, [False, False]), (3 * 16 * 8, [False, True]), (6 * 16 * 8, [True, True])):
        monkeypatch.setattr(clipping, "KEPT_BYTES", room)
        kept.clear()
        assert_as_one_by_one(Clipper, model, losses_of(model, inputs), 3, 0.5, EXACT)
        # The last layer's gradients come first.
        assert kept == expected
