"""What `megaopt describe` says of names that are no optimizer, schedule or setting of the core."""

from __future__ import annotations

import inspect
from typing import Any

from megaopt_core.config._fields import CORE_FIELD_NAMES
from megaopt_core.errors import ConfigurationError, UnknownNameError
from megaopt_core.registry._catalogue import STRATEGIES
from megaopt_core.registry._missing import did_you_mean
from megaopt_core.registry._registry import get_registry

__all__ = ["other_name", "setting_row"]


def other_name(name: str) -> dict[str, Any]:
    """Tell about a plugin's setting or a sharding strategy.

    Args:
        name: what was asked for.

    Raises:
        ConfigurationError: it is a plugin's or a distribution's, with what that brings.
        PluginError: nothing has this name; the error names what is near.
    """
    registry = get_registry()
    if name in registry.setting_owners():
        return _setting(name)
    if name in registry.strategies() or name in STRATEGIES:
        return _strategy(name)
    _refuse_plugin(name)
    try:
        registry.optimizer(name)
    except UnknownNameError as error:
        known = [
            *registry.optimizers(),
            *CORE_FIELD_NAMES,
            *registry.setting_owners(),
            *registry.strategies(),
            *registry.schedules(),
        ]
        guess = did_you_mean(name, known)
        if not guess:
            raise
        raise UnknownNameError(
            f"no optimizer, setting, sharding strategy or schedule is called {name!r}{guess}",
            name=name,
            known=known,
        ) from error
    raise AssertionError(f"{name!r} is an optimizer")


def setting_row(name: str) -> dict[str, Any]:
    """Return what is to be known about a plugin's setting.

    Args:
        name: its full name.
    """
    info = get_registry().setting_owners()[name]
    choices = f" ({', '.join(info.choices)})" if info.choices else ""
    return {"name": name, "type": info.type, "default": info.default, "help": info.help + choices}


def _setting(name: str) -> dict[str, Any]:
    registry = get_registry()
    info = registry.setting_owners()[name]
    readers = [each for each, entry in registry.optimizers().items() if info.prefix in entry.setting_prefixes]
    return {
        "name": name,
        "description": f"a setting of {', '.join(readers)}",
        "plugin": info.plugin.source,
        "settings": [setting_row(name)],
    }


def _strategy(name: str) -> dict[str, Any]:
    registry = get_registry()
    strategy = registry.strategy(name)
    about = (inspect.getdoc(type(strategy)) or "its plugin does not describe it").splitlines()[0]
    return {
        "name": name,
        "description": f"a sharding strategy (sharding={name!r}): {about}",
        "plugin": registry.owner("strategy", name).source,
        "granularity": ", ".join(sorted(each.value for each in strategy.granularities)),
        "acts on": ", ".join(sorted(strategy.supported_settings)) or "no setting of the core",
        "settings": [],
    }


def _refuse_plugin(name: str) -> None:
    """Raise if a name is a plugin's that works."""
    for plugin in get_registry().loaded_plugins():
        if not plugin.info.goes_by(name):
            continue
        offers = {
            "optimizers": plugin.optimizers,
            "sharding strategies": plugin.strategies,
            "schedules": plugin.schedules,
        }
        brought = "; ".join(f"{what}: {', '.join(names)}" for what, names in offers.items() if names)
        told = f"describe what it brings ({brought})" if brought else "it brings nothing that has settings"
        raise ConfigurationError(f"{name!r} is {plugin.info}: {told}", setting="name", value=name)
