"""Per-sample gradients of one layer: how long they are, and their weighted sum.

A weight's gradient of one sample is a sum over positions l (those of a feature map, and of all calls of the module),
sum_l g_l a_l^T, with a_l the inputs that a position sees and g_l the gradient of its output. There are two ways:

- directly, sample by sample, by the same kernels that make the gradient of a batch. The results are kept where there
  is room, so that the weighted sum is no second pass;
- by Gram matrices: |sum_l g_l a_l^T|^2 = sum_lm (a_l . a_m)(g_l . g_m), without the gradients (Goodfellow 2015;
  Rochette et al. 2019), which is cheaper where a layer has few positions and many weights. Digits are lost where
  positions cancel each other; such samples are done directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DIRECT_PER_WEIGHT = 125
"""Gram matrices are taken where their products are fewer than this per weight; measured on a CPU with oneDNN."""

GRAM_BYTES = 32 * 2**20
"""Room for Gram matrices and unfolded inputs of as many samples as are treated at once."""

CANCELLED = 2.0**-10
"""Below this part of what independent positions would give, a square is worked out directly."""


@dataclass
class Call:
    """One call of a module: its input [b,...], the state that it was in, and the gradient of its output."""

    inputs: Tensor
    version: int
    gradient: Tensor | None = None


class Layer(ABC):
    """What per-sample gradients need to know about one module.

    Args:
        module: with trainable parameters of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.trained = {name: value for name, value in module.named_parameters(recurse=False) if value.requires_grad}

    @abstractmethod
    def plain(self, inputs: Tensor) -> Tensor:
        """The output that the formulas here are for."""

    @abstractmethod
    def small(self, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Per-sample gradients [b,...] of the parameters that are few, by name."""

    def accepts(self, inputs: Tensor) -> bool:
        """Whether an input has a dimension for samples and the others that the module expects."""
        return inputs.ndim > 1


class Norm(Layer):
    """GroupNorm or LayerNorm: y = weight * normalised + bias."""

    @abstractmethod
    def normalised(self, inputs: Tensor) -> Tensor:
        """The input before weight and bias."""

    @abstractmethod
    def per_sample(self, values: Tensor) -> Tensor:
        """Sum over the positions of a sample, [b, *weight]."""

    def small(self, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        found = {}
        if "weight" in self.trained:
            found["weight"] = self.per_sample(self.normalised(inputs) * gradient)
        if "bias" in self.trained:
            found["bias"] = self.per_sample(gradient)
        return found


class GroupNormLayer(Norm):
    """GroupNorm of [b,c,...]."""

    module: nn.GroupNorm

    def plain(self, inputs: Tensor) -> Tensor:
        module = self.module
        return functional.group_norm(inputs, module.num_groups, module.weight, module.bias, module.eps)

    def normalised(self, inputs: Tensor) -> Tensor:
        return functional.group_norm(inputs, self.module.num_groups, eps=self.module.eps)

    def per_sample(self, values: Tensor) -> Tensor:
        return values if values.ndim == 2 else values.flatten(start_dim=2).sum(dim=2)


class LayerNormLayer(Norm):
    """LayerNorm over the last dimensions."""

    module: nn.LayerNorm

    def plain(self, inputs: Tensor) -> Tensor:
        module = self.module
        return functional.layer_norm(inputs, module.normalized_shape, module.weight, module.bias, module.eps)

    def accepts(self, inputs: Tensor) -> bool:
        return inputs.ndim > len(self.module.normalized_shape)

    def normalised(self, inputs: Tensor) -> Tensor:
        return functional.layer_norm(inputs, self.module.normalized_shape, eps=self.module.eps)

    def per_sample(self, values: Tensor) -> Tensor:
        between = tuple(range(1, values.ndim - len(self.module.normalized_shape)))
        return values.sum(dim=between) if between else values


class Matrix(Layer):
    """A module with a weight that is applied at every position: a convolution or a linear layer."""

    module: nn.Conv2d | nn.Linear

    @abstractmethod
    def products(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """The weight's gradient, summed over samples."""

    @abstractmethod
    def columns(self, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What every position sees and the gradient of its output, [b, groups, d, l] and [b, groups, o, l]."""

    @abstractmethod
    def positions(self, gradient: Tensor) -> int:
        """How many a sample has."""

    @property
    def groups(self) -> int:
        """Parts of the weight that see inputs of their own."""
        return 1

    def each(self, calls: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int] | None = None) -> Iterator[Tensor]:
        """The weight's gradient of every sample, or of some, one after another."""
        for row in range(len(calls[0][0])) if rows is None else rows:
            piece = slice(row, row + 1)
            total, *more = [self.products(inputs[piece], gradient[piece]) for inputs, gradient in calls]
            for other in more:
                total = total + other
            yield total

    def weighted(self, calls: Sequence[tuple[Tensor, Tensor]], factors: Tensor) -> Tensor:
        """The sum over samples of the weight's gradients times factors [b]."""
        parts = [
            self.products(inputs, gradient * factors.view(-1, *[1] * (gradient.ndim - 1))) for inputs, gradient in calls
        ]
        return torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]

    def gram_pays(self, calls: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether Gram matrices are cheaper than the gradients."""
        count = sum(self.positions(gradient) for _, gradient in calls)
        outputs, inputs = len(self.module.weight) // self.groups, self.module.weight[0].numel()
        return count**2 * (inputs + outputs) < DIRECT_PER_WEIGHT * inputs * outputs

    def squares(self, calls: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Squared norms [b] of the weight's gradients, by Gram matrices where these have digits enough."""
        samples = len(calls[0][0])
        count = sum(self.positions(gradient) for _, gradient in calls)
        width = sum(self.module.weight.shape[:1]) // self.groups + self.module.weight[0].numel() + 2 * count
        step = max(1, GRAM_BYTES // max(1, self.module.weight.element_size() * self.groups * count * width))
        found = [
            self._squares(
                [(inputs[first : first + step], gradient[first : first + step]) for inputs, gradient in calls]
            )
            for first in range(0, samples, step)
        ]
        squares, whole = (torch.cat(parts) for parts in zip(*found, strict=True))
        unsure = torch.nonzero(squares < CANCELLED * whole / max(1, count)).flatten().tolist()
        for row, gradient in zip(unsure, self.each(calls, unsure), strict=True):
            squares[row] = square(gradient)
        return squares

    def _squares(self, calls: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Squares by Gram matrices, and the product of the squares of all that goes into them."""
        pairs = [self.columns(inputs, gradient) for inputs, gradient in calls]
        seen, sent = (torch.cat(parts, dim=3) if len(parts) > 1 else parts[0] for parts in zip(*pairs, strict=True))
        grams = [part.transpose(2, 3) @ part for part in (seen, sent)]
        squares = (grams[0] * grams[1]).sum(dim=(1, 2, 3), dtype=torch.float64)
        traces = [gram.diagonal(dim1=2, dim2=3).sum(dim=2, dtype=torch.float64) for gram in grams]
        return squares, (traces[0] * traces[1]).sum(dim=1)


class LinearLayer(Matrix):
    """A linear layer of [b,d], or of [b,...,d] with positions between."""

    module: nn.Linear

    def plain(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.module.weight, self.module.bias)

    def small(self, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        del inputs
        return {"bias": _rows(gradient).sum(dim=1)} if "bias" in self.trained else {}

    def products(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return gradient.flatten(end_dim=-2).T @ inputs.flatten(end_dim=-2)

    def columns(self, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return _rows(inputs).transpose(1, 2).unsqueeze(1), _rows(gradient).transpose(1, 2).unsqueeze(1)

    def positions(self, gradient: Tensor) -> int:
        return gradient[0].numel() // gradient.shape[-1]


class ConvLayer(Matrix):
    """A convolution of [b,c,h,w] with any stride, padding, dilation and groups."""

    module: nn.Conv2d

    def plain(self, inputs: Tensor) -> Tensor:
        module = self.module
        inputs, padding = self._padded(inputs)
        return functional.conv2d(
            inputs, module.weight, module.bias, module.stride, padding, module.dilation, module.groups
        )

    def accepts(self, inputs: Tensor) -> bool:
        return inputs.ndim == 4

    def small(self, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        del inputs
        return {"bias": gradient.sum(dim=(2, 3))} if "bias" in self.trained else {}

    def products(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        module = self.module
        inputs, padding = self._padded(inputs)
        return _weight_gradient(
            gradient, inputs, module.weight, None, module.stride, padding, module.dilation, False, [0, 0], module.groups
        )

    def columns(self, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        module = self.module
        inputs, padding = self._padded(inputs)
        patches = functional.unfold(inputs, module.kernel_size, module.dilation, padding, module.stride)
        count = patches.shape[2]
        return (
            patches.view(len(inputs), self.groups, -1, count),
            gradient.reshape(len(inputs), self.groups, -1, count),
        )

    def positions(self, gradient: Tensor) -> int:
        return gradient.shape[2] * gradient.shape[3]

    @property
    def groups(self) -> int:
        return self.module.groups

    def _padded(self, inputs: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input and what is left to pad with zeros on both sides."""
        module = self.module
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            return inputs, module.padding
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return functional.pad(inputs, module._reversed_padding_repeated_twice, mode=mode), (0, 0)


def _weight_gradient(*convolution: Any) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(*convolution, [False, True, False])[1]
    return found


def _rows(values: Tensor) -> Tensor:
    """[b,...,d] as [b,l,d]."""
    return values.reshape(len(values), -1, values.shape[-1])


def square(gradient: Tensor) -> Tensor:
    """The squared norm, in double precision."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return norm.double().square()


KINDS: Mapping[type[nn.Module], type[Layer]] = {
    nn.Conv2d: ConvLayer,
    nn.Linear: LinearLayer,
    nn.GroupNorm: GroupNormLayer,
    nn.LayerNorm: LayerNormLayer,
}


def layer_of(module: nn.Module) -> Layer | None:
    """The layer of a module with parameters of its own; none where its kind, or a parameter, is not known here."""
    kind = next((layer for base, layer in KINDS.items() if isinstance(module, base)), None)
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if kind is None or not names <= {"weight", "bias"} or not isinstance(module.weight, nn.Parameter):
        return None
    return kind(module)


def is_changed(layer: Layer) -> bool:
    """Whether the module has a forward pass of its own, which must show that its result is the plain one."""
    base = next(base for base in KINDS if isinstance(layer.module, base))
    return type(layer.module).forward is not base.forward or "forward" in vars(layer.module)
