"""The core's own plugin: schedules, the replicated strategy and plain precision policies, through the same hooks."""

from __future__ import annotations

from collections.abc import Mapping

from megaopt_core.config._fields import CORE_FIELD_NAMES
from megaopt_core.plugin_api._hookspecs import hookimpl
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.precision._main_params import MainParams
from megaopt_core.precision._policy import Fp32, PrecisionPolicy
from megaopt_core.schedules._styles import BUILTIN_STYLES
from megaopt_core.sharding._protocol import ShardingStrategy
from megaopt_core.sharding._replicated import Replicated

__all__ = [
    "core_fields",
    "megaopt_api",
    "megaopt_precision_policies",
    "megaopt_schedules",
    "megaopt_sharding_strategies",
]

megaopt_api = "1"

core_fields = CORE_FIELD_NAMES
"""Names that no plugin's setting may have."""


@hookimpl
def megaopt_sharding_strategies() -> Mapping[str, ShardingStrategy]:
    """Return the replicated strategy."""
    return {"replicated": Replicated()}


@hookimpl
def megaopt_schedules() -> Mapping[str, ScheduleStyle]:
    """Return the built-in styles."""
    return BUILTIN_STYLES


@hookimpl
def megaopt_precision_policies() -> Mapping[str, type[PrecisionPolicy]]:
    """Return the policies of full precision, and of fp32 main parameters."""
    return {"fp32": Fp32, "main_params": MainParams}
