"""What strategies need to know of chunks that `DistributedDataParallel` wraps: buffers and process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from attrs import evolve

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError, ParallelGroupError, ShardingError
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of
from megaopt_core.params._meshes import groups_of_model
from megaopt_core.params._names import named_params
from megaopt_core.params._shards import Shard, intersect
from megaopt_core.params._specs import ParamSpec
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._routing import Routing
from megaopt_core.sharding._elements import extent_of
from megaopt_core.sharding._layout import BufferKey, LayoutOptions, PerBufferParamLayout, World
from megaopt_core.sharding._ownership import require_partition
from megaopt_core.sharding._protocol import ParamLayout
from megaopt_core.sharding._stage_specs import specs_of_stage
from megaopt_core.sharding._wrapped import WrappedModel, wrappers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.routing._routing import NameMap

__all__ = [
    "groups_of_wrapped",
    "reduced_elsewhere",
    "require_as_planned",
    "require_same_overlap",
    "require_same_ranks",
    "strategy_layouts",
    "wrapped_buffers",
]


def groups_of_wrapped(
    chunks: Sequence[torch.nn.Module], pgs: ProcessGroupCollection | None
) -> ProcessGroupCollection:
    """Return the process groups of a model: the caller's, and what only its wrapper knows.

    Args:
        chunks: the model chunks.
        pgs: the caller's process groups; None: the wrapper's; where no chunk has one of ours, those of the
            mesh that its DTensors lie on, or the default group.

    Raises:
        ParallelGroupError: a wrapper reduces gradients over other ranks than the caller's groups name.
    """
    for index, wrapper in _each(chunks):
        made = wrapper.process_groups
        if pgs is None:
            pgs = made
        require_same_ranks(index, wrapper, pgs)
        if made.intra_dp_cp is not None and pgs.intra_dp_cp is None:
            pgs = evolve(
                pgs,
                intra_dp_cp=made.intra_dp_cp,
                intra_expt_dp=made.intra_expt_dp,
                inter_dist_opt=made.inter_dist_opt,
                inter_expt_dist_opt=made.inter_expt_dist_opt,
                intra_dist_opt=made.intra_dist_opt,
            )
    return groups_of_model(chunks) if pgs is None else ProcessGroupCollection.of(pgs)


def _each(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[int, WrappedModel]]:
    """Yield every wrapper with the index of the first chunk whose gradients it reduces."""
    seen: set[int] = set()
    for index, chunk in enumerate(chunks):
        for wrapper in wrappers_of([chunk]):
            if id(wrapper) not in seen:
                seen.add(id(wrapper))
                yield index, wrapper


def require_same_ranks(index: int, wrapper: WrappedModel, given: ProcessGroupCollection) -> None:
    """Raise unless a wrapper reduces gradients over the ranks that an optimizer is built for.

    Args:
        index: which chunk's wrapper it is.
        wrapper: the wrapper.
        given: the optimizer's process groups.

    Raises:
        ParallelGroupError: it reduces them over others.
    """
    made = wrapper.process_groups
    pairs = [
        ("dense", given.dense_dp, made.dense_dp),
        ("one instance's", given.intra_dp_cp, made.intra_dp_cp),
    ]
    if any(key.is_expert for key in wrapper.full_param_layout.buffers):
        pairs += [
            ("expert", given.expt_dp, made.expt_dp),
            ("one instance's expert", given.intra_expt_dp, made.intra_expt_dp),
        ]
    for whose, mine, theirs in pairs:
        only_wrapping_made_it = mine is None and whose.startswith("one instance")
        if not only_wrapping_made_it and _ranks(mine) != _ranks(theirs):
            raise ParallelGroupError(
                f"model chunk {index} is wrapped over other ranks than the optimizer is built for: {whose} "
                f"data-parallel ranks {_ranks(theirs)} and {_ranks(mine)}. Pass the same pg_collection to both, or "
                "leave it out here"
            )


def _ranks(group: ProcessGroup | None) -> list[int]:
    """Return the ranks of a group; none for a group of one rank, which is as good as no group."""
    return [] if group is None or size_of(group) == 1 else dist.get_process_group_ranks(group)


def require_as_planned(chunks: Sequence[torch.nn.Module], routing: Routing, fqn: NameMap | None) -> None:
    """Raise unless a model is routed as it was when the buffers of its wrappers were planned.

    Args:
        chunks: the model chunks.
        routing: what `route` returned.
        fqn: maps `(chunk index, local name)` to a globally unique name.

    Raises:
        RoutingChangedError: it is routed otherwise.
    """
    for index, wrapper in _each(chunks):
        planned = wrapper.full_param_layout.routing
        if planned is None:
            continue
        names: dict[str, str] = {}
        if not routing.params.keys() >= planned.params.keys():  # planned without what holds the wrapper
            local = _names_in(index, chunks[index], wrapper)
            names = {
                fqn(index, old) if fqn else old: fqn(index, new) if fqn else new for old, new in local.items()
            }
        planned.require_same(routing, names)


def wrapped_buffers(
    chunks: Sequence[torch.nn.Module], fqn: NameMap | None
) -> dict[BufferKey, PerBufferParamLayout] | None:
    """Return the layouts of the buffers that gradients are scattered into, by global names; None when there are none.

    Args:
        chunks: the model chunks.
        fqn: maps `(chunk index, local name)` to a globally unique name.

    Raises:
        ShardingError: some chunks are wrapped that way and others are not, or a chunk has several wrappers or not all
            that is in its wrapper.
    """
    sharing = [[wrapper for wrapper in wrappers_of([chunk]) if wrapper.scatters_grads] for chunk in chunks]
    if not any(sharing):
        return None
    if not all(sharing):
        raise ShardingError(
            f"model chunks {[index for index, found in enumerate(sharing) if not found]} are not wrapped in "
            "DistributedDataParallel with use_distributed_optimizer=True as the others are; wrap all or none"
        )
    buffers = {}
    for index, (chunk, found) in enumerate(zip(chunks, sharing, strict=True)):
        wrapper = _only(index, chunk, found)
        local = _names_in(index, chunk, wrapper)
        for key, buffer in wrapper.full_param_layout.buffers.items():

            def rename(name: str, chunk_index: int = index, local: Mapping[str, str] = local) -> str:
                return fqn(chunk_index, local[name]) if fqn else local[name]

            buffers[evolve(key, chunk=index)] = evolve(
                buffer,
                param_ranges={rename(name): where for name, where in buffer.param_ranges.items()},
                bucket_of={rename(name): bucket for name, bucket in buffer.bucket_of.items()},
            )
    return buffers


def _only(index: int, chunk: torch.nn.Module, found: Sequence[WrappedModel]) -> WrappedModel:
    """Return the one wrapper of a chunk, whose buffers are those of the chunk."""
    if len(found) < len(wrappers_of([chunk])) or len(found) > 1:
        raise ShardingError(
            f"{len(wrappers_of([chunk]))} wrappers reduce gradients of model chunk {index}, and "
            f"{len(found)} of them scatter gradients over ranks (use_distributed_optimizer=True): give the optimizer a "
            "list in which each of them is a chunk of its own"
        )
    return found[0]


def _names_in(index: int, chunk: torch.nn.Module, wrapper: WrappedModel) -> dict[str, str]:
    """Return the names that a chunk has for the parameters in a wrapper's buffers."""
    names = [name for buffer in wrapper.full_param_layout.buffers.values() for name in buffer.param_ranges]
    if id(chunk) == id(wrapper):
        return dict(zip(names, names, strict=True))
    name_of = {param: entry.name for entry in named_params(chunk) for param in (entry.param, *entry.twins)}
    theirs = {entry.name: entry.param for entry in named_params(cast("torch.nn.Module", wrapper))}
    local = {name: name_of[theirs[name]] for name in names if theirs.get(name) in name_of}
    lacking = [name for name in names if name not in local]
    if lacking:
        raise ShardingError(
            f"{type(wrapper).__name__} shares out gradients of {len(lacking)} parameters that model chunk {index} has "
            f"not: {', '.join(lacking[:5])}. Build the optimizer for the wrapper, and exclude what it is not to step"
        )
    return local


