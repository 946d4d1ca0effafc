"""The one entry: what every parameter of a model is, as it is said, or as a plugin reads it from the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import evolve
from torch import nn

from megaopt_core.errors import PluginHookError, RoutingError
from megaopt_core.params._names import NamedParam, named_params, unwrap
from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.params._views import MatrixView
from megaopt_core.registry._catalogue import ROLE_READER
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._roles.explicit import apply_explicit

__all__ = ["infer_roles"]

type Said = Role | MatrixView
"""What a plugin knows about a parameter in models of this kind."""


def infer_roles(
    model: nn.Module,
    annotations: Mapping[str, Role | MatrixView] | None = None,
    *,
    example: Any = None,
    no_forward: str = "",
    failed: list[PluginHookError] | None = None,
) -> dict[str, RoleDecision]:
    """Find what every parameter of a model is.

    What is said of a parameter explicitly comes first: attributes on it, then annotations, then views that users
    registered. Then what a plugin has read from the model (`megaopt-roles` does). Where there is no such plugin,
    parameters of two or more dimensions are element-wise, in doubt.

    Args:
        model: any module, on any device (meta too), wrapped or not.
        annotations: canonical name to role or view, beside what plugins annotate.
        example: a batch that a reader may run one forward with, on the meta device: a tensor, a tuple of arguments or a
            mapping of keyword arguments.
        no_forward: why no forward may be run, though there is a batch: another rank's failed; empty: one may.
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
        >>> decisions = infer_roles(torch.nn.Linear(8, 4), {"weight": Role.OUTPUT})
        >>> {name: str(decision.role) for name, decision in decisions.items()}
        {'weight': 'output', 'bias': 'elementwise'}
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
    said, read = _ask_plugins(unwrap(model), known, failed, example=example, no_forward=no_forward)
    said |= annotations or {}
    absent = _absent_reader(read)
    return {
        entry.name: _settleable(apply_explicit(entry, _read(entry, read) or _unread(entry, absent), said))
        for entry in entries
    }


def _unread(entry: NamedParam, absent: PluginInfo | str | None) -> RoleDecision:
    """Return what is known of a parameter that nothing has read from the model: what its number type and shape tell.

    Args:
        entry: the parameter.
        absent: who would know more, and why it does not; None: it has read this model.
    """
    if entry.param.dtype.is_complex:
        return RoleDecision.elementwise("complex numbers")
    if entry.param.dim() < 2:
        return RoleDecision.elementwise("one dimension" if entry.param.dim() else "a scalar")
    if absent is None:
        hint = ""
    elif isinstance(absent, str):
        hint = f"; pip install {absent} reads it from the model"
    else:
        hint = f"; {absent} would read it from the model: {absent.error or 'it has not'}"
    unknown = RoleDecision.elementwise(f"its use is not known{hint}").doubted()
    return evolve(unknown, unread=absent is not None)


def _settleable(decision: RoleDecision) -> RoleDecision:
    """Return a decision whose reason names the attribute that settles what is doubtful about it."""
    if not decision.uncertain:
        return decision
    return evolve(
        decision, reason=f"{decision.reason}; its attribute {decision.doubt.settled_by} settles this"
    )


def _absent_reader(read: Mapping[str, RoleDecision]) -> PluginInfo | str | None:
    """Return who would know more: what other readers leave out, it may know; None where it has read this model."""
    installed = next((info for info in get_registry().plugins() if info.goes_by(ROLE_READER)), None)
    if installed is None:
        return ROLE_READER
    return None if installed.status is PluginStatus.LOADED and read else installed


def _read(entry: NamedParam, read: Mapping[str, RoleDecision]) -> RoleDecision | None:
    return next((read[name] for name in (entry.name, *entry.aliases) if name in read), None)


def _ask_plugins(
    model: nn.Module, known: Collection[str], failed: list[PluginHookError] | None, **asked: Any
) -> tuple[dict[str, Said], dict[str, RoleDecision]]:
    """Return what plugins say about a model's parameters, and what they have read from the model, by canonical name.

    Args:
        model: one model chunk, unwrapped.
        known: the names of its parameters.
        failed: where the error of a plugin that raises or answers nonsense is put, and nothing that it said is taken;
            None: it is raised.
        asked: what else the hook takes.

    Raises:
        RoutingError: two plugins contradict each other.
        PluginHookError: one raised, or returned something else.
    """
    answers: dict[tuple[str, bool], tuple[Any, PluginInfo]] = {}
    for plugin, result in get_registry().call_each(
        "megaopt_annotate_params", failed=failed, model_chunk=model, **asked
    ):
        nonsense = _nonsense(result, known)
        if nonsense is None:
            for name, what in result.items():
                _add(answers, plugin, name, what)
            continue
        error = plugin.wrong_answer("megaopt_annotate_params", nonsense)
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
