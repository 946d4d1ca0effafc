"""The protocol of sharding strategies, layouts as pure data, and the strategy that replicates; provisional."""

from megaopt_core.sharding._attached import buffers_alike
from megaopt_core.sharding._cuts import cut_of
from megaopt_core.sharding._layout import (
    BufferKey,
    FullParamLayout,
    LayoutOptions,
    Peers,
    PerBufferParamLayout,
    PieceSpec,
    PlannedRouting,
    World,
)
from megaopt_core.sharding._live_model import LiveModel, Piece, gradient_of, has_gradient
from megaopt_core.sharding._ownership import owning_axes
from megaopt_core.sharding._protocol import (
    OverlappedParams,
    ParamLayout,
    ShardedParams,
    ShardingStrategy,
    SharedStates,
)
from megaopt_core.sharding._replicated import Replicated, ReplicatedParams
from megaopt_core.sharding._split_step import Exchange, Sent, SplitStep, StatefulSplitStep, Travel
from megaopt_core.sharding._wrapped import (
    ReducedBy,
    WrappedModel,
    finish_grad_sync,
    known_wrappers,
    reducer_of,
    wrappers_of,
)

__all__ = [
    "BufferKey",
    "Exchange",
    "FullParamLayout",
    "LayoutOptions",
    "LiveModel",
    "OverlappedParams",
    "ParamLayout",
    "Peers",
    "PerBufferParamLayout",
    "Piece",
    "PieceSpec",
    "PlannedRouting",
    "ReducedBy",
    "Replicated",
    "ReplicatedParams",
    "Sent",
    "ShardedParams",
    "ShardingStrategy",
    "SharedStates",
    "SplitStep",
    "StatefulSplitStep",
    "Travel",
    "World",
    "WrappedModel",
    "buffers_alike",
    "cut_of",
    "finish_grad_sync",
    "gradient_of",
    "has_gradient",
    "known_wrappers",
    "owning_axes",
    "reducer_of",
    "wrappers_of",
]
