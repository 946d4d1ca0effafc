"""Parameters: names, roles, views, overrides, and what layouts and planners know of them as pure data.

The names below describe parameters to optimizers and sharding strategies.
"""

from megaopt_core.params.specs import (
    AxisPlacement,
    Box,
    Granularity,
    ParamInfo,
    ParamSpec,
    PeerGroup,
    RankCoordinates,
    Shard,
)

__all__ = [
    "AxisPlacement",
    "Box",
    "Granularity",
    "ParamInfo",
    "ParamSpec",
    "PeerGroup",
    "RankCoordinates",
    "Shard",
]
