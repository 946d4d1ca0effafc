"""What a plugin offers as a schedule: a style for the learning rate, for weight decay, or for both."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Literal

from attrs import frozen

from megaopt_core.errors import ScheduleError
from megaopt_core.plugin_api._schedule_points import LearningRatePoint, WeightDecayPoint

__all__ = ["AfterDecay", "ScheduleStyle"]


class AfterDecay(Enum):
    """What the learning rate is once `lr_decay_steps` are over."""

    MIN_LR = "min_lr"
    """It stays at `min_lr`; the style is not asked any more."""
    CURVE = "curve"
    """The style goes on being asked."""


@frozen(kw_only=True)
class ScheduleStyle:
    """A named way in which the learning rate decays, or weight decay grows, or both.

    A plugin returns `{name: ScheduleStyle(...)}` from the hook `megaopt_schedules`; the name is what users
    write in `lr_decay_style="..."`, if the style has a `learning_rate`, and in `wd_incr_style="..."`, if it
    has a `weight_decay`.

    Args:
        learning_rate: the learning rate at a :class:`LearningRatePoint`. It is asked after warm-up only, and
            up to `lr_decay_steps` (see `after_decay`). None: no style for learning rates.
        weight_decay: weight decay at a :class:`WeightDecayPoint`, without the group's `wd_mult`. It is asked
            up to `wd_incr_steps`; after them `end_wd` holds. None: no style for weight decay.
        check_learning_rate: asked for every parameter group when a scheduler is built or loaded, with the
            point of step 0. Returns what is wrong with the settings in words, None if nothing is.
        check_weight_decay: the same for weight decay.
        after_decay: what holds after `lr_decay_steps`.
        description: one line for people.
        settings: an attrs class of settings that the style has beside the scheduler's, each with a default, a validator
            of `megaopt_core.config` and `metadata={"help": ...}`. Users give them as `lr_style_settings={"power": 2.0}`
            (`wd_style_settings` for weight decay), and the functions find them as `point.settings`.

    Raises:
        ScheduleError: neither of the two functions is given.

    Example:
        >>> def square_root(point: LearningRatePoint) -> float:
        ...     return point.between(1 - math.sqrt(point.progress))
        >>> style = ScheduleStyle(learning_rate=square_root, description="falls fast, then slowly")
        >>> style.learning_rate(LearningRatePoint(step=25, max_lr=0.1, lr_decay_steps=100))
        0.05

        With a setting of its own:

        >>> @frozen
        ... class Power:
        ...     power: float = 2.0
        >>> style = ScheduleStyle(
        ...     learning_rate=lambda point: point.between((1 - point.progress) ** point.settings.power), settings=Power)
        >>> style.learning_rate(LearningRatePoint(step=50, max_lr=1.0, lr_decay_steps=100, settings=Power(3.0)))
        0.125
    """

    learning_rate: Callable[[LearningRatePoint], float] | None = None
    weight_decay: Callable[[WeightDecayPoint], float] | None = None
    check_learning_rate: Callable[[LearningRatePoint], str | None] | None = None
    check_weight_decay: Callable[[WeightDecayPoint], str | None] | None = None
    after_decay: AfterDecay = AfterDecay.MIN_LR
    description: str = ""
    settings: type | None = None

    def __attrs_post_init__(self) -> None:
        if self.learning_rate is None and self.weight_decay is None:
            raise ScheduleError("a ScheduleStyle needs learning_rate, weight_decay or both; neither is given")

    def serves(self, kind: Literal["lr", "wd"]) -> bool:
        """Return whether this is a style for learning rates, or for weight decay.

        Args:
            kind: `"lr"` or `"wd"`.
        """
        return (self.learning_rate if kind == "lr" else self.weight_decay) is not None

    def learning_rate_at(self, point: LearningRatePoint) -> float:
        """Return the learning rate: linear warm-up, then the style's curve, then what `after_decay` says.

        Args:
            point: the step and the settings of one parameter group.

        Raises:
            ScheduleError: this is no style for learning rates, or its curve gave no usable number.
        """
        if point.in_warmup:
            return point.warmup_lr
        if point.after_decay and self.after_decay is AfterDecay.MIN_LR:
            return point.min_lr
        if self.learning_rate is None:
            raise ScheduleError("this style is not one for the learning rate")
        return _usable(self.learning_rate(point), "learning rate", point.step)

    def weight_decay_at(self, point: WeightDecayPoint) -> float:
        """Return weight decay before `wd_mult`: the style's curve, then `end_wd`.

        Args:
            point: the step and the settings of one parameter group.

        Raises:
            ScheduleError: this is no style for weight decay, or its curve gave no usable number.
        """
        if point.step > point.wd_incr_steps:
            return point.end_wd
        if self.weight_decay is None:
            raise ScheduleError("this style is not one for weight decay")
        return _usable(self.weight_decay(point), "weight decay", point.step)


def _usable(value: float, what: str, step: float) -> float:
    if not math.isfinite(value):
        raise ScheduleError(f"the style gives {what} {value!r} at step {step!r}: must be finite", value=value)
    return value
