"""What a scheduler's checkpoint holds, and how older checkpoints named it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaopt_core.errors import ScheduleError

__all__ = ["SETTINGS", "read_state"]

SETTINGS = (
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "wsd_decay_steps",
    "lr_wsd_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
)
"""The settings of a scheduler that are saved, in the order in which they are loaded."""

_OLD_KEYS: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
    "num_steps": ("num_iters",),
}

_ALWAYS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")
_WEIGHT_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")


def _found_under(state_dict: Mapping[str, Any], name: str) -> list[str]:
    return [key for key in (*_OLD_KEYS.get(name, ()), name) if key in state_dict]


def read_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's saved values under today's names.

    Checkpoints without weight-decay values are read, as are those without the settings of warm-up's start
    and of style `WSD`: what is missing is left out. Keys that belong to nobody are ignored.

    Args:
        state_dict: what some version of the scheduler saved; it is not changed.

    Raises:
        ScheduleError: a key is missing without which the schedule is unknown, or a value is saved under two
            names and the two differ.

    Example:
        >>> old = {"start_lr": 0.1, "min_lr": 0.0, "warmup_iter": 5, "end_iter": 50, "decay_style": "linear"}
        >>> read_state(old | {"num_iters": 7})
        {'max_lr': 0.1, 'min_lr': 0.0, 'lr_warmup_steps': 5, 'lr_decay_steps': 50, 'lr_decay_style': 'linear',
         'num_steps': 7}
    """
    values: dict[str, Any] = {}
    for name in (*SETTINGS, "num_steps"):
        keys = _found_under(state_dict, name)
        if not keys:
            continue
        for key in keys[1:]:
            if state_dict[key] != state_dict[keys[0]]:
                raise ScheduleError(
                    f"the scheduler's checkpoint gives {name} twice: {keys[0]}={state_dict[keys[0]]!r} "
                    f"and {key}={state_dict[key]!r}",
                    setting=name,
                    value=(state_dict[keys[0]], state_dict[key]),
                )
        values[name] = state_dict[keys[0]]
    needed = _ALWAYS + (_WEIGHT_DECAY if any(name in values for name in _WEIGHT_DECAY) else ())
    missing = [name for name in needed if name not in values]
    if missing:
        raise ScheduleError(
            f"the scheduler's checkpoint lacks {', '.join(missing)}; "
            f"it has {', '.join(map(str, state_dict)) or 'nothing'}",
            setting=missing[0],
        )
    return values
