"""The one entry: what every parameter of a model is, as it is said, read by a plugin, or known from its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megaopt_core.errors import PluginHookError, RoutingError
from megaopt_core.params._names import NamedParam, named_params, unwrap
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.params._views import MatrixView
from megaopt_core.registry._catalogue import ROLE_READER
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._roles.annotations import ask_plugins
from megaopt_core.routing._roles.base_rules import BaseRules
from megaopt_core.routing._roles.decisions import settleable
from megaopt_core.routing._roles.explicit import apply_explicit

__all__ = ["infer_roles"]


def infer_roles(
    model: nn.Module,
    annotations: Mapping[str, Role | MatrixView] | None = None,
    *,
    example: Any = None,
    failed: list[PluginHookError] | None = None,
) -> dict[str, RoleDecision]:
    """Find what every parameter of a model is.

    What is said of a parameter explicitly comes first: attributes on it, then annotations, then views that users
    registered. Then what a plugin has read from the model (`megaopt-roles` does). Where there is no such plugin, the
    type of the module that owns it decides, and what that leaves in doubt is element-wise. Nothing is run, and names
    decide nothing.

    Args:
        model: any module, on any device (meta too), wrapped or not.
        annotations: canonical name to role or view, beside what plugins annotate.
        example: a batch that a reader may run one forward with, on the meta device: a tensor, a tuple of arguments or a
            mapping of keyword arguments.
        failed: where errors of plugins that cannot read this model are put, which is then decided without them; None:
            the first is raised.

    Returns:
        A decision for every parameter, frozen ones included, by canonical name, in registration order.

    Raises:
        ViewError: two descriptions of one parameter contradict each other, or a view does not fit.
        RoutingError: an annotation names no parameter, or a lazy module was not initialized.
        PluginHookError: a plugin raised, or answered nonsense.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.LSTM(8, 8))
        >>> {name: str(decision.role) for name, decision in infer_roles(model).items() if "weight" in name}
        {'0.weight': 'embedding', '1.weight_ih_l0': 'matrix', '1.weight_hh_l0': 'matrix'}
    """
    entries = named_params(model)
    known = {name for entry in entries for name in (entry.name, *entry.aliases)}
    unknown = sorted(set(annotations or ()) - known)
    if unknown:
        raise RoutingError(
            f"infer_roles: annotations name parameters that the model does not have: {unknown}"
        )
    for entry in entries:
        if nn.parameter.is_lazy(entry.param):
            raise RoutingError(f"infer_roles: {entry.name} is not initialized yet; run one forward before")
    said, read = ask_plugins(unwrap(model), known, example, failed=failed)
    said |= annotations or {}
    rules = BaseRules(unwrap(model), reader=_absent_reader(read))
    return {
        entry.name: settleable(apply_explicit(entry, _read(entry, read) or rules.decide(entry), said))
        for entry in entries
    }


def _absent_reader(read: Mapping[str, RoleDecision]) -> PluginInfo | str | None:
    """Return who would know more: what other readers leave out, it may know; None where it has read this model."""
    installed = next((info for info in get_registry().plugins() if info.goes_by(ROLE_READER)), None)
    if installed is None:
        return ROLE_READER
    return None if installed.status is PluginStatus.LOADED and read else installed


def _read(entry: NamedParam, read: Mapping[str, RoleDecision]) -> RoleDecision | None:
    return next((read[name] for name in (entry.name, *entry.aliases) if name in read), None)
