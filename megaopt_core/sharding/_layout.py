"""Layouts as pure data: which elements of which named parameter lie where, and which rank steps them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from attrs import Factory, frozen

from megaopt_core.errors import ShardingError
from megaopt_core.params._shards import RankCoordinates, Shard

__all__ = [
    "BufferKey",
    "FullParamLayout",
    "LayoutOptions",
    "Peers",
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
        share_ends: for each bucket where every rank's share ends, in elements of the buffer; empty: equal shares.
    """

    param_ranges: Mapping[str, tuple[int, int]]
    bucket_ends: tuple[int, ...]
    bucket_of: Mapping[str, int]
    share_ends: tuple[tuple[int, ...], ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.bucket_ends[-1] if self.bucket_ends else 0

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """`[start, stop)` of every bucket."""
        return tuple(zip((0, *self.bucket_ends), self.bucket_ends, strict=False))

    def ends(self, bucket: int, ranks: int) -> tuple[int, ...]:
        """Return where the share of each rank in a bucket ends, in elements of the buffer.

        Args:
            bucket: its index.
            ranks: number of ranks that share the buffer out.
        """
        if self.share_ends:
            return self.share_ends[bucket]
        start, stop = self.buckets[bucket]
        size = (stop - start) // ranks
        return tuple(start + size * (rank + 1) for rank in range(ranks))

    def share_ends_in(self, bucket: int) -> tuple[int, ...]:
        """Return where every rank's share ends, in elements of a bucket; empty: equal shares.

        Args:
            bucket: its index.
        """
        if not self.share_ends:
            return ()
        start, _ = self.buckets[bucket]
        return tuple(end - start for end in self.share_ends[bucket])

    def share(self, bucket: int, rank: int, ranks: int) -> tuple[int, int]:
        """Return a rank's `[start, stop)` of a bucket, in elements of the buffer.

        Args:
            bucket: its index.
            rank: whose share.
            ranks: number of ranks that share the buffer out.
        """
        ends = self.ends(bucket, ranks)
        return (ends[rank - 1] if rank else self.buckets[bucket][0]), ends[rank]


class PlannedRouting(Protocol):
    """The optimizer, group and strategy of each parameter when a layout was made; a `Routing` is one."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Canonical name to where the parameter went."""

    def require_same(self, other: Any, names: Mapping[str, str] | None = None) -> None:
        """Raise unless another routing sends every parameter to the same place.

        Args:
            other: the routing that would be computed now.
            names: what parameters of this one are called there, where that is something else.
        """


@frozen
class FullParamLayout:
    """The layouts of all buffers of one model chunk.

    Args:
        buffers: one layout a buffer; names are the chunk's own canonical ones.
        routing: the routing that the layout was made for, None where it holds for any.
    """

    buffers: Mapping[BufferKey, PerBufferParamLayout]
    routing: PlannedRouting | None = None


@frozen
class World:
    """How many ranks there are along each axis.

    Args:
        axes: axis to number of ranks, named as :data:`megaopt_core.parallel._groups.AXES` names them: `dp` shares dense
            parameters out, `expert_dp` expert ones, `tp`, `ep` and `pp` divide the model. Absent axes have one rank.

    Raises:
        ShardingError: an axis has less than one rank.

    Example:
        >>> world = World({"dp": 2, "tp": 4})
        >>> world.size("dp"), world.size("ep"), len(list(world.ranks("dp", "tp")))
        (2, 1, 8)
    """

    axes: Mapping[str, int] = Factory(dict)

    def __attrs_post_init__(self) -> None:
        for axis, size in self.axes.items():
            if size < 1:
                raise ShardingError(f"World: axis {axis!r} has {size} ranks; it must have at least 1")

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis.

        Args:
            axis: its name.
        """
        return self.axes.get(axis, 1)

    def ranks(self, *axes: str) -> Iterator[RankCoordinates]:
        """Yield the coordinates of every rank along some axes; on the others it stands at 0.

        Args:
            *axes: names of the axes, the last of which varies fastest.
        """
        for coordinates in itertools.product(*(range(self.size(axis)) for axis in axes)):
            yield dict(zip(axes, coordinates, strict=True))


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
class Peers:
    """Ranks that step one tensor together: a block of consecutive ranks along one axis.

    All blocks along the axis have the same size and begin at its multiples, so that one process group a block size
    serves all tensors.

    Without `dim` the ranks are *replicas*: each steps the same elements, and the first one counts in norms. With it
    each has a *part*, and counts its own; parts are given only where `ParamSpec.takes_peers` is set.

    Args:
        axis: name of the axis.
        size: number of ranks in the block.
        index: this rank's place in the block, which is its coordinate along the axis modulo `size`.
        dim: dimension of the logical tensor that is cut into the ranks' parts; None: replicas.

    Raises:
        ShardingError: the place is outside of the block.

    Example:
        >>> Peers("dp", 2, index=1).is_counted
        False
    """

    axis: str
    size: int
    index: int
    dim: int | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ShardingError(f"Peers({self.axis!r}): place {self.index} is outside a block of {self.size}")

    @property
    def is_counted(self) -> bool:
        """True when this rank's elements count in norms: all parts do, and the first of several replicas."""
        return self.dim is not None or self.index == 0


@frozen
class PieceSpec:
    """One tensor that one rank steps; a fused flat piece has many members.

    Args:
        group: index into the routing's groups.
        shape: shape of the tensor.
        members: `(offset, shard)` pairs: the shard's elements begin at `offset` in the flattened piece.
        buffer: `(key, start, stop)` when the piece is a range of a buffer; None when it has memory of its own.
        peers: the ranks that step the same tensor together; None: this rank alone.
    """

    group: int
    shape: tuple[int, ...]
    members: tuple[tuple[int, Shard], ...]
    buffer: tuple[BufferKey, int, int] | None = None
    peers: Peers | None = None

    @classmethod
    def of(cls, shard: Shard, group: int, *, peers: Peers | None = None) -> Self:
        """Return the piece of one shard: in the shape of its box where it is all of it, else flat.

        Args:
            shard: which elements.
            group: index into the routing's groups.
            peers: the ranks that step the same tensor together.
        """
        shape = shard.box[1] if shard.is_box else (shard.numel,)
        return cls(group, shape, ((0, shard),), peers=peers)
