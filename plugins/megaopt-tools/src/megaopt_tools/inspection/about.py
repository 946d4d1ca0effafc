"""What `megaopt describe` tells about a name: a setting, an optimizer, a schedule or a sharding strategy."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from megaopt_core.config import CORE_FIELD_NAMES, OptimizerConfig, core_field_info
from megaopt_core.errors import ConfigurationError, PluginError, UnknownNameError, UnknownSettingError
from megaopt_core.registry import did_you_mean, get_registry, type_name
from megaopt_tools.inspection.optimizers import settings_of_optimizer

__all__ = ["about"]

_OF_EVERY_OPTIMIZER = ("lr", "weight_decay", "clip_grad")
"""Settings of the core that whoever sets up an optimizer asks for first."""

_NO_WORDS = "its plugin does not describe it"


def about(name: str | None) -> dict[str, Any]:
    """Return what is to be known about a name, with its settings under `settings`.

    Args:
        name: what was asked for; None: the core's fields.

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
    if _is_strategy(name):
        return _strategy(name)
    _refuse_plugin(name)
    _refuse_absent_setting(name)
    try:
        return _optimizer(name)
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


def _core(name: str | None) -> dict[str, Any]:
    return {
        "name": "OptimizerConfig",
        "description": "settings of the core, available in every run",
        "settings": [attrs.asdict(info) for info in core_field_info() if name in {None, info.name}],
        "example": "OptimizerConfig(lr=3e-4, weight_decay=0.1, bf16=True)",
    }


def _schedule(name: str) -> dict[str, Any]:
    """Tell about a style of learning rate or weight decay, with the settings of its own."""
    registry = get_registry()
    style = registry.schedule(name)
    serves = [
        what
        for what, function in (("lr_decay_style", style.learning_rate), ("wd_incr_style", style.weight_decay))
        if function is not None
    ]
    fields = () if style.settings is None else attrs.fields(style.settings)
    return {
        "name": name,
        "description": style.description or _NO_WORDS,
        "plugin": registry.owner("schedule", name).source,
        "serves": ", ".join(serves),
        "settings": [
            {
                "name": field.name,
                "type": type_name(field.type),
                "default": getattr(style.settings(), field.name),  # type: ignore[misc] # there are fields
                "help": str(field.metadata.get("help", "")),
            }
            for field in fields
        ],
    }


def _optimizer(name: str) -> dict[str, Any]:
    registry = get_registry()
    entry = registry.optimizer(name)
    cls = entry.optimizer_cls
    own = [_setting_row(full) for full in settings_of_optimizer(name)]
    return {
        "name": name,
        "description": entry.description or _NO_WORDS,
        "plugin": registry.owner("optimizer", name).source,
        "class": cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}",
        "granularity": entry.granularity.value,
        "fp16": "supported" if entry.supports_fp16 else "not supported",
        "settings": own + [row for row in _core(None)["settings"] if row["name"] in _OF_EVERY_OPTIMIZER],
        "example": entry.example or f'build_optimizer(model, "{name}", lr=1e-3)',
    }


def _setting(name: str) -> dict[str, Any]:
    registry = get_registry()
    info = registry.setting_owners()[name]
    readers = [each for each, entry in registry.optimizers().items() if info.prefix in entry.setting_prefixes]
    return {
        "name": name,
        "description": f"a setting of {', '.join(readers)}",
        "plugin": info.plugin.source,
        "settings": [_setting_row(name)],
    }


def _setting_row(name: str) -> dict[str, Any]:
    info = get_registry().setting_owners()[name]
    choices = f" ({', '.join(info.choices)})" if info.choices else ""
    return {"name": name, "type": info.type, "default": info.default, "help": info.help + choices}


def _strategy(name: str) -> dict[str, Any]:
    registry = get_registry()
    strategy = registry.strategy(name)
    description = (inspect.getdoc(type(strategy)) or _NO_WORDS).splitlines()[0]
    return {
        "name": name,
        "description": f"a sharding strategy (sharding={name!r}): {description}",
        "plugin": registry.owner("strategy", name).source,
        "granularity": ", ".join(sorted(each.value for each in strategy.granularities)),
        "acts on": ", ".join(sorted(strategy.supported_settings)) or "not a setting of the core",
        "settings": [],
    }


def _is_strategy(name: str) -> bool:
    """Return whether a name is a sharding strategy's, of a distribution that is not installed too."""
    try:
        get_registry().strategy(name)
    except UnknownNameError:
        return False
    except PluginError:
        return True
    return True


def _refuse_absent_setting(name: str) -> None:
    """Raise if a name is a setting of a distribution that is not installed."""
    try:
        getattr(OptimizerConfig(), name)
    except UnknownSettingError:
        return


def _refuse_plugin(name: str) -> None:
    """Raise if a name is a plugin's that works."""
    for plugin in get_registry().loaded_plugins():
        if not plugin.info.goes_by(name):
            continue
        offers = {
            "optimizers": plugin.offers["optimizer"],
            "sharding strategies": plugin.offers["strategy"],
            "schedules": plugin.offers["schedule"],
            "precision policies": plugin.offers["precision"],
        }
        brought = "; ".join(f"{what}: {', '.join(names)}" for what, names in offers.items() if names)
        told = f"describe one of its parts ({brought})" if brought else "nothing in it has settings"
        raise ConfigurationError(f"{name!r} is {plugin.info}: {told}", setting="name", value=name)
