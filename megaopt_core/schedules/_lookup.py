"""Finding a schedule style by its name, and making the settings that it declares for itself."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import attrs

from megaopt_core.errors import ScheduleError, UnknownNameError
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._missing import did_you_mean
from megaopt_core.registry._registry import get_registry
from megaopt_core.schedules._styles import BUILTIN_STYLES

__all__ = ["StyleSetting", "find_style", "settings_of_style"]

type StyleSetting = Literal["lr_decay_style", "wd_incr_style"]

_KINDS: Mapping[StyleSetting, Literal["lr", "wd"]] = {"lr_decay_style": "lr", "wd_incr_style": "wd"}


def find_style(setting: StyleSetting, name: str, styles: Mapping[str, ScheduleStyle]) -> ScheduleStyle:
    """Return the style of this name: a given one, a built-in one or a plugin's, in this order.

    Plugins are loaded only when nobody else knows the name.

    Args:
        setting: the setting that names the style, hence what the style must serve.
        name: the style's name.
        styles: styles that the user gave.

    Raises:
        ScheduleError: nobody knows the name, or the style does not serve the setting; the message lists what
            does.
        BrokenPluginError: the name may belong to a plugin that failed to load.

    Example:
        >>> find_style("lr_decay_style", "cosine", {}).description
        'half a cosine wave: slow, fast, slow'
    """
    if not isinstance(name, str):
        raise ScheduleError.of(setting, name, "must be the name of a style")
    kind, near = _KINDS[setting], {**BUILTIN_STYLES, **styles}
    other = "wd_incr_style" if kind == "lr" else "lr_decay_style"
    cause, wrong = None, f"this style serves {other} only"
    try:
        style = near[name] if name in near else get_registry().schedule(name)
    except UnknownNameError as error:
        style, cause = None, error
    if style is not None and style.serves(kind):
        return style
    offered = {**near, **get_registry().schedules()}
    known = sorted((each for each, style in offered.items() if style.serves(kind)), key=str.lower)
    if cause is not None:
        close = get_close_matches(name, known, n=1)
        wrong = "no plugin offers this style" + (f" (did you mean {close[0]!r}?)" if close else "")
    raise ScheduleError.of(setting, name, f"{wrong}; known are {', '.join(known)}") from cause


def settings_of_style(
    setting: str, style_name: str, style: ScheduleStyle, given: Mapping[str, Any] | None
) -> Any:
    """Return an instance of the style's settings class; None for a style that has none.

    Args:
        setting: where they were given, `lr_style_settings` or `wd_style_settings`.
        style_name: the style's name.
        style: the style.
        given: names to values; what is left out has its default.

    Raises:
        ScheduleError: the style has no such setting, or refuses a value.

    Example:
        >>> settings_of_style("lr_style_settings", "cosine", ScheduleStyle(learning_rate=lambda point: 0.0), None)
    """
    if given is not None and not isinstance(given, Mapping):
        raise ScheduleError.of(setting, given, "must map names of settings to values")
    given = dict(given or {})
    known = [] if style.settings is None else [field.name for field in attrs.fields(style.settings)]
    for name in given:
        if name not in known:
            told = f"it has {', '.join(known)}" if known else "it has none"
            raise ScheduleError(
                f"{setting}: style {style_name!r} has no setting {name!r}; {told}{did_you_mean(str(name), known)}",
                setting=setting,
                value=given,
            )
    if style.settings is None:
        return None
    try:
        return style.settings(**given)
    except Exception as error:
        words = str(error.args[0]) if error.args else type(error).__name__
        raise ScheduleError(
            f"{setting}: style {style_name!r} refuses it: {words}", setting=setting, value=given
        ) from error
