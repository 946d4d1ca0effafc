"""Buffers whose shards are equal: parameters are packed whole into shards, each padded to the largest. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from megaopt_distributed import DistributedDataParallelConfig

from megaopt_core.errors import ShardingError
from megaopt_core.params import is_marked_expert
from megaopt_core.sharding import BufferKey, FullParamLayout, PerBufferParamLayout
from megaopt_layerwise.buffer_routing import is_managed_by_layer_wise_optimizer
from megaopt_layerwise.buffers import in_buckets

__all__ = ["compute_full_param_layout", "compute_per_buffer_param_layout", "shard_divisor"]

_START = 64
"""Elements that the start of a parameter is aligned to."""


@frozen
class _Placed:
    """One parameter that gets a place: its name, its elements, and whether pipeline stages share it."""

    name: str
    numel: int
    shared_embedding: bool


def shard_divisor(data_parallel_world_size: int, ddp_config: DistributedDataParallelConfig) -> int:
    """Return what the size of every shard is a multiple of: `lcm(64, bucket_divisor // dp)`.

    Bucket ends are multiples of `bucket_divisor = lcm(dp, 128)`, and of 2**16 more with
    `pad_buckets_for_high_nccl_busbw`; every shard begins at a multiple of 64 elements.

    Args:
        data_parallel_world_size: number of shards.
        ddp_config: whether buckets are padded.

    Example:
        >>> shard_divisor(8, DistributedDataParallelConfig())
        64
        >>> shard_divisor(8, DistributedDataParallelConfig(pad_buckets_for_high_nccl_busbw=True))
        8192
    """
    _require_ranks(data_parallel_world_size)
    multiples = [data_parallel_world_size, 128]
    if ddp_config.pad_buckets_for_high_nccl_busbw:
        multiples.append(2**16)
    return math.lcm(_START, math.lcm(*multiples) // data_parallel_world_size)


def compute_per_buffer_param_layout(
    params: Sequence[torch.nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: DistributedDataParallelConfig,
    param_indices: Sequence[int] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> PerBufferParamLayout:
    """Return where the parameters of one buffer lie, so that none crosses the shard of a rank.

    Parameters are taken in reverse order, that of their gradients, into buckets of about `bucket_size` elements; one
    with the attribute `shared_embedding` ends the bucket and has one of its own. Inside a bucket the largest goes
    first, onto the shard with the fewest elements; every shard is padded to the largest.

    Args:
        params: in model order.
        bucket_size: elements after which a bucket is closed; None: one bucket.
        data_parallel_world_size: number of shards of every bucket.
        ddp_config: whether buckets are padded.
        param_indices: what parameters are called in the layout; None: their positions.
        names: what they are called instead, such as the canonical names that a wrapped model needs.

    Raises:
        ShardingError: there is no rank, or not one name a parameter.

    Example:
        >>> params = [torch.nn.Parameter(torch.empty(n)) for n in (100, 60, 64, 30)]
        >>> layout = compute_per_buffer_param_layout(params, None, 2, DistributedDataParallelConfig())
        >>> layout.param_ranges, layout.bucket_ends
        ({'3': (128, 158), '2': (192, 256), '1': (256, 316), '0': (0, 100)}, (384,))
    """
    called = _names(params, param_indices, names)
    placed = [
        _Placed(name, param.numel(), bool(getattr(param, "shared_embedding", False)))
        for name, param in zip(called, params, strict=True)
    ]
    divisor = shard_divisor(data_parallel_world_size, ddp_config)
    ranges: dict[str, tuple[int, int]] = {}
    bucket_of: dict[str, int] = {}
    ends: list[int] = []
    for bucket, some in enumerate(in_buckets(reversed(placed), bucket_size)):
        begin = ends[-1] if ends else 0
        offsets, size = _pack(some, data_parallel_world_size, divisor)
        for one in some:
            start = begin + offsets[one.name]
            ranges[one.name] = start, start + one.numel
            bucket_of[one.name] = bucket
        ends.append(begin + size)
    return PerBufferParamLayout(ranges, tuple(ends), bucket_of)


def compute_full_param_layout(
    params: Sequence[torch.nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: DistributedDataParallelConfig,
    expert_data_parallel_world_size: int | None = None,
    *,
    names: Sequence[str] | None = None,
) -> FullParamLayout:
    """Return the layouts of all buffers: one for each dtype, for experts, and for what layer-wise owners step.

    Args:
        params: all parameters to lay out, in model order.
        bucket_size: elements after which a bucket is closed; None: one bucket.
        data_parallel_world_size: number of ranks that share dense parameters out.
        ddp_config: whether buckets are padded, and in which dtype gradients are reduced.
        expert_data_parallel_world_size: the same for expert parameters (attribute `allreduce` False); None: as many.
        names: what parameters are called in the layout; None: their positions in `params`.

    Raises:
        ShardingError: there is no rank, or not one name a parameter.

    Example:
        >>> params = [torch.nn.Parameter(torch.empty(8, 8)), torch.nn.Parameter(torch.empty(8))]
        >>> layout = compute_full_param_layout(params, None, 2, DistributedDataParallelConfig())
        >>> [(key.is_managed_by_layer_wise, list(buffer.param_ranges)) for key, buffer in layout.buffers.items()]
        [(True, ['0']), (False, ['1'])]
    """
    expert_size = (
        data_parallel_world_size
        if expert_data_parallel_world_size is None
        else expert_data_parallel_world_size
    )
    by_key: dict[BufferKey, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in zip(_names(params, None, names), params, strict=True):
        by_key.setdefault(_key_of(param, ddp_config), []).append((name, param))
    return FullParamLayout(
        {
            key: compute_per_buffer_param_layout(
                [param for _, param in some],
                bucket_size,
                expert_size if key.is_expert else data_parallel_world_size,
                ddp_config,
                names=[name for name, _ in some],
            )
            for key, some in by_key.items()
        }
    )


def _key_of(param: torch.nn.Parameter, ddp_config: DistributedDataParallelConfig) -> BufferKey:
    return BufferKey(
        param.dtype,
        torch.float32 if ddp_config.grad_reduce_in_fp32 else param.dtype,
        is_expert=is_marked_expert(param),
        is_managed_by_layer_wise=is_managed_by_layer_wise_optimizer(param),
    )


def _names(
    params: Sequence[torch.nn.Parameter], indices: Sequence[int] | None, names: Sequence[str] | None
) -> list[str]:
    called = [str(name) for name in (names or indices or range(len(params)))]
    if len(set(called)) != len(params) or len(called) != len(params):
        raise ShardingError(
            f"a layout of {len(params)} parameters needs as many different names, got {len(set(called))}"
        )
    return called


def _pack(params: Sequence[_Placed], shards: int, divisor: int) -> tuple[dict[str, int], int]:
    """Return where each parameter begins inside a bucket, and the size of the bucket."""
    ends = [0] * shards
    places: dict[str, tuple[int, int]] = {}
    for param in sorted(params, key=lambda param: -param.numel):
        shard = min(range(shards), key=ends.__getitem__)
        start = -(-ends[shard] // _START) * _START
        places[param.name] = shard, start
        ends[shard] = start + param.numel
    size = -(-max(ends) // divisor) * divisor
    return {name: shard * size + start for name, (shard, start) in places.items()}, shards * size


def _require_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ShardingError(f"data_parallel_world_size={ranks}: there is at least 1 rank")
