"""Which sharding strategy a model gets: the one that is configured, or the one that claims it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._inventory import InventoryItem

__all__ = ["UNSHARDED", "chosen_strategy", "strategies_that_claim"]

UNSHARDED = "replicated"
"""The strategy of a model that nobody claims."""


def strategies_that_claim(items: Iterable[InventoryItem]) -> frozenset[str]:
    """Return the strategies that claim one of this rank's parameters.

    Args:
        items: the parameters that train.
    """
    registry = get_registry()
    left, found = dict(registry.strategies()), set()
    for item in (item for item in items if item.part.placements):
        for name, strategy in list(left.items()):
            with registry.blaming("strategy", name):
                if strategy.claims(item.param, item.part.placements):
                    found.add(name)
                    del left[name]
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
            f"the sharding strategies {', '.join(sorted(claims))} all claim this model: say which one, as in "
            f"sharding={name!r}",
            setting="sharding",
        )
    return name
