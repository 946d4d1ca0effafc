"""The one entry: a decision for every parameter of a model."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve
from torch import nn

from megaopt_core.errors import RoutingError
from megaopt_core.params import (
    MatrixView,
    NamedParam,
    Role,
    RoleDecision,
    named_modules,
    named_params,
    unwrap,
)
from megaopt_core.routing import by_module_type, by_shape, elementwise, target_of, tied_role
from megaopt_core.routing._roles.explicit import apply_explicit
from megaopt_roles.adapters import adapted_role
from megaopt_roles.heads import find_heads
from megaopt_roles.reading import ModelReading
from megaopt_roles.scripted import stand_ins
from megaopt_roles.splits import with_split
from megaopt_roles.uses import by_uses, is_stack_bias

__all__ = ["infer_roles"]


def infer_roles(
    model: nn.Module, annotations: Mapping[str, Role | MatrixView] | None = None
) -> dict[str, RoleDecision]:
    """Find what every parameter of a model is.

    What is said of a parameter explicitly comes first: attributes on it, then `annotations`, then views that users
    registered. Otherwise the module that owns it decides, by its type, and by what its forward does with the
    parameter. Nothing is run, and names decide nothing.

    Args:
        model: any module, on any device (meta too), wrapped or not.
        annotations: what plugins know: canonical name to role or view.

    Returns:
        A decision for every parameter, frozen ones included, by canonical name, in registration order.

    Raises:
        ViewError: two descriptions of one parameter contradict each other, or a view does not fit.
        RoutingError: an annotation names no parameter, or a lazy module was not initialized.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 100))
        >>> {name: str(decision.role) for name, decision in infer_roles(model).items() if "weight" in name}
        {'0.weight': 'embedding', '1.weight': 'matrix', '2.weight': 'output'}
    """
    annotations = annotations or {}
    entries = named_params(model)
    known = {name for entry in entries for name in (entry.name, *entry.aliases)}
    unknown = sorted(set(annotations) - known)
    if unknown:
        raise RoutingError(
            f"infer_roles: annotations name parameters that the model does not have: {unknown}"
        )
    for entry in entries:
        if nn.parameter.is_lazy(entry.param):
            raise RoutingError(f"infer_roles: {entry.name} is not initialized yet; run one forward before")
    rules = _Rules(unwrap(model))
    return {entry.name: apply_explicit(entry, rules.decide(entry), annotations) for entry in entries}


class _Rules:
    """The rules, with everything that they look up."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(named_modules(model))
        self._stand_ins = stand_ins(model, self.modules.values())
        if self._stand_ins:
            model = self._stand_ins[id(model)]
            self.modules = dict(named_modules(model))
        self.reading = ModelReading(self.modules)
        self.heads = find_heads(model, self.modules, self.reading)

    def decide(self, entry: NamedParam) -> RoleDecision:
        shape = tuple(entry.param.shape)
        settled = by_shape(shape, entry.param.dtype)
        if settled is not None:
            return settled
        found = [self._at(entry, owner) for owner in entry.owners]
        return tied_role(found)

    def _at(self, entry: NamedParam, owner: tuple[str, nn.Module, str]) -> RoleDecision:
        param, shape = entry.param, tuple(entry.param.shape)
        target = target_of(owner, self.modules)
        if target is not None:
            owner, scales = target
            if scales:
                return elementwise("the gain of a parametrized weight")
        name, module, attribute = owner
        module = self._stand_ins.get(id(module), module) if self._stand_ins else module
        adapted = adapted_role(name, module, self.modules, self.heads)
        if adapted is not None:
            return adapted
        if attribute == "weight" and id(module) in self.heads:
            return self.heads[id(module)]
        decision = by_module_type(module, attribute, shape)
        if decision is not None and attribute == "weight":
            return self._if_read(name, module, with_split(decision, module, shape, self.reading))
        if decision is not None:
            return decision
        if id(param) in self.heads:
            return self.heads[id(param)]
        readable = self.reading.analysis(module).readable
        found = by_uses(shape, self.reading.uses.get(id(param), ()), readable=readable)
        if found.role is not Role.MATRIX and is_stack_bias(module, shape, self.reading.uses):
            return elementwise("bias of a stack of matrices: one row each")
        return with_split(found, param, shape, self.reading)

    def _if_read(self, name: str, module: nn.Module, decision: RoleDecision) -> RoleDecision:
        """Return the decision for a projection, uncertain where no forward that can be read calls it."""
        if decision.role is not Role.MATRIX or self.reading.is_read(name, module):
            return decision
        why = f"{decision.reason}; the forward that calls it cannot be read"
        return evolve(decision, reason=why, uncertain=True)
