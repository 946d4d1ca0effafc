"""Deciding which optimizer, group and strategy every parameter gets; also those that begin to train later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from megaopt_core.config._optimizer_config import OptimizerConfig, require_config
from megaopt_core.errors import ConfigurationError, MegaoptError, RoutingError
from megaopt_core.parallel._agreement import agree_over_ranks
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._chunks import chunks_of
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.routing._agreement import (
    ADVICE,
    names_of_several,
    params_alike,
    settings_alike,
    wrong_names,
)
from megaopt_core.routing._groups import GroupKey, GroupSpec, children_of, group_values, order_children
from megaopt_core.routing._inventory import InventoryItem
from megaopt_core.routing._one_rank import RankRouting, Told, route_this_rank
from megaopt_core.routing._overrides.matching import raise_unmatched
from megaopt_core.routing._process_groups import find_process_groups
from megaopt_core.routing._routing import NameMap, ParamRoute, Routing
from megaopt_core.routing._sharding import chosen_strategy, strategy_of
from megaopt_core.routing._stored import GivenRouting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["route", "route_added", "usual_modes"]


@contextmanager
def usual_modes() -> Iterator[None]:
    """Make tensors that can be stepped and read, whatever mode the caller is in."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(mode=False))
        if torch.get_default_device().type == "meta":  # where a model is made without memory
            modes.enter_context(torch.device("cpu"))
        yield


