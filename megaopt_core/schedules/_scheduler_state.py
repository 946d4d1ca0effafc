"""What a scheduler's checkpoint holds, and how older checkpoints named it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaopt_core.errors import ScheduleError

__all__ = ["OWN_TO_STYLES", "SETTINGS", "read_state"]

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

OWN_TO_STYLES: Mapping[str, str] = {
    "lr_style_settings": "lr_decay_style",
    "wd_style_settings": "wd_incr_style",
}
"""Settings that styles have of their own, to the setting that names the style; saved where there are any."""

_OLD_KEYS: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
    "num_steps": ("num_iters",),
}

_ALWAYS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")
_WEIGHT_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")


def read_state(state_dict: Mapping[str, Any], *, only_steps: bool = False) -> dict[str, Any]:
    """Return a scheduler's saved values under today's names.

    Checkpoints without weight-decay values are read, as are those without the settings of warm-up's start
    and of style `WSD`: what is missing is left out. Keys that belong to nobody are ignored. Of a value that is saved
    under an old and a new name, the old one's holds, as in the trainers that save both.

    Args:
        state_dict: what some version of the scheduler saved; it is not changed.
        only_steps: read the number of steps and no setting.

    Raises:
        ScheduleError: it is no mapping, or a key is missing without which the schedule is unknown.

    Example:
        >>> old = {"start_lr": 0.1, "min_lr": 0.0, "warmup_iter": 5, "end_iter": 50, "decay_style": "linear"}
        >>> read_state(old | {"num_iters": 7})
        {'max_lr': 0.1, 'min_lr': 0.0, 'lr_warmup_steps': 5, 'lr_decay_steps': 50, 'lr_decay_style': 'linear',
         'num_steps': 7}
    """
    if not isinstance(state_dict, Mapping):
        raise ScheduleError(
            f"a scheduler's checkpoint is a mapping, as state_dict() returns it, got {type(state_dict).__name__}: "
            f"{state_dict!r}",
            value=state_dict,
        )
    values: dict[str, Any] = {}
    for name in ("num_steps",) if only_steps else (*SETTINGS, *OWN_TO_STYLES, "num_steps"):
        found = [key for key in (*_OLD_KEYS.get(name, ()), name) if key in state_dict]
        if found:
            values[name] = state_dict[found[0]]
    needed = _ALWAYS + (_WEIGHT_DECAY if any(name in values for name in _WEIGHT_DECAY) else ())
    if only_steps:
        needed = ("num_steps",)
    missing = [name for name in needed if name not in values]
    if missing:
        raise ScheduleError(
            f"the scheduler's checkpoint lacks {', '.join(missing)}; "
            f"it has {', '.join(map(str, state_dict)) or 'nothing'}",
            setting=missing[0],
        )
    return values
