"""The ways of other trainers to ask for a sharding strategy: two flags, and a prefix of the optimizer's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaopt_core.errors import ConfigurationError, warn_user

__all__ = ["STRATEGY_FLAGS", "with_one_strategy"]

_DIST_PREFIX = "dist_"
STRATEGY_FLAGS = {
    "use_distributed_optimizer": "distributed",
    "use_layer_wise_distributed_optimizer": "layer_wise",
}
"""Flag to the strategy that it asks for."""


def with_one_strategy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with `sharding`, its two flags and `optimizer="dist_..."` brought to one meaning.

    Args:
        settings: core fields and plugin settings, by name; they are not changed.

    Raises:
        ConfigurationError: they ask for different strategies.
    """
    settings = dict(settings)
    asked: dict[str, str] = {}
    optimizer = settings.get("optimizer")
    if isinstance(optimizer, str) and optimizer.startswith(_DIST_PREFIX):
        settings["optimizer"] = optimizer.removeprefix(_DIST_PREFIX)
        warn_user(
            f"optimizer={optimizer!r} is deprecated: write optimizer={settings['optimizer']!r}, "
            "sharding='layer_wise'",
            DeprecationWarning,
        )
        asked[f"optimizer={optimizer!r}"] = "layer_wise"
    for flag, strategy in STRATEGY_FLAGS.items():
        if settings.get(flag) is True:
            asked[f"{flag}=True"] = strategy
    sharding = settings.get("sharding")
    if isinstance(sharding, str):
        asked[f"sharding={sharding!r}"] = sharding
    if not asked:
        return settings
    first, chosen = next(iter(asked.items()))
    for other, strategy in asked.items():
        if strategy != chosen:
            raise ConfigurationError(
                f"{first} and {other} ask for different sharding strategies; keep one of them",
                setting="sharding",
                value=sharding,
            )
    settings["sharding"] = chosen if sharding is None else sharding
    for flag, strategy in STRATEGY_FLAGS.items():
        if isinstance(settings.get(flag, False), bool):
            settings[flag] = settings["sharding"] == strategy
    return settings
