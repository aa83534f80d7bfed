"""Scopes: what may leave a site, decided by the part that made a tensor and never guessed from its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from crossward.federation.errors import PrivacyRefusal

_MARK = "_crossward_scope"


class Scope(StrEnum):
    """Where a tensor may go, and how it is combined.

    ``SHARED`` leaves as an update and the sites' updates are combined; ``BUFFER`` likewise, for the statistics
    that a method shares; ``PERSONAL`` leaves, and every site gets a sum of its own back; ``LOCAL`` never leaves.
    """

    SHARED = "shared"
    BUFFER = "buffer"
    PERSONAL = "personal"
    LOCAL = "local"

    @property
    def leaves(self) -> bool:
        return self is not Scope.LOCAL


@dataclass(frozen=True)
class TensorSpec:
    """The declaration of one tensor: its scope and its shape."""

    scope: Scope
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


Layout = Mapping[str, TensorSpec]


def mark(module: nn.Module, *, parameters: Scope, buffers: Scope) -> None:
    """Give a module's tensors their scopes; modules inside it inherit them unless marked themselves."""
    setattr(module, _MARK, (parameters, buffers))


def mark_where(
    root: nn.Module, accept: Callable[[nn.Module], bool], *, parameters: Scope, buffers: Scope | None = None
) -> None:
    """Mark every module inside ``root`` that ``accept`` picks; it is asked about the module, not its name."""
    for module in root.modules():
        if accept(module):
            mark(module, parameters=parameters, buffers=parameters if buffers is None else buffers)


def layout_of(model: nn.Module) -> dict[str, TensorSpec]:
    """Collect the scope of every tensor in the model's state dict.

    A tensor that is not floating point (BatchNorm's batch counter) cannot be averaged and is always local.

    Raises:
        PrivacyRefusal: a tensor has no scope, because no part of the model marked it.
    """
    layout: dict[str, TensorSpec] = {}
    for name, tensor, scope in _walk(model, prefix="", inherited=None):
        if not tensor.is_floating_point():
            scope = Scope.LOCAL
        if scope is None:
            raise PrivacyRefusal(
                f"tensor '{name}' has no scope, so it is not known whether it may leave a site; "
                "the part that makes it must call mark() when the model is built"
            )
        layout[name] = TensorSpec(scope=scope, shape=tuple(tensor.shape))
    return layout


def _walk(
    module: nn.Module, *, prefix: str, inherited: tuple[Scope, Scope] | None
) -> Iterator[tuple[str, Tensor, Scope | None]]:
    scopes: tuple[Scope, Scope] | None = getattr(module, _MARK, inherited)
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, parameter, scopes[0] if scopes else None
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer, scopes[1] if scopes else None
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix=f"{prefix}{name}.", inherited=scopes)


def names_in(layout: Layout, *scopes: Scope) -> list[str]:
    """List the tensors of the given scopes, in the model's order."""
    return [name for name, spec in layout.items() if spec.scope in scopes]


def layout_digest(layout: Layout) -> str:
    """Hash names, shapes and scopes: two sites with the same digest exchange the same tensors."""
    lines = [[name, spec.scope.value, list(spec.shape)] for name, spec in sorted(layout.items())]
    return hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash names and values: the identity of a model as sent."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
