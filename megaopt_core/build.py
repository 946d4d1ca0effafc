"""Building optimizers: from a configuration and a model to something that steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve

from megaopt_core.config._dump import dump_config
from megaopt_core.config._group_values import group_checks
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.config._plugin_settings import with_prefixes
from megaopt_core.errors import (
    ConfigurationError,
    MegaoptError,
    OwnershipError,
    ShardingError,
    UnsupportedSettingError,
)
from megaopt_core.execution._exchanged_step import exchanged_step
from megaopt_core.execution._inner import build_inner, init_inner_state
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._between_steps.look import ModelLook
from megaopt_core.optimizers._chained import ChainedOptimizer
from megaopt_core.optimizers._gradients.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megaopt_core.optimizers._gradients.norm_deduplication import Counting, counting_rule
from megaopt_core.optimizers._loading.late_params import LateParams
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._tied_params import Twins
from megaopt_core.parallel._agreement import Comparison, agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.parallel._meeting import takes_part
from megaopt_core.params._chunks import chunks_of
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._names import named_params
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._parts import local_tensor
from megaopt_core.params._specs import ParamInfo, PeerGroup, RankCoordinates
from megaopt_core.precision._choice import precision_policy, require_possible
from megaopt_core.registry._catalogue import DEFAULT_OPTIMIZER
from megaopt_core.registry._registry import get_registry
from megaopt_core.reporting._replicas import Replicas
from megaopt_core.reporting._unused_settings import Use, unused_settings, warn_of_unused
from megaopt_core.reporting._watched_model import WatchedModel
from megaopt_core.routing._agreement import ADVICE
from megaopt_core.routing._groups import ChildSpec
from megaopt_core.routing._routing import Routing, route, route_added
from megaopt_core.routing._wrapped_model import (
    groups_of_wrapped,
    reduced_elsewhere,
    require_same_overlap,
    strategy_layouts,
    wrapped_buffers,
)
from megaopt_core.sharding._agreement import buffers_alike
from megaopt_core.sharding._attached import (
    duplicated,
    make_peer_groups,
    require_attached,
    require_sharded_params,
)
from megaopt_core.sharding._layout import LayoutOptions, Peers, World
from megaopt_core.sharding._protocol import LiveModel, ParamLayout, Piece
from megaopt_core.sharding._wrapped import wrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from megaopt_core.routing._routing import NameMap
    from megaopt_core.routing._stored import GivenRouting

__all__ = ["build_optimizer", "get_megatron_optimizer", "optimizer_from_routing"]

_STRATEGY_SETTINGS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")


def build_optimizer(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: str = DEFAULT_OPTIMIZER,
    *,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
    fqn: NameMap | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
    **settings: Any,
) -> MegatronOptimizer:
    """Build an optimizer by name: the short form of :func:`get_megatron_optimizer`.

    Args:
        model: the model, or its chunks.
        optimizer: a registered name; `megaopt optimizers` lists them.
        overrides: per-parameter settings; None means the standard ones (no weight decay on biases and vectors).
        pg_collection: process groups, or a DeviceMesh that names them; None: those that the model is wrapped with, or
            the default group.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        example: a batch that settles doubtful roles, as for :func:`megaopt_core.route`.
        routing: a checkpoint whose routing is built: every parameter gets the optimizer that stepped it there.
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
    _require_name(optimizer)
    chunks = chunks_of(model)
    config = OptimizerConfig(optimizer=optimizer, **with_prefixes(optimizer, settings))
    return get_megatron_optimizer(
        config, chunks, overrides, pg_collection=pg_collection, fqn=fqn, example=example, routing=routing
    )


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
) -> MegatronOptimizer:
    """Build the optimizer of a model's chunks.

    Args:
        config: the run's configuration.
        model_chunks: the model's chunks, wrapped or bare; a single one may be given without a list.
        config_overrides: `{ParamKey: ParamGroupOverride}`; None means the standard overrides, `{}` none.
        use_gloo_process_groups: kept for the signature; no gloo groups are made, whatever it says.
        pg_collection: process groups, or a DeviceMesh that names them; None: those that the model is wrapped with, or
            the default group.
        dump_param_to_param_group_map: folder into which `{parameter name: group id}` is written.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        example: a batch that settles doubtful roles, as for :func:`megaopt_core.route`.
        routing: a checkpoint whose routing is built, as for :func:`megaopt_core.route`.

    Returns:
        The optimizer; a chain when more than one is needed.

    Raises:
        MegaoptError: a setting, an override or the routing is not possible; nothing has been built.
    """
    _require_config(config)
    chunks = chunks_of(model_chunks)
    given = None if pg_collection is None else ProcessGroupCollection.of(pg_collection)
    pgs = groups_of_wrapped(chunks, given)
    routed = route(config, chunks, config_overrides, pgs, fqn=fqn, example=example, routing=routing)
    _require_trainable(routed)
    optimizer = optimizer_from_routing(
        routed, config, chunks, pgs, fqn=fqn, config_overrides=config_overrides
    )
    if config.config_logger_dir:
        dump_config(config, config.config_logger_dir)
    if dump_param_to_param_group_map is not None:
        from megaopt_core.state._group_map import dump_group_map

        dump_group_map(routed, dump_param_to_param_group_map)
    return optimizer


