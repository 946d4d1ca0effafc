"""Finding a schedule style by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from megaopt_core.errors import ScheduleError, UnknownNameError
from megaopt_core.schedules.styles import BUILTIN_STYLES, ScheduleStyle

__all__ = ["StyleSetting", "find_style"]

type StyleSetting = Literal["lr_decay_style", "wd_incr_style"]


def find_style(setting: StyleSetting, name: str, styles: Mapping[str, ScheduleStyle]) -> ScheduleStyle:
    """Return the style of this name: a given one, a built-in one or a plugin's, in this order.

    Plugins are loaded only when nobody else knows the name.

    Args:
        setting: the setting that names the style, hence what the style must serve.
        name: the style's name.
        styles: styles that the user gave.

    Raises:
        ScheduleError: nobody knows the name, or the style does not serve the setting; the message lists
            what does.
        BrokenPluginError: the name may belong to a plugin that failed to load.

    Example:
        >>> find_style("lr_decay_style", "cosine", {}).description
        'half a cosine wave: slow, fast, slow'
    """
    near = {**BUILTIN_STYLES, **styles}
    try:
        style = near[name] if name in near else _from_plugins(name)
    except UnknownNameError as error:
        raise _refusal(setting, name, "nobody offers this style", near, error.known) from error
    if not _serves(style, setting):
        other = "wd_incr_style" if setting == "lr_decay_style" else "lr_decay_style"
        raise _refusal(setting, name, f"this style serves {other} only", near)
    return style


def _from_plugins(name: str) -> ScheduleStyle:
    from megaopt_core.registry import get_registry  # a built-in style needs no plugin machinery

    return get_registry().schedule(name)


def _serves(style: ScheduleStyle, setting: StyleSetting) -> bool:
    return (style.learning_rate if setting == "lr_decay_style" else style.weight_decay) is not None


def _refusal(
    setting: StyleSetting,
    name: str,
    reason: str,
    near: Mapping[str, ScheduleStyle],
    known: Iterable[str] = (),
) -> ScheduleError:
    offered = dict(near) | {other: _from_plugins(other) for other in known if other not in near}
    allowed = sorted((other for other in offered if _serves(offered[other], setting)), key=str.lower)
    return ScheduleError(
        f"{setting}={name!r}: {reason}; known are {', '.join(allowed)}", setting=setting, value=name
    )
