"""What all plugins together offer; a name that two of them give belongs to neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from megaopt_core.errors import DuplicateNameError
from megaopt_core.registry._infos import PluginInfo, contested
from megaopt_core.registry._loading import LoadedPlugin
from megaopt_core.registry._missing import WORDS, Kind
from megaopt_core.registry._setting_owners import SettingInfo, find_owners

__all__ = ["Contents", "collect"]

type _Conflicts = dict[tuple[str, str], DuplicateNameError]

_OFFERED = {"optimizer": "optimizers", "strategy": "strategies", "schedule": "schedules"}
"""Kind to the attribute of a loaded plugin that holds what it offers of it."""


@frozen
class Contents:
    """What all plugins together offer; every name in the tables has one owner.

    Args:
        plugins: those that work, in their one order.
        tables: of optimizers, strategies and schedules, by name what is offered and by whom.
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
            kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"setting"` or `"plugin"`.
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
