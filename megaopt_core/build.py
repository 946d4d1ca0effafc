"""Building optimizers: from a configuration and a model to something that steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.config._dump import dump_config
from megaopt_core.config._optimizer_config import OptimizerConfig, require_config
from megaopt_core.config._plugin_settings import with_prefixes
from megaopt_core.errors import ConfigurationError
from megaopt_core.execution._step_runner import unused_by_runners
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._building.asked import (
    dtypes_refused,
    refusal,
    require_known_roles,
    require_name,
    require_ownership,
    require_supported,
    require_trainable,
    unused,
)
from megaopt_core.optimizers._building.builder import ChildBuilder, grad_scaler
from megaopt_core.optimizers._building.late_params import LateParams
from megaopt_core.optimizers._building.model_alike import model_alike
from megaopt_core.optimizers._building.phases import raised_on_all
from megaopt_core.optimizers._chained import ChainedOptimizer
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.params._chunks import chunks_of
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.registry._catalogue import CHECKPOINT_READER, DEFAULT_OPTIMIZER
from megaopt_core.registry._missing import import_distribution
from megaopt_core.registry._registry import PluginRegistry, get_registry
from megaopt_core.reporting._watched_model import WatchedModel
from megaopt_core.routing._route import route, usual_modes
from megaopt_core.routing._routing import Routing
from megaopt_core.routing._sharding import reduced_elsewhere, strategy_layouts
from megaopt_core.routing._wrapped_model import checked_buffers, groups_of_wrapped
from megaopt_core.sharding._attached import buffers_alike, make_peer_groups
from megaopt_core.sharding._wrapped import require_whole_grads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megaopt_core.routing._routing import NameMap
    from megaopt_core.routing._stored import GivenRouting

__all__ = ["build_optimizer", "get_megatron_optimizer", "optimizer_from_routing"]


def build_optimizer(
    model: torch.nn.Module | Sequence[torch.nn.Module] = (),
    optimizer: str = DEFAULT_OPTIMIZER,
    *,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
    fqn: NameMap | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
    trusted_names: Collection[str] = (),
    **settings: Any,
) -> MegatronOptimizer:
    """Build an optimizer by name: the short form of :func:`get_megatron_optimizer`.

    Args:
        model: the model, or its chunks.
        optimizer: a registered name; `megaopt optimizers` lists them.
        overrides: per-parameter settings; None means the standard ones (no weight decay on biases and vectors).
        pg_collection: process groups, or a DeviceMesh that names them; None: those that the model is wrapped with, that
            its trainer keeps, of the mesh that its DTensors lie on, or the default group.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        example: a batch that settles doubtful roles, as for :func:`megaopt_core.route`.
        routing: a checkpoint whose routing is built: every parameter gets the optimizer that stepped it there.
        trusted_names: optimizers that `routing` may name although no plugin lists them.
        **settings: any field of :class:`OptimizerConfig`: `lr`, `weight_decay`, `sharding`, `muon_momentum`... The
            optimizer's own may be written without their prefix: `momentum`.

    Returns:
        A `torch.optim.Optimizer`; a chain when more than one optimizer is needed.

    Raises:
        MegaoptError: a setting, an override or the routing is not possible; nothing has been built.

    Example:
        >>> import torch
        >>> from megaopt_core import build_optimizer
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = build_optimizer(model, "adam", lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step().update_successful
        True
    """
    if isinstance(model, tuple) and not model:
        raise ConfigurationError(
            "build_optimizer() was called without a model. The Trainer of Hugging Face calls a factory without "
            "arguments, and its result with the model: optimizer_cls_and_kwargs=(lambda: build_optimizer, {...})"
        )
    require_name(optimizer)
    chunks = chunks_of(model)
    config = OptimizerConfig(optimizer=optimizer, **with_prefixes(optimizer, settings))
    return get_megatron_optimizer(
        config,
        chunks,
        overrides,
        pg_collection=pg_collection,
        fqn=fqn,
        example=example,
        routing=routing,
        trusted_names=trusted_names,
    )


@usual_modes()
def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    fqn: NameMap | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
    trusted_names: Collection[str] = (),
    **removed: Any,
) -> MegatronOptimizer:
    """Build the optimizer of a model's chunks.

    Args:
        config: the run's configuration.
        model_chunks: the model's chunks, wrapped or bare; a single one may be given without a list.
        config_overrides: `{ParamKey: ParamGroupOverride}`; None means the standard overrides, `{}` none.
        use_gloo_process_groups: kept for the signature; no gloo groups are made, whatever it says.
        pg_collection: process groups, or a DeviceMesh that names them; None: those that the model is wrapped with, that
            its trainer keeps, of the mesh that its DTensors lie on, or the default group.
        dump_param_to_param_group_map: folder into which `{parameter name: group id}` is written.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        example: a batch that settles doubtful roles, as for :func:`megaopt_core.route`.
        routing: a checkpoint whose routing is built, as for :func:`megaopt_core.route`.
        trusted_names: as for :func:`megaopt_core.route`.
        **removed: arguments of other trainers that have been replaced (`no_weight_decay_cond`): the error says by what.

    Returns:
        The optimizer; a chain when more than one is needed.

    Raises:
        MegaoptError: a setting, an override or the routing is not possible; nothing has been built.
        TypeError: an argument that never was there.
    """
    for name, value in removed.items():
        if advice := get_registry().advice_on(name, (), kind="argument"):
            raise ConfigurationError(f"{name} has been removed{advice}", setting=name, value=value)
        raise TypeError(f"get_megatron_optimizer() got an unexpected keyword argument {name!r}")
    require_config(config)
    writer: Any = None
    if dump_param_to_param_group_map is not None:
        writer = import_distribution(CHECKPOINT_READER, "dump_param_to_param_group_map")
    chunks = chunks_of(model_chunks)
    given = None if pg_collection is None else ProcessGroupCollection.of(pg_collection)
    pgs = groups_of_wrapped(chunks, given)
    routed = route(
        config,
        chunks,
        config_overrides,
        pgs,
        fqn=fqn,
        example=example,
        routing=routing,
        trusted_names=trusted_names,
    )
    require_trainable(routed)
    if routing is None:
        with raised_on_all(pgs, "finding hidden matrices"):
            require_known_roles(config, routed, get_registry())
    optimizer = optimizer_from_routing(
        routed, config, chunks, pgs, fqn=fqn, config_overrides=config_overrides
    )
    dump_config(config)
    if writer is not None:
        writer.dump_group_map(routed, dump_param_to_param_group_map)
    return optimizer


@usual_modes()
def optimizer_from_routing(
    routing: Routing,
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    pgs: ProcessGroupCollection,
    *,
    fqn: NameMap | None = None,
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
) -> MegatronOptimizer:
    """Build what a routing says.

    Args:
        routing: what :func:`route` returned for these chunks.
        config: the run's configuration.
        chunks: the model's chunks.
        pgs: the process groups.
        fqn: the same as for :func:`route`.
        config_overrides: the same as for :func:`route`: they hold for what begins to train later too.

    Raises:
        OwnershipError: a trainable parameter is owned by no optimizer, or by more than one, or a layout does not share
            its elements out over the data-parallel ranks.
        ParallelGroupError: the model is wrapped with other process groups.
    """
    registry, pgs = get_registry(), groups_of_wrapped(chunks, pgs)
    # What is wrong on one rank alone is raised on all: none waits in a collective for one that has given up.
    with raised_on_all(pgs, "examining the model") as alike:
        if communicates(pgs.dense_dp):
            require_whole_grads(chunks)
        builder = ChildBuilder(config, chunks, pgs, fqn, grad_scaler(config), registry)
        model, twins = builder.live(routing)
        require_supported(config, routing, registry)
        buffers = checked_buffers(chunks, routing, config, fqn)
        watched = WatchedModel(chunks, fqn, frozenset(routing.excluded))
        held = model_alike(watched.named_chunks(), set(model.params.values()), pgs, everything=False)
        alike.extend([*buffers_alike(buffers, pgs), *held])
    with raised_on_all(pgs, "laying out the optimizer") as alike:
        layouts = strategy_layouts(routing, pgs, buffers, alike)
        error = refusal(routing, model.params, registry) or reduced_elsewhere(layouts, routing, buffers)
        if error is not None:
            raise error
    peer_groups = make_peer_groups(layouts.values(), model.rank, pgs)
    with raised_on_all(pgs, "building the optimizer"):
        children = [
            builder.build(child, routing, model, twins, layouts[child.strategy], peer_groups)
            for child in routing.children
        ]
    _agree(routing, children, pgs, registry)
    require_ownership(children, model.params)
    parts = [part for child in children for part in child.parts]
    told = {**unused_by_runners(parts), **dtypes_refused(routing, children, registry)}
    unused_settings = unused(config, routing, model, pgs, builder.scaler, told)
    optimizer = _chained(children, routing.sharding, registry)
    optimizer.watched_model = watched
    optimizer.unused_settings = unused_settings
    optimizer.late = LateParams(optimizer, children, builder, config_overrides)
    with raised_on_all(pgs, "asking for step observers") as alike:
        alike.extend([optimizer.observers.alike(), optimizer.pipeline.transforms.alike()])
    return optimizer


def _chained(children: list[MegatronOptimizer], strategy: str, registry: PluginRegistry) -> MegatronOptimizer:
    """Return the children as one: as the strategy that the configuration names chains them, if it does."""
    with registry.blaming("strategy", strategy):
        chain: MegatronOptimizer | None = registry.strategy(strategy).chain(children)
    if chain is not None:
        return chain
    return children[0] if len(children) == 1 else ChainedOptimizer(children)


def _agree(
    routing: Routing,
    children: Sequence[MegatronOptimizer],
    pgs: ProcessGroupCollection,
    registry: PluginRegistry,
) -> None:
    """Let optimizers settle with those of other ranks what all must choose alike; every rank has built every child."""
    for spec, child in zip(routing.children, children, strict=True):
        agree = registry.optimizer(spec.optimizer).agree
        if agree is not None:
            with registry.blaming("optimizer", spec.optimizer):
                agree(child.parts[0].inner, pgs)
