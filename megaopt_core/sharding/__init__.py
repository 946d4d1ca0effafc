"""The protocol of sharding strategies, layouts as pure data, and the strategy that replicates; provisional."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.sharding._layout import (
        BufferKey,
        FullParamLayout,
        LayoutOptions,
        Peers,
        PerBufferParamLayout,
        PieceSpec,
        World,
    )
    from megaopt_core.sharding._ownership import require_partition
    from megaopt_core.sharding._protocol import (
        LiveModel,
        OverlappedParams,
        ParamLayout,
        Piece,
        ShardedParams,
        ShardingStrategy,
        finish_grad_sync,
        gradient_of,
    )
    from megaopt_core.sharding._replicated import Replicated, ReplicatedParams
    from megaopt_core.sharding._split_step import Exchange, SplitStep, StatefulSplitStep, Travel
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "ReplicatedParams": "_replicated",
            "StatefulSplitStep": "_split_step",
            "BufferKey": "_layout",
            "Exchange": "_split_step",
            "FullParamLayout": "_layout",
            "LayoutOptions": "_layout",
            "LiveModel": "_protocol",
            "OverlappedParams": "_protocol",
            "ParamLayout": "_protocol",
            "Peers": "_layout",
            "PerBufferParamLayout": "_layout",
            "Piece": "_protocol",
            "PieceSpec": "_layout",
            "Replicated": "_replicated",
            "ShardedParams": "_protocol",
            "ShardingStrategy": "_protocol",
            "SplitStep": "_split_step",
            "Travel": "_split_step",
            "World": "_layout",
            "finish_grad_sync": "_protocol",
            "gradient_of": "_protocol",
            "require_partition": "_ownership",
        },
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
    "Replicated",
    "ReplicatedParams",
    "ShardedParams",
    "ShardingStrategy",
    "SplitStep",
    "StatefulSplitStep",
    "Travel",
    "World",
    "finish_grad_sync",
    "gradient_of",
    "require_partition",
]
