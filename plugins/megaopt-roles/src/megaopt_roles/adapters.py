"""Low-rank adapters, and parametrizations: what they adapt, or change, decides what their factors are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from megaopt_core.params import Role, RoleDecision
from megaopt_core.routing import doubted, elementwise, is_linear

__all__ = ["adapted_role", "changed_by", "factor_role"]


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


def changed_by(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the weight that each parametrization changes, by the identity of the parametrization.

    Args:
        modules: all modules of a model.
    """
    return {
        id(part): original
        for module in modules
        if isinstance(module, ParametrizationList)
        and isinstance(original := module._parameters.get("original"), nn.Parameter)
        for part in module._modules.values()
        if part is not None
    }


def factor_role(found: RoleDecision, changed: RoleDecision) -> RoleDecision:
    """Return what a parameter of a parametrization is.

    Args:
        found: what its uses say.
        changed: what the weight is that the parametrization changes.
    """
    if found.role is not Role.MATRIX:
        return found
    if changed.role is not Role.MATRIX:
        return elementwise(
            f"factor of a parametrization of a weight that is {changed.role}: {changed.reason}"
        )
    return doubted(found, "the weight that it changes is doubtful") if changed.uncertain else found
