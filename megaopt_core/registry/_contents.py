"""What all plugins together offer, where one name can have one owner only."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from megaopt_core.errors import DuplicateNameError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._loading import LoadedPlugin, PluginInfo
from megaopt_core.registry._setting_owners import SettingInfo, find_owners
from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = ["Contents", "collect"]


@frozen
class Contents:
    """What all plugins together offer; every name has one owner.

    Args:
        plugins: those that work, in their one order.
        optimizers: name to entry and owner.
        strategies: name to strategy and owner.
        schedules: name to style and owner.
        settings: full name to setting.
    """

    plugins: tuple[LoadedPlugin, ...]
    optimizers: Mapping[str, tuple[OptimizerEntry, PluginInfo]]
    strategies: Mapping[str, tuple[ShardingStrategy, PluginInfo]]
    schedules: Mapping[str, tuple[ScheduleStyle, PluginInfo]]
    settings: Mapping[str, SettingInfo]


def collect(plugins: tuple[LoadedPlugin, ...]) -> Contents:
    """Put together what plugins offer.

    Args:
        plugins: the plugins that work, in their one order.

    Raises:
        DuplicateNameError: two of them give one name.
    """
    by_name: dict[str, PluginInfo] = {}
    for plugin in plugins:
        name = plugin.info.name
        _refuse_second(f"plugin name {name!r}", name, by_name.get(name), plugin.info)
        by_name[name] = plugin.info
    optimizers: dict[str, tuple[OptimizerEntry, PluginInfo]] = {}
    strategies: dict[str, tuple[ShardingStrategy, PluginInfo]] = {}
    schedules: dict[str, tuple[ScheduleStyle, PluginInfo]] = {}
    for plugin in plugins:
        _add("optimizer", optimizers, plugin.optimizers, plugin.info)
        _add("sharding strategy", strategies, plugin.strategies, plugin.info)
        _add("schedule", schedules, plugin.schedules, plugin.info)
    core_fields = {name for plugin in plugins for name in plugin.core_fields}
    return Contents(plugins, optimizers, strategies, schedules, find_owners(optimizers, core_fields))


def _add[T](
    what: str, table: dict[str, tuple[T, PluginInfo]], offered: Mapping[str, T], info: PluginInfo
) -> None:
    for name, value in offered.items():
        _refuse_second(f"{what} {name!r}", name, table[name][1] if name in table else None, info)
        table[name] = value, info


def _refuse_second(what: str, name: str, first: PluginInfo | None, second: PluginInfo) -> None:
    if first is None:
        return
    raise DuplicateNameError(
        f"{what} is given by {first} and by {second}; uninstall one of them, or block it: "
        f"MEGAOPT_DISABLE_PLUGINS={second.distribution or second.name}",
        name=name,
        owners=(first.source, second.source),
    )
