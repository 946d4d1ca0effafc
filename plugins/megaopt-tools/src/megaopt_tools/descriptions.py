"""What a name is that `megaopt describe` is asked for, with its settings: as data, for tables and for programs."""

from __future__ import annotations

import inspect
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

import attrs

from megaopt_core.config import CORE_FIELD_NAMES, core_field_info
from megaopt_core.errors import ConfigurationError, UnknownNameError
from megaopt_core.registry import SettingInfo, get_registry

__all__ = ["about"]

_OF_EVERY_OPTIMIZER = ("lr", "weight_decay", "clip_grad")
"""Settings of the core that whoever sets up an optimizer asks for first."""

_UNDESCRIBED = "its plugin does not describe it"


def about(name: str | None) -> dict[str, Any]:
    """Return what a name is: `name`, `description`, `settings`, and what else there is to say of its kind.

    Args:
        name: of an optimizer, setting, schedule or sharding strategy; None: the settings of the core.

    Raises:
        ConfigurationError: it is a plugin's or a distribution's, with what that brings.
        PluginError: nothing has this name; the error names what is near.
    """
    if name is None or name in CORE_FIELD_NAMES:
        return _core(name)
    registry = get_registry()
    if name in registry.schedules() and name not in registry.optimizers():
        return _schedule(name)
    if registry.has_optimizer(name):
        return _optimizer(name)
    if name in registry.setting_owners():
        return _setting(name)
    if name not in registry.strategies():
        _refuse(name)
    return _strategy(name)


def _core(name: str | None) -> dict[str, Any]:
    rows = [
        {"name": info.name, "type": info.type, "default": info.default, "help": info.help}
        for info in core_field_info()
        if name is None or info.name == name
    ]
    return {
        "name": "OptimizerConfig",
        "description": "what every run can set, whichever plugins are installed",
        "settings": rows,
        "example": "OptimizerConfig(lr=3e-4, weight_decay=0.1, bf16=True)",
    }


def _optimizer(name: str) -> dict[str, Any]:
    registry = get_registry()
    entry = registry.optimizer(name)
    cls, owners = entry.optimizer_cls, registry.setting_owners().values()
    own = [_row(info) for prefix in entry.setting_prefixes for info in owners if info.prefix == prefix]
    return {
        "name": name,
        "description": entry.description or _UNDESCRIBED,
        "plugin": registry.owner("optimizer", name).source,
        "class": cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}",
        "granularity": entry.granularity.value,
        "fp16": "supported" if entry.supports_fp16 else "not supported",
        "settings": own + [row for row in _core(None)["settings"] if row["name"] in _OF_EVERY_OPTIMIZER],
        "example": entry.example or f'build_optimizer(model, "{name}", lr=1e-3)',
    }


def _schedule(name: str) -> dict[str, Any]:
    registry = get_registry()
    style, owner = registry.schedule(name), registry.owner("schedule", name)
    serves = {"lr_decay_style": style.learning_rate, "wd_incr_style": style.weight_decay}
    settings = style.settings
    infos = [
        SettingInfo(field.name, "", field, settings, owner, name)
        for field in (() if settings is None else attrs.fields(settings))
        if settings is not None
    ]
    return {
        "name": name,
        "description": style.description or _UNDESCRIBED,
        "plugin": owner.source,
        "serves": ", ".join(setting for setting, function in serves.items() if function is not None),
        "settings": [_row(info) for info in infos],
    }


def _setting(name: str) -> dict[str, Any]:
    registry = get_registry()
    info = registry.setting_owners()[name]
    readers = [each for each, entry in registry.optimizers().items() if info.prefix in entry.setting_prefixes]
    return {
        "name": name,
        "description": f"a setting of {', '.join(readers)}",
        "plugin": info.plugin.source,
        "settings": [_row(info)],
    }


def _strategy(name: str) -> dict[str, Any]:
    registry = get_registry()
    strategy = registry.strategy(name)
    does = (inspect.getdoc(type(strategy)) or _UNDESCRIBED).splitlines()[0]
    return {
        "name": name,
        "description": f"a sharding strategy (sharding={name!r}): {does}",
        "plugin": registry.owner("strategy", name).source,
        "granularity": ", ".join(sorted(each.value for each in strategy.granularities)),
        "acts on": ", ".join(sorted(strategy.supported_settings)) or "no setting of the core",
        "settings": [],
    }


def _row(info: SettingInfo) -> dict[str, Any]:
    """Return what is to be known about a setting."""
    choices = f" ({', '.join(info.choices)})" if info.choices else ""
    return {"name": info.name, "type": info.type, "default": info.default, "help": info.help + choices}


def _refuse(name: str) -> NoReturn:
    """Raise for a name of nothing that is here: what brings it, what it is instead, or what is near."""
    registry = get_registry()
    for plugin in registry.loaded_plugins():
        if plugin.info.goes_by(name):
            offers = {
                "optimizers": plugin.optimizers,
                "sharding strategies": plugin.strategies,
                "schedules": plugin.schedules,
            }
            brought = "; ".join(f"{what}: {', '.join(names)}" for what, names in offers.items() if names)
            told = (
                f"describe what it brings ({brought})" if brought else "it brings nothing that has settings"
            )
            raise ConfigurationError(f"{name!r} is {plugin.info}: {told}", setting="name", value=name)
    try:
        registry.optimizer(name)
    except UnknownNameError as error:
        with suppress(UnknownNameError):
            registry.strategy(name)
        known = [
            *registry.optimizers(),
            *CORE_FIELD_NAMES,
            *registry.setting_owners(),
            *registry.strategies(),
            *registry.schedules(),
        ]
        close = get_close_matches(name, known, n=3, cutoff=0.7)
        if not close:
            raise
        raise UnknownNameError(
            f"no optimizer, setting, sharding strategy or schedule is called {name!r}; did you mean "
            f"{' or '.join(map(repr, close))}?",
            name=name,
            known=known,
        ) from error
    raise AssertionError(f"{name!r} is an optimizer")
