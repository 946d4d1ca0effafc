"""Parameters that have begun to train since a routing was made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from attrs import evolve

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.routing._groups import (
    GroupSpec,
    children_of,
    group_values,
    order_children,
)
from megaopt_core.routing._one_rank import param_route, route_this_rank
from megaopt_core.routing._routing import NameMap, Routing
from megaopt_core.routing._sharding import strategy_of

__all__ = ["route_added"]


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
    mine = route_this_rank(config, chunks, config_overrides, pgs, fqn)
    items = {item.name: item for item in mine.inventory.trainable if item.name in names}
    present = [group.key for group in routing.groups]
    needed = {mine.assignments[name].key for name in items}
    new = order_children(needed - set(present), config.optimizer)
    index = {key: position for position, key in enumerate([*present, *new])}
    strategies = {child.optimizer: child.strategy for child in routing.children}
    strategies |= {key.optimizer: strategy_of(config, key.optimizer, routing.sharding) for key in new}
    children = [
        evolve(child, groups=tuple(len(present) + at for at in child.groups))
        for child in children_of(new, strategies)
    ]
    added = {
        name: param_route(
            mine, item, index[mine.assignments[name].key], strategies[mine.assignments[name].key.optimizer]
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
