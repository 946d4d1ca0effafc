"""A plugin with two schedules that the core does not have; a model for those who write one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megaopt_core.plugin_api import (
    AfterDecay,
    LearningRatePoint,
    ScheduleStyle,
    WeightDecayPoint,
    hookimpl,
)

__all__ = ["megaopt_api", "megaopt_schedules"]

megaopt_api = "1"


def warm_restarts(point: LearningRatePoint) -> float:
    """Return cosine annealing that begins anew after every cycle (SGDR), `d - w` steps long."""
    within_cycle = math.fmod(point.progress, 1.0)
    return point.between(0.5 * (1 + math.cos(math.pi * within_cycle)))


def needs_a_minimum_below(point: LearningRatePoint) -> str | None:
    """Refuse a schedule that would restart to where it is."""
    if point.min_lr < point.max_lr:
        return None
    return f"min_lr={point.min_lr!r}: style 'warm-restarts' needs it below max_lr={point.max_lr!r}"


def quadratic_lr(point: LearningRatePoint) -> float:
    """Return polynomial decay of power 2."""
    return point.between((1 - point.progress) ** 2)


def quadratic_wd(point: WeightDecayPoint) -> float:
    """Return weight decay that grows with the square of the step."""
    return point.between(point.progress**2)


@hookimpl
def megaopt_schedules() -> Mapping[str, ScheduleStyle]:
    """Offer both."""
    return {
        "warm-restarts": ScheduleStyle(
            learning_rate=warm_restarts,
            check_learning_rate=needs_a_minimum_below,
            after_decay=AfterDecay.CURVE,
            description="cosine annealing, again and again",
        ),
        "quadratic": ScheduleStyle(
            learning_rate=quadratic_lr, weight_decay=quadratic_wd, description="a parabola"
        ),
    }
