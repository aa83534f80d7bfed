"""Sums of clipped per-sample gradients (Abadi et al. 2016), at hardly more than the cost of a plain step.

The gradient of a sample's loss with respect to *all* trainable parameters is scaled to a norm of at most C, and the
results are added up. One forward pass and one backward pass note what goes into every layer and the gradient of what
comes out of it (book-keeping, Bu et al. 2023); the parameters themselves are taken for constants meanwhile. From the
notes follow every sample's norm, then the weighted sum, layer by layer (clipping_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.clipping_common import (
    Clipped,
    ClipsSamples,
    UnknownLayer,
    check_clippable,
    check_losses,
    countable,
    factors_of,
)
from crossward.privacy.dp.clipping_layers import Call, Layer, Matrix, is_changed, layer_of, square
from crossward.privacy.dp.clipping_opacus import OpacusClipper as OpacusClipper

KEPT_BYTES = 256 * 2**20
"""Room for per-sample gradients that are kept for the sum; those of further layers are worked out twice."""

_SAME = 1e-3


def clipper_for(model: nn.Module, *, clip: float) -> ClipsSamples:
    """The fast way where it knows all layers, and Opacus's otherwise.

    Raises:
        PrivacyRefusal: neither can clip this model's gradients per sample.
    """
    try:
        return Clipper(model, clip=clip)
    except UnknownLayer:
        return OpacusClipper(model, clip=clip)


@dataclass
class _Share:
    """What one layer adds to the norms and to the sum."""

    layer: Layer
    calls: list[Call] = field(default_factory=list)
    waiting: int = 0
    small: dict[str, Tensor] = field(default_factory=dict)
    kept: list[Tensor] | None = None
    notes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    squares: Tensor | None = None

    def measure(self, room: int) -> int:
        """Work out squared norms [b], keep what the sum needs, and give how many bytes of the room are left."""
        self.notes = [self._note(call) for call in self.calls if call.gradient is not None]
        self.calls = []
        if not self.notes:
            return room
        parts = [self.layer.small(*note) for note in self.notes]
        self.small = {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}
        found = [torch.linalg.vector_norm(each.flatten(1), dim=1).double().square() for each in self.small.values()]
        if isinstance(self.layer, Matrix) and "weight" in self.layer.trained:
            weight = self.layer.module.weight
            needed = len(self.notes[0][0]) * weight.numel() * weight.element_size()
            if self.layer.gram_pays(self.notes):
                found.append(self.layer.squares(self.notes))
            elif needed <= room:
                self.kept, room = list(self.layer.each(self.notes)), room - needed
                found.append(torch.stack([square(gradient) for gradient in self.kept]))
            else:
                found.append(torch.stack([square(gradient) for gradient in self.layer.each(self.notes)]))
        if self.kept is not None or not isinstance(self.layer, Matrix):
            self.notes = []
        self.squares = torch.stack(found).sum(dim=0) if found else None
        return room

    def leave_out(self, rows: Tensor) -> None:
        """Take samples [b] out of all that the sum is made of: a factor of 0 makes nothing of what is not finite."""
        self.small = {name: _without(rows, each) for name, each in self.small.items()}
        self.notes = [(_without(rows, inputs), _without(rows, gradient)) for inputs, gradient in self.notes]
        if self.kept is not None:
            left_out = rows.tolist()
            self.kept = [torch.zeros_like(each) if out else each for each, out in zip(self.kept, left_out, strict=True)]

    def add_up(self, factors: Tensor) -> None:
        """Give every parameter its gradient."""
        for name, parameter in self.layer.trained.items():
            parameter.grad = self._total(name, factors).view_as(parameter)

    def _total(self, name: str, factors: Tensor) -> Tensor:
        parameter = self.layer.trained[name]
        if self.squares is None:
            return torch.zeros_like(parameter)
        factors = factors.to(parameter.dtype)
        if name in self.small:
            return factors @ self.small[name].flatten(1)
        if self.kept is None:
            assert isinstance(self.layer, Matrix)
            return self.layer.weighted(self.notes, factors)
        total = torch.zeros_like(parameter)
        for gradient, factor in zip(self.kept, factors.tolist(), strict=True):
            total.add_(gradient, alpha=factor)
        return total

    def _note(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.inputs._version != call.version:
            raise PrivacyRefusal(
                f"the input of a {type(self.layer.module).__name__} was changed in place after it was used, so that "
                "its gradient cannot be known. Use operations that leave their inputs as they are"
            )
        assert call.gradient is not None
        kind = next(iter(self.layer.trained.values())).dtype
        return call.inputs.to(kind), call.gradient.to(kind)


class Clipper:
    """Sums of clipped per-sample gradients of all trainable parameters, without making them one by one.

    Modules must treat samples, the first dimension of their inputs, each by itself. What a module mixes cannot be seen
    here: ``check_per_sample`` looks whether it does.

    Args:
        model: its trainable parameters belong to convolutions, linear layers, GroupNorm and LayerNorm.
        clip: C, the largest norm of a sample's gradient.

    Raises:
        PrivacyRefusal: a module mixes samples; ``UnknownLayer`` where a parameter belongs to another kind of module.
    """

    way: ClassVar[str] = "book-keeping"

    def __init__(self, model: nn.Module, *, clip: float) -> None:
        check_clippable(model, clip)
        self._model, self._clip = model, clip
        self._layers = dict(_layers_of(model))
        self._trained = [id(parameter) for parameter in _trained(model)]
        self._unproven = {name for name, layer in self._layers.items() if is_changed(layer)}

    def backward(self, losses: Callable[[], Tensor]) -> Clipped:
        """Fill ``grad`` of every trainable parameter with the sum over samples of clipped gradients.

        Args:
            losses: runs the forward pass and gives the loss of every sample, [b].

        Raises:
            PrivacyRefusal: something was found that mixes samples.
        """
        trained = _trained(self._model)
        if [id(parameter) for parameter in trained] != self._trained:
            raise PrivacyRefusal("parameters were frozen or freed since clipping was set up; make a new Clipper")
        shares = {name: _Share(layer) for name, layer in self._layers.items()}
        with self._watched(shares, trained):
            found = losses()
            check_losses(found)
            self._check_batch(shares, len(found))
            self._adding = True
            if len(found) and found.requires_grad:
                found.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad(), _full_precision(found.device):
            self._finish(shares)
            squares = [share.squares for share in shares.values() if share.squares is not None]
            norms = torch.stack(squares).sum(dim=0).sqrt() if squares else found.new_zeros(len(found)).double()
            out = ~countable(found, norms)
            left_out = int(out.sum())
            norms = norms.masked_fill(out, 0.0)
            factors = factors_of(norms, self._clip)
            for share in shares.values():
                if left_out:
                    share.leave_out(out)
                share.add_up(factors)
        return Clipped(found.detach(), norms.to(found.dtype), left_out)

    @contextmanager
    def _watched(self, shares: dict[str, _Share], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Note every layer's inputs and gradients, with all parameters taken for constants."""
        self._room, self._adding = KEPT_BYTES, False
        handles = [
            layer.module.register_forward_hook(partial(self._note, name, shares[name]))
            for name, layer in self._layers.items()
        ]
        try:
            for parameter in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

    def _note(self, name: str, share: _Share, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """The forward hook of a layer."""
        if not torch.is_grad_enabled():
            return None
        shapes = [list(each.shape) for each in inputs]
        if len(inputs) != 1 or not share.layer.accepts(inputs[0]):
            raise PrivacyRefusal(
                f"'{name}' was called with inputs of shapes {shapes} instead of one tensor with a row for every image"
            )
        if name in self._unproven:
            self._prove(name, share.layer, inputs[0], output)
        call = Call(inputs[0].detach(), inputs[0]._version)
        share.calls.append(call)
        share.waiting += 1
        # The first layer's output would need no gradient, as everything before it is constant.
        watched = output if output.requires_grad else output.detach().requires_grad_().clone()
        watched.register_hook(partial(self._arrived, share, call))  # type: ignore[no-untyped-call]
        return watched

    def _arrived(self, share: _Share, call: Call, gradient: Tensor) -> None:
        """The hook of an output's gradient; a layer is done with as soon as all its calls have theirs."""
        if not self._adding:
            raise PrivacyRefusal(
                "the loss takes gradients of its own, which cannot be clipped by image. Use a loss without them"
            )
        call.gradient = gradient.detach()
        share.waiting -= 1
        if not share.waiting:
            with torch.no_grad(), _full_precision(gradient.device):
                self._room = share.measure(self._room)

    def _finish(self, shares: dict[str, _Share]) -> None:
        """Treat layers some of whose calls the losses do not depend on."""
        for share in shares.values():
            if share.waiting:
                self._room = share.measure(self._room)

    def _prove(self, name: str, layer: Layer, inputs: Tensor, output: Tensor) -> None:
        """See at its first images that a module with a forward pass of its own gives the plain result."""
        with torch.no_grad():
            plain = layer.plain(inputs)
            # What is not finite can be held against nothing, and is left out of the step.
            finite = torch.isfinite(plain.flatten(1)).all(dim=1)
            if not finite.any():
                return
            if len(plain) == len(output):
                plain, output = plain[finite], output[finite]
            if plain.shape != output.shape or not (plain - output).abs().max() <= _SAME * plain.abs().max():
                raise PrivacyRefusal(
                    f"'{name}' ({type(layer.module).__name__}) computes something else than a plain layer with its "
                    "weight, so that its gradients per image are not known. Use a plain layer"
                )
        self._unproven.discard(name)

    @staticmethod
    def _check_batch(shares: dict[str, _Share], samples: int) -> None:
        for name, share in shares.items():
            for call in share.calls:
                if len(call.inputs) != samples:
                    raise PrivacyRefusal(
                        f"'{name}' got {len(call.inputs)} rows for {samples} images, so that its gradient cannot be "
                        "told apart by image. Give every layer one row for every image"
                    )


def _layers_of(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    owners: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        own = {
            ".".join(filter(None, (name, key))): value
            for key, value in module.named_parameters(recurse=False)
            if value.requires_grad
        }
        if not own:
            continue
        first, layer = next(iter(own)), layer_of(module)
        if layer is None:
            raise UnknownLayer(
                f"'{first}' belongs to a {type(module).__name__}, whose gradients per image are not known. "
                "Use Conv2d, Linear, GroupNorm and LayerNorm"
            )
        for full, parameter in own.items():
            if parameter in owners:
                raise UnknownLayer(
                    f"'{full}' is also '{owners[parameter]}': gradients of a parameter that two modules share are not "
                    "known per image. Call one module twice instead"
                )
            owners[parameter] = full
        yield name, layer


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _without(rows: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(rows.view(-1, *[1] * (values.ndim - 1)), 0.0)


def _full_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)
