"""Settings of plugins on a configuration: checked by their settings classes, kept while their plugin is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from megaopt_core.config._fields import CORE_FIELD_NAMES
from megaopt_core.errors import (
    ConfigurationError,
    DuplicateNameError,
    PluginError,
    PluginHookError,
    PluginNotInstalledError,
    UnknownNameError,
    UnknownSettingError,
)
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.registry._catalogue import (
    REFERENCE_SETTINGS,
    RESOLVER,
    distribution_of,
)
from megaopt_core.registry._registry import get_registry
from megaopt_core.registry._setting_owners import SettingInfo

__all__ = ["check_settings", "read_setting", "settings_of", "with_prefixes"]


def check_settings(given: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return plugin settings with converted, valid values; loads plugins if there is any setting.

    Settings whose plugin is known but not installed, blocked or broken are kept as they are given.

    Args:
        given: full names to values.
        optimizer: the run's optimizer, whose settings a plugin may bring that resolves its name.

    Raises:
        UnknownSettingError: no core field and no plugin has a setting of this name.
        ConfigurationError: a value is not allowed.
        PluginError: nobody has the setting, and there is no such optimizer, or two, or its plugin failed to say.
    """
    if not given:
        return {}
    entry = _look_up(optimizer)
    registry = get_registry()
    owners = registry.setting_owners()
    checked: dict[str, Any] = {}
    for name, value in given.items():
        registry.require_one_owner("setting", name)
        if name in owners:
            instance = _instance(owners[name], owners, given)
            checked[name] = getattr(instance, owners[name].field.name)
        elif _is_kept(name, entry):
            checked[name] = _without_lists(value)
        elif isinstance(entry, DuplicateNameError | PluginHookError | UnknownNameError):
            raise entry  # whose setting it may be
        else:
            raise _unknown(name, optimizer)
    return checked


def _is_kept(name: str, entry: OptimizerEntry | PluginError) -> bool:
    """Whether a setting that nobody owns belongs to a plugin, or to an optimizer, that is not there now."""
    if isinstance(entry, OptimizerEntry) and any(
        name.startswith(f"{own}_") for own in entry.setting_prefixes
    ):
        return False
    if isinstance(entry, PluginNotInstalledError) and distribution_of("setting", name) == RESOLVER:
        return True
    return absent_setting(name) is not None


def _look_up(optimizer: str) -> OptimizerEntry | PluginError:
    """Return an entry, which makes its settings known, or why there is none: whoever builds it raises that."""
    try:
        return get_registry().optimizer(optimizer)
    except PluginError as error:
        return error


