"""Low-rank adapters: what they adapt decides what their factors are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megaopt_core.params import RoleDecision
from megaopt_core.routing import elementwise, is_linear

__all__ = ["adapted_role"]


def adapted_role(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], heads: Mapping[int, RoleDecision]
) -> RoleDecision | None:
    """Return what a factor of an adapter is when the layer that it adapts is no hidden matrix.

    An adapter is a module that holds the layer that it adapts as `base_layer`, and its factors beside it.

    Args:
        name: canonical name of the module that owns the parameter.
        module: that module.
        modules: every module by canonical name.
        heads: the decisions for output heads, by identity of the layer.

    Returns:
        None for everything that is no factor of an adapter, and for the factors of hidden layers.
    """
    parent = name
    for _ in range(2):
        parent, _, child = parent.rpartition(".")
        holder = modules.get(parent)
        base = None if holder is None else holder._modules.get("base_layer")
        if base is None or child == "base_layer":
            continue
        if isinstance(base, nn.Embedding | nn.EmbeddingBag):
            return elementwise("factor of a low-rank adapter of an embedding")
        if id(base) in heads and is_linear(module):
            return elementwise("factor of a low-rank adapter of an output head")
    return None
