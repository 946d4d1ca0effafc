"""What a settings class of a plugin must be: one of attrs, with defaults that it takes itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import attrs

from megaopt_core.errors import PluginError

__all__ = ["check_defaults", "check_settings_class"]


def check_settings_class(whose: str, settings: Any) -> None:
    """Raise unless a settings class is one of attrs, with a default for everything.

    Args:
        whose: whose settings they are, in words.
        settings: what was given as the class.

    Raises:
        PluginError: it is something else; the message says what to write.
    """
    if not isinstance(settings, type):
        own = type(settings)
        if attrs.has(own) or dataclasses.is_dataclass(own):
            raise PluginError(
                f"{whose}: settings is an instance of {own.__name__}; give the class, without (): "
                f"settings={own.__name__}{_unless_attrs(own)}"
            )
        raise PluginError(f"{whose}: settings={settings!r} is no attrs class")
    if not attrs.has(settings):
        raise PluginError(f"{whose}: settings={settings!r} is no attrs class{_unless_attrs(settings)}")
    required = [setting.name for setting in attrs.fields(settings) if setting.default is attrs.NOTHING]
    if required:
        raise PluginError(f"{whose}: {settings.__name__} has no default for {', '.join(required)}")


def _unless_attrs(settings: type) -> str:
    """Return by what to decorate a class, where attrs has not made it."""
    if attrs.has(settings):
        return ""
    instead = " in place of dataclass" if dataclasses.is_dataclass(settings) else ""
    return f"; decorate it with attrs.frozen (or attrs.define){instead}"


def check_defaults(whose: str, settings: Any) -> None:
    """Raise unless a settings class takes its own defaults, shares none that can be changed, and offers choices.

    Args:
        whose: whose settings they are, in words.
        settings: the class.

    Raises:
        PluginError: they cannot be the defaults; the message names the setting.
    """
    try:
        made = settings()
    except Exception as error:
        where = _refused_field(settings, error)
        called = (
            f"; a validator is called where it is named: validator={where[1]}()"
            if where is not None and isinstance(error, TypeError) and where[1].isidentifier()
            else ""
        )
        told = f"the setting {where[0]!r} cannot have its default" if where else "it cannot be made"
        raise PluginError(
            f"{whose}: {settings.__name__}: {told}: {type(error).__name__}: {error}{called}"
        ) from error
    for setting in attrs.fields(settings):
        choices = setting.metadata.get("choices", ())
        if isinstance(choices, str):
            raise PluginError(
                f"{whose}: {settings.__name__}: the choices of {setting.name!r} are the text {choices!r}; they must be "
                f"a tuple of texts: ({choices!r},)"
            )
        kind = next((each for each in _INSTEAD if isinstance(setting.default, each)), None)
        # A converter may make a tuple of it.
        if kind is not None and getattr(made, setting.name) is setting.default:
            raise PluginError(
                f"{whose}: {settings.__name__}: the default of {setting.name!r} is a {kind.__name__}, which all "
                f"configurations would share; give {_INSTEAD[kind]}"
            )


_INSTEAD: Mapping[type, str] = {
    list: "a tuple, or field(factory=list)",
    dict: "field(factory=dict)",
    set: "a frozenset, or field(factory=set)",
}
"""A default that can be changed in place, and the default to write instead."""


def _refused_field(settings: Any, error: Exception) -> tuple[str, str] | None:
    """Return the field whose validator raises such an error for its default, and the validator's name."""
    for setting in attrs.fields(settings):
        if setting.validator is None or isinstance(setting.default, attrs.Factory):  # type: ignore[arg-type] # a class
            continue
        try:
            setting.validator(None, setting, setting.default)
        except type(error):
            return setting.name, getattr(setting.validator, "__name__", "one_of")
        except Exception:  # noqa: BLE001, S112 - another field's error is not this one
            continue
    return None
