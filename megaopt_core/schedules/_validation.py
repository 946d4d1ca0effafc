"""Which settings a schedule can have; all of it is checked before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaopt_core.errors import ScheduleError, UnusedSettingWarning, warn_user
from megaopt_core.params._overrides import wrong_number
from megaopt_core.plugin_api._schedule_points import LearningRatePoint, WeightDecayPoint

__all__ = ["check_learning_rates", "check_number", "check_weight_decays", "warn_of_unused"]


def check_number(name: str, value: Any, where: str = "") -> None:
    """Refuse what is no finite number of at least 0.

    Args:
        name: what the number is called.
        value: the number.
        where: what precedes the message, such as `"param group 3: "`.

    Raises:
        ScheduleError: the value is no such number.
    """
    wrong = wrong_number(value)
    if wrong is not None:
        raise ScheduleError.of(name, value, wrong, where=where)


def check_learning_rates(point: LearningRatePoint, where: str = "") -> None:
    """Refuse learning-rate settings that are no numbers or contradict each other, whatever the style.

    A group may have a `max_lr` below the scheduler's `init_lr`, for it has no `init_lr` of its own: so
    `init_lr` is compared for the scheduler's settings only.

    Args:
        point: the settings, of the scheduler or as they hold for one group.
        where: what precedes the message for a group; empty for the scheduler's own.

    Raises:
        ScheduleError: a setting cannot be; the message names it, what was given, and what is allowed.
    """
    for name in ("init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps"):
        check_number(name, getattr(point, name), where)
    if point.wsd_decay_steps is not None:
        check_number("wsd_decay_steps", point.wsd_decay_steps, where)
    for name in ["min_lr"] if where else ["init_lr", "min_lr"]:
        value = getattr(point, name)
        if value > point.max_lr:
            raise ScheduleError.of(name, value, f"must not be above max_lr={point.max_lr!r}", where=where)
    warmup, decay = point.lr_warmup_steps, point.lr_decay_steps
    if warmup >= decay:
        why = f"must be below lr_decay_steps={decay!r}, which counts from step 0"
        raise ScheduleError.of("lr_warmup_steps", warmup, why, where=where)


def check_weight_decays(point: WeightDecayPoint, where: str = "") -> None:
    """Refuse weight-decay settings that are no finite numbers of at least 0, whatever the style.

    Args:
        point: the settings, of the scheduler or as they hold for one group.
        where: what precedes the message for a group; empty for the scheduler's own.

    Raises:
        ScheduleError: a setting cannot be.
    """
    for name in ("start_wd", "end_wd", "wd_incr_steps"):
        check_number(name, getattr(point, name), where)


def warn_of_unused(settings: Mapping[str, float], groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of the scheduler's settings for which every parameter group has a value of its own, and another.

    Args:
        settings: the scheduler's values of what groups can have themselves.
        groups: the parameter groups.
    """
    unused = []
    for name, value in settings.items():
        own: list[Any] = [group.get(name) for group in groups]
        if own and None not in own and value not in own:
            shown = ", ".join(map(repr, sorted(set(own))))
            unused.append(
                f"{name}={value!r} (every parameter group has a {name} of its own, which wins: {shown})"
            )
    if unused:
        warn_user(
            f"settings of the scheduler that change nothing here: {'; '.join(unused)}",
            UnusedSettingWarning,
        )