def _require_name(optimizer: object) -> None:
    if isinstance(optimizer, str):
        return
    if isinstance(optimizer, (OptimizerConfig, Mapping)):
        advice = "a configuration goes to get_megatron_optimizer(config, model), its settings here as keywords: lr=..."
    elif isinstance(optimizer, torch.optim.Optimizer):
        advice = "an optimizer that is built already is wrapped: FP32Optimizer(optimizer, config)"
    else:
        advice = "`megaopt optimizers` lists the names; a class of another package gets one from a plugin"
    shown = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    raise ConfigurationError(
        f"optimizer: got {shown}; give a registered name: {advice}",
        setting="optimizer",
        value=optimizer,
    )


def _require_config(config: object) -> None:
    if isinstance(config, OptimizerConfig):
        return
    if isinstance(config, Mapping):
        advice = "OptimizerConfig.from_dict(settings) makes one of a mapping"
    elif isinstance(config, type):
        advice = f"give an instance: {config.__name__}(lr=...)"
    else:
        advice = "the configuration comes first, then the model: get_megatron_optimizer(config, model)"
    shown = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
    raise ConfigurationError(
        f"config: got {shown}, not an OptimizerConfig; {advice}", setting="config", value=config
    )


def _require_trainable(routing: Routing) -> None:
    """Raise if no rank has a parameter to step."""
    if routing.groups:
        return
    if routing.frozen or routing.excluded:
        left = f"{len(routing.frozen)} are frozen (requires_grad=False)"
        left += f", {len(routing.excluded)} left to somebody else" if routing.excluded else ""
        raise ConfigurationError(
            f"there is nothing to train: of the model's {len(routing.frozen) + len(routing.excluded)} parameters "
            f"{left}; unfreeze those that are to train before you build",
            setting="model",
        )
    raise ConfigurationError("there is nothing to train: the model has no parameters", setting="model")


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
    pgs = groups_of_wrapped(chunks, pgs)
    # What is wrong on one rank alone is raised on all: none waits in a collective for one that has given up.
    with _raised_on_all(pgs, "examining the model") as phase:
        for chunk in wrapped(chunks):
            if chunk is not None and chunk.full_param_layout.routing is not None:
                chunk.full_param_layout.routing.require_same(routing)
        params, twins = _live_params(chunks, fqn, routing)
        _require_supported(config, routing)
        require_same_overlap(chunks, config)
        scaler = _grad_scaler(config)
        buffers = wrapped_buffers(chunks, fqn)
        phase.alike = buffers_alike(buffers, pgs)
    with _raised_on_all(pgs, "laying out the optimizer"):
        layouts = strategy_layouts(routing, pgs, buffers)
        error = _refusal(routing, params) or reduced_elsewhere(layouts, routing, buffers)
        if error is not None:
            raise error
    boxes = {name: entry.box for name, entry in routing.params.items()}
    model = LiveModel(chunks, params, boxes, {**routing.rank, **pgs.coordinates}, _infos(routing))
    peer_groups = make_peer_groups(layouts.values(), model.rank, pgs)
    with _raised_on_all(pgs, "building the optimizer"):
        children = [
            _build_child(
                child, routing, config, model, twins, pgs, layouts[child.strategy], scaler, peer_groups
            )
            for child in routing.children
        ]
    _agree(routing, children, pgs)
    _require_ownership(children, params)
    unused = _unused(config, routing, model, pgs, scaler)
    named = config.sharding or "replicated"
    with get_registry().blaming("strategy", named):
        chain = get_registry().strategy(named).chain(children)
    if chain is None:
        chain = children[0] if len(children) == 1 else ChainedOptimizer(children)
    optimizer = chain
    optimizer.watched_model = WatchedModel(chunks, fqn, frozenset(routing.excluded))
    optimizer.unused_settings = unused
    if takes_part(pgs):
        optimizer.replicas = Replicas(pgs)
        optimizer.before_first_step = optimizer.require_equal_replicas
    optimizer.late = _late_params(optimizer, children, config, chunks, config_overrides, pgs, fqn, scaler)
    return optimizer


