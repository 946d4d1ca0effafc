"""Finding a schedule style by its name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal

from megaopt_core.errors import ScheduleError, UnknownNameError
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._registry import get_registry
from megaopt_core.schedules._styles import BUILTIN_STYLES

__all__ = ["StyleSetting", "find_style"]

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
        raise ScheduleError(f"{setting}={name!r}: must be the name of a style", setting=setting, value=name)
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
        wrong = "nobody offers this style" + (f" (did you mean {close[0]!r}?)" if close else "")
    raise ScheduleError(
        f"{setting}={name!r}: {wrong}; known are {', '.join(known)}", setting=setting, value=name
    ) from cause