@usual_modes()
def route(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
    *,
    fqn: NameMap | None = None,
    example: Any = None,
    routing: GivenRouting | None = None,
    trusted_names: Collection[str] = (),
) -> Routing:
    """Decide for every parameter which optimizer, group and sharding strategy it gets, and why.

    Nothing is built and no parameter is read: a model on the meta device is enough. No code of the model is run, but
    for one forward where there is an `example`, which settles what is doubtful: on the meta device, or, of a small
    model that needs them, with copies of its values. It is a collective over the process groups: afterwards every rank
    holds the same optimizers and groups, and what ranks must have alike has been compared. Groups of one rank
    communicate nothing.

    Args:
        config: the run's configuration.
        model_chunks: the model, or its chunks under virtual pipeline parallelism; wrapped or bare.
        config_overrides: `{ParamKey: ParamGroupOverride}`; None means the standard overrides, `{}` none.
        pg_collection: process groups, or a DeviceMesh that names them; None: those that the model's trainer keeps,
            of the mesh that its DTensors lie on, or the default group.
        fqn: maps `(chunk index, local name)` to a globally unique name, where ranks number locally.
        example: a batch to run one forward with: a tensor, a tuple of arguments or a mapping of keyword arguments.
        routing: a checkpoint, or what a plugin read from one: every parameter gets the optimizer, role and view that it
            had there, whatever would be found here; settings and overrides stay those of the configuration.
        trusted_names: optimizers that `routing` may name although no plugin lists them, such as
            `"some_module:Class"`: to resolve such a name imports a module. Names in `config` and overrides are trusted.

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
    pgs = find_process_groups(chunks) if pg_collection is None else ProcessGroupCollection.of(pg_collection)
    asked = (config, chunks, config_overrides, pgs, fqn, example, routing, trusted_names)
    mine, gathered = _agreed(asked, pgs)
    if _failed_on_some(gathered):
        rank, why = next((rank, told.no_forward) for rank, told in enumerate(gathered) if told.no_forward)
        mine, gathered = _agreed((*asked, f"it failed on rank {rank}: {why}"), pgs)
    if len({told.followed for told in gathered}) > 1:
        raise RoutingError(
            f"the ranks follow different routings: routing={routing!r} must be one checkpoint for all ranks, "
            "and no process may replace it during the build"
        )
    several = names_of_several(told.stages for told in gathered)
    if several:
        raise RoutingError(f"routing={routing!r} goes by name: {wrong_names(several)}")
    matched = {pattern for told in gathered for pattern in told.matched}
    raise_unmatched(mine.overrides, matched, mine.inventory.names())
    return _assemble(config, mine, gathered, pgs)


def _agreed(asked: tuple[Any, ...], pgs: ProcessGroupCollection) -> tuple[RankRouting, list[Told]]:
    """Return what this rank decides, and what all ranks tell; where a forward ran on some alone, nothing is compared.

    Args:
        asked: the arguments of :func:`route_this_rank`.
        pgs: the process groups.
    """
    mine, error = None, None
    try:
        mine = route_this_rank(*asked)
    except MegaoptError as raised:
        error = raised
    alike = [settings_alike(asked[0])]
    if mine is not None:
        alike += params_alike(mine.held, pgs)
    gathered = agree_over_ranks(
        Told() if mine is None else mine.told,
        pgs,
        "routing the parameters",
        error=error,
        alike=alike,
        advice=ADVICE,
        unless=_failed_on_some,
    )
    assert mine is not None  # noqa: S101 - else agree_over_ranks has raised this rank's error
    return mine, gathered


def _failed_on_some(gathered: Sequence[Told]) -> bool:
    """Return whether the forward that shows roles could be run on some ranks alone."""
    return len({bool(told.no_forward) for told in gathered}) > 1


def _require_function(fqn: object) -> None:
    if fqn is not None and not callable(fqn):
        advice = "give a function that takes a chunk index and a local name and returns a name"
        raise ConfigurationError.got("fqn", fqn, advice)


def _assemble(
    config: OptimizerConfig, mine: RankRouting, gathered: Sequence[Told], pgs: ProcessGroupCollection
) -> Routing:
    ordered = order_children({key for told in gathered for key in told.keys}, config.optimizer)
    sharding = chosen_strategy(config, {name for told in gathered for name in told.claims})
    used = dict.fromkeys(key.optimizer for key in ordered)
    strategies = {name: strategy_of(config, name, sharding, mine.registry) for name in used}
    axes, rank = pgs.axes, pgs.coordinates
    for item in mine.inventory.trainable:
        axes.update((placement.axis, placement.size) for placement in item.part.placements)
        rank.update(item.part.coordinates)
    index = {key: at for at, key in enumerate(ordered)}
    return Routing(
        params=_params(mine, mine.inventory.trainable, index, strategies),
        groups=tuple(GroupSpec(key, group_values(key, config)) for key in ordered),
        children=children_of(ordered, strategies),
        frozen=tuple(item.name for item in mine.inventory.frozen),
        grad_norm_groups=tuple(sorted({name for told in gathered for name in told.norm_groups})),
        axes=axes,
        rank=rank,
        excluded=tuple(item.name for item in mine.inventory.excluded),
        digest=mine.held.digest,
        sharding=sharding,
    )


def _params(
    mine: RankRouting,
    items: Iterable[InventoryItem],
    index: Mapping[GroupKey, int],
    strategies: Mapping[str, str],
) -> dict[str, ParamRoute]:
    """Return where parameters go: each to the group that stands where its key does."""
    params = {}
    for item in items:
        given = mine.assignments[item.name]
        params[item.name] = ParamRoute(
            spec=evolve(mine.specs[item.name], group=index[given.key]),
            chunk=item.chunk,
            box=item.part.box,
            aliases=item.aliases,
            decision=item.decision,
            override=given.override,
            matched=given.matched,
            reason=given.reason,
            strategy=strategies[given.key.optimizer],
            module_type=item.module_type,
            shared=item.shared,
            tensor_parallel=item.part.tensor_parallel,
            partition_dim=item.part.partition_dim,
            grad_norm_group=item.grad_norm_group,
        )
    return params


def route_added(
    routing: Routing,
    names: Collection[str],
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None,
    pgs: ProcessGroupCollection,
    fqn: NameMap | None,
    *,
    apart: bool = False,
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
        apart: in groups of their own, whatever groups there are.

    Raises:
        MegaoptError: as for :func:`route`.
    """
    mine = route_this_rank(config, chunks, config_overrides, pgs, fqn)
    items = [item for item in mine.inventory.trainable if item.name in names]
    present = [group.key for group in routing.groups]
    new = order_children(
        {mine.assignments[item.name].key for item in items}.difference(() if apart else present),
        config.optimizer,
    )
    strategies = {child.optimizer: child.strategy for child in routing.children}
    strategies |= {
        key.optimizer: strategy_of(config, key.optimizer, routing.sharding, mine.registry) for key in new
    }
    index = {key: at for at, key in reversed([*enumerate(present)])}
    index.update((key, at) for at, key in enumerate(new, len(present)))
    added = _params(mine, items, index, strategies)
    excluded = dict.fromkeys([*routing.excluded, *(item.name for item in mine.inventory.excluded)])
    return evolve(
        routing,
        params={**routing.params, **added},
        groups=(*routing.groups, *(GroupSpec(key, group_values(key, config)) for key in new)),
        children=(*routing.children, *children_of(new, strategies, first=len(present))),
        frozen=tuple(name for name in routing.frozen if name not in added),
        excluded=tuple(excluded),
        digest=b"",
    )
