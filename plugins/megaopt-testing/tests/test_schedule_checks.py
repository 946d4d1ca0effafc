"""Checks of schedules: the built-in styles pass, and each check catches a style that it is for."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from attrs import field, frozen
from megaopt_testing import CheckStatus, run_checks, temporary_plugin
from megaopt_testing.schedule_checks import SCHEDULE_CHECKS

from megaopt_core import ScheduleStyle, get_registry, hookimpl
from megaopt_core.config import between
from megaopt_core.plugin_api import LearningRatePoint, WeightDecayPoint

pytestmark = pytest.mark.any_python

_CALLS = itertools.count()


def _overshoots(point: LearningRatePoint) -> float:
    return 1.5 * point.max_lr


def _logarithm(point: LearningRatePoint) -> float:
    return point.between(1.0 - math.log(point.progress) / math.log(1e-9))


def _drifts(point: LearningRatePoint) -> float:
    return point.between(1.0 / (2.0 + next(_CALLS)))


def _own_number(point: LearningRatePoint) -> float:
    return min(max(0.05, point.min_lr), point.max_lr) if point.max_lr < 1e-3 or point.max_lr > 0.5 else 0.05


def _whole_steps_only(point: LearningRatePoint) -> float:
    return point.between(1.0 - point.progress)


def _refuses(point: LearningRatePoint) -> str | None:
    if not isinstance(point.lr_decay_steps, float):
        raise TypeError("lr_decay_steps must be a float")
    return None


def _refuses_all(point: LearningRatePoint) -> str:
    return "not so"


def _early(point: LearningRatePoint) -> float:
    length = point.lr_decay_steps - point.lr_warmup_steps
    return point.between(1.0 - min(1.0, (point.step - point.lr_warmup_steps + 1) / length))


def _late(point: LearningRatePoint) -> float:
    length = point.lr_decay_steps - point.lr_warmup_steps
    return point.between(1.0 - max(0.0, (point.step - point.lr_warmup_steps - 1) / length))


def _forgets_warmup(point: LearningRatePoint) -> float:
    return point.between(1.0 - point.step / point.lr_decay_steps)


def _below(point: LearningRatePoint) -> float:
    return point.max_lr * (1.0 - point.progress)


def _furthest(point: LearningRatePoint, seen: list[float] = [0.0]) -> float:  # noqa: B006 - this is its fault
    seen[0] = max(seen[0], point.progress)
    return point.between(1.0 - seen[0])


def _draws(point: LearningRatePoint) -> float:
    torch.rand(())
    return point.between(1.0 - point.progress)


def _falling(point: WeightDecayPoint) -> float:
    return point.between(1.0 - point.progress)


def _stops_early(point: WeightDecayPoint) -> float:
    return point.between(0.9 * point.progress) if point.wd_incr_steps else point.end_wd


ABOUT = "one line"


def _powers(point: LearningRatePoint) -> float:
    return point.between((1.0 - point.progress) ** point.settings.power)


@frozen
class Good:
    """As it should be."""

    power: float = field(default=2.0, validator=between(0.1, 10.0), metadata={"help": "of the polynomial"})


@frozen
class Anything:
    """Takes any number."""

    power: float = field(default=2.0, metadata={"help": "of the polynomial"})


@frozen
class Silent:
    """Explains nothing."""

    power: float = field(default=2.0, validator=between(0.1, 10.0))


BAD = {
    "anything": (
        "style_settings",
        ScheduleStyle(learning_rate=_powers, settings=Anything, description=ABOUT),
        "give it a validator",
    ),
    "unexplained": (
        "style_settings",
        ScheduleStyle(learning_rate=_powers, settings=Silent, description=ABOUT),
        "power has no help",
    ),
    "not_heard": (
        "style_settings",
        ScheduleStyle(learning_rate=_whole_steps_only, settings=Good, description=ABOUT),
        "power does nothing",
    ),
    "overshoots": ("style_range", ScheduleStyle(learning_rate=_overshoots, description=ABOUT), "is not in"),
    "logarithm": (
        "style_range",
        ScheduleStyle(learning_rate=_logarithm, description=ABOUT),
        "raises ValueError",
    ),
    "drifts": ("style_repeats", ScheduleStyle(learning_rate=_drifts, description=ABOUT), "for the same step"),
    "own_number": (
        "own_group",
        ScheduleStyle(learning_rate=_own_number, description=ABOUT),
        "point.between()",
    ),
    "refuses": (
        "in_scheduler",
        ScheduleStyle(learning_rate=_whole_steps_only, check_learning_rate=_refuses, description=ABOUT),
        "return None, or the fault in words",
    ),
    "refuses_all": (
        "style_range",
        ScheduleStyle(learning_rate=_whole_steps_only, check_learning_rate=_refuses_all, description=ABOUT),
        "it refuses all settings that the kit tries",
    ),
    "early": ("style_range", ScheduleStyle(learning_rate=_early, description=ABOUT), "is it a step early"),
    "late": ("style_range", ScheduleStyle(learning_rate=_late, description=ABOUT), "is it a step late"),
    "forgets_warmup": (
        "style_range",
        ScheduleStyle(learning_rate=_forgets_warmup, description=ABOUT),
        "at the end of the warm-up and never higher, but max_lr",
    ),
    "below": ("style_range", ScheduleStyle(learning_rate=_below, description=ABOUT), "is not in [0.01"),
    "furthest": (
        "style_range",
        ScheduleStyle(learning_rate=_furthest, description=ABOUT),
        "after a call for later steps",
    ),
    "draws": (
        "style_repeats",
        ScheduleStyle(learning_rate=_draws, description=ABOUT),
        "draws random numbers",
    ),
    "falling": (
        "style_range",
        ScheduleStyle(weight_decay=_falling, description=ABOUT),
        "but start_wd=0.01 is configured",
    ),
    "stops_early": (
        "style_range",
        ScheduleStyle(weight_decay=_stops_early, description=ABOUT),
        "but end_wd=0.1 is configured",
    ),
    "silent": ("style_described", ScheduleStyle(learning_rate=_whole_steps_only), "it has no description"),
}
"""Name to the check that it fails, the style, and what the message says."""


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_schedules(self) -> dict[str, ScheduleStyle]:
        return {name: style for name, (_, style, _) in BAD.items()}


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with temporary_plugin(Plugin(), name="bad-schedules"):
        yield


@pytest.mark.parametrize("name", sorted(get_registry().schedules()))
def test_good_styles_pass(name: str) -> None:
    """Whatever is registered without the bad ones."""
    results = run_checks(name, kind="schedule")
    other = {result.id: result.message for result in results if result.status is not CheckStatus.PASSED}
    assert other in ({}, {"style_settings": "it declares no settings"})


HONEST = {
    "one_cycle": lambda point: point.between(
        min(point.progress / 0.3, max(0.0, (1.0 - point.progress) / 0.7)) * 0.96
        + 0.04 * (point.progress < 1.0)
    ),
    "restarts": lambda point: point.between(0.5 + 0.5 * math.cos(math.pi * (3.0 * point.progress % 1.0))),
    "staircase": lambda point: point.between(0.5 ** math.floor(4.0 * min(point.progress, 1.0))),
    "noam": lambda point: max(
        point.min_lr,
        point.max_lr * (max(point.lr_warmup_steps, 1) / max(point.step, point.lr_warmup_steps, 1)) ** 0.5,
    ),
    "exponential": lambda point: point.between(math.exp(-5.0 * point.progress)),
    "root": lambda point: point.between(1.0 - math.sqrt(point.progress)),
    "steep_root": lambda point: point.between(1.0 - point.progress**0.1),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_published_curve_passes(name: str) -> None:
    """Curves that rise first, begin anew, stand still or end above the smallest value are no fault."""

    class Offers:
        megaopt_api = "1"

        @hookimpl
        def megaopt_schedules(self) -> dict[str, ScheduleStyle]:
            return {name: ScheduleStyle(learning_rate=HONEST[name], description=ABOUT)}

    with temporary_plugin(Offers(), name="published-curves"):
        results = run_checks(name, kind="schedule")
    assert {result.id: result.message for result in results if not result.ok} == {}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_style_fails_the_check_that_it_is_for(name: str) -> None:
    """The message says what to mend."""
    intended, _, told = BAD[name]
    failed = {result.id: result for result in run_checks(name, kind="schedule") if not result.ok}
    assert intended in failed, failed
    assert told in failed[intended].message, failed[intended].message
    assert failed[intended].hint


def test_every_check_has_a_style_that_it_catches() -> None:
    """A check that nothing can fail proves nothing."""
    assert {intended for intended, _, _ in BAD.values()} == {check.id for check in SCHEDULE_CHECKS}
