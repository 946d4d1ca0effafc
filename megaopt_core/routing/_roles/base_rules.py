"""What the core knows about a parameter by itself: its shape, the type of its module, and who it is tied to."""

from __future__ import annotations

from attrs import evolve
from torch import nn

from megaopt_core.params._names import NamedParam, ParamOwner, named_modules
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.routing._roles.decisions import doubted, elementwise
from megaopt_core.routing._roles.module_types import by_module_type, by_shape, is_projection
from megaopt_core.routing._roles.parametrized import target_of
from megaopt_core.routing._roles.tied import tied_role

__all__ = ["BaseRules"]


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
            return self._in_doubt(f"{attribute} of {kind}: what for is not known")
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
