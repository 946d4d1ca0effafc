"""Checks of schedule styles: of learning rate, of weight decay, or of both."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from attrs import evolve

from megaopt_core.errors import ConformanceError, ScheduleError
from megaopt_core.plugin_api import LearningRatePoint, ScheduleStyle, WeightDecayPoint
from megaopt_core.schedules import OptimizerParamScheduler
from megaopt_testing.check import Check, Kind, subject
from megaopt_testing.style_settings import check_style_settings, requires_style_settings

__all__ = [
    "SCHEDULE_CHECKS",
    "check_in_scheduler",
    "check_own_group",
    "check_style_described",
    "check_style_range",
    "check_style_repeats",
]

_WSD: dict[str, Any] = {"wsd_decay_steps": 3, "lr_wsd_decay_style": "linear"}
_LEARNING_RATES = (
    LearningRatePoint(step=0, max_lr=0.1, min_lr=0.01, lr_decay_steps=20, **_WSD),
    LearningRatePoint(step=0, max_lr=0.1, init_lr=0.02, lr_warmup_steps=5, lr_decay_steps=20, **_WSD),
    LearningRatePoint(step=0, max_lr=3e-4, min_lr=3e-5, lr_warmup_steps=2, lr_decay_steps=1e6, **_WSD),
    LearningRatePoint(step=0, max_lr=1.0, min_lr=1.0, lr_decay_steps=7, **_WSD),
)
_WEIGHT_DECAYS = (
    WeightDecayPoint(step=0, start_wd=0.01, end_wd=0.1, wd_incr_steps=20),
    WeightDecayPoint(step=0, start_wd=0.1, end_wd=0.1, wd_incr_steps=7),
    WeightDecayPoint(step=0, start_wd=0.1, end_wd=0.1, wd_incr_steps=0),
)
_FRACTIONS = (0.0, 0.03, 0.25, 0.26, 0.5, 0.75, 0.9, 1.0, 1.3)

type _Curve = tuple[str, Callable[[Any], float], Any]


def _fail(name: str, message: str) -> NoReturn:
    raise ConformanceError(message, optimizer=name)


def _curves(name: str) -> Iterator[_Curve]:
    """Yield what the style sets, how, and the settings that it takes, of those that are tried."""
    style: ScheduleStyle = subject(Kind.SCHEDULE, name)
    own = None if style.settings is None else style.settings()
    if style.learning_rate is not None:
        for point in (evolve(each, settings=own) for each in _LEARNING_RATES):
            if _takes(name, style.check_learning_rate, point):
                yield "learning rate", style.learning_rate_at, point
    if style.weight_decay is not None:
        for decay in (evolve(each, settings=own) for each in _WEIGHT_DECAYS):
            if _takes(name, style.check_weight_decay, decay):
                yield "weight decay", style.weight_decay_at, decay


def _takes(name: str, check: Callable[[Any], str | None] | None, point: Any) -> bool:
    """Whether the style has nothing against the settings."""
    try:
        wrong = None if check is None else check(point)
    except Exception as error:  # noqa: BLE001 - a style may raise anything
        _fail(
            name,
            f"its check of {point} raises {type(error).__name__}: {error}; return None, or the fault in words",
        )
    if wrong is not None and not isinstance(wrong, str):
        _fail(
            name,
            f"its check of {point} returns {wrong!r}; return None, or the fault in words",
        )
    return not wrong


def _steps(point: Any) -> list[float]:
    length = point.lr_decay_steps if isinstance(point, LearningRatePoint) else point.wd_incr_steps
    whole = [float(math.floor(length * fraction)) for fraction in _FRACTIONS]
    return sorted({*whole, length / 3})


def _asked(name: str, what: str, at: Callable[[Any], float], point: Any) -> float:
    try:
        value = at(point)
    except ScheduleError as error:
        _fail(name, f"{error}, of {point}")
    except Exception as error:  # noqa: BLE001 - a style may raise anything
        _fail(name, f"it raises {type(error).__name__} for {what} at {point}: {error}")
    if isinstance(value, bool) or not isinstance(value, float | int):
        _fail(
            name,
            f"it returns {value!r} for {what} at {point}; it must return a number, got {type(value).__name__}",
        )
    return value


def check_style_range(name: str) -> None:
    """It gives a finite number at every step, between the smallest and the largest value of its settings.

    A learning rate goes on from the end of warm-up: a curve that only falls begins at `max_lr`, and at once. Weight
    decay is `start_wd` at step 0, and `end_wd` when its steps are over.

    Args:
        name: the style's name.

    Raises:
        ConformanceError: it raises, gives something else, begins a step early or late, or refuses all that is tried.
    """
    curves = list(_curves(name))
    if not curves:
        _fail(
            name,
            f"it refuses all settings that the kit tries, from {_LEARNING_RATES[0]} and {_WEIGHT_DECAYS[0]} "
            "on; it must accept usual settings",
        )
    for what, at, point in curves:
        asked = [_within(name, what, at, evolve(point, step=step)) for step in _steps(point)]
        again = _asked(name, what, at, evolve(point, step=_steps(point)[0]))
        if again != asked[0]:
            _fail(
                name,
                f"it gives {what} {asked[0]!r} at step {_steps(point)[0]:g}, but {again!r} after a call for "
                f"later steps: it remembers calls, of {point}",
            )
        if isinstance(point, LearningRatePoint):
            _require_begin(name, at, point)
        else:
            _require_ends(name, at, point)


def _within(name: str, what: str, at: Callable[[Any], float], point: Any) -> float:
    """Return the value at a point, which has to lie between the smallest and the largest of its settings."""
    if isinstance(point, LearningRatePoint):
        bounds = (min(point.min_lr, point.init_lr) if point.in_warmup else point.min_lr, point.max_lr)
    else:
        bounds = (point.start_wd, point.end_wd)
    slack = 1e-6 * max(bounds)
    value = _asked(name, what, at, point)
    if not bounds[0] - slack <= value <= bounds[1] + slack:
        _fail(
            name,
            f"it gives {what} {value!r} at step {point.step:g}, which is not in {list(bounds)} of {point}",
        )
    return value


def _require_begin(name: str, at: Callable[[Any], float], point: LearningRatePoint) -> None:
    """Compare the first values after warm-up with those that follow."""
    if point.max_lr <= point.min_lr:
        return
    begin, end = point.lr_warmup_steps, point.lr_decay_steps

    def value(step: float) -> float:
        return _asked(name, "learning rate", at, evolve(point, step=step))

    # At step 0 the curve itself; after warm-up, just where it begins: a root may fall steeply, but from max_lr.
    first = value(begin + 1e-6 if begin else 0.0)
    is_steep = bool(begin) and point.max_lr - value(math.nextafter(begin, end)) < 0.9 * (point.max_lr - first)
    later = [value(begin + (end - begin) * part / 32) for part in range(1, 33)]
    lowest = point.max_lr * (1 - 1e-4)
    if first < lowest and first >= max(later) and not is_steep:
        _fail(
            name,
            f"its learning rate is {first!r} at the end of the warm-up and never higher, but "
            f"max_lr={point.max_lr!r}: is it a step early? r = point.progress begins at 0, of {point}",
        )
    half, one, two, three = (value(begin + steps) for steps in (0.5, 1, 2, 3))
    if begin and half == one == point.max_lr and two < one and three < two and end - begin > 10:
        _fail(
            name,
            "its learning rate stays at max_lr for one step after the warm-up, and falls then: is it a step "
            f"late? r = point.progress, of {point}",
        )


def _require_ends(name: str, at: Callable[[Any], float], point: WeightDecayPoint) -> None:
    """Look at weight decay where it begins, and where it ends, after which `end_wd` holds."""
    for key, step in (("start_wd", 0.0), ("end_wd", point.wd_incr_steps)):
        wanted = getattr(point, key)
        found = _asked(name, "weight decay", at, evolve(point, step=step))
        if point.wd_incr_steps and abs(found - wanted) > 1e-6 * max(point.start_wd, point.end_wd):
            _fail(
                name,
                f"it gives weight decay {found!r} at step {step:g}, but {key}={wanted!r} is configured: use "
                f"point.between(c) with c from 0 to 1, of {point}",
            )


def check_style_repeats(name: str) -> None:
    """What it gives depends on the point alone: asked in another order, or again, it says the same.

    A scheduler asks once for every group, again after a load, and charts ask ahead.

    Args:
        name: the style's name.

    Raises:
        ConformanceError: it says something else, or draws random numbers.
    """
    chance = torch.get_rng_state(), random.getstate()
    for what, at, point in _curves(name):
        points = [evolve(point, step=step) for step in _steps(point)]
        first = [_asked(name, what, at, each) for each in points]
        backwards = [_asked(name, what, at, each) for each in reversed(points)][::-1]
        for each, one, other in zip(points, first, backwards, strict=True):
            if one != other:
                _fail(name, f"it gives {what} {one!r} and later {other!r} for the same step: {each}")
    if not torch.equal(chance[0], torch.get_rng_state()) or chance[1] != random.getstate():
        _fail(name, "a call draws random numbers, so a run that logs its learning rates changes")


def check_own_group(name: str) -> None:
    """Each group goes by its own values: with `max_lr` and `min_lr`, or both weight decays, doubled, it says another.

    Args:
        name: the style's name.

    Raises:
        ConformanceError: it gives the same at every step.
    """
    for what, at, point in _curves(name):
        keys = (
            ("max_lr", "min_lr", "init_lr")
            if isinstance(point, LearningRatePoint)
            else ("start_wd", "end_wd")
        )
        doubled = evolve(point, **{key: 2 * getattr(point, key) for key in keys})
        alike = [
            _asked(name, what, at, evolve(point, step=step))
            == _asked(name, what, at, evolve(doubled, step=step))
            for step in _steps(point)
            if _is_the_styles(point, step)
        ]
        if alike and all(alike):
            _fail(
                name,
                f"it gives the same {what} for every {' and '.join(keys[:2])} of a group; use point.between()",
            )


def _is_the_styles(point: Any, step: float) -> bool:
    """Whether the style is asked at a step, and not warm-up or what holds after the end."""
    if isinstance(point, LearningRatePoint):
        at = evolve(point, step=step)
        return not at.in_warmup and not at.after_decay
    return bool(step <= point.wd_incr_steps)


def check_in_scheduler(name: str) -> None:
    """In a scheduler it arrives at one value however the steps are counted, and goes on after a load.

    Args:
        name: the style's name.

    Raises:
        ConformanceError: a scheduler with usual settings refuses it, or single steps, one jump, and a saved and loaded
            scheduler differ.
    """
    for what, _, point in _curves(name):
        single, jumped, loaded = (_scheduler(name, what, point) for _ in range(3))
        for step in range(12):
            single.step(increment=1)
            if step == 5:
                saved = io.BytesIO()
                torch.save(single.state_dict(), saved)
                saved.seek(0)
                loaded.load_state_dict(torch.load(saved, weights_only=True))
        jumped.step(increment=12)
        loaded.step(increment=6)
        ends = [
            [_set_by(scheduler, key) for key in ("lr", "weight_decay")]
            for scheduler in (single, jumped, loaded)
        ]
        if ends[0] != ends[1]:
            _fail(
                name,
                f"twelve steps lead to {what} {ends[0]}, and one step of twelve to {ends[1]}, with {point}",
            )
        if ends[0] != ends[2]:
            _fail(
                name,
                f"a scheduler that was saved and loaded gives {what} {ends[2]}, not {ends[0]}: {point}",
            )


def _set_by(scheduler: OptimizerParamScheduler, key: str) -> list[float]:
    return [float(group[key]) for group in scheduler.optimizer.param_groups]


def _scheduler(name: str, what: str, point: Any) -> OptimizerParamScheduler:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [weights[0]]}, {"params": [weights[1]], "wd_mult": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    given: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 0.1,
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 20,
        "lr_decay_style": "constant",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }
    if what == "learning rate":
        keys = ("init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", *_WSD)
        given.update({key: getattr(point, key) for key in keys}, lr_decay_style=name)
    else:
        given.update(
            {key: getattr(point, key) for key in ("start_wd", "end_wd", "wd_incr_steps")}, wd_incr_style=name
        )
    try:
        return OptimizerParamScheduler(optimizer, **given)
    except Exception as error:  # noqa: BLE001 - a style may raise anything
        _fail(name, f"a scheduler cannot be built with {point}: {type(error).__name__}: {error}")


def check_style_described(name: str) -> None:
    """It has a description, which lists of styles show.

    Args:
        name: the style's name.

    Raises:
        ConformanceError: it has none.
    """
    if not subject(Kind.SCHEDULE, name).description.strip():
        _fail(name, 'it has no description: ScheduleStyle(..., description="one line")')


SCHEDULE_CHECKS: tuple[Check, ...] = (
    Check(
        "style_range",
        "a finite number at every step, between its smallest and its largest",
        check_style_range,
        hint="point.between(c) with c from 0 to 1 is always right; r = point.progress begins at 0",
        kind=Kind.SCHEDULE,
    ),
    Check(
        "style_repeats",
        "the value depends on the point alone",
        check_style_repeats,
        hint="remember nothing between calls",
        kind=Kind.SCHEDULE,
    ),
    Check(
        "own_group",
        "each group follows its own values",
        check_own_group,
        hint="use the values of the point, never those of the first one",
        kind=Kind.SCHEDULE,
    ),
    Check(
        "in_scheduler",
        "steps may be counted in any way, and continue after a load",
        check_in_scheduler,
        hint="accept any number as a step, not only whole numbers; refuse in words, not by an exception",
        kind=Kind.SCHEDULE,
    ),
    Check(
        "style_described",
        "it has a description",
        check_style_described,
        hint='ScheduleStyle(..., description="one line")',
        kind=Kind.SCHEDULE,
    ),
    Check(
        "style_settings",
        "settings of its own have help, refuse impossible values, and change the curve",
        check_style_settings,
        requires_style_settings,
        hint="give each a validator and help, and read it as `point.settings.NAME`",
        kind=Kind.SCHEDULE,
    ),
)
"""Every check of schedule styles."""