def with_prefixes(optimizer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by full name, where an optimizer's own may have been given without their prefix.

    Args:
        optimizer: the optimizer.
        given: names to values; core fields and full names are left as they are.

    Raises:
        ConfigurationError: one setting is given under both of its names.

    Example:
        >>> with_prefixes("adam", {"lr": 0.1})
        {'lr': 0.1}
    """
    if given.keys() <= set(CORE_FIELD_NAMES):
        return dict(given)
    entry = _look_up(optimizer)
    if isinstance(entry, PluginError) or entry.settings is None:
        return dict(given)
    owners = get_registry().setting_owners()
    known = {*CORE_FIELD_NAMES, *owners}
    short = {info.field.name: name for name, info in owners.items() if info.settings is entry.settings}
    full: dict[str, Any] = {}
    for name, value in given.items():
        meant = name if name in known else short.get(name, name)
        if meant != name and meant in given:
            raise ConfigurationError(
                f"{name}={value!r} and {meant}={given[meant]!r} are one setting; give one of them",
                setting=meant,
                value=value,
            )
        full[meant] = value
    return full


def read_setting(name: str, given: Mapping[str, Any]) -> Any:
    """Return the value of a plugin's setting: the given one, or its default.

    Args:
        name: full name.
        given: the plugin settings of the configuration.

    Raises:
        PluginNotInstalledError: its plugin is not installed, or is blocked.
        BrokenPluginError: its plugin failed to load.
        UnknownSettingError: no core field and no plugin has a setting of this name.
        DuplicateNameError: two plugins have one.
    """
    registry = get_registry()
    registry.require_one_owner("setting", name)
    owners = registry.setting_owners()
    if name in owners:
        return getattr(_instance(owners[name], owners, given), owners[name].field.name)
    raise absent_setting(name) or _unknown(name)


def settings_of[T](settings_cls: type[T], given: Mapping[str, Any]) -> T:
    """Return all settings of one settings class.

    Args:
        settings_cls: the class, as a plugin gave it to its entry.
        given: the plugin settings of the configuration.

    Raises:
        PluginError: no loaded plugin has this settings class.
    """
    owners = get_registry().setting_owners()
    for info in owners.values():
        if info.settings is settings_cls:
            return cast("T", _instance(info, owners, given))
    name = f"{settings_cls.__module__}.{settings_cls.__qualname__}"
    raise PluginError(f"{name} is the settings class of no loaded plugin{get_registry().may_provide()}")


def _instance(info: SettingInfo, owners: Mapping[str, SettingInfo], given: Mapping[str, Any]) -> Any:
    mine = {
        name: value
        for name, value in given.items()
        if name in owners and owners[name].settings is info.settings and owners[name].prefix == info.prefix
    }
    try:
        return info.settings(**{str(owners[name].field.alias): value for name, value in mine.items()})
    except ConfigurationError as error:
        raise _with_full_name(error, info) from error
    except (TypeError, ValueError) as error:
        guilty = next((name for name, value in mine.items() if _refuses(owners[name], value)), None)
        if guilty is None:
            raise ConfigurationError(f"settings of {info.plugin}: {_reason(error)}") from error
        raise ConfigurationError.of(guilty, mine[guilty], _reason(error)) from error


def _refuses(info: SettingInfo, value: Any) -> bool:
    """Whether a value is refused by itself, whatever the other settings are."""
    try:
        info.settings(**{str(info.field.alias): value})
    except (TypeError, ValueError):
        return True
    return False


def _reason(error: TypeError | ValueError) -> str:
    """Return the words; validators of attrs put the attribute, itself and the value behind them."""
    return str(error.args[0]) if error.args else type(error).__name__


def _with_full_name(error: ConfigurationError, info: SettingInfo) -> ConfigurationError:
    """Validators know the field, not the prefix under which it is set."""
    if error.setting not in {setting.name for setting in attrs.fields(info.settings)}:
        return error
    message = str(error)
    full = f"{info.prefix}_{error.setting}"
    message = f"{info.prefix}_{message}" if message.startswith(f"{error.setting}=") else f"{full}: {message}"
    return type(error)(message, setting=full, value=error.value)


def absent_setting(name: str) -> PluginError | None:
    """Return the error for a setting whose plugin is not loaded; None where no plugin is known for it, or it is.

    Args:
        name: full name of a setting.
    """
    distribution = distribution_of("setting", name)
    if distribution is None:
        return None
    return get_registry().absent_plugin(f"setting {name!r}", name, distribution)


def _unknown(name: str, optimizer: str | None = None) -> UnknownSettingError:
    registry = get_registry()
    known = [*CORE_FIELD_NAMES, *registry.setting_owners(), *REFERENCE_SETTINGS]
    described = "describe" if optimizer is None else f"describe {optimizer}"
    advice = registry.advice_on(name, known, optimizer) or f"; `megaopt {described}` lists the settings"
    return UnknownSettingError(
        f"OptimizerConfig has no setting {name!r}, in the core or in an installed plugin{advice}"
        f"{registry.may_provide()}",
        setting=name,
    )


def _without_lists(value: Any) -> Any:
    """Files have lists where Python has tuples; equal settings should stay equal."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_without_lists(item) for item in value)
    return value
