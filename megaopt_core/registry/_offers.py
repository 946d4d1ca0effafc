"""The offers of plugins: asked and checked plugin by plugin, then put into one table in which a name has one owner."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
from attrs import define, evolve, field

from megaopt_core.errors import DuplicateNameError, MegaoptError, PluginError, PluginHookError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo, PluginStatus, contested
from megaopt_core.registry._loading import LoadedPlugin
from megaopt_core.registry._missing import WORDS
from megaopt_core.registry._setting_owners import settings_in
from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = ["Offers"]

_HOOKS: Mapping[str, tuple[str, type]] = {
    "optimizer": ("megaopt_optimizer_entries", OptimizerEntry),
    "strategy": ("megaopt_sharding_strategies", ShardingStrategy),
    "schedule": ("megaopt_schedules", ScheduleStyle),
    "precision": ("megaopt_precision_policies", type),
}
"""Kind to the hook that offers it, and of what type it is."""

_RESOLVE = "megaopt_resolve_optimizer"


@define
class Offers:
    """The offers of all plugins together; a name that two of them give belongs to neither.

    Args:
        plugins: those that work, in their one order.
        core_fields: names of the core's configuration fields, which no setting of a plugin may have.
        table: kind to name to what is offered and whose it is, for names that have one owner.
        conflicts: `(kind, name)` to the error for whoever asks for a name that two plugins give.
    """

    plugins: list[LoadedPlugin] = field(init=False, factory=list)
    core_fields: Collection[str] = field(init=False, default=())
    table: dict[str, dict[str, tuple[Any, PluginInfo]]] = field(
        init=False, factory=lambda: {kind: {} for kind in (*_HOOKS, "resolved", "setting", "plugin")}
    )
    conflicts: dict[tuple[str, str], DuplicateNameError] = field(init=False, factory=dict)

    def add(self, imported: LoadedPlugin) -> LoadedPlugin:
        """Ask a plugin what it offers, check it, and add it.

        Args:
            imported: the plugin; its offers are not known yet.

        Raises:
            PluginError: something that it offers cannot be used; nothing is added.
            BaseException: whatever its hooks raise.
        """
        offers: dict[str, dict[str, Any]] = {kind: _offered(imported, *hook) for kind, hook in _HOOKS.items()}
        for name, entry in offers["optimizer"].items():
            self.check_entry(name, entry, imported.info)
        for name, style in offers["schedule"].items():
            _require_settings(f"schedule {name!r}", style.settings)
        info = evolve(imported.info, status=PluginStatus.LOADED)
        plugin = evolve(imported, info=info, offers=offers)
        if info.is_core:  # it brings the names of its fields: the configuration lies above the registry
            self.core_fields = frozenset(plugin.implementation.core_fields)
        self.plugins.append(plugin)
        for kind, offered in {"plugin": {info.name: plugin}, **offers}.items():
            for name, value in offered.items():
                self.give(kind, name, value, info)
        return plugin

    def give(self, kind: str, name: str, value: Any, info: PluginInfo) -> None:
        """Add one thing, and the settings that it brings.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"precision"`, `"setting"`, `"plugin"`, or `"resolved"`
                for an optimizer that no plugin lists.
            name: its name.
            value: the thing.
            info: whose it is.
        """
        if (kind, name) not in self.conflicts:
            first, owner = self.table[kind].setdefault(name, (value, info))
            if kind == "setting":
                error = value.conflict_with(first)
            else:
                error = contested(WORDS[kind], name, owner, info) if owner != info else None
            if error is not None:
                self.conflicts[kind, name] = error
                del self.table[kind][name]
        if isinstance(value, OptimizerEntry):
            for setting in settings_in(name, value, info):
                self.give("setting", setting.name, setting, info)

    def require_one_owner(self, kind: str, name: str) -> None:
        """Raise if two plugins give a name.

        Args:
            kind: as for :meth:`give`.
            name: the name.

        Raises:
            DuplicateNameError: they do; it names both.
        """
        conflict = self.conflicts.get((kind, name))
        if conflict is not None:
            raise DuplicateNameError(str(conflict), name=conflict.name, owners=conflict.owners)

    def call_each(
        self, hook: str, failed: list[PluginHookError] | None, arguments: Mapping[str, Any]
    ) -> list[tuple[PluginInfo, Any]]:
        """Call a hook of every plugin that implements it, in their one order.

        Args:
            hook: its name.
            failed: gets the errors of plugins that raise; None: the first is raised.
            arguments: all its arguments.

        Returns:
            Plugin and answer, where that is not None.

        Raises:
            PluginHookError: a plugin raised.
        """
        found = []
        for plugin in self.plugins:
            try:
                found += [(plugin.info, answer) for answer in plugin.call(hook, **arguments)]
            except PluginHookError as error:
                if failed is None:
                    raise
                failed.append(error)
        return found

    def resolved(self, name: str) -> tuple[OptimizerEntry, PluginInfo] | None:
        """Return the optimizer that a plugin makes of a name that none lists, and the plugin; asked for once.

        Args:
            name: what a user wrote in `optimizer="..."`.

        Raises:
            DuplicateNameError: two plugins know it, or a setting of it has the name of another.
            MegaoptError: a plugin knows the name and refuses it, in its own words.
            PluginError: no plugin knows it and one raised something else, or what it returns cannot be used.
        """
        if name not in self.table["resolved"]:
            failed: list[PluginHookError] = []
            found = self.call_each(_RESOLVE, failed, {"name": name})
            for error in failed:
                if isinstance(error.__cause__, MegaoptError):
                    raise error.__cause__
            if len(found) > 1:
                raise contested("optimizer", name, found[0][0], found[1][0], by="resolved by")
            if not found and failed:
                failed[0].args = (f"optimizer {name!r}: {failed[0]}",)
                raise failed[0]
            for info, entry in found:
                self._check_resolved(name, entry, info)
                self.give("resolved", name, entry, info)
        return self.table["resolved"].get(name)

    def _check_resolved(self, name: str, entry: OptimizerEntry, info: PluginInfo) -> None:
        if not isinstance(entry, OptimizerEntry):
            words = f"returned {type(entry).__name__} for {name!r}; it must return an OptimizerEntry or None"
            raise info.wrong_answer(_RESOLVE, words)
        self.check_entry(name, entry, info)
        for setting in settings_in(name, entry, info):
            first = self.table["setting"].get(setting.name)
            conflict = setting.conflict_with(first[0]) if first else None
            if conflict is not None:
                raise conflict

    def check_entry(self, name: str, entry: OptimizerEntry, info: PluginInfo) -> None:
        """Raise unless the settings of an entry can be used.

        Args:
            name: the optimizer's name.
            entry: its entry.
            info: whose it is.

        Raises:
            PluginError: they cannot.
        """
        _require_settings(f"optimizer {name!r}", entry.settings)
        if entry.settings is not None and not entry.setting_prefixes:
            raise PluginError(f"optimizer {name!r} has settings but no setting_prefixes")
        for setting in settings_in(name, entry, info):
            if setting.name in self.core_fields:
                raise PluginError(
                    f"setting {setting.name!r} of optimizer {name!r} is a field of the core's configuration; "
                    "give the optimizer another setting prefix"
                )


def _offered[T](plugin: LoadedPlugin, hook: str, kind: type[T]) -> dict[str, T]:
    """Return what a hook of a plugin offers, where all of it is of the right type."""
    offered: dict[str, T] = {}
    for answer in plugin.ask(hook):
        if not isinstance(answer, Mapping):
            raise PluginError(
                f"{hook} returned {type(answer).__name__}; it must return {{name: {kind.__name__}}}"
            )
        for name, value in answer.items():
            if not (isinstance(name, str) and name):
                raise PluginError(f"{hook} returned the name {name!r}; a name is a non-empty str")
            if not isinstance(value, kind):
                raise PluginError(
                    f"{hook} returned {name!r}: {type(value).__name__}; it must be of type {kind.__name__}"
                )
            offered[name] = value
    return offered


def _require_settings(whose: str, settings: type | None) -> None:
    """Raise unless a settings class, where there is one, is made by attrs and takes its own defaults."""
    if settings is None:
        return
    if not (isinstance(settings, type) and attrs.has(settings)):
        raise PluginError(f"{whose}: settings={settings!r} is no attrs class")
    try:
        settings()
    except Exception as error:
        raise PluginError(
            f"{whose}: {settings.__name__} cannot be made of its defaults: {words_of(error)}"
        ) from error