def require_same_overlap(chunks: Sequence[torch.nn.Module], config: OptimizerConfig) -> None:
    """Raise unless the optimizer leaves waiting for parameters to forward hooks exactly where wrapping has put them.

    Args:
        chunks: the model chunks.
        config: the optimizer's configuration.

    Raises:
        ConfigurationError: `overlap_param_gather` has one value here and another in a chunk's wrapper.
    """
    asked = config.overlap_param_gather
    for index, chunk in enumerate(chunks):
        found = wrappers_of([chunk])
        if all(wrapper.forward_waits is asked for wrapper in found) and (found or not asked):
            continue
        if any(wrapper.scatters_grads for wrapper in found):
            reason = f"is wrapped with overlap_param_gather={not asked}; give all chunks and the optimizer one value"
        else:
            reason = (
                "is not wrapped in DistributedDataParallel(use_distributed_optimizer=True), whose forward hooks wait "
                "for parameters; leave it out"
            )
        raise ConfigurationError(
            f"overlap_param_gather={asked}, but model chunk {index} {reason}",
            setting="overlap_param_gather",
            value=asked,
        )


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

    Raises:
        OwnershipError: a layout leaves elements of a parameter to no rank, or gives them to more than one.
    """
    # A routing may have been made before there were process groups.
    world = World({**routing.axes, **pgs.axes})
    chunk_of = {name: entry.chunk for name, entry in routing.params.items() if entry.chunk}
    options = LayoutOptions(buffers=buffers, chunk_of=chunk_of)
    mine = [entry.spec for entry in routing.params.values()]
    # The buffers are those of this rank, and of the ranks that have the same parameters.
    stage: Sequence[ParamSpec] = mine
    if buffers is None:
        rank = {**routing.rank, **pgs.coordinates}
        stage = specs_of_stage(mine, pgs, rank, world, routing.digest)
    strategy_of = {child_group: child.strategy for child in routing.children for child_group in child.groups}
    layouts = {}
    for strategy in dict.fromkeys(child.strategy for child in routing.children):
        specs = [spec for spec in stage if strategy_of[spec.group] == strategy]
        with get_registry().blaming("strategy", strategy):
            layout = get_registry().strategy(strategy).layout(specs, world, options)
        require_partition(strategy, layout, specs, world)
        layouts[strategy] = layout
    return layouts


def reduced_elsewhere(
    layouts: Mapping[str, ParamLayout],
    routing: Routing,
    buffers: Mapping[BufferKey, PerBufferParamLayout] | None,
) -> ShardingError | None:
    """Return why this rank cannot step a piece: its gradient is reduced to another rank; None when all is here.

    Args:
        layouts: the layout of every strategy in use.
        routing: what `route` returned.
        buffers: the buffers that gradients are scattered into; None: every rank has whole gradients.
    """
    if buffers is None:
        return None
    world, rank = World(routing.axes), routing.rank
    lies_in = {name: (key, buffer) for key, buffer in buffers.items() for name in buffer.param_ranges}
    for strategy, layout in layouts.items():
        steps = ((piece.peers, shard) for piece in layout.pieces(rank) for _, shard in piece.members)
        for peers, shard in ((peers, _held_here(shard, routing)) for peers, shard in steps):
            if shard.name not in lies_in or not shard.numel:
                continue
            key, buffer = lies_in[shard.name]
            axis = "expert_dp" if key.is_expert else "dp"
            first = last = rank.get(axis, 0)
            if peers is not None and peers.axis == axis and peers.dim is not None:
                # Together the peers have all of it, and exchange what each steps.
                first, last = first - peers.index, first - peers.index + peers.size - 1
            bucket, ranks = buffer.bucket_of[shard.name], world.size(axis)
            low, high = buffer.share(bucket, first, ranks)[0], buffer.share(bucket, last, ranks)[1]
            begin = buffer.param_ranges[shard.name][0]
            first, last = extent_of(routing.params[shard.name].box, shard)
            if begin + first < low or begin + last > high:
                return ShardingError(
                    f"sharding={strategy!r} steps elements of {shard.name!r} on a rank to which "
                    "DistributedDataParallel does not reduce their gradients: wrap the model with "
                    "use_distributed_optimizer=False, or with buffers that the strategy lays out "
                    "(ShardingStrategy.buffers), of which it steps a rank's share"
                )
    return None


def _held_here(shard: Shard, routing: Routing) -> Shard:
    """Return what this rank's parameter has of a shard; what it lacks comes from the ranks that have it."""
    entry = routing.params.get(shard.name)
    here = shard.box if entry is None else intersect(shard.box, entry.box)
    return shard if entry is None or here == shard.box else entry.spec.part(here)
