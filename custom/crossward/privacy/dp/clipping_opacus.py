"""Clipped gradients by Opacus, for models with layers that the fast way does not know."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.clipping_common import Clipped, check_clippable, check_losses, countable, factors_of

_LEFT_ON_PARAMETERS = ("grad_sample", "_current_grad_sample", "_forward_counter")
_LEFT_ON_MODULES = ("activations", "max_batch_len")


class OpacusClipper:
    """Sums of clipped per-sample gradients by the hooks of Opacus, which makes the gradients of all samples at once.

    It takes about twice the time of ``Clipper``, and memory for a whole model for every sample. Hooks are on the model
    only while gradients are made.

    Args:
        model: of layers that Opacus or functorch knows, in training mode whenever gradients are made.
        clip: C, the largest norm of a sample's gradient.

    Raises:
        PrivacyRefusal: a module mixes samples, or Opacus does not take it.
    """

    way: ClassVar[str] = "opacus"

    def __init__(self, model: nn.Module, *, clip: float) -> None:
        check_clippable(model, clip)
        self._model, self._clip = model, clip
        with self._hooked():
            pass

    def backward(self, losses: Callable[[], Tensor]) -> Clipped:
        """Fill ``grad`` of every trainable parameter with the sum over samples of clipped gradients.

        Args:
            losses: runs the forward pass and gives the loss of every sample, [b].

        Raises:
            PrivacyRefusal: gradients cannot be told apart by sample.
        """
        parameters = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        inactive = next((name for name, module in self._model.named_modules() if not module.training), None)
        if inactive is not None:
            raise PrivacyRefusal(f"'{inactive}' is not in training mode, and Opacus would leave it out. Use train()")
        for parameter in parameters.values():
            parameter.grad = None
        with self._hooked():
            found = losses()
            check_losses(found)
            if len(found) and found.requires_grad:
                found.sum().backward()  # type: ignore[no-untyped-call]
            each = {name: _gradients(name, value, len(found)) for name, value in parameters.items()}
        with torch.no_grad():
            squares = [
                torch.linalg.vector_norm(gradients.flatten(1), dim=1).double().square() for gradients in each.values()
            ]
            norms = torch.stack(squares).sum(dim=0).sqrt() if len(found) else found.new_zeros(0).double()
            out = ~countable(found, norms)
            norms = norms.masked_fill(out, 0.0)
            factors = factors_of(norms, self._clip)
            for name, parameter in parameters.items():
                # A factor of 0 would make nothing of what is not finite.
                each[name][out] = 0.0
                parameter.grad = torch.tensordot(factors.to(each[name].dtype), each[name], dims=1)
        return Clipped(found.detach(), norms.to(found.dtype), int(out.sum()))

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        # Takes seconds to import, and hardly any model needs it.
        from opacus.grad_sample import GradSampleModule

        try:
            hooked = GradSampleModule(self._model, loss_reduction="sum", strict=True)
        except (NotImplementedError, ValueError) as cause:
            raise PrivacyRefusal(
                "the model has trainable layers with buffers, or others whose gradients per image Opacus does not "
                "know. Use Conv2d, Linear, GroupNorm and LayerNorm"
            ) from cause
        # Opacus notes a layer's output by a view, which may not be changed in place.
        in_place = [vars(module) for module in self._model.modules() if vars(module).get("inplace") is True]
        try:
            for attributes in in_place:
                attributes["inplace"] = False
            with warnings.catch_warnings():
                # PyTorch tells that the images need no gradient.
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                yield
        finally:
            for attributes in in_place:
                attributes["inplace"] = True
            hooked.to_standard_module()
            for parameter in self._model.parameters():
                _forget(parameter, _LEFT_ON_PARAMETERS)
            for module in self._model.modules():
                _forget(module, _LEFT_ON_MODULES)


def _gradients(name: str, parameter: nn.Parameter, samples: int) -> Tensor:
    """What Opacus noted at a parameter, [b, ...]; zeros where the losses do not depend on it."""
    found = getattr(parameter, "grad_sample", None)
    if found is None and getattr(parameter, "_current_grad_sample", None) is None:
        if parameter.grad is not None and parameter.grad.any():
            raise PrivacyRefusal(f"Opacus noted no gradients per image of '{name}', which has some")
        return parameter.new_zeros((samples, *parameter.shape))
    if not isinstance(found, Tensor) or len(found) != samples:
        raise PrivacyRefusal(
            f"the gradients of '{name}' cannot be told apart by image: Opacus noted "
            f"{len(found) if isinstance(found, Tensor) else 'not one set'} for {samples} images"
        )
    difference = parameter.new_tensor(math.inf) if parameter.grad is None else found.sum(0).sub(parameter.grad).norm()
    if difference > 1e-3 * found.flatten(1).norm(dim=1).sum():
        raise PrivacyRefusal(f"the gradients per image of '{name}' do not add up to its gradient")
    return found


def _forget(thing: object, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(thing, name):
            delattr(thing, name)
