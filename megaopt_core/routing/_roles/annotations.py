"""What plugins say about the parameters of a model, through the hook `megaopt_annotate_params`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import evolve
from torch import nn

from megaopt_core.errors import PluginHookError, RoutingError
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.params._views import MatrixView
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._registry import get_registry

__all__ = ["ask_plugins"]

type Said = Role | MatrixView
"""What a plugin knows about a parameter in models of this kind."""


def ask_plugins(
    model: nn.Module,
    known: Collection[str],
    example: Any = None,
    *,
    failed: list[PluginHookError] | None = None,
) -> tuple[dict[str, Said], dict[str, RoleDecision]]:
    """Return what plugins say about a model's parameters, and what they have read from the model, by canonical name.

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
    answers: dict[tuple[str, bool], tuple[Any, PluginInfo]] = {}
    for plugin, result in get_registry().call_each(
        "megaopt_annotate_params", failed=failed, model_chunk=model, example=example
    ):
        nonsense = _nonsense(result, known)
        if nonsense is None:
            for name, what in result.items():
                _add(answers, plugin, name, what)
            continue
        error = PluginHookError(
            f"{plugin}: megaopt_annotate_params {nonsense}",
            plugin=plugin.name,
            hook="megaopt_annotate_params",
        )
        if failed is None:
            raise error
        failed.append(error)
    said, read = (
        {name: what for (name, of_kind), (what, _) in answers.items() if of_kind is is_read}
        for is_read in (False, True)
    )
    return said, read


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
    answers: dict[tuple[str, bool], tuple[Any, PluginInfo]], plugin: PluginInfo, name: str, what: Any
) -> None:
    is_read = isinstance(what, RoleDecision)
    if is_read:
        what = evolve(what, reader=f"{plugin.distribution or plugin.name} {plugin.version or ''}".rstrip())
    present, owner = answers.get((name, is_read), (what, plugin))
    if is_read and present.uncertain != what.uncertain:
        if what.uncertain:  # who is certain wins over who guesses
            return
    elif _meaning(present) != _meaning(what):
        raise RoutingError(
            f"parameter {name!r} is annotated as {_words(present)} by plugin {owner.name!r} and as {_words(what)} by "
            f"plugin {plugin.name!r}; an attribute on the parameter decides (matrix_view=...)",
            names=[name],
        )
    answers[name, is_read] = what, plugin


def _meaning(what: Said | RoleDecision) -> object:
    return (what.role, what.view) if isinstance(what, RoleDecision) else what


def _words(what: Said | RoleDecision) -> str:
    if isinstance(what, RoleDecision):
        return str(what.role if what.view is None else what.view)
    return str(what)
