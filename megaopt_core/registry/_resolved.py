"""Optimizers that no plugin lists: their names are resolved when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megaopt_core.errors import MegaoptError, PluginHookError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo, contested
from megaopt_core.registry._loading import LoadedPlugin

__all__ = ["resolve_optimizer"]

_HOOK = "megaopt_resolve_optimizer"


def resolve_optimizer(name: str, plugins: Iterable[LoadedPlugin]) -> tuple[OptimizerEntry, PluginInfo] | None:
    """Ask every plugin for an optimizer that none of them lists.

    Args:
        name: what a user wrote in `optimizer="..."`.
        plugins: the plugins that work, in their one order.

    Returns:
        The entry and the plugin that gives it; None: no plugin knows the name.

    Raises:
        DuplicateNameError: two plugins know it.
        MegaoptError: a plugin knows the name and refuses it, in its own words.
        PluginHookError: no plugin knows it, and one raised something else or returned what is no entry.
    """
    found: tuple[OptimizerEntry, PluginInfo] | None = None
    fault: PluginHookError | None = None
    for plugin in plugins:
        try:
            entry = _ask(plugin, name)
        except PluginHookError as error:
            fault = fault or error
            continue
        if entry is None:
            continue
        if found is not None:
            raise contested("optimizer", name, found[1], plugin.info, by="resolved by")
        found = entry, plugin.info
    if found is None and fault is not None:
        raise fault
    return found


def _ask(plugin: LoadedPlugin, name: str) -> OptimizerEntry | None:
    try:
        answers: list[Any] = plugin.hooks.megaopt_resolve_optimizer(name=name)
    except (MegaoptError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _fault(plugin, f"failed for {name!r}: {words_of(error)}") from error
    for answer in answers:
        if not isinstance(answer, OptimizerEntry):
            raise _fault(
                plugin,
                f"returned {type(answer).__name__} for {name!r}; it must return an OptimizerEntry or None",
            )
        return answer
    return None


def _fault(plugin: LoadedPlugin, what: str) -> PluginHookError:
    return PluginHookError(f"{plugin.info}: hook {_HOOK} {what}", plugin=plugin.info.name, hook=_HOOK)
