"""Routing: which optimizer, group and strategy every parameter gets, and why, as pure data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, evolve, frozen

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import MegaoptError, RoutingChangedError, RoutingError
from megaopt_core.parallel._agreement import agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._chunks import chunks_of
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._meshes import groups_of_model
from megaopt_core.params._overrides import NO_OPTIMIZER, ParamGroupOverride
from megaopt_core.params._roles import RoleDecision
from megaopt_core.params._shards import Box, RankCoordinates, Shard
from megaopt_core.params._specs import ParamSpec
from megaopt_core.plugin_api._stored_routing import StoredRouting
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._agreement import ADVICE, Holding, params_alike, settings_alike
from megaopt_core.routing._assign import Assigner, Assignment
from megaopt_core.routing._groups import (
    ChildSpec,
    GroupKey,
    GroupSpec,
    children_of,
    group_values,
    order_children,
)
from megaopt_core.routing._inventory import Inventory, InventoryItem, take_inventory
from megaopt_core.routing._matching import STANDARD, OverrideSet, raise_unmatched
from megaopt_core.routing._plugin_faults import PluginFaults, add_plugin_overrides
from megaopt_core.routing._sharding import UNSHARDED, chosen_strategy, strategies_that_claim
from megaopt_core.routing._standard import get_standard_config_overrides
from megaopt_core.routing._stored import GivenRouting, as_stored, read_stored_routing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParamRoute", "Routing", "route"]

type NameMap = Callable[[int, str], str]
"""Maps (chunk index, local name) to the globally unique name."""


@frozen
class ParamRoute:
    """Where one trainable parameter goes, and why.

    Args:
        spec: the parameter as pure data; `spec.name` is its globally unique canonical name.
        chunk: index of its model chunk.
        box: this rank's part of `spec.shape`.
        aliases: other names of the same tensor.
        decision: its role, view and the reason for them.
        override: the combined override.
        matched: for each key that matched, what matched and what it sets.
        reason: why it gets this optimizer.
        strategy: name of the sharding strategy.
        module_type: class name of the module that owns it.
        shared: counted elsewhere (tied across pipeline stages).
        tensor_parallel: cut over the tensor-parallel group.
        partition_dim: dimension that tensor parallelism cuts; -1 for none.
        grad_norm_group: name of the norm that it counts in; None: the main one.
    """

    spec: ParamSpec
    chunk: int
    box: Box
    aliases: tuple[str, ...]
    decision: RoleDecision
    override: ParamGroupOverride
    matched: tuple[str, ...]
    reason: str
    strategy: str
    module_type: str
    shared: bool = False
    tensor_parallel: bool = False
    partition_dim: int = -1
    grad_norm_group: str | None = None

    @property
    def name(self) -> str:
        """The globally unique canonical name."""
        return self.spec.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        return self.box[1]

    @property
    def shard(self) -> Shard:
        """This rank's part of the logical tensor."""
        return self.spec.part(self.box)


