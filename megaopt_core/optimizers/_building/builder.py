"""One optimizer of a routing: its pieces, its precision policy and the inner optimizer, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from megaopt_core.config._group_values import group_checks
from megaopt_core.errors import ConfigurationError
from megaopt_core.execution._exchanged_step import exchanged_step
from megaopt_core.execution._inner import build_inner
from megaopt_core.execution._step_runner import step_runner
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._gradients.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megaopt_core.optimizers._gradients.norm_deduplication import Counting
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.params._names import named_params
from megaopt_core.params._parts import local_tensor
from megaopt_core.params._shards import RankCoordinates
from megaopt_core.params._specs import ParamInfo, PeerGroup
from megaopt_core.precision._choice import precision_policy
from megaopt_core.sharding._attached import duplicated, require_attached, require_sharded_params
from megaopt_core.sharding._layout import Peers, World
from megaopt_core.sharding._live_model import LiveModel, Piece
from megaopt_core.sharding._protocol import ParamLayout
from megaopt_core.state._notes import note_checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.registry._registry import PluginRegistry
    from megaopt_core.routing._groups import ChildSpec
    from megaopt_core.routing._routing import NameMap, Routing

__all__ = ["ChildBuilder", "grad_scaler", "infos_of"]

type PeerGroups = Mapping[tuple[str, int], ProcessGroup]


@frozen(eq=False)
class ChildBuilder:
    """Builds the optimizers of a routing, which have configuration, model, groups and loss scaler in common.

    Args:
        config: the run's configuration.
        chunks: the model's chunks.
        pgs: the process groups.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        scaler: the loss scaler of all.
        registry: the plugins.
    """

    config: OptimizerConfig
    chunks: Sequence[torch.nn.Module]
    pgs: ProcessGroupCollection
    fqn: NameMap | None
    scaler: MegatronGradScaler | None
    registry: PluginRegistry

    def live(self, routing: Routing) -> tuple[LiveModel, dict[str, tuple[torch.nn.Parameter, ...]]]:
        """Return this rank's routed parameters as they are now, and the twins of those that have any.

        Args:
            routing: what is routed.

        Raises:
            ConfigurationError: parameters are on the meta device.
        """
        params, twins = {}, {}
        for index, chunk in enumerate(self.chunks):
            for named in named_params(chunk):
                name = self.fqn(index, named.name) if self.fqn else named.name
                if name in routing.params:
                    params[name] = named.param
                    if named.twins:
                        twins[name] = named.twins
        meta = [name for name, param in params.items() if param.is_meta]
        if meta:
            raise ConfigurationError(
                f"{len(meta)} parameters are on the meta device ({', '.join(meta[:3])}...): materialise the model with "
                "to_empty() and initialise it before building its optimizer; route() and `megaopt explain` work on "
                "meta",
                setting="model_chunks",
                value=meta,
            )
        boxes = {name: entry.box for name, entry in routing.params.items()}
        rank = {**routing.rank, **self.pgs.coordinates}
        return LiveModel(self.chunks, params, boxes, rank, infos_of(routing)), twins

    def build(
        self,
        child: ChildSpec,
        routing: Routing,
        model: LiveModel,
        twins: Mapping[str, tuple[torch.nn.Parameter, ...]],
        layout: ParamLayout,
        peer_groups: PeerGroups,
    ) -> MegatronOptimizer:
        """Return one optimizer of a routing, with state.

        Args:
            child: which one.
            routing: the routing.
            model: this rank's parameters.
            twins: those that share the memory of others, by name.
            layout: of the strategy that shards it.
            peer_groups: the groups of ranks that have parts of one tensor.

        Raises:
            MegaoptError: it cannot be built so.
        """
        entry = self.registry.optimizer(child.optimizer)
        if self.config.fp16 and not entry.supports_fp16:
            raise ConfigurationError(
                f"fp16=True, but {child.optimizer!r} declares no support for fp16; use bf16=True",
                setting="fp16",
                value=True,
            )
        strategy = self.registry.strategy(child.strategy)
        with self.registry.blaming("strategy", child.strategy):
            sharded = strategy.attach(layout, model, self.pgs, child.groups, is_expert=child.is_expert)
        require_sharded_params(sharded, child.strategy)
        specs = {name: entry.spec for name, entry in routing.params.items()}
        world = World({**routing.axes, **self.pgs.axes})
        require_attached(sharded, layout, model.rank, child.groups, child.strategy, specs, world)
        runner = step_runner(self.config, entry, child.optimizer)
        sharded = runner.place(sharded)
        precision = precision_policy(self.config).of(self.config, entry, child.optimizer)
        stepped = precision.attach(sharded.pieces)
        for piece, tensor in zip(sharded.pieces, stepped, strict=True):
            _tag(tensor, piece, model.infos[piece.spec.members[0][1].name], peer_groups)
        public, private = [], []
        for index in child.groups:
            values = dict(routing.groups[index].values)
            tensors = [
                tensor
                for piece, tensor in zip(sharded.pieces, stepped, strict=True)
                if piece.spec.group == index
            ]
            own = list(routing.names_of(index))
            public.append({"params": [model.params[name] for name in own], "param_names": own, **values})
            private.append({"params": tensors, **values})
        with self.registry.blaming("optimizer", child.optimizer):
            inner = build_inner(entry, private, self.config, model.chunks, self.pgs, dict(child.settings))
            split = exchanged_step(entry, child.optimizer, self.config, inner, precision, sharded, stepped)
            if split is None:
                runner.init_state(inner, precision, stepped, entry.init_state_fn or entry.state, self.config)
            else:
                split.init_state()
        names = {model.params[name]: name for index in child.groups for name in routing.names_of(index)}
        part = OptimizerPart(
            inner,
            precision,
            sharded,
            stepped,
            public,
            self.config,
            _counting(routing, layout, model.rank),
            entry.scalar_states,
            split,
            {**group_checks(entry, inner.defaults), **note_checks(inner)},
            runner,
            entry.honours_noop,
        )
        part.settings.copy_outward()
        return MegatronOptimizer(
            [part],
            config=self.config,
            names=names,
            process_groups=self.pgs,
            grad_scaler=self.scaler,
            norm_groups=routing.grad_norm_groups,
            twins={param: twins[name] for param, name in names.items() if name in twins},
            routing=routing,
        )


def infos_of(routing: Routing) -> dict[str, ParamInfo]:
    """Return what inner optimizers are told of every parameter, by name.

    Args:
        routing: the routing.
    """
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


def _tag(tensor: torch.Tensor, piece: Piece, info: ParamInfo, peer_groups: PeerGroups) -> None:
    peers = _peer_group(piece.spec.peers, peer_groups)
    cut = -1 if _is_joined(piece, info.partition_dim) else info.partition_dim
    tensor.param_info = evolve(info, peers=peers, partition_dim=cut)  # type: ignore[attr-defined]


def _is_joined(piece: Piece, dim: int) -> bool:
    """Return whether a piece has more along a dimension than this rank's parameter: parts of several ranks."""
    if dim < 0:
        return False
    ((_, sizes), *_) = (shard.box for _, shard in piece.spec.members)
    return sizes[dim] > local_tensor(piece.model_params[0]).shape[dim]


def _peer_group(peers: Peers | None, peer_groups: PeerGroups) -> PeerGroup | None:
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


def grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """Return the loss scaler that a configuration asks for, None where it asks for none.

    Args:
        config: the run's configuration.
    """
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
