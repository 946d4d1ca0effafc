"""Stand-ins for compiled modules (`torch.jit.script`, `torch.jit.trace`), whose classes and sources are gone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

__all__ = ["stand_ins"]


class Unread(nn.Module):
    """Stands in for a compiled module of an unknown class: it has no forward."""


def stand_ins(model: nn.Module, modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Return modules to look at in place of a model's own, by identity; nothing where no module is compiled.

    A compiled module keeps the name of its class: for torch's own that says what it is. The parameters are those of
    the model itself.

    Args:
        model: any module.
        modules: all that it consists of.
    """
    found: dict[int, nn.Module] = {}
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        _stand_in(model, found)
    return found


def _stand_in(module: nn.Module, found: dict[int, nn.Module]) -> nn.Module:
    if id(module) in found:
        return found[id(module)]
    compiled = isinstance(module, torch.jit.ScriptModule)
    made: nn.Module = _empty(module) if compiled else copy.copy(module)
    found[id(module)] = made
    made.__dict__["_modules"] = {
        name: None if child is None else _stand_in(child, found) for name, child in module._modules.items()
    }
    if compiled:
        made.__dict__["_parameters"] = dict(module._parameters.items())
        _restore_sizes(made)
    return made


def _empty(module: nn.Module) -> nn.Module:
    name = getattr(module, "original_name", "")
    kind: Any = getattr(nn, str(name), Unread)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        kind = Unread
    made: nn.Module = kind.__new__(kind)
    nn.Module.__init__(made)
    for constant in getattr(kind, "__constants__", ()):
        with suppress(AttributeError, RuntimeError):
            made.__dict__[constant] = getattr(module, constant)
    return made


def _restore_sizes(made: nn.Module) -> None:
    """Set the sizes that the rules read, where the compiled module did not keep them."""
    weight = made._parameters.get("in_proj_weight" if isinstance(made, nn.MultiheadAttention) else "weight")
    if weight is None or weight.dim() < 2:
        return
    first, second, *kernel = weight.shape
    sizes: dict[str, Any] = {}
    if isinstance(made, nn.Embedding | nn.EmbeddingBag):
        sizes = {"num_embeddings": first, "embedding_dim": second}
    elif isinstance(made, nn.MultiheadAttention):
        sizes = {"embed_dim": second}
    elif isinstance(made, _ConvTransposeNd):
        sizes = {"in_channels": first, "out_channels": second, "groups": 1}
    elif isinstance(made, _ConvNd):
        groups = first if second == 1 else 1
        sizes = {"in_channels": second * groups, "out_channels": first, "groups": groups}
    elif isinstance(made, nn.Linear):
        sizes = {"in_features": second, "out_features": first}
    if isinstance(made, _ConvNd):
        sizes["kernel_size"] = tuple(kernel)
    for name, size in sizes.items():
        made.__dict__.setdefault(name, size)