@frozen
class Routing:
    """The whole decision, before anything is built: pure data, equal on every rank but for what follows from `params`.

    Args:
        params: canonical name to route, every trainable parameter of this rank, in model order.
        groups: all groups of all ranks, in their one order; a group may have no parameter on this rank.
        children: the optimizers, in their one order.
        frozen: names of the parameters that do not train.
        excluded: names of those that an override sends to no optimizer (`"none"`): others step them.
        grad_norm_groups: names of the separate gradient norms of all ranks, sorted.
        axes: number of ranks along each axis of the world.
        rank: this rank's coordinates on these axes.
        digest: equal on two ranks that hold the same parameters and send them to the same groups; empty: not known.
        sharding: name of the strategy that the configuration asks for, or that claims the model where it asks for none.
    """

    params: Mapping[str, ParamRoute]
    groups: tuple[GroupSpec, ...]
    children: tuple[ChildSpec, ...]
    frozen: tuple[str, ...] = ()
    grad_norm_groups: tuple[str, ...] = ()
    axes: Mapping[str, int] = Factory(dict)
    rank: RankCoordinates = Factory(dict)
    excluded: tuple[str, ...] = ()
    digest: bytes = b""
    sharding: str = UNSHARDED

    @property
    def readers(self) -> tuple[str, ...]:
        """Distributions and versions of the plugins that read roles from the model, sorted."""
        return tuple(
            sorted({entry.decision.reader for entry in self.params.values() if entry.decision.reader})
        )

    def names_of(self, group: int) -> tuple[str, ...]:
        """Return the names of this rank's parameters in a group.

        Args:
            group: index into `groups`.
        """
        return tuple(name for name, entry in self.params.items() if entry.spec.group == group)

    def child_of(self, name: str) -> ChildSpec:
        """Return the optimizer that steps a parameter.

        Args:
            name: canonical name.
        """
        group = self.params[name].spec.group
        return next(child for child in self.children if group in child.groups)

    def require_same(self, other: Routing) -> None:
        """Raise unless another routing sends every parameter to the same optimizer, group and strategy.

        Args:
            other: the routing that would be computed now.

        Raises:
            RoutingChangedError: it differs; the message names the parameters.
        """
        changed = [
            name for name in {**self.params, **other.params} if self._where(name) != other._where(name)
        ]
        if changed:
            shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            raise RoutingChangedError(
                f"configuration or overrides route {len(changed)} parameters otherwise than when the model was "
                f"wrapped: {shown}. Wrap the model again with the new configuration",
                names=changed,
            )

    def _where(self, name: str) -> tuple[Any, ...] | None:
        if name not in self.params:
            return None
        entry = self.params[name]
        return self.groups[entry.spec.group].key, self.child_of(name).strategy


@frozen
class _Told:
    """What ranks tell each other."""

    keys: frozenset[GroupKey] = frozenset()
    matched: frozenset[str] = frozenset()
    norm_groups: frozenset[str] = frozenset()
    followed: str = ""
    claims: frozenset[str] = frozenset()


@frozen
class _Rank:
    """What this rank found, before the ranks agree."""

    inventory: Inventory
    assignments: dict[str, Assignment]
    held: Holding
    followed: str = ""
    claims: frozenset[str] = frozenset()

    def tell(self, overrides: OverrideSet) -> _Told:
        norm_groups = {item.grad_norm_group for item in self.inventory.trainable if item.grad_norm_group}
        keys = frozenset(assignment.key for assignment in self.assignments.values())
        return _Told(keys, frozenset(overrides.matched), frozenset(norm_groups), self.followed, self.claims)


