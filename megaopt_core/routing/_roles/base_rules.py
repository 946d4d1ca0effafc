"""What the core knows about a parameter by itself: its shape, the type of its module, and who it is tied to."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from megaopt_core.params._names import NamedParam, ParamOwner, named_modules
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.routing._roles.decisions import doubted, elementwise, embedding
from megaopt_core.routing._roles.module_types import by_module_type, by_shape, is_projection

__all__ = ["BaseRules", "target_of", "tied_role"]

type Target = tuple[ParamOwner, bool]
"""The place whose parameter is meant, and whether this part of it only scales it."""


class BaseRules:
    """The rules that need no forward to be read.

    Args:
        model: one model chunk, unwrapped.
        reader: who would know more, and why it does not; None: it has read this model.
    """

    def __init__(self, model: nn.Module, *, reader: PluginInfo | str | None) -> None:
        self._modules = dict(named_modules(model))
        self._unread = reader is not None
        self._hint = _hint(reader)

    def decide(self, entry: NamedParam) -> RoleDecision:
        """Return what a parameter is, element-wise where that is in doubt.

        Args:
            entry: the parameter with all its places.
        """
        settled = by_shape(tuple(entry.param.shape), entry.param.dtype)
        return settled or tied_role([self._at(entry, owner) for owner in entry.owners])

    def _at(self, entry: NamedParam, owner: ParamOwner) -> RoleDecision:
        stands_for = target_of(owner, self._modules)
        if stands_for is not None:
            owner, scales = stands_for
            if scales:
                return elementwise("the gain of a parametrized weight")
        _, module, attribute = owner
        kind = type(module).__name__
        decision = by_module_type(module, attribute, tuple(entry.param.shape))
        if decision is None:
            return self._in_doubt(f"{attribute} of {kind}: its use is not known")
        if decision.role is Role.MATRIX and is_projection(module):
            return self._in_doubt(f"{decision.reason}: hidden or the model's output is not known")
        return decision

    def _in_doubt(self, why: str) -> RoleDecision:
        return evolve(doubted(elementwise(f"{why}{self._hint}")), unread=self._unread)


def _hint(reader: PluginInfo | str | None) -> str:
    if reader is None:
        return ""
    if isinstance(reader, str):
        return f"; pip install {reader} reads it from the model"
    return f"; {reader} would read it from the model: {reader.error or 'it has not'}"


def tied_role(found: list[RoleDecision]) -> RoleDecision:
    """Return the decision for a parameter from those of all its places."""
    roles = {decision.role for decision in found}
    if Role.EMBEDDING in roles:
        first = next(decision for decision in found if decision.role is Role.EMBEDDING)
        return embedding(f"{first.reason}, tied to the output head") if len(roles) > 1 else first
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
