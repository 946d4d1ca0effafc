"""`megaopt optimizers`: every optimizer that is installed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megaopt_core.errors import PluginError, UnknownNameError
from megaopt_core.registry import get_registry
from megaopt_tools.cli.output import print_json, print_table

__all__ = ["run", "settings_of_optimizer"]


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
    if not found:
        names = ", ".join(optimizer["name"] for optimizer in everything)
        print(
            f"None of {names} has {' and '.join(args.words)}."
            if names
            else "No optimizer is installed. Optimizers are plugins: `pip install` the one that you want."
        )
        _tell_who_brings(args.words)
        return 0
    rows = [[optimizer["name"], optimizer["plugin"], optimizer["description"]] for optimizer in found]
    print_table(["optimizer", "plugin", "what it is"], rows)
    print("\n`megaopt describe NAME` explains the settings of one.")
    return 0


def _tell_who_brings(words: Sequence[str]) -> None:
    """Print why an optimizer of ours that is asked for by its name is not here."""
    for word in words:
        try:
            get_registry().optimizer(word)
        except UnknownNameError:
            continue
        except PluginError as error:
            print(f"The {error}")


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
        "settings": settings_of_optimizer(name),
        "description": entry.description,
    }


def settings_of_optimizer(name: str) -> list[str]:
    """Return the full names of the settings that an optimizer reads, its own first.

    Args:
        name: the optimizer.
    """
    prefixes = get_registry().optimizer(name).setting_prefixes
    owners = get_registry().setting_owners()
    return [full for prefix in prefixes for full, info in owners.items() if info.prefix == prefix]
