"""Planning the buffers of a model before it is wrapped: by hand, by default, or as a routing asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from megaopt_core.errors import RoutingChangedError, ShardingError
from megaopt_core.parallel import ProcessGroupCollection
from megaopt_core.params import Granularity, NamedParam, ParamSpec, is_marked_expert, named_params
from megaopt_core.registry import get_registry
from megaopt_core.sharding import BufferKey, FullParamLayout, LayoutOptions, PerBufferParamLayout, World
from megaopt_distributed import DistributedDataParallelConfig
from megaopt_distributed.buffers.buffer_layout import default_bucket_size, lay_out_buffers

if TYPE_CHECKING:
    from megaopt_core.routing import NameMap, Routing

__all__ = ["plan_full_param_layout"]


def plan_full_param_layout(
    module: torch.nn.Module,
    ddp_config: DistributedDataParallelConfig,
    pg_collection: ProcessGroupCollection | None = None,
    routing: Routing | None = None,
    *,
    chunk: int = 0,
    fqn: NameMap | None = None,
) -> FullParamLayout:
    """Return the buffers that `DistributedDataParallel` gives a module.

    Args:
        module: one model chunk, bare; on the meta device too.
        ddp_config: bucket size, padding, whether buffers are sharded.
        pg_collection: the process groups; None: the default group.
        routing: what the optimizer will be built for: every sharding strategy in use says where its parameters should
            lie. The layout keeps it, so that a build with another configuration is refused.
        chunk: index of the module among the model chunks that were routed.
        fqn: the same as for :func:`route`.

    Raises:
        RoutingChangedError: the routing is one of another module.
        ShardingError: two strategies ask for one buffer.

    Example:
        >>> import torch
        >>> layout = plan_full_param_layout(torch.nn.Linear(3, 2), DistributedDataParallelConfig())
        >>> [buffer.param_ranges for buffer in layout.buffers.values()]
        [{'bias': (0, 2), 'weight': (2, 8)}]
    """
    pgs = ProcessGroupCollection.of(pg_collection)
    world = World(pgs.axes)
    overlaps = ddp_config.overlap_grad_reduce or ddp_config.overlap_param_gather
    size = ddp_config.bucket_size or default_bucket_size(pgs.data_parallel_size)
    options = LayoutOptions(size if overlaps else None, ddp_config.pad_buckets_for_high_nccl_busbw)
    specs = [_spec(named, ddp_config) for named in named_params(module) if named.param.requires_grad]
    if routing is None:
        buffers = lay_out_buffers(specs, world, options, sharded=ddp_config.use_distributed_optimizer)
        return FullParamLayout(buffers)
    names = {spec.name: fqn(chunk, spec.name) if fqn else spec.name for spec in specs}
    by_strategy = _by_strategy(specs, names, routing)
    return FullParamLayout(_union(by_strategy, world, options, ddp_config), routing)


def _by_strategy(
    specs: Sequence[ParamSpec], names: Mapping[str, str], routing: Routing
) -> dict[str, list[ParamSpec]]:
    """Return what a module has of the parameters that are routed to each strategy."""
    found: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        entry = routing.params.get(names[spec.name])
        if entry is None or entry.local_shape != spec.shape:
            raise RoutingChangedError(
                f"the routing has no parameter {names[spec.name]!r} of shape {spec.shape}; route() the model as it is "
                "wrapped, with the same chunks and fqn",
                names=[spec.name],
            )
        routed = evolve(
            entry.spec, name=spec.name, shape=spec.shape, placements=(), grad_dtype=spec.grad_dtype
        )
        found.setdefault(entry.strategy, []).append(routed)
    return found


def _union(
    by_strategy: Mapping[str, list[ParamSpec]],
    world: World,
    options: LayoutOptions,
    ddp_config: DistributedDataParallelConfig,
) -> dict[BufferKey, PerBufferParamLayout]:
    """Return the buffers that the strategies ask for; parameters for which none is asked lie as by default."""
    sharded = ddp_config.use_distributed_optimizer
    buffers: dict[BufferKey, PerBufferParamLayout] = {}
    others: list[ParamSpec] = []
    for name, specs in by_strategy.items():
        planned = get_registry().strategy(name).buffers(specs, world, options) if sharded else None
        if planned is None:
            others += specs
        else:
            _add(buffers, planned.buffers, name)
    _add(buffers, lay_out_buffers(others, world, options, sharded=sharded), "of the wrapper")
    return buffers


def _add(
    buffers: dict[BufferKey, PerBufferParamLayout],
    more: Mapping[BufferKey, PerBufferParamLayout],
    name: str,
) -> None:
    twice = [key for key in more if key in buffers]
    if twice:
        raise ShardingError(
            f"two sharding strategies give a buffer {twice[0]}, the second is {name!r}: a strategy that lays out "
            "buffers in its own way marks them (is_managed_by_layer_wise)"
        )
    buffers.update(more)


def _spec(named: NamedParam, ddp_config: DistributedDataParallelConfig) -> ParamSpec:
    param, shape = named.param, tuple(named.param.shape)
    grad_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else param.dtype
    return ParamSpec(
        name=named.name,
        shape=shape,
        dtype=param.dtype,
        grad_dtype=grad_dtype,
        optimizer="",
        group=0,
        granularity=Granularity.TENSOR,
        cost=0.0,
        is_expert=is_marked_expert(param),
        shared_embedding=bool(getattr(param, "shared_embedding", False)),
    )
