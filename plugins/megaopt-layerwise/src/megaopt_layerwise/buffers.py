"""Where matrices lie in contiguous memory: the share of every rank is one segment of each bucket. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from megaopt_core.params import ParamSpec
from megaopt_core.sharding import BufferKey, LayoutOptions, PerBufferParamLayout, World
from megaopt_layerwise.data_places import plan_dense_first
from megaopt_layerwise.planner import work_of

__all__ = ["in_buckets", "key_of", "lay_out_buckets", "lay_out_segments"]

_ALIGNMENT = 64
"""Elements that a parameter's start is aligned to: cache lines, and vector instructions."""


class _Sized(Protocol):
    @property
    def numel(self) -> int:
        """How many elements it has."""

    @property
    def shared_embedding(self) -> bool:
        """Pipeline stages share it."""


def key_of(spec: ParamSpec, chunk: int = 0) -> BufferKey:
    """Return the buffer that a matrix belongs to.

    Args:
        spec: the parameter.
        chunk: index of its model chunk.
    """
    return BufferKey(spec.dtype, spec.grad_dtype, spec.is_expert, is_managed_by_layer_wise=True, chunk=chunk)


def lay_out_segments(
    buckets: Sequence[Sequence[ParamSpec]], place_of: Mapping[str, int], ranks: int
) -> PerBufferParamLayout:
    """Return a buffer in which the matrices of each owner lie together in every bucket, one owner after the other.

    Args:
        buckets: the matrices of each bucket, as this rank holds them.
        place_of: name to the place of the owner along the axis that shares the buffer out.
        ranks: number of ranks along that axis.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity
        >>> specs = [
        ...     ParamSpec(name, (n,), torch.float32, torch.float32, "any", 0, Granularity.TENSOR, 1.0)
        ...     for name, n in (("a", 100), ("b", 7))
        ... ]
        >>> layout = lay_out_segments([specs], {"a": 1, "b": 0}, 2)
        >>> layout.param_ranges, layout.share_ends
        ({'b': (0, 7), 'a': (64, 164)}, ((64, 192),))
    """
    ranges: dict[str, tuple[int, int]] = {}
    bucket_of: dict[str, int] = {}
    share_ends: list[tuple[int, ...]] = []
    position = 0
    for bucket, specs in enumerate(buckets):
        ends = []
        by_place: dict[int, list[ParamSpec]] = {}
        for spec in specs:
            by_place.setdefault(place_of[spec.name], []).append(spec)
        for place in range(ranks):
            for spec in by_place.get(place, ()):
                ranges[spec.name] = position, position + spec.numel
                bucket_of[spec.name] = bucket
                position = _round_up(position + spec.numel, _ALIGNMENT)
            ends.append(position)
        share_ends.append(tuple(ends))
    return PerBufferParamLayout(ranges, tuple(ends[-1] for ends in share_ends), bucket_of, tuple(share_ends))


def lay_out_buckets(
    specs: Sequence[ParamSpec], world: World, options: LayoutOptions
) -> dict[BufferKey, PerBufferParamLayout]:
    """Return the buffers of a model that will be wrapped: buckets in reverse model order, owners over the whole model.

    Shares need not be equal, so owners are chosen without regard to buckets, and each bucket is ready as early as the
    backward pass can have it.

    Args:
        specs: the matrices as this rank holds them, in model order.
        world: number of ranks along each axis.
        options: bucket size and chunks.
    """
    dense = [work_of(spec) for spec in specs if not spec.is_expert]
    place_of = plan_dense_first(dense, [work_of(spec) for spec in specs if spec.is_expert], world)
    by_key: dict[BufferKey, list[ParamSpec]] = {}
    for spec in reversed(specs):
        by_key.setdefault(key_of(spec, options.chunk_of.get(spec.name, 0)), []).append(spec)
    return {
        key: lay_out_segments(
            list(in_buckets(some, options.bucket_size)), place_of, world.size(some[0].data_axis)
        )
        for key, some in by_key.items()
    }


def in_buckets[Item: _Sized](items: Iterable[Item], size: int | None) -> Iterator[list[Item]]:
    """Yield runs of about `size` elements; an embedding that pipeline stages share stands alone.

    Args:
        items: what is laid out, in the order of backward.
        size: elements of a bucket; None: one bucket takes all.
    """
    bucket: list[Item] = []
    numel = 0
    for item in items:
        if item.shared_embedding and bucket:
            yield bucket
            bucket, numel = [], 0
        bucket.append(item)
        numel += item.numel
        if item.shared_embedding or (size is not None and numel >= size):
            yield bucket
            bucket, numel = [], 0
    if bucket:
        yield bucket


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
