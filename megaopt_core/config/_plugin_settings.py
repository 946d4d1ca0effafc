"""Settings of plugins on a configuration: checked by their settings classes, kept while their plugin is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from megaopt_core.config._fields import CORE_FIELD_NAMES
from megaopt_core.errors import ConfigurationError, PluginError, UnknownSettingError
from megaopt_core.registry._catalogue import REFERENCE_SETTINGS, distribution_of_setting
from megaopt_core.registry._missing import absent_plugin, did_you_mean, may_provide
from megaopt_core.registry._registry import get_registry
from megaopt_core.registry._setting_owners import SettingInfo

__all__ = ["check_settings", "read_setting", "settings_of"]


def check_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return plugin settings with converted, valid values; loads plugins if there is any setting.

    Settings whose plugin is known but not installed, blocked or broken are kept as they are given.

    Args:
        given: full names to values.

    Raises:
        UnknownSettingError: no core field and no plugin has a setting of this name.
        ConfigurationError: a value is not allowed.
    """
    if not given:
        return {}
    owners = get_registry().setting_owners()
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if name in owners:
            instance = _instance(owners[name], owners, given)
            checked[name] = getattr(instance, owners[name].field.name)
        elif _absence(name) is not None:
            checked[name] = _without_lists(value)
        else:
            raise _unknown(name)
    return checked


def read_setting(name: str, given: Mapping[str, Any]) -> Any:
    """Return the value of a plugin's setting: the given one, or its default.

    Args:
        name: full name.
        given: the plugin settings of the configuration.

    Raises:
        PluginNotInstalledError: its plugin is not installed, or is blocked.
        BrokenPluginError: its plugin failed to load.
        UnknownSettingError: no core field and no plugin has a setting of this name.
    """
    owners = get_registry().setting_owners()
    if name in owners:
        return getattr(_instance(owners[name], owners, given), owners[name].field.name)
    raise _absence(name) or _unknown(name)


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
    raise PluginError(
        f"{name} is the settings class of no loaded plugin{may_provide(get_registry().plugins())}"
    )


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
        where = f"settings of {info.plugin}" if guilty is None else f"{guilty}={mine[guilty]!r}"
        value = None if guilty is None else mine[guilty]
        raise ConfigurationError(f"{where}: {_reason(error)}", setting=guilty, value=value) from error


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


def _absence(name: str) -> PluginError | None:
    distribution = distribution_of_setting(name)
    if distribution is None:
        return None
    return absent_plugin(f"setting {name!r}", name, distribution, get_registry().plugins())


def _unknown(name: str) -> UnknownSettingError:
    known = [*CORE_FIELD_NAMES, *get_registry().setting_owners(), *REFERENCE_SETTINGS]
    hints = did_you_mean(name, known) + may_provide(get_registry().plugins())
    return UnknownSettingError(
        f"OptimizerConfig has no setting {name!r}, in the core or in an installed plugin{hints}", setting=name
    )


def _without_lists(value: Any) -> Any:
    """Files have lists where Python has tuples; equal settings should stay equal."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_without_lists(item) for item in value)
    return value