def route(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
    *,
    fqn: NameMap | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
) -> Routing:
    """Decide for every parameter which optimizer, group and sharding strategy it gets, and why.

    Nothing is built and no parameter is read: a model on the meta device is enough. No code of the model is run, but
    for one forward on the meta device where there is an `example`, which settles what is doubtful. It is a collective
    over the process groups: afterwards every rank holds the same optimizers and
    groups, and what ranks must have alike has been compared. Groups of one rank communicate nothing.

    Args:
        config: the run's configuration.
        model_chunks: the model, or its chunks under virtual pipeline parallelism; wrapped or bare.
        config_overrides: `{ParamKey: ParamGroupOverride}`; None means the standard overrides, `{}` none.
        pg_collection: process groups, or a DeviceMesh that names them; None: those of the mesh that the model's
            DTensors lie on, or the default group.
        fqn: maps `(chunk index, local name)` to a globally unique name, where ranks number locally.
        example: a batch to run one forward with: a tensor, a tuple of arguments or a mapping of keyword arguments.
        routing: a checkpoint, or what a plugin read from one: every parameter gets the optimizer, role and view that it
            had there, whatever would be found here; settings and overrides stay those of the configuration.

    Returns:
        The routing.

    Raises:
        RoutingError: a parameter can go nowhere, a name is not unique, `routing` does not name a parameter, or another
            rank failed.
        OverrideError: an override is invalid, conflicting, or its pattern matches nothing.
        PluginError: the optimizer or strategy that was asked for is not there.
        RankMismatchError: ranks differ in the configuration, or replicas in their parameters or overrides.
        MissingRanksError: a rank of a process group has not come before the group's timeout was over.

    Example:
        >>> import torch
        >>> from megaopt_core import OptimizerConfig, route
        >>> routing = route(OptimizerConfig(optimizer="adam", lr=1e-3), torch.nn.Linear(2, 2))
        >>> [(name, entry.spec.group) for name, entry in routing.params.items()]
        [('weight', 0), ('bias', 1)]
    """
    chunks = chunks_of(model_chunks)
    pgs = groups_of_model(chunks) if pg_collection is None else ProcessGroupCollection.of(pg_collection)
    overrides = OverrideSet()
    mine, error = None, None
    try:
        mine = _route_this_rank(config, chunks, config_overrides, pgs, overrides, fqn, example, routing)
    except MegaoptError as raised:
        error = raised
    alike = [settings_alike(config)]
    if mine is not None:
        alike += params_alike(mine.held, pgs)
    gathered = agree_over_ranks(
        _Told() if mine is None else mine.tell(overrides),
        pgs,
        "routing the parameters",
        error=error,
        alike=alike,
        advice=ADVICE,
    )
    if mine is None:  # unreachable: agree_over_ranks raises this rank's error
        raise RoutingError("this rank could not route its parameters")
    everyone = _Told(
        keys=frozenset(key for told in gathered for key in told.keys),
        matched=frozenset(pattern for told in gathered for pattern in told.matched),
        norm_groups=frozenset(name for told in gathered for name in told.norm_groups),
    )
    if len({told.followed for told in gathered}) > 1:
        raise RoutingError(
            f"the ranks follow different routings: routing={routing!r} must be one checkpoint, which all of them see, "
            "and which nobody replaces meanwhile"
        )
    raise_unmatched(overrides, everyone.matched, mine.inventory.names())
    ordered = order_children(everyone.keys, config.optimizer)
    sharding = chosen_strategy(config, frozenset[str]().union(*(told.claims for told in gathered)))
    return _assemble(config, mine, ordered, everyone.norm_groups, pgs, sharding)


def _route_this_rank(
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    pgs: ProcessGroupCollection,
    overrides: OverrideSet,
    fqn: NameMap | None,
    example: Any,
    routing: GivenRouting | None,
) -> _Rank:
    registry = get_registry()
    primary = registry.optimizer(config.optimizer)
    stored = read_stored_routing(routing)
    inventory = take_inventory(chunks, pgs, fqn, example)
    if stored is not None:
        inventory.trainable = as_stored(stored, inventory.trainable)
    if config_overrides is None or getattr(config_overrides, "with_standard", False):
        standard = get_standard_config_overrides(config)
        given = config_overrides or {}
        overrides.add({key: standard[key] for key in standard if key not in given}, STANDARD)
    if config_overrides is not None:
        overrides.add(config_overrides, "config_overrides", must_match=True)
    overrides.add(primary.default_param_overrides, f"default of {config.optimizer}")
    failed = PluginFaults(inventory.failed, add_plugin_overrides(overrides, config, chunks))
    assigner = Assigner(config, chunks, pgs, stored)
    assignments = {}
    for item in inventory.trainable:
        with failed.reading():
            overrides.require_read(item.name, item.decision)
        match = overrides.match(item.named, item.decision.role)
        if match.override.get("optimizer") == NO_OPTIMIZER:
            inventory.excluded.append(item)
        else:
            assignments[item.name] = assigner.assign(item, match)
    inventory.trainable = [item for item in inventory.trainable if item.name in assignments]
    for item in inventory.frozen:
        overrides.match(item.named, item.decision.role)
    failed.raise_or_warn(config, {assignment.key.optimizer for assignment in assignments.values()})
    held = Holding.of(inventory.trainable, assignments)
    return _Rank(inventory, assignments, held, _digest(stored), strategies_that_claim(inventory.trainable))


def _digest(stored: StoredRouting | None) -> str:
    return "" if stored is None else hashlib.sha256(repr(stored).encode()).hexdigest()


