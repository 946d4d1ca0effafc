"""Optimizers and parameter groups as pure data, equal and equally ordered on every rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from attrs import frozen

from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import ConfigurationError

__all__ = ["ChildSpec", "GroupKey", "GroupSpec", "group_values", "order_children"]

_LEARNING_RATE_KEYS = ("max_lr", "min_lr", "lr_mult")


@frozen(cache_hash=True)
class GroupKey:
    """What makes two parameters share a group.

    Args:
        optimizer: name of the registered optimizer.
        is_expert: dense and expert parameters never share an optimizer.
        settings: sorted constructor settings that differ from the configuration's; they make a separate optimizer.
        override: the sorted override tuple, None when nothing overrides.
    """

    optimizer: str
    is_expert: bool
    settings: tuple[tuple[str, Any], ...] = ()
    override: tuple[tuple[str, Any], ...] | None = None

    @property
    def child(self) -> tuple[str, bool, tuple[tuple[str, Any], ...]]:
        """What makes two groups share an optimizer."""
        return self.optimizer, self.is_expert, self.settings


@frozen
class GroupSpec:
    """One parameter group.

    Args:
        key: what its parameters have in common.
        values: the group's settings (`max_lr`, `wd_mult`...), without `params`.
    """

    key: GroupKey
    values: Mapping[str, Any]


@frozen
class ChildSpec:
    """One optimizer of the chain.

    Args:
        optimizer: name of the registered optimizer.
        is_expert: it steps expert parameters.
        settings: constructor settings that differ from the configuration's.
        strategy: name of the sharding strategy.
        groups: indices into the routing's groups; consecutive.
    """

    optimizer: str
    is_expert: bool
    settings: Mapping[str, Any]
    strategy: str
    groups: tuple[int, ...]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def order_children(keys: Iterable[GroupKey], primary: str) -> tuple[GroupKey, ...]:
    """Return the keys in their one order: by optimizer, primary first, dense before expert; None before overrides.

    Args:
        keys: keys of any number of ranks, in any order.
        primary: the run's optimizer.
    """

    def rank(key: GroupKey) -> tuple[Any, ...]:
        return (
            key.optimizer != primary,
            key.optimizer,
            key.is_expert,
            _canonical(key.settings),
            key.override is not None,
            _canonical(key.override),
        )

    return tuple(sorted(set(keys), key=rank))


def group_values(key: GroupKey, config: OptimizerConfig) -> dict[str, Any]:
    """Return a group's settings: the defaults, then the override.

    `lr` is the group's `max_lr` or the configuration's; `weight_decay` is the group's or the configuration's, times
    `wd_mult`. What a group has itself is its `start_wd` and `end_wd` as well.

    Args:
        key: the group's key.
        config: the run's configuration.

    Raises:
        ConfigurationError: the group's `min_lr` is above its `max_lr`.
    """
    override = dict(key.override or ())
    values: dict[str, Any] = {
        "is_expert_parallel": key.is_expert,
        "default_config": not any(name in override for name in _LEARNING_RATE_KEYS),
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
    }
    values.update(override)
    if values["min_lr"] is not None and values["max_lr"] is not None and values["min_lr"] > values["max_lr"]:
        raise ConfigurationError(
            f"a group of {key.optimizer!r} has min_lr={values['min_lr']} above max_lr={values['max_lr']}; "
            "set both in the override",
            setting="min_lr",
            value=values["min_lr"],
        )
    if values["max_lr"] is not None:
        values.setdefault("lr", values["max_lr"])
    own = override.get("weight_decay")
    if own is not None:  # also where a scheduler writes weight decay
        values = {"start_wd": own, "end_wd": own} | values
    values["weight_decay"] = (config.weight_decay if own is None else own) * values["wd_mult"]
    return values


def children_of(
    keys: Sequence[GroupKey], strategies: Mapping[str, str], *, first: int = 0
) -> tuple[ChildSpec, ...]:
    """Return the optimizers that ordered group keys add up to.

    Args:
        keys: the keys in order; those of one optimizer are consecutive.
        strategies: optimizer name to strategy name.
        first: index of the first key among the routing's groups.
    """
    children = []
    runs = groupby(enumerate(keys, first), key=lambda indexed: indexed[1].child)
    for (optimizer, is_expert, settings), members in runs:
        indices = tuple(index for index, _ in members)
        children.append(ChildSpec(optimizer, is_expert, dict(settings), strategies[optimizer], indices))
    return tuple(children)
