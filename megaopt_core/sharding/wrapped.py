"""What strategies need to know of chunks that `DistributedDataParallel` wraps: buffers and process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from megaopt_core.errors import ShardingError
from megaopt_core.parallel.groups import ProcessGroupCollection, size_of
from megaopt_core.params.routing import Routing
from megaopt_core.registry import get_registry
from megaopt_core.sharding.base import ParamLayout
from megaopt_core.sharding.layout import BufferKey, LayoutOptions, PerBufferParamLayout, World

if TYPE_CHECKING:
    from megaopt_core.params.routing import NameMap

__all__ = ["groups_of_wrapped", "strategy_layouts", "wrapped_buffers"]


def _shares_out(chunk: torch.nn.Module) -> bool:
    ddp_config: Any = getattr(chunk, "ddp_config", None)
    return bool(getattr(ddp_config, "use_distributed_optimizer", False))


def groups_of_wrapped(
    chunks: Sequence[torch.nn.Module], pgs: ProcessGroupCollection
) -> ProcessGroupCollection:
    """Return the process groups with the ones that wrapping has made: those of several optimizer instances.

    Args:
        chunks: the model chunks.
        pgs: the caller's process groups.
    """
    for chunk in chunks:
        made: ProcessGroupCollection | None = getattr(chunk, "process_groups", None)
        if made is not None and made.intra_dp_cp is not None and pgs.intra_dp_cp is None:
            return evolve(
                pgs,
                intra_dp_cp=made.intra_dp_cp,
                intra_expt_dp=made.intra_expt_dp,
                inter_dist_opt=made.inter_dist_opt,
                inter_expt_dist_opt=made.inter_expt_dist_opt,
                intra_dist_opt=made.intra_dist_opt,
            )
    return pgs


def wrapped_buffers(
    chunks: Sequence[torch.nn.Module], fqn: NameMap | None
) -> dict[BufferKey, PerBufferParamLayout] | None:
    """Return the layouts of the buffers that gradients are scattered into, by global names; None when there are none.

    Args:
        chunks: the model chunks.
        fqn: maps `(chunk index, local name)` to a globally unique name.

    Raises:
        ShardingError: some chunks are wrapped that way and others are not.
    """
    sharing = [_shares_out(chunk) for chunk in chunks]
    if not any(sharing):
        return None
    if not all(sharing):
        raise ShardingError(
            f"model chunks {[index for index, yes in enumerate(sharing) if not yes]} are not wrapped in "
            "DistributedDataParallel with use_distributed_optimizer=True as the others are; wrap all or none"
        )
    buffers = {}
    for index, chunk in enumerate(chunks):
        full: Any = chunk.full_param_layout
        for key, buffer in full.buffers.items():

            def rename(name: str, chunk_index: int = index) -> str:
                return fqn(chunk_index, name) if fqn else name

            buffers[evolve(key, chunk=index)] = PerBufferParamLayout(
                {rename(name): where for name, where in buffer.param_ranges.items()},
                buffer.bucket_ends,
                {rename(name): bucket for name, bucket in buffer.bucket_of.items()},
            )
    return buffers


def strategy_layouts(
    routing: Routing,
    pgs: ProcessGroupCollection,
    buffers: Mapping[BufferKey, PerBufferParamLayout] | None = None,
) -> dict[str, ParamLayout]:
    """Return the layout of every strategy that a routing uses.

    Args:
        routing: what `route` returned.
        pgs: the process groups.
        buffers: what the model is wrapped in.
    """
    world = World(size_of(pgs.shard_group()), size_of(pgs.shard_group(is_expert=True)))
    chunk_of = {name: entry.chunk for name, entry in routing.params.items() if entry.chunk}
    options = LayoutOptions(buffers=buffers, chunk_of=chunk_of)
    layouts = {}
    for strategy in dict.fromkeys(child.strategy for child in routing.children):
        specs = [entry.spec for entry in routing.params.values() if entry.strategy == strategy]
        layouts[strategy] = get_registry().strategy(strategy).layout(specs, world, options)
    return layouts
