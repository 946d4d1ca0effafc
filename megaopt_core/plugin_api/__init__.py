"""What plugins are written against: hooks, and the records that hooks return.

Names whose modules need torch are imported when they are first used: a plugin's module that only adds commands needs
none.
"""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily
from megaopt_core.plugin_api._after_step import AfterStep, NamedPiece
from megaopt_core.plugin_api._commands import Commands
from megaopt_core.plugin_api._hookspecs import hookimpl
from megaopt_core.plugin_api._observers import (
    Change,
    ReportLine,
    StepNumbers,
    StepObserver,
    StepOutcome,
    VoteSpec,
)
from megaopt_core.plugin_api._schedule_points import LearningRatePoint, WeightDecayPoint
from megaopt_core.plugin_api._schedule_style import AfterDecay, ScheduleStyle

if TYPE_CHECKING:
    from megaopt_core.plugin_api._declared_state import DeclaredState, StateKind
    from megaopt_core.plugin_api._entries import (
        ConfigToKwargs,
        GranularityRule,
        InitState,
        MupRule,
        OptimizerEntry,
        SplitRefusal,
        SplitStepFactory,
    )
    from megaopt_core.plugin_api._optimizer_checks import (
        dense_gradient,
        require_argument,
        require_decoupled_if_cautious,
    )
    from megaopt_core.plugin_api._shared_state import SharedState
    from megaopt_core.plugin_api._stored_routing import StoredParam, StoredRouting

__all__ = [
    "AfterDecay",
    "AfterStep",
    "Change",
    "Commands",
    "ConfigToKwargs",
    "DeclaredState",
    "GranularityRule",
    "InitState",
    "LearningRatePoint",
    "MupRule",
    "NamedPiece",
    "OptimizerEntry",
    "ReportLine",
    "ScheduleStyle",
    "SharedState",
    "SplitRefusal",
    "SplitStepFactory",
    "StateKind",
    "StepNumbers",
    "StepObserver",
    "StepOutcome",
    "StoredParam",
    "StoredRouting",
    "VoteSpec",
    "WeightDecayPoint",
    "dense_gradient",
    "hookimpl",
    "require_argument",
    "require_decoupled_if_cautious",
    "resolve_lazily",
]

_HOME = {
    "SharedState": "_shared_state",
    "SplitRefusal": "_entries",
    "GranularityRule": "_entries",
    "ConfigToKwargs": "_entries",
    "DeclaredState": "_declared_state",
    "InitState": "_entries",
    "MupRule": "_entries",
    "OptimizerEntry": "_entries",
    "SplitStepFactory": "_entries",
    "StateKind": "_declared_state",
    "StoredParam": "_stored_routing",
    "StoredRouting": "_stored_routing",
    "dense_gradient": "_optimizer_checks",
    "require_argument": "_optimizer_checks",
    "require_decoupled_if_cautious": "_optimizer_checks",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
