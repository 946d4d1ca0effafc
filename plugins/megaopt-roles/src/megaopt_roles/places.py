"""The places of a parameter: which layer it stands in for, and what follows where it has several."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from megaopt_core.params import ParamOwner, Role, RoleDecision

__all__ = ["target_of", "tied_role"]

type Target = tuple[ParamOwner, bool]
"""The place whose parameter is meant, and whether this part of it only scales it."""


def tied_role(found: list[RoleDecision]) -> RoleDecision:
    """Return the decision for a parameter from those of all its places.

    Args:
        found: a decision for each place.
    """
    roles = {decision.role for decision in found}
    if Role.EMBEDDING in roles:
        first = next(decision for decision in found if decision.role is Role.EMBEDDING)
        return RoleDecision.embedding(f"{first.reason}, tied to the output head") if len(roles) > 1 else first
    for role in (Role.OUTPUT, Role.MATRIX):
        if role in roles:
            return next(decision for decision in found if decision.role is role)
    return found[0]


def target_of(owner: ParamOwner, modules: Mapping[str, nn.Module]) -> Target | None:
    """Return which parameter of a layer another parameter stands in for; None for an ordinary one.

    `parametrizations.weight.original1` of a weight-normalized layer is the direction of its `weight`,
    `original0` the gain; `weight_v` and `weight_g` are the same in the old style; `weight_orig` of a spectral norm
    or a pruned layer is its `weight`.

    Args:
        owner: the place that holds the parameter.
        modules: every module by canonical name.
    """
    name, module, attribute = owner
    if isinstance(module, ParametrizationList):
        holder, _, tensor_name = name.rpartition(".parametrizations.")
        if not _:
            holder, tensor_name = "", name.removeprefix("parametrizations.")
        layer = modules.get(holder)
        if layer is None:
            return None
        return (holder, layer, tensor_name), _scales(module, attribute)
    for suffix, scales in (("_v", False), ("_g", True), ("_orig", False)):
        stem = attribute.removesuffix(suffix)
        if stem != attribute and stem not in module._parameters and _is_hooked(module, stem):
            return (name, module, stem), scales
    return None


def _scales(parametrization: ParametrizationList, attribute: str) -> bool:
    """True for the part of a parametrization that has fewer elements than its largest one."""
    params = parametrization._parameters
    own = params[attribute]
    largest = max(param.numel() for param in params.values() if param is not None)
    return own is not None and own.numel() < largest


def _is_hooked(module: nn.Module, name: str) -> bool:
    """True when a hook makes this attribute before each forward."""
    return any(
        getattr(hook, "name", getattr(hook, "_tensor_name", None)) == name
        for hook in module._forward_pre_hooks.values()
    )
