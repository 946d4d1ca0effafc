"""Where parameters lie in contiguous buffers: reverse model order, aligned starts, padded bucket ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from megaopt_core.params import DEFAULT_ALIGNMENT, ParamSpec
from megaopt_core.sharding import BufferKey, LayoutOptions, PerBufferParamLayout, World

__all__ = [
    "PARAM_ALIGNMENT",
    "SHARD_ALIGNMENT",
    "BufferRules",
    "default_bucket_size",
    "key_of",
    "lay_out_buffer",
    "lay_out_buffers",
]

PARAM_ALIGNMENT = 64
"""Elements that the start of a parameter is aligned to in a buffer that is sharded."""

SHARD_ALIGNMENT = DEFAULT_ALIGNMENT
"""Elements that the cuts between ranks are aligned to, where no optimizer asks for more."""

_BUCKET_ALIGNMENT = 128
_HIGH_BANDWIDTH_ALIGNMENT = 2**16


def default_bucket_size(data_parallel_size: int) -> int:
    """Return `max(40_000_000, 1_000_000 * dp)` elements: more ranks need larger messages.

    Args:
        data_parallel_size: number of ranks that reduce together.

    Example:
        >>> default_bucket_size(64)
        64000000
    """
    return max(40_000_000, 1_000_000 * data_parallel_size)


@frozen
class BufferRules:
    """How one buffer is divided.

    Args:
        bucket_size: elements after which a bucket is closed; None: one bucket.
        param_alignment: of parameter starts, in elements.
        bucket_alignment: of bucket ends, in elements.
    """

    bucket_size: int | None = None
    param_alignment: int = 1
    bucket_alignment: int = 1

    @classmethod
    def sharded(cls, shards: int, options: LayoutOptions, alignment: int = SHARD_ALIGNMENT) -> BufferRules:
        """Return the rules of a buffer of which each of `shards` ranks owns an equal part of every bucket.

        Bucket ends are multiples of `lcm(shards, 128)` (and of 2**16 with `pad_buckets`), and parameters begin and are
        cut at multiples of the alignment.

        Args:
            shards: number of ranks.
            options: bucket size and padding.
            alignment: elements that cuts are aligned to; at least :data:`SHARD_ALIGNMENT`.

        Example:
            >>> BufferRules.sharded(3, LayoutOptions()).bucket_alignment
            384
        """
        cut = math.lcm(SHARD_ALIGNMENT, alignment)
        bucket_alignment = math.lcm(shards * cut, _BUCKET_ALIGNMENT)
        if options.pad_buckets:
            bucket_alignment = math.lcm(bucket_alignment, _HIGH_BANDWIDTH_ALIGNMENT)
        return cls(options.bucket_size, math.lcm(PARAM_ALIGNMENT, cut), bucket_alignment)

    @property
    def is_sharded(self) -> bool:
        """True when shared embeddings get buckets of their own, as they do in sharded buffers."""
        return self.bucket_alignment > 1


def key_of(spec: ParamSpec, chunk: int = 0) -> BufferKey:
    """Return the buffer that a parameter belongs to.

    Args:
        spec: the parameter.
        chunk: index of its model chunk.
    """
    return BufferKey(spec.dtype, spec.grad_dtype, spec.is_expert, chunk=chunk)


def lay_out_buffer(specs: Sequence[ParamSpec], rules: BufferRules) -> PerBufferParamLayout:
    """Return where parameters lie: in reverse order, so that the first bucket is the first whose gradients are ready.

    Args:
        specs: the parameters of one buffer, as whole tensors, in model order.
        rules: alignment and bucket size.

    Example:
        >>> import torch
        >>> from megaopt_core.params import Granularity, ParamSpec
        >>> specs = [
        ...     ParamSpec(name, (n,), torch.float32, torch.float32, "adam", 0, Granularity.ELEMENT, 1.0)
        ...     for name, n in (("first", 100), ("last", 7))
        ... ]
        >>> layout = lay_out_buffer(specs, BufferRules.sharded(2, LayoutOptions()))
        >>> layout.param_ranges, layout.bucket_ends
        ({'last': (0, 7), 'first': (64, 164)}, (256,))
    """
    ranges: dict[str, tuple[int, int]] = {}
    bucket_of: dict[str, int] = {}
    ends: list[int] = []
    begin = position = 0

    def close() -> None:
        nonlocal begin, position
        position = _round_up(position, rules.bucket_alignment)
        ends.append(position)
        begin = position

    for spec in reversed(specs):
        alone = spec.shared_embedding and rules.is_sharded
        if alone and position > begin:
            close()
        start = _round_up(position, rules.param_alignment)
        position = start + spec.numel
        ranges[spec.name] = start, position
        bucket_of[spec.name] = len(ends)
        if alone or (rules.bucket_size is not None and position - begin >= rules.bucket_size):
            close()
    if position > begin:
        close()
    last = max(len(ends) - 1, 0)
    return PerBufferParamLayout(
        ranges,
        tuple(ends or [0] * bool(ranges)),
        {name: min(bucket, last) for name, bucket in bucket_of.items()},
    )


def lay_out_buffers(
    specs: Sequence[ParamSpec], world: World, options: LayoutOptions, *, sharded: bool = True
) -> dict[BufferKey, PerBufferParamLayout]:
    """Return the layouts of all buffers, one a key, in the order in which keys first occur.

    Args:
        specs: what a rank has of the parameters, as whole tensors, in model order.
        world: the number of ranks that share each buffer.
        options: bucket size, padding, chunks.
        sharded: every rank owns a part of every bucket; False: every rank keeps all.
    """
    by_key: dict[BufferKey, list[ParamSpec]] = {}
    for spec in specs:
        by_key.setdefault(key_of(spec, options.chunk_of.get(spec.name, 0)), []).append(spec)
    layouts = {}
    for key, some in by_key.items():
        alignment = math.lcm(*(spec.alignment for spec in some))
        rules = (
            BufferRules.sharded(world.size(some[0].data_axis), options, alignment)
            if sharded
            else BufferRules(options.bucket_size)
        )
        layouts[key] = lay_out_buffer(some, rules)
    return layouts


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