def param_route(
    item: InventoryItem, given: Assignment, group: int, config: OptimizerConfig, strategy: str
) -> ParamRoute:
    """Return where one parameter goes, with all that is known of it.

    Args:
        item: the parameter.
        given: what it was assigned.
        group: index of its group.
        config: the run's configuration.
        strategy: name of the strategy that shards its optimizer.
    """
    optimizer = given.key.optimizer
    entry = get_registry().optimizer(optimizer).configured(config)
    with get_registry().blaming("optimizer", optimizer):
        spec = evolve(item.spec(optimizer, group, entry), peers=config.peers_per_matrix)
    return ParamRoute(
        spec=spec,
        chunk=item.chunk,
        box=item.part.box,
        aliases=item.aliases,
        decision=item.decision,
        override=given.override,
        matched=given.matched,
        reason=given.reason,
        strategy=strategy,
        module_type=item.module_type,
        shared=item.shared,
        tensor_parallel=item.part.tensor_parallel,
        partition_dim=item.part.partition_dim,
        grad_norm_group=item.grad_norm_group,
    )


def route_added(
    routing: Routing,
    names: Collection[str],
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    pgs: ProcessGroupCollection,
    fqn: NameMap | None,
) -> Routing:
    """Return a routing with parameters that have begun to train since it was made; nothing is communicated.

    Groups and optimizers keep their places; those that the added ones need besides come after them.

    Args:
        routing: what there is.
        names: the parameters that are added; those that an override excludes become excluded.
        config: the run's configuration.
        chunks: the model chunks as they are now.
        config_overrides: as for :func:`route`.
        pgs: the process groups.
        fqn: as for :func:`route`.

    Raises:
        MegaoptError: as for :func:`route`.
    """
    mine = _route_this_rank(config, chunks, config_overrides, pgs, OverrideSet(), fqn, None, None)
    items = {item.name: item for item in mine.inventory.trainable if item.name in names}
    present = [group.key for group in routing.groups]
    needed = {mine.assignments[name].key for name in items}
    new = order_children(needed - set(present), config.optimizer)
    index = {key: position for position, key in enumerate([*present, *new])}
    strategies = {child.optimizer: child.strategy for child in routing.children}
    strategies |= {
        key.optimizer: Assigner.strategy_of(config, key.optimizer, routing.sharding) for key in new
    }
    children = [
        evolve(child, groups=tuple(len(present) + at for at in child.groups))
        for child in children_of(new, strategies)
    ]
    added = {
        name: param_route(
            item,
            mine.assignments[name],
            index[mine.assignments[name].key],
            config,
            strategies[mine.assignments[name].key.optimizer],
        )
        for name, item in items.items()
    }
    excluded = dict.fromkeys([*routing.excluded, *(item.name for item in mine.inventory.excluded)])
    return evolve(
        routing,
        params={**routing.params, **added},
        groups=(*routing.groups, *(GroupSpec(key, group_values(key, config)) for key in new)),
        children=(*routing.children, *children),
        frozen=tuple(name for name in routing.frozen if name not in added),
        excluded=tuple(excluded),
        digest=b"",
    )


def _assemble(
    config: OptimizerConfig,
    mine: _Rank,
    ordered: Sequence[GroupKey],
    norm_groups: Iterable[str],
    pgs: ProcessGroupCollection,
    sharding: str,
) -> Routing:
    used = dict.fromkeys(key.optimizer for key in ordered)
    strategies = {name: Assigner.strategy_of(config, name, sharding) for name in used}
    groups = tuple(GroupSpec(key, group_values(key, config)) for key in ordered)
    index = {key: position for position, key in enumerate(ordered)}
    params = {}
    axes, rank = pgs.axes, pgs.coordinates
    for item in mine.inventory.trainable:
        given = mine.assignments[item.name]
        axes.update((placement.axis, placement.size) for placement in item.part.placements)
        rank.update(item.part.coordinates)
        params[item.name] = param_route(
            item, given, index[given.key], config, strategies[given.key.optimizer]
        )
    frozen_names = tuple(item.name for item in mine.inventory.frozen)
    return Routing(
        params,
        groups,
        children_of(ordered, strategies),
        frozen_names,
        tuple(sorted(norm_groups)),
        axes,
        rank,
        tuple(item.name for item in mine.inventory.excluded),
        mine.held.digest,
        sharding,
    )
