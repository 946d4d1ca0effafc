"""Layouts as pure data: which elements of which named parameter lie where, and which rank steps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import Factory, frozen

from megaopt_core.params.specs import Shard

if TYPE_CHECKING:
    from megaopt_core.params.routing import Routing

__all__ = [
    "BufferKey",
    "FullParamLayout",
    "GradReduction",
    "LayoutOptions",
    "PerBufferParamLayout",
    "PieceSpec",
    "World",
]


@frozen
class BufferKey:
    """Parameters with equal keys share one contiguous buffer.

    Args:
        param_dtype: of the parameters.
        grad_dtype: of the gradients.
        is_expert: reduced over the expert data-parallel group.
        is_managed_by_layer_wise: laid out so that no parameter crosses a shard.
        chunk: index of the model chunk; 0 in the layout of a single chunk.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool = False
    is_managed_by_layer_wise: bool = False
    chunk: int = 0


@frozen
class PerBufferParamLayout:
    """One buffer: where each parameter starts and ends, and where the buckets end.

    Args:
        param_ranges: name to `[start, stop)` in elements of the buffer.
        bucket_ends: end of each bucket in elements, ascending; the last is the buffer's size.
        bucket_of: name to the index of its bucket.
    """

    param_ranges: Mapping[str, tuple[int, int]]
    bucket_ends: tuple[int, ...]
    bucket_of: Mapping[str, int]

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.bucket_ends[-1] if self.bucket_ends else 0

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """`[start, stop)` of every bucket."""
        return tuple(zip((0, *self.bucket_ends), self.bucket_ends, strict=False))


@frozen
class FullParamLayout:
    """The layouts of all buffers of one model chunk.

    Args:
        buffers: one layout a buffer; names are the chunk's own canonical ones.
        routing: the routing that the layout was made for, None where it holds for any.
    """

    buffers: Mapping[BufferKey, PerBufferParamLayout]
    routing: Routing | None = None


@frozen
class GradReduction:
    """How a buffer's gradients are reduced: `scatter` leaves each rank its shard only."""

    scatter: bool = False


@frozen
class World:
    """Sizes of the groups that parameters are sharded over.

    Args:
        data_parallel_size: ranks that share dense parameters out; with several instances of the optimizer, those of
            one.
        expert_data_parallel_size: the same for expert parameters.
    """

    data_parallel_size: int = 1
    expert_data_parallel_size: int = 1


@frozen
class LayoutOptions:
    """What a layout depends on besides the parameters and the world.

    Args:
        bucket_size: approximate elements per bucket; None: one bucket.
        pad_buckets: pad bucket ends to a multiple of 2**16 elements for high bus bandwidth.
        buffers: the buffers that the model is wrapped in, by global names; None: gradients come one by one.
        chunk_of: name to the index of its model chunk; absent names are in chunk 0.
    """

    bucket_size: int | None = None
    pad_buckets: bool = False
    buffers: Mapping[BufferKey, PerBufferParamLayout] | None = None
    chunk_of: Mapping[str, int] = Factory(dict)


@frozen
class PieceSpec:
    """One tensor that one rank steps; a fused flat piece has many members.

    Args:
        group: index into the routing's groups.
        shape: shape of the tensor.
        members: `(offset, shard)` pairs: the shard's elements begin at `offset` in the flattened piece.
        buffer: `(key, start, stop)` when the piece is a range of a buffer; None when it has memory of its own.
        peers: ranks that step the same matrix together.
    """

    group: int
    shape: tuple[int, ...]
    members: tuple[tuple[int, Shard], ...]
    buffer: tuple[BufferKey, int, int] | None = None
    peers: tuple[int, ...] = Factory(tuple)
