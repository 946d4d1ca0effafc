"""The plugin: the sharding strategy `distributed`."""

from __future__ import annotations

from collections.abc import Mapping

from megaopt_core import ShardingStrategy, hookimpl
from megaopt_distributed.strategy import Distributed

__all__ = ["megaopt_api", "megaopt_sharding_strategies"]

megaopt_api = "1"


@hookimpl
def megaopt_sharding_strategies() -> Mapping[str, ShardingStrategy]:
    """Return the strategy under both of its names."""
    return {"distributed": Distributed()}
