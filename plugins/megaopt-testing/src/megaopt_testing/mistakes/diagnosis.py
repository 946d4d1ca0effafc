"""What is wrong with a plugin before any check of the kit is made of what it offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import OptimizerEntry, ScheduleStyle
from megaopt_core.registry import GROUP, PluginInfo, PluginStatus, get_registry
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
    check_hooks(_plugin_of(info, None if loaded is None else loaded.hooks), _given())
    offers: dict[str, _Records] = (
        {kind: _asked(info, hook) for kind, hook in _OFFERS.items()}
        if loaded is None
        else {"optimizer": loaded.optimizers, "schedule": loaded.schedules}
    )
    for kind, records in offers.items():
        for name, record in records.items():
            whose = f"{kind} {name!r}"
            check_signatures(whose, record)
            if record.settings is not None:
                check_settings_class(whose, record.settings)
                check_defaults(whose, record.settings)


def _plugin_of(info: PluginInfo, hooks: pluggy.HookRelay | None) -> Any:
    """Return what the entry point of a plugin names."""
    if hooks is None:
        return load_named(EntryPoint(info.name, info.module, GROUP))
    found = (impl.plugin for caller in _callers(hooks).values() for impl in caller.get_hookimpls())
    return next(found, None)


def _asked(info: PluginInfo, hook: str) -> _Records:
    """Return the usable records that the hook of a broken plugin returns."""
    ask: Callable[[], Any] = getattr(_plugin_of(info, None), hook, dict)
    answer = ask()
    items = answer.items() if isinstance(answer, Mapping) else ()
    return {name: record for name, record in items if isinstance(record, OptimizerEntry | ScheduleStyle)}


def _given() -> dict[str, Sequence[str]]:
    """Return the arguments that every hook is given."""
    callers = _callers(get_registry().loaded_plugins()[0].hooks)
    return {name: caller.spec.argnames for name, caller in callers.items() if caller.spec is not None}


def _callers(hooks: pluggy.HookRelay) -> dict[str, pluggy.HookCaller]:
    return {name: caller for name, caller in vars(hooks).items() if isinstance(caller, pluggy.HookCaller)}