def _agree(routing: Routing, children: Sequence[MegatronOptimizer], pgs: ProcessGroupCollection) -> None:
    """Let optimizers settle with those of other ranks what all must choose alike; every rank has built every child."""
    registry = get_registry()
    for spec, child in zip(routing.children, children, strict=True):
        agree = registry.optimizer(spec.optimizer).agree
        if agree is not None:
            with registry.blaming("optimizer", spec.optimizer):
                agree(child.parts[0].inner, pgs)


@define
class _Phase:
    """A phase of building, of which ranks tell each other how it went.

    Args:
        alike: what ranks must have alike afterwards.
    """

    alike: Sequence[Comparison] = ()


@contextmanager
def _raised_on_all(pgs: ProcessGroupCollection, what: str) -> Iterator[_Phase]:
    phase, error = _Phase(), None
    try:
        yield phase
    except MegaoptError as raised:
        error = raised
    agree_over_ranks(None, pgs, what, error=error, alike=phase.alike, advice=ADVICE)


def _late_params(
    optimizer: MegatronOptimizer,
    children: list[MegatronOptimizer],
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    pgs: ProcessGroupCollection,
    fqn: NameMap | None,
    scaler: MegatronGradScaler | None,
) -> LateParams:
    """Return what brings parameters that begin to train later to an optimizer."""

    def build(routing: Routing, position: int) -> MegatronOptimizer:
        child = routing.children[position]
        params, twins = _live_params(chunks, fqn, routing)
        specs = [entry.spec for entry in routing.params.values() if entry.spec.group in child.groups]
        boxes = {name: entry.box for name, entry in routing.params.items()}
        model = LiveModel(chunks, params, boxes, {**routing.rank, **pgs.coordinates}, _infos(routing))
        layout = get_registry().strategy(child.strategy).layout(specs, World(routing.axes), LayoutOptions())
        return _build_child(child, routing, config, model, twins, pgs, layout, scaler, {})

    def count(routing: Routing, name: str) -> Counting:
        entry = routing.params[name]
        return counting_rule(
            pgs,
            shared=entry.shared,
            tensor_parallel=entry.tensor_parallel,
            is_expert=entry.spec.is_expert,
            norm_group=entry.grad_norm_group,
        )

    look = ModelLook(chunks, optimizer.names, optimizer.twins)
    left = frozenset(() if optimizer.routing is None else optimizer.routing.excluded)
    for index, chunk in enumerate(chunks):
        for named in named_params(chunk):
            if (fqn(index, named.name) if fqn else named.name) in left:
                look.leave((named.param, *named.twins))
    return LateParams(
        look,
        optimizer,
        children,
        fqn,
        route=lambda routing, names: route_added(routing, names, config, chunks, config_overrides, pgs, fqn),
        build=build,
        info=lambda routing, name: _infos(routing)[name],
        count=count,
    )


