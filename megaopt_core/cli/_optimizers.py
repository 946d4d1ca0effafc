"""`megaopt optimizers`: every optimizer that is installed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaopt_core.cli._output import print_json, print_table
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.plugin_api._entries import OptimizerEntry

__all__ = ["run"]


def run(args: Namespace) -> int:
    """Print the optimizers.

    Args:
        args: `words`, `json`.

    Returns:
        0.
    """
    everything = [_about(name) for name in get_registry().optimizers()]
    found = [optimizer for optimizer in everything if _has(optimizer, args.words)]
    if args.json:
        print_json(found)
        return 0
    if not everything:
        print("No optimizer is installed. Optimizers are plugins: `pip install` the one that you want.")
        return 0
    if not found:
        print(
            f"None of {', '.join(optimizer['name'] for optimizer in everything)} has {' and '.join(args.words)}."
        )
        return 0
    rows = [[optimizer["name"], optimizer["plugin"], optimizer["description"]] for optimizer in found]
    print_table(["optimizer", "plugin", "what it is"], rows)
    print("\n`megaopt describe NAME` explains the settings of one.")
    return 0


def _has(optimizer: dict[str, Any], words: Sequence[str]) -> bool:
    text = f"{optimizer['name']} {optimizer['plugin']} {optimizer['description']}".lower()
    return all(word.lower() in text for word in words)


def _about(name: str) -> dict[str, Any]:
    registry = get_registry()
    entry = registry.optimizer(name)
    return {
        "name": name,
        "plugin": registry.owner("optimizer", name).source,
        "granularity": entry.granularity.value,
        "settings": _settings_of(entry),
        "description": entry.description,
    }


def _settings_of(entry: OptimizerEntry) -> list[str]:
    """Return the full names of the settings that an optimizer reads, its own first."""
    owners = get_registry().setting_owners()
    return [
        full for prefix in entry.setting_prefixes for full, info in owners.items() if info.prefix == prefix
    ]
