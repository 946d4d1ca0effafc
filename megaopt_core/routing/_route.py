"""Deciding which optimizer, group and strategy every parameter gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.config._optimizer_config import OptimizerConfig, require_config
from megaopt_core.errors import ConfigurationError, MegaoptError, RoutingError
from megaopt_core.parallel._agreement import agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._chunks import chunks_of
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._meshes import groups_of_model
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.routing._agreement import ADVICE, params_alike, settings_alike
from megaopt_core.routing._groups import (
    GroupKey,
    GroupSpec,
    children_of,
    group_values,
    order_children,
)
from megaopt_core.routing._overrides.matching import raise_unmatched
from megaopt_core.routing._sharding import chosen_strategy, strategy_of
from megaopt_core.routing._stored import GivenRouting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

from megaopt_core.routing._one_rank import RankRouting, Told, param_route, route_this_rank
from megaopt_core.routing._routing import NameMap, Routing

__all__ = ["route"]


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
        ConfigurationError: `config` is none, or the model none.
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
    require_config(config)
    chunks = chunks_of(model_chunks)
    _require_function(fqn)
    pgs = groups_of_model(chunks) if pg_collection is None else ProcessGroupCollection.of(pg_collection)
    mine, error = None, None
    try:
        mine = route_this_rank(config, chunks, config_overrides, pgs, fqn, example, routing)
    except MegaoptError as raised:
        error = raised
    alike = [settings_alike(config)]
    if mine is not None:
        alike += params_alike(mine.held, pgs)
    gathered = agree_over_ranks(
        Told() if mine is None else mine.told,
        pgs,
        "routing the parameters",
        error=error,
        alike=alike,
        advice=ADVICE,
    )
    if mine is None:  # unreachable: agree_over_ranks raises this rank's error
        raise RoutingError("this rank could not route its parameters")
    if len({told.followed for told in gathered}) > 1:
        raise RoutingError(
            f"the ranks follow different routings: routing={routing!r} must be one checkpoint, which all of them see, "
            "and which nobody replaces meanwhile"
        )
    matched = {pattern for told in gathered for pattern in told.matched}
    raise_unmatched(mine.overrides, matched, mine.inventory.names())
    ordered = order_children({key for told in gathered for key in told.keys}, config.optimizer)
    norm_groups = {name for told in gathered for name in told.norm_groups}
    sharding = chosen_strategy(config, {name for told in gathered for name in told.claims})
    return _assemble(config, mine, ordered, norm_groups, pgs, sharding)


def _require_function(fqn: object) -> None:
    if fqn is not None and not callable(fqn):
        raise ConfigurationError(
            f"fqn: got {type(fqn).__name__}; give a function of chunk index and local name that returns a name",
            setting="fqn",
            value=fqn,
        )


def _assemble(
    config: OptimizerConfig,
    mine: RankRouting,
    ordered: Sequence[GroupKey],
    norm_groups: Iterable[str],
    pgs: ProcessGroupCollection,
    sharding: str,
) -> Routing:
    used = dict.fromkeys(key.optimizer for key in ordered)
    strategies = {name: strategy_of(config, name, sharding) for name in used}
    groups = tuple(GroupSpec(key, group_values(key, config)) for key in ordered)
    index = {key: position for position, key in enumerate(ordered)}
    params = {}
    axes, rank = pgs.axes, pgs.coordinates
    for item in mine.inventory.trainable:
        given = mine.assignments[item.name]
        axes.update((placement.axis, placement.size) for placement in item.part.placements)
        rank.update(item.part.coordinates)
        params[item.name] = param_route(mine, item, index[given.key], strategies[given.key.optimizer])
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
