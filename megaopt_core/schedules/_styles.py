"""Decay styles of the learning rate and increment styles of weight decay, as pure functions.

A style says where a value stands between its two ends. Warm-up, the values of single parameter groups and the
step count are the scheduler's: a style sees one :class:`LearningRatePoint` or :class:`WeightDecayPoint` and
returns one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megaopt_core.errors import ScheduleError
from megaopt_core.plugin_api._schedule_points import LearningRatePoint, WeightDecayPoint
from megaopt_core.plugin_api._schedule_style import AfterDecay, ScheduleStyle

__all__ = ["BUILTIN_STYLES", "WSD_DECAYS"]


def _cosine_fall(progress: float) -> float:
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


WSD_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine_fall,
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Curves of the final decay of style `WSD`: progress in [0, 1] gives a coefficient that falls from 1 to 0."""


# Functions with names, not lambdas: a style can be pickled, and with it a scheduler that was given one.


def _constant_lr(point: LearningRatePoint) -> float:
    return point.max_lr


def _linear_lr(point: LearningRatePoint) -> float:
    return point.between(1.0 - point.progress)


def _cosine_lr(point: LearningRatePoint) -> float:
    return point.between(_cosine_fall(point.progress))


def _inverse_square_root_lr(point: LearningRatePoint) -> float:
    warmup, step = max(point.lr_warmup_steps, 1), max(point.step, 1)
    return max(point.min_lr, point.max_lr * math.sqrt(warmup) / math.sqrt(step))


def _wsd_lr(point: LearningRatePoint) -> float:
    if point.wsd_decay_steps is None or point.lr_wsd_decay_style is None:
        raise ScheduleError(_check_wsd(point) or "")
    into_decay = point.step - (point.lr_decay_steps - point.wsd_decay_steps)
    if into_decay <= 0:
        return point.max_lr
    return point.between(WSD_DECAYS[point.lr_wsd_decay_style](into_decay / point.wsd_decay_steps))


def _check_wsd(point: LearningRatePoint) -> str | None:
    steps, style = point.wsd_decay_steps, point.lr_wsd_decay_style
    most = point.lr_decay_steps - point.lr_warmup_steps
    if steps is None:
        return "wsd_decay_steps=None: style 'WSD' needs the length of its final decay"
    if not 1 <= steps <= most:
        return f"wsd_decay_steps={steps!r}: must be from 1 to lr_decay_steps - lr_warmup_steps = {most!r}"
    if style not in WSD_DECAYS:
        return f"lr_wsd_decay_style={style!r}: style 'WSD' takes {', '.join(map(repr, WSD_DECAYS))}"
    return None


def _constant_wd(point: WeightDecayPoint) -> float:
    return point.end_wd


def _linear_wd(point: WeightDecayPoint) -> float:
    return point.between(point.progress)


def _cosine_wd(point: WeightDecayPoint) -> float:
    return point.between(_cosine_fall(1.0 - point.progress))


def _check_constant_wd(point: WeightDecayPoint) -> str | None:
    if point.start_wd == point.end_wd:
        return None
    return f"start_wd={point.start_wd!r}: style 'constant' needs it equal to end_wd={point.end_wd!r}"


def _check_growing_wd(point: WeightDecayPoint) -> str | None:
    if point.start_wd <= point.end_wd:
        return None
    return f"start_wd={point.start_wd!r}: must not be above end_wd={point.end_wd!r}"


BUILTIN_STYLES: Mapping[str, ScheduleStyle] = MappingProxyType(
    {
        "constant": ScheduleStyle(
            learning_rate=_constant_lr,
            weight_decay=_constant_wd,
            check_weight_decay=_check_constant_wd,
            after_decay=AfterDecay.CURVE,
            description="stays where it is",
        ),
        "linear": ScheduleStyle(
            learning_rate=_linear_lr,
            weight_decay=_linear_wd,
            check_weight_decay=_check_growing_wd,
            description="a straight line",
        ),
        "cosine": ScheduleStyle(
            learning_rate=_cosine_lr,
            weight_decay=_cosine_wd,
            check_weight_decay=_check_growing_wd,
            description="half a cosine wave: slow, fast, slow",
        ),
        "inverse-square-root": ScheduleStyle(
            learning_rate=_inverse_square_root_lr,
            description="falls with the square root of the step, never below min_lr",
        ),
        "WSD": ScheduleStyle(
            learning_rate=_wsd_lr,
            check_learning_rate=_check_wsd,
            description="warm-up, stable, decay: stays at max_lr and falls over the last wsd_decay_steps",
        ),
    }
)
"""The styles that megaopt brings, by name. The core's own plugin offers them through `megaopt_schedules`."""
