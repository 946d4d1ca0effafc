"""What plugins are written against: hooks, and the records that hooks return."""

from megaopt_core.plugin_api._commands import Commands
from megaopt_core.plugin_api._entries import (
    ConfigToKwargs,
    InitState,
    MupRule,
    OptimizerEntry,
    SplitStepFactory,
)
from megaopt_core.plugin_api._hookspecs import hookimpl
from megaopt_core.plugin_api._schedule_points import LearningRatePoint, WeightDecayPoint
from megaopt_core.plugin_api._schedule_style import AfterDecay, ScheduleStyle
from megaopt_core.plugin_api._stored_routing import StoredParam, StoredRouting

__all__ = [
    "AfterDecay",
    "Commands",
    "ConfigToKwargs",
    "InitState",
    "LearningRatePoint",
    "MupRule",
    "OptimizerEntry",
    "ScheduleStyle",
    "SplitStepFactory",
    "StoredParam",
    "StoredRouting",
    "WeightDecayPoint",
    "hookimpl",
]