def _live_params(
    chunks: Sequence[torch.nn.Module], fqn: NameMap | None, routing: Routing
) -> tuple[dict[str, torch.nn.Parameter], dict[str, tuple[torch.nn.Parameter, ...]]]:
    """Return every routed parameter by name, and the twins of those that have any."""
    params, twins = {}, {}
    for index, chunk in enumerate(chunks):
        for named in named_params(chunk):
            name = fqn(index, named.name) if fqn else named.name
            if name in routing.params:
                params[name] = named.param
                if named.twins:
                    twins[name] = named.twins
    meta = [name for name, param in params.items() if param.is_meta]
    if meta:
        raise ConfigurationError(
            f"{len(meta)} parameters are on the meta device ({', '.join(meta[:3])}...): materialise the model with "
            "to_empty() and initialise it before building its optimizer; route() and `megaopt explain` work on meta",
            setting="model_chunks",
            value=meta,
        )
    return params, twins


def _refusal(routing: Routing, params: Mapping[str, torch.nn.Parameter]) -> ShardingError | None:
    """Return why a strategy cannot take one of this rank's parameters; other ranks may hold none like it."""
    registry = get_registry()
    for name, param in params.items():
        entry = routing.params[name]
        with registry.blaming("strategy", entry.strategy):
            reason = registry.strategy(entry.strategy).refuse(param, entry.spec)
        if reason is not None:
            return ShardingError(f"sharding={entry.strategy!r} cannot take {name!r}: {reason}")
    return None


def _build_child(
    child: ChildSpec,
    routing: Routing,
    config: OptimizerConfig,
    model: LiveModel,
    twins: Mapping[str, tuple[torch.nn.Parameter, ...]],
    pgs: ProcessGroupCollection,
    layout: ParamLayout,
    scaler: MegatronGradScaler | None,
    peer_groups: Mapping[tuple[str, int], ProcessGroup],
) -> MegatronOptimizer:
    entry = get_registry().optimizer(child.optimizer)
    if config.fp16 and not entry.supports_fp16:
        raise ConfigurationError(
            f"fp16=True, but {child.optimizer!r} declares no support for fp16; use bf16=True",
            setting="fp16",
            value=True,
        )
    strategy = get_registry().strategy(child.strategy)
    with get_registry().blaming("strategy", child.strategy):
        sharded = strategy.attach(layout, model, pgs, child.groups, is_expert=child.is_expert)
    require_sharded_params(sharded, child.strategy)
    require_attached(sharded, layout, model.rank, child.groups, child.strategy)
    precision = precision_policy(config, entry, child.optimizer)
    stepped = precision.attach(sharded.pieces)
    for piece, tensor in zip(sharded.pieces, stepped, strict=True):
        _tag(tensor, piece, model.infos[piece.spec.members[0][1].name], peer_groups)
    public, private = [], []
    for index in child.groups:
        values = dict(routing.groups[index].values)
        tensors = [
            tensor for piece, tensor in zip(sharded.pieces, stepped, strict=True) if piece.spec.group == index
        ]
        public.append({"params": [model.params[name] for name in routing.names_of(index)], **values})
        private.append({"params": tensors, **values})
    with get_registry().blaming("optimizer", child.optimizer):
        inner = build_inner(entry, private, config, model.chunks, pgs, dict(child.settings))
        split = exchanged_step(entry, child.optimizer, config, inner, precision, sharded, stepped)
        if split is None:
            init_inner_state(inner, precision, entry.init_state_fn, config)
        else:
            split.init_state()
    for group, inside in zip(public, inner.param_groups, strict=True):
        group.update({key: value for key, value in inside.items() if key != "params"})
    names = {model.params[name]: name for index in child.groups for name in routing.names_of(index)}
    part = OptimizerPart(
        inner,
        precision,
        sharded,
        stepped,
        public,
        config,
        _counting(routing, layout, model.rank),
        entry.scalar_states,
        split,
        group_checks(entry, inner.defaults),
    )
    return MegatronOptimizer(
        [part],
        config=config,
        names=names,
        process_groups=pgs,
        grad_scaler=scaler,
        norm_groups=routing.grad_norm_groups,
        twins=Twins({param: twins[name] for param, name in names.items() if name in twins}),
        routing=routing,
    )


