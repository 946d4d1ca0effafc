"""What is wrong with a plugin before any check of the kit is made of what it offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, distribution
from typing import Any

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import OptimizerEntry, ScheduleStyle
from megaopt_core.registry import COMMANDS, GROUP, PluginInfo, PluginStatus, get_registry, hook_arguments
from megaopt_testing.mistakes.entry_points import load_named
from megaopt_testing.mistakes.hooks import check_hooks
from megaopt_testing.mistakes.remedies import remedy_of
from megaopt_testing.mistakes.settings_classes import check_defaults, check_settings_class
from megaopt_testing.mistakes.signatures import check_signatures

__all__ = ["require_sound"]

type _Records = Mapping[str, OptimizerEntry | ScheduleStyle]

_OFFERS = {"optimizer": "megaopt_optimizer_entries", "schedule": "megaopt_schedules"}


def require_sound(info: PluginInfo) -> None:
    """Raise for a plugin that could not be loaded, or whose hooks, functions and settings cannot be used.

    Args:
        info: the plugin; it has been loaded, or is broken.

    Raises:
        PluginError: something is wrong; the message says what to write instead, where that is known.
    """
    try:
        _examine(info)
    except Exception as error:
        words = str(error) if type(error) is PluginError else f"{type(error).__name__}: {error}"
        raise PluginError(f"{info}: {' '.join(words.split())}{remedy_of(error)}") from error
    if info.status is PluginStatus.BROKEN:
        raise PluginError(f"{info} failed to load: {info.error}")


def _examine(info: PluginInfo) -> None:
    """Raise for the first mistake of a plugin."""
    loaded = next((each for each in get_registry().loaded_plugins() if each.info == info), None)
    plugin = (
        load_named(EntryPoint(info.name, info.module, GROUP)) if loaded is None else loaded.implementation
    )
    check_hooks(plugin, hook_arguments())
    _require_commands_named(info, plugin)
    offers: Mapping[str, _Records] = (
        {kind: _asked(plugin, hook) for kind, hook in _OFFERS.items()} if loaded is None else loaded.offers
    )
    for kind in _OFFERS:
        for name, record in offers[kind].items():
            whose = f"{kind} {name!r}"
            check_signatures(whose, record)
            if record.settings is not None:
                check_settings_class(whose, record.settings)
                check_defaults(whose, record.settings)


def _require_commands_named(info: PluginInfo, plugin: Any) -> None:
    """Raise where commands of an installed plugin would not be listed, because no second entry point names it."""
    if info.distribution is None or not hasattr(plugin, "megaopt_commands"):
        return
    named = [point.name for point in distribution(info.distribution).entry_points if point.group == COMMANDS]
    if info.name not in named:
        raise PluginError(
            f"it brings commands, which `megaopt` lists only if an entry point of the group {COMMANDS!r} names it too: "
            f"{info.name} = {info.module!r}"
        )


def _asked(plugin: Any, hook: str) -> _Records:
    """Return the usable records that the hook of a broken plugin returns."""
    ask: Callable[[], Any] = getattr(plugin, hook, dict)
    answer = ask()
    items = answer.items() if isinstance(answer, Mapping) else ()
    return {name: record for name, record in items if isinstance(record, OptimizerEntry | ScheduleStyle)}
