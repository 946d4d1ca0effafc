"""What all plugins together offer; a name that two of them give belongs to neither."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from megaopt_core.errors import DuplicateNameError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._loading import LoadedPlugin
from megaopt_core.registry._setting_owners import SettingInfo, find_owners
from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = ["Contents", "collect"]

type _Conflicts = dict[tuple[str, str], DuplicateNameError]


@frozen
class Contents:
    """What all plugins together offer; every name in the tables has one owner.

    Args:
        plugins: those that work, in their one order.
        optimizers: name to entry and owner.
        strategies: name to strategy and owner.
        schedules: name to style and owner.
        settings: full name to setting.
        conflicts: `(kind, name)` to the error for whoever asks for a name that two plugins give.
    """

    plugins: tuple[LoadedPlugin, ...]
    optimizers: Mapping[str, tuple[OptimizerEntry, PluginInfo]]
    strategies: Mapping[str, tuple[ShardingStrategy, PluginInfo]]
    schedules: Mapping[str, tuple[ScheduleStyle, PluginInfo]]
    settings: Mapping[str, SettingInfo]
    conflicts: Mapping[tuple[str, str], DuplicateNameError] = field(factory=dict)

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
    optimizers = _owned(
        "optimizer", "optimizer", [(each.info, each.optimizers) for each in plugins], conflicts
    )
    strategies = _owned(
        "strategy", "sharding strategy", [(each.info, each.strategies) for each in plugins], conflicts
    )
    schedules = _owned("schedule", "schedule", [(each.info, each.schedules) for each in plugins], conflicts)
    offered = [(name, entry, each.info) for each in plugins for name, entry in each.optimizers.items()]
    settings, contested = find_owners(offered)
    conflicts.update((("setting", name), error) for name, error in contested.items())
    return Contents(plugins, optimizers, strategies, schedules, settings, conflicts)


def _owned[T](
    kind: str, what: str, offers: list[tuple[PluginInfo, Mapping[str, T]]], conflicts: _Conflicts
) -> dict[str, tuple[T, PluginInfo]]:
    """Return what has one owner; what has two becomes a conflict."""
    table: dict[str, tuple[T, PluginInfo]] = {}
    for info, offered in offers:
        for name, value in offered.items():
            if name in table:
                conflicts.setdefault((kind, name), _conflict(f"{what} {name!r}", name, table[name][1], info))
            table.setdefault(name, (value, info))
    return {name: owned for name, owned in table.items() if (kind, name) not in conflicts}


def _conflict(what: str, name: str, first: PluginInfo, second: PluginInfo) -> DuplicateNameError:
    return DuplicateNameError(
        f"{what} is given by {first} and by {second}; uninstall one of them, or block it: "
        f"MEGAOPT_DISABLE_PLUGINS={second.distribution or second.name}",
        name=name,
        owners=(first.source, second.source),
    )