def _infos(routing: Routing) -> dict[str, ParamInfo]:
    """Return what inner optimizers are told of every parameter."""
    position = {index: at for child in routing.children for at, index in enumerate(child.groups)}
    return {
        name: ParamInfo(
            name=name,
            role=entry.decision.role,
            view=entry.decision.view,
            is_expert=entry.spec.is_expert,
            partition_dim=entry.partition_dim,
            shape=entry.spec.shape,
            group=position[entry.spec.group],
        )
        for name, entry in routing.params.items()
    }


def _tag(
    tensor: torch.Tensor, piece: Piece, info: ParamInfo, peer_groups: Mapping[tuple[str, int], ProcessGroup]
) -> None:
    peers = _peer_group(piece.spec.peers, peer_groups)
    cut = -1 if _is_joined(piece, info.partition_dim) else info.partition_dim
    tensor.param_info = evolve(info, peers=peers, partition_dim=cut)  # type: ignore[attr-defined]


def _is_joined(piece: Piece, dim: int) -> bool:
    """Return whether a piece has more along a dimension than this rank's parameter: parts of several ranks."""
    if dim < 0:
        return False
    ((_, sizes), *_) = (shard.box for _, shard in piece.spec.members)
    return sizes[dim] > local_tensor(piece.model_params[0]).shape[dim]


def _peer_group(peers: Peers | None, peer_groups: Mapping[tuple[str, int], ProcessGroup]) -> PeerGroup | None:
    """Return the ranks that have parts of the same tensor; replicas need not know of each other."""
    if peers is None or peers.dim is None or peers.size == 1:
        return None
    return PeerGroup(peer_groups[peers.axis, peers.size], peers.dim)


def _counting(routing: Routing, layout: ParamLayout, rank: RankCoordinates) -> dict[str, Counting]:
    experts = {name for name, entry in routing.params.items() if entry.spec.is_expert}
    copies = duplicated(layout, rank, experts)
    return {
        name: Counting(
            counted=not entry.shared and (entry.tensor_parallel or name not in copies),
            norm_group=entry.grad_norm_group,
        )
        for name, entry in routing.params.items()
    }


def _require_supported(config: OptimizerConfig, routing: Routing) -> None:
    """Raise if a setting is on that nothing in use acts on."""
    registry = get_registry()
    require_possible(
        config, {child.optimizer: registry.optimizer(child.optimizer) for child in routing.children}
    )
    used = sorted({child.strategy for child in routing.children})
    for setting in _STRATEGY_SETTINGS:
        supported = any(setting in registry.strategy(name).supported_settings for name in used)
        if getattr(config, setting) and not supported:
            raise UnsupportedSettingError(
                f"{setting}=True: has no effect with the sharding strategy {', '.join(map(repr, used))}, which gathers "
                "no parameters; leave it out, or choose a strategy that overlaps",
                setting=setting,
                value=True,
            )


def _unused(
    config: OptimizerConfig,
    routing: Routing,
    model: LiveModel,
    pgs: ProcessGroupCollection,
    scaler: MegatronGradScaler | None,
) -> tuple[str, ...]:
    """Return the settings that nothing in use acts on, and warn of them."""
    registry = get_registry()
    unused = unused_settings(
        Use(
            config,
            frozenset(param.dtype for param in model.params.values() if param.is_floating_point()),
            {child.optimizer: registry.optimizer(child.optimizer) for child in routing.children},
            routing,
            model.chunks,
            pgs,
            scales_dynamically=isinstance(scaler, DynamicGradScaler),
        )
    )
    warn_of_unused(unused, stacklevel=4)
    return unused


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )


def _require_ownership(
    children: Sequence[MegatronOptimizer], params: Mapping[str, torch.nn.Parameter]
) -> None:
    owned: dict[torch.nn.Parameter, int] = {}
    for child in children:
        for param in child.get_parameters():
            owned[param] = owned.get(param, 0) + 1
    wrong = [name for name, param in params.items() if owned.get(param, 0) != 1]
    if wrong:
        raise OwnershipError(
            f"{len(wrong)} trainable parameters are not owned exactly once: {', '.join(wrong[:5])}",
            names=wrong,
        )
