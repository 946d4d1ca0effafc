"""What all plugins together offer, listed or when asked; a name that two of them give belongs to neither."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from megaopt_core.errors import DuplicateNameError, MegaoptError, PluginHookError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo, contested
from megaopt_core.registry._loading import LoadedPlugin
from megaopt_core.registry._missing import WORDS, Kind
from megaopt_core.registry._setting_owners import SettingInfo, find_owners

__all__ = ["Contents", "collect", "resolve_optimizer"]

type _Conflicts = dict[tuple[str, str], DuplicateNameError]

_HOOK = "megaopt_resolve_optimizer"

_OFFERED = {
    "optimizer": "optimizers",
    "strategy": "strategies",
    "schedule": "schedules",
    "precision": "precision_policies",
}
"""Kind to the attribute of a loaded plugin that holds what it offers of it."""


@frozen
class Contents:
    """What all plugins together offer; every name in the tables has one owner.

    Args:
        plugins: those that work, in their one order.
        tables: of optimizers, strategies, schedules and precision policies, by name what is offered and by whom.
        settings: full name to setting.
        conflicts: `(kind, name)` to the error for whoever asks for a name that two plugins give.
    """

    plugins: tuple[LoadedPlugin, ...]
    tables: Mapping[Kind, Mapping[str, tuple[Any, PluginInfo]]]
    settings: Mapping[str, SettingInfo]
    conflicts: Mapping[tuple[str, str], DuplicateNameError]

    def require_one_owner(self, kind: str, name: str) -> None:
        """Raise if two plugins give a name.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"precision"`, `"setting"` or `"plugin"`.
            name: the name.

        Raises:
            DuplicateNameError: they do; it names both.
        """
        conflict = self.conflicts.get((kind, name))
        if conflict is not None:
            raise DuplicateNameError(str(conflict), name=conflict.name, owners=conflict.owners)


def collect(plugins: tuple[LoadedPlugin, ...]) -> Contents:
    """Put together what plugins offer.

    Args:
        plugins: the plugins that work, in their one order.
    """
    conflicts: _Conflicts = {}
    _owned("plugin", "plugin name", [(each.info, {each.info.name: None}) for each in plugins], conflicts)
    tables = {
        kind: _owned(kind, what, [(each.info, getattr(each, _OFFERED[kind])) for each in plugins], conflicts)
        for kind, what in WORDS.items()
    }
    offered = [(name, entry, each.info) for each in plugins for name, entry in each.optimizers.items()]
    settings, contested_settings = find_owners(offered)
    conflicts.update((("setting", name), error) for name, error in contested_settings.items())
    return Contents(plugins, tables, settings, conflicts)


def _owned(
    kind: str, what: str, offers: list[tuple[PluginInfo, Mapping[str, Any]]], conflicts: _Conflicts
) -> dict[str, tuple[Any, PluginInfo]]:
    """Return what has one owner; what has two becomes a conflict."""
    table: dict[str, tuple[Any, PluginInfo]] = {}
    for info, offered in offers:
        for name, value in offered.items():
            if name in table:
                conflicts.setdefault((kind, name), contested(what, name, table[name][1], info))
            table.setdefault(name, (value, info))
    return {name: owned for name, owned in table.items() if (kind, name) not in conflicts}


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
        with warnings.catch_warnings():  # filters that it sets are its own affair
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
