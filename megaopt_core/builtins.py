"""The core's own plugin: built-in schedules and the replicated strategy, registered through the same hooks."""

from __future__ import annotations

from collections.abc import Mapping

from megaopt_core.hookspecs import hookimpl
from megaopt_core.schedules.styles import BUILTIN_STYLES, ScheduleStyle
from megaopt_core.sharding.base import ShardingStrategy
from megaopt_core.sharding.replicated import Replicated

__all__ = ["megaopt_api", "megaopt_schedules", "megaopt_sharding_strategies"]

megaopt_api = "1"


@hookimpl
def megaopt_sharding_strategies() -> Mapping[str, ShardingStrategy]:
    """Return the replicated strategy."""
    return {"replicated": Replicated()}


@hookimpl
def megaopt_schedules() -> Mapping[str, ScheduleStyle]:
    """Return the built-in styles."""
    return BUILTIN_STYLES
