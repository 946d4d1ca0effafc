"""What plugins are written against: hooks, and the records that hooks return.

Public names are imported when they are first used: a plugin's module that only adds commands needs no torch.
"""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.plugin_api._commands import Commands
    from megaopt_core.plugin_api._entries import (
        ConfigToKwargs,
        InitState,
        MupRule,
        OptimizerEntry,
        SplitStepFactory,
    )
    from megaopt_core.plugin_api._hookspecs import hookimpl
    from megaopt_core.plugin_api._optimizer_checks import (
        dense_gradient,
        require_argument,
        require_decoupled_if_cautious,
    )
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
    "dense_gradient",
    "hookimpl",
    "require_argument",
    "require_decoupled_if_cautious",
]

_HOME = {
    "AfterDecay": "_schedule_style",
    "Commands": "_commands",
    "ConfigToKwargs": "_entries",
    "InitState": "_entries",
    "LearningRatePoint": "_schedule_points",
    "MupRule": "_entries",
    "OptimizerEntry": "_entries",
    "ScheduleStyle": "_schedule_style",
    "SplitStepFactory": "_entries",
    "StoredParam": "_stored_routing",
    "StoredRouting": "_stored_routing",
    "WeightDecayPoint": "_schedule_points",
    "dense_gradient": "_optimizer_checks",
    "hookimpl": "_hookspecs",
    "require_argument": "_optimizer_checks",
    "require_decoupled_if_cautious": "_optimizer_checks",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
