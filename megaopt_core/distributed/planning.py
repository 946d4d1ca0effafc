"""Planning the buffers of a model before it is wrapped: by hand, by default, or as a routing asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaopt_core.distributed.config import DistributedDataParallelConfig
from megaopt_core.parallel.groups import ProcessGroupCollection, size_of
from megaopt_core.params.names import NamedParam, named_params
from megaopt_core.params.specs import Granularity, ParamSpec, whole
from megaopt_core.sharding.buffer_layout import default_bucket_size, lay_out_buffers
from megaopt_core.sharding.layout import FullParamLayout, LayoutOptions, World

if TYPE_CHECKING:
    from megaopt_core.params.routing import Routing

__all__ = ["plan_full_param_layout"]


def plan_full_param_layout(
    module: torch.nn.Module,
    ddp_config: DistributedDataParallelConfig,
    pg_collection: ProcessGroupCollection | None = None,
    routing: Routing | None = None,
) -> FullParamLayout:
    """Return the buffers that `DistributedDataParallel` gives a module.

    Args:
        module: one model chunk, bare; on the meta device too.
        ddp_config: bucket size, padding, whether buffers are sharded.
        pg_collection: the process groups; None: the default group.
        routing: what the optimizer will be built for; the layout keeps it, so that a build with another configuration
            is refused.

    Example:
        >>> import torch
        >>> layout = plan_full_param_layout(torch.nn.Linear(3, 2), DistributedDataParallelConfig())
        >>> [buffer.param_ranges for buffer in layout.buffers.values()]
        [{'bias': (0, 2), 'weight': (2, 8)}]
    """
    pgs = ProcessGroupCollection.of(pg_collection)
    specs = [_spec(named, ddp_config) for named in named_params(module) if named.param.requires_grad]
    world = World(size_of(pgs.shard_group()), size_of(pgs.shard_group(is_expert=True)))
    overlaps = ddp_config.overlap_grad_reduce or ddp_config.overlap_param_gather
    size = ddp_config.bucket_size or default_bucket_size(pgs.data_parallel_size)
    options = LayoutOptions(size if overlaps else None, ddp_config.pad_buckets_for_high_nccl_busbw)
    buffers = lay_out_buffers(specs, world, options, sharded=ddp_config.use_distributed_optimizer)
    return FullParamLayout(buffers, routing)


def _spec(named: NamedParam, ddp_config: DistributedDataParallelConfig) -> ParamSpec:
    param, shape = named.param, tuple(named.param.shape)
    grad_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else param.dtype
    return ParamSpec(
        name=named.name,
        shape=shape,
        box=whole(shape),
        dtype=param.dtype,
        grad_dtype=grad_dtype,
        optimizer="",
        group=0,
        granularity=Granularity.TENSOR,
        cost=0.0,
        is_expert=not getattr(param, "allreduce", True),
        shared_embedding=bool(getattr(param, "shared_embedding", False)),
    )
