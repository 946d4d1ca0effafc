"""What plugins say about the parameters of a model, through the hook `megaopt_annotate_params`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import define, evolve, field
from torch import nn

from megaopt_core.errors import PluginHookError, RoutingError
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.params._views import MatrixView
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._registry import get_registry

__all__ = ["PluginAnnotations", "ask_plugins"]


@define
class PluginAnnotations:
    """The answers of all plugins.

    Args:
        said: canonical name to role or view: what a plugin knows about a model of this kind.
        read: canonical name to decision: what a plugin has read from this model.
    """

    said: dict[str, Role | MatrixView] = field(factory=dict)
    read: dict[str, RoleDecision] = field(factory=dict)


def ask_plugins(
    model: nn.Module,
    known: Collection[str],
    example: Any = None,
    *,
    failed: list[PluginHookError] | None = None,
) -> PluginAnnotations:
    """Return what plugins say about a model's parameters.

    Args:
        model: one model chunk, unwrapped.
        known: the names of its parameters.
        example: a batch that a plugin may run one forward with; None: there is none.
        failed: where the error of a plugin that raises or answers nonsense is put, and nothing that it said is taken;
            None: it is raised.

    Raises:
        RoutingError: two plugins contradict each other.
        PluginHookError: one raised, or returned something else.
    """
    found = PluginAnnotations()
    owner: dict[tuple[str, bool], PluginInfo] = {}
    for plugin, result in get_registry().call_each(
        "megaopt_annotate_params", failed=failed, model_chunk=model, example=example
    ):
        nonsense = _nonsense(result, known)
        if nonsense is None:
            for name, what in result.items():
                _add(found, owner, plugin, name, what)
            continue
        error = PluginHookError(
            f"{plugin}: megaopt_annotate_params {nonsense}",
            plugin=plugin.name,
            hook="megaopt_annotate_params",
        )
        if failed is None:
            raise error
        failed.append(error)
    return found


def _nonsense(result: Any, known: Collection[str]) -> str | None:
    """Return what is wrong with an answer, None for one that can be used."""
    if not isinstance(result, Mapping):
        return f"returned {type(result).__name__}; it must return {{name: Role, MatrixView or RoleDecision}}"
    for name, what in result.items():
        if not isinstance(what, Role | MatrixView | RoleDecision):
            return f"says {what!r} of {name!r}; it must be a Role, a MatrixView or a RoleDecision"
    unknown = sorted(str(name) for name in result if name not in known)
    return f"names parameters that the model does not have: {unknown}" if unknown else None


def _add(
    found: PluginAnnotations,
    owner: dict[tuple[str, bool], PluginInfo],
    plugin: PluginInfo,
    name: str,
    what: Any,
) -> None:
    is_read = isinstance(what, RoleDecision)
    if isinstance(what, RoleDecision):
        what = evolve(what, reader=f"{plugin.distribution or plugin.name} {plugin.version or ''}".rstrip())
    table: dict[str, Any] = found.read if is_read else found.said
    present = table.get(name)
    if present is not None and is_read and present.uncertain != what.uncertain:
        what = present if what.uncertain else what  # who is certain wins over who guesses
        plugin = owner[name, is_read] if what is present else plugin
    elif present is not None and _meaning(present) != _meaning(what):
        raise RoutingError(
            f"parameter {name!r} is annotated as {_words(present)} by plugin {owner[name, is_read].name!r} and as "
            f"{_words(what)} by plugin {plugin.name!r}; an attribute on the parameter decides (matrix_view=...)",
            names=[name],
        )
    table[name], owner[name, is_read] = what, plugin


def _meaning(what: Role | MatrixView | RoleDecision) -> object:
    return (what.role, what.view) if isinstance(what, RoleDecision) else what


def _words(what: Role | MatrixView | RoleDecision) -> str:
    if isinstance(what, RoleDecision):
        return str(what.role if what.view is None else what.view)
    return str(what)
