"""Whether a given layout fits the module, the configuration and the ranks that it is used with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megaopt_core.errors import ShardingError
from megaopt_core.parallel import ProcessGroupCollection, size_of
from megaopt_core.params import is_dtensor, is_marked_expert
from megaopt_core.sharding import BufferKey, FullParamLayout, PerBufferParamLayout
from megaopt_distributed import DistributedDataParallelConfig
from megaopt_distributed.buffers.buffer_layout import SHARD_ALIGNMENT

__all__ = ["require_fitting"]


def require_fitting(
    layout: FullParamLayout,
    trainable: Mapping[str, torch.nn.Parameter],
    ddp_config: DistributedDataParallelConfig,
    pgs: ProcessGroupCollection,
) -> None:
    """Raise unless a layout has room for exactly the trainable parameters of a module, in the buffers they need.

    Args:
        layout: a planned layout.
        trainable: canonical name to parameter.
        ddp_config: how gradients will be kept and reduced.
        pgs: the process groups that share sharded buffers out.

    Raises:
        ShardingError: parameters are DTensors, missing, superfluous, of another size or kind, overlap or leave their
            bucket, or buckets cannot be shared out over the ranks.
    """
    cut = [name for name, param in trainable.items() if is_dtensor(param)]
    if cut:
        raise ShardingError(
            f"DistributedDataParallel keeps gradients in flat buffers, but {cut[0]!r} is a DTensor ({len(cut)} "
            "parameters are): build the optimizer for the bare module, and let torch reduce its gradients"
        )
    placed: dict[str, BufferKey] = {}
    for key, buffer in layout.buffers.items():
        _require_room(buffer, placed)
        if ddp_config.use_distributed_optimizer:
            _require_shares(buffer, size_of(pgs.shard_group(is_expert=key.is_expert)))
        placed.update(dict.fromkeys(buffer.param_ranges, key))
    sizes = {
        name: stop - start
        for buffer in layout.buffers.values()
        for name, (start, stop) in buffer.param_ranges.items()
    }
    wrong = [
        *(name for name, param in trainable.items() if sizes.get(name) != param.numel()),
        *(name for name in placed if name not in trainable),
    ]
    if wrong:
        raise ShardingError(
            f"the parameter layout does not fit the module: {', '.join(wrong[:5])} ({len(wrong)} parameters) are "
            "missing, superfluous or of another size"
        )
    for name, param in trainable.items():
        _require_kind(name, param, placed[name], ddp_config)


def _require_room(buffer: PerBufferParamLayout, placed: Mapping[str, BufferKey]) -> None:
    """Raise unless the parameters of a buffer lie side by side, each inside its bucket."""
    buckets, position = dict(enumerate(buffer.buckets)), 0
    for name, (start, stop) in sorted(buffer.param_ranges.items(), key=lambda item: item[1]):
        first, last = buckets.get(buffer.bucket_of.get(name, -1), (0, -1))
        if name in placed or start < max(position, first) or stop > last:
            raise ShardingError(
                f"the parameter layout places {name!r} at [{start}, {stop}) in bucket "
                f"{buffer.bucket_of.get(name)} of {len(buckets)}, where it has no room"
            )
        position = stop


def _require_shares(buffer: PerBufferParamLayout, ranks: int) -> None:
    """Raise unless every bucket can be cut into shares, at elements where kernels may be cut."""
    if buffer.share_ends:
        _require_share_ends(buffer, ranks)
        return
    for start, stop in buffer.buckets:
        if stop < start or (stop - start) % (ranks * SHARD_ALIGNMENT):
            raise ShardingError(
                f"the parameter layout has a bucket [{start}, {stop}), which {ranks} ranks cannot share out in "
                f"multiples of {SHARD_ALIGNMENT} elements; plan it with the same DistributedDataParallelConfig and "
                "process groups"
            )
    for name, (start, _) in buffer.param_ranges.items():
        if start % SHARD_ALIGNMENT:
            raise ShardingError(
                f"the parameter layout places {name!r} at {start}, no multiple of {SHARD_ALIGNMENT} elements; plan it "
                "with use_distributed_optimizer=True"
            )


def _require_share_ends(buffer: PerBufferParamLayout, ranks: int) -> None:
    """Raise unless every bucket has one share a rank, in order, that together are all of it."""
    if len(buffer.share_ends) != len(buffer.bucket_ends):
        raise ShardingError(
            f"the parameter layout has {len(buffer.bucket_ends)} buckets and shares of {len(buffer.share_ends)}"
        )
    for (start, stop), ends in zip(buffer.buckets, buffer.share_ends, strict=True):
        if (
            len(ends) != ranks
            or sorted(ends) != list(ends)
            or (ends and (ends[0] < start or ends[-1] != stop))
        ):
            raise ShardingError(
                f"the parameter layout has a bucket [{start}, {stop}) with shares that end at {ends}; {ranks} ranks "
                "need one each, in order, of which the last ends with the bucket"
            )


def _require_kind(
    name: str, param: torch.nn.Parameter, key: BufferKey, ddp_config: DistributedDataParallelConfig
) -> None:
    """Raise unless a parameter is in a buffer of its kind."""
    for what, given, needed in _kinds(param, key, ddp_config):
        if given != needed:
            raise ShardingError(
                f"the parameter layout has {name!r} in a buffer with {what}={given}; it needs {what}={needed}: plan "
                "the layout with the same module and DistributedDataParallelConfig"
            )


def _kinds(
    param: torch.nn.Parameter, key: BufferKey, ddp_config: DistributedDataParallelConfig
) -> Iterator[tuple[str, object, object]]:
    yield "param_dtype", key.param_dtype, param.dtype
    yield "grad_dtype", key.grad_dtype, torch.float32 if ddp_config.grad_reduce_in_fp32 else param.dtype
    yield "is_expert", key.is_expert, is_marked_expert(param)
    yield "chunk", key.chunk, 0
