"""Sharding: the protocol, layouts as pure data, and the built-in replicated strategy.

The names below are what a strategy is written against, with those of :mod:`megaopt_core.params`. They are provisional
until strategies for whole layers and for FSDP2 stand on them.
"""

from megaopt_core.sharding.base import (
    LiveModel,
    OverlappedParams,
    ParamLayout,
    Piece,
    ShardedParams,
    ShardingStrategy,
    finish_grad_sync,
)
from megaopt_core.sharding.layout import (
    BufferKey,
    FullParamLayout,
    LayoutOptions,
    Peers,
    PerBufferParamLayout,
    PieceSpec,
    World,
)
from megaopt_core.sharding.split_step import Exchange, SplitStep, Travel

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
    "ShardedParams",
    "ShardingStrategy",
    "SplitStep",
    "Travel",
    "World",
    "finish_grad_sync",
]
