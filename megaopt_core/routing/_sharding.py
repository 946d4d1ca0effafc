"""Which sharding strategy a model and its optimizers get, and how each lays out what it steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError, ShardingError, warn_user
from megaopt_core.parallel._agreement import Comparison
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.params._shards import Shard, intersect
from megaopt_core.params._specs import Granularity, ParamSpec
from megaopt_core.registry._registry import PluginRegistry, get_registry
from megaopt_core.routing._inventory import InventoryItem
from megaopt_core.routing._routing import UNSHARDED, Routing
from megaopt_core.sharding._elements import extent_of
from megaopt_core.sharding._layout import BufferKey, LayoutOptions, PerBufferParamLayout, World
from megaopt_core.sharding._ownership import Owners, owners_of
from megaopt_core.sharding._protocol import ParamLayout
from megaopt_core.sharding._stage_specs import specs_of_stage

__all__ = ["chosen_strategy", "reduced_elsewhere", "strategies_that_claim", "strategy_layouts", "strategy_of"]


def strategies_that_claim(items: Iterable[InventoryItem], registry: PluginRegistry) -> frozenset[str]:
    """Return the strategies that claim one of this rank's parameters.

    Args:
        items: the parameters that train.
        registry: the plugins.
    """
    found = set()
    divided = [item for item in items if item.part.placements]
    for name, strategy in registry.strategies().items():
        with registry.blaming("strategy", name):
            if any(strategy.claims(item.param, item.part.placements) for item in divided):
                found.add(name)
    return frozenset(found)


def chosen_strategy(config: OptimizerConfig, claims: Collection[str]) -> str:
    """Return the name of the strategy that a model gets, the same on every rank.

    Args:
        config: the run's configuration.
        claims: the strategies that claim a parameter of some rank.

    Raises:
        ConfigurationError: none is configured, and several claim the model.
    """
    if config.sharding is not None or not claims:
        return config.sharding or UNSHARDED
    name, *others = sorted(claims)
    if others:
        raise ConfigurationError(
            f"the sharding strategies {', '.join(sorted(claims))} all claim this model: choose one, such as "
            f"sharding={name!r}",
            setting="sharding",
        )
    return name


def strategy_of(config: OptimizerConfig, optimizer: str, name: str, registry: PluginRegistry) -> str:
    """Return the name of the strategy that shards an optimizer: the routing's, or its fallback.

    Args:
        config: the run's configuration.
        optimizer: name of the optimizer.
        name: the strategy that the routing asks for.
        registry: the plugins.

    Raises:
        ConfigurationError: neither can shard the optimizer's granularity.
    """
    with registry.blaming("optimizer", optimizer):
        granularity = registry.optimizer(optimizer).configured(config).granularity
    strategy = registry.strategy(name)
    if granularity in strategy.granularities:
        return name
    fallback = strategy.fallback
    if fallback is None or granularity not in registry.strategy(fallback).granularities:
        raise ConfigurationError(
            f"sharding={name!r} cannot shard {optimizer!r} (granularity {granularity.value}) "
            "and names no strategy that can",
            setting="sharding",
            value=name,
        )
    if granularity is not Granularity.ELEMENT:
        warn_user(
            f"{optimizer!r} steps {_UNITS[granularity]}: it is sharded with {fallback!r}, not with {name!r}",
            UserWarning,
        )
    return fallback


_UNITS = {Granularity.TENSOR: "whole tensors", Granularity.GROUP: "all of a group together"}


def strategy_layouts(
    routing: Routing,
    pgs: ProcessGroupCollection,
    buffers: Mapping[BufferKey, PerBufferParamLayout] | None = None,
    alike: list[Comparison] | None = None,
) -> dict[str, ParamLayout]:
    """Return the layout of every strategy that a routing uses.

    Args:
        routing: what `route` returned.
        pgs: the process groups.
        buffers: what the model is wrapped in.
        alike: gets what ranks must have alike of the layouts.

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
    registry, layouts = get_registry(), {}
    for strategy in dict.fromkeys(child.strategy for child in routing.children):
        specs = [spec for spec in stage if strategy_of[spec.group] == strategy]
        with registry.blaming("strategy", strategy):
            layout = registry.strategy(strategy).layout(specs, world, options)
        owners = owners_of(strategy, layout, specs, world)
        layouts[strategy] = layout
        if alike is not None:
            alike += _layouts_alike(strategy, owners, pgs, of_stage=buffers is None)
    return layouts


def _layouts_alike(
    strategy: str, owners: Iterable[Owners], pgs: ProcessGroupCollection, *, of_stage: bool
) -> list[Comparison]:
    """Return what ranks must have alike of a layout: those that share parameters out, or all of a pipeline stage."""
    found = []
    for each in owners:
        groups = {pgs.expt_dp if each.is_expert else pgs.dense_dp}
        if of_stage:
            groups |= {pgs.tensor_parallel(is_expert=each.is_expert), pgs.ep}
        what = f"the layout of sharding={strategy!r}{', of experts' * each.is_expert}"
        found += [Comparison(what, each.digest, each.rows, group) for group in groups if communicates(group)]
    return found


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
                    f"sharding={strategy!r} steps elements of {shard.name!r} on a rank whose gradients of them "
                    "DistributedDataParallel does not reduce. Wrap the model with use_distributed_optimizer=False, or "
                    "with buffers in the layout of the strategy (ShardingStrategy.buffers)"
                )
    return None


def _held_here(shard: Shard, routing: Routing) -> Shard:
    """Return what this rank's parameter has of a shard; what it lacks comes from the ranks that have it."""
    entry = routing.params.get(shard.name)
    here = shard.box if entry is None else intersect(shard.box, entry.box)
    return shard if entry is None or here == shard.box else entry.spec.part(here)
