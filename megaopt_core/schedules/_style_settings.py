"""Settings that a style declares for itself: filled, checked, and turned into its settings class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from megaopt_core.errors import ScheduleError
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._missing import did_you_mean

__all__ = ["settings_of_style"]


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
        raise ScheduleError(
            f"{setting}={given!r}: must map names of settings to values", setting=setting, value=given
        )
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
