"""How the gradients of each buffer are reduced: by whom, in which dtype, scaled by what."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaopt_core.errors import ConfigurationError
from megaopt_core.parallel import ProcessGroupCollection, size_of
from megaopt_core.sharding import BufferKey, FullParamLayout
from megaopt_distributed import DistributedDataParallelConfig
from megaopt_distributed.buffers.bucket import Bucket, Reduction
from megaopt_distributed.buffers.buffer import ParamAndGradBuffer
from megaopt_distributed.buffers.collectives import communicator

__all__ = ["buckets_by_group", "reduction_of", "require_wide_gradients"]


def reduction_of(
    key: BufferKey, config: DistributedDataParallelConfig, pgs: ProcessGroupCollection, device: torch.device
) -> Reduction:
    """Return how a buffer's gradients become their mean over all data-parallel ranks.

    Args:
        key: the buffer.
        config: whether gradients are scattered, and who divides.
        pgs: the process groups.
        device: where the buffer is.
    """
    shards = pgs.shard_group(is_expert=key.is_expert)
    replicas = pgs.inter_expt_dist_opt if key.is_expert else pgs.inter_dist_opt
    ranks = size_of(shards) * size_of(replicas)
    # The loss is a mean over all data-parallel ranks, whose tokens meet in the experts.
    factor = (ranks if config.average_in_collective else 1.0) / pgs.data_parallel_size
    return Reduction(
        communicator(shards, device),
        communicator(replicas, device),
        scatter=config.use_distributed_optimizer,
        average=config.average_in_collective,
        factor=factor,
    )


def buckets_by_group(
    buffers: Mapping[BufferKey, ParamAndGradBuffer], pgs: ProcessGroupCollection
) -> list[list[Bucket]]:
    """Return the buckets of each process group, in which they are reduced one after the other.

    Args:
        buffers: all buffers.
        pgs: the process groups.
    """
    by_group: dict[int, list[Bucket]] = {}
    for key, buffer in buffers.items():
        by_group.setdefault(id(pgs.shard_group(is_expert=key.is_expert)), []).extend(buffer.buckets)
    return list(by_group.values())


def require_wide_gradients(layout: FullParamLayout, config: DistributedDataParallelConfig) -> None:
    """Raise when gradients would lose digits, or their imaginary part, in fp32.

    Args:
        layout: the buffers.
        config: whether gradients are reduced in fp32.

    Raises:
        ConfigurationError: it names a parameter.
    """
    for key, buffer in layout.buffers.items():
        loses = key.param_dtype != key.grad_dtype and (
            key.param_dtype.is_complex or key.param_dtype == torch.float64
        )
        if config.grad_reduce_in_fp32 and loses:
            raise ConfigurationError(
                f"grad_reduce_in_fp32 cannot hold the gradient of {next(iter(buffer.param_ranges))!r} "
                f"({key.param_dtype}): it is for parameters in bf16, fp16 and fp32",
                setting="grad_reduce_in_fp32",
            )
