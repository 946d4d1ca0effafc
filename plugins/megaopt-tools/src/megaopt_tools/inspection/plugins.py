"""`megaopt plugins`: what is installed, and whether it works."""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import TYPE_CHECKING, Any

import attrs

from megaopt_core.errors import BrokenPluginWarning, MegaoptError
from megaopt_core.registry import PluginInfo, PluginStatus, get_registry
from megaopt_tools.cli.arguments import OWN_COMMANDS
from megaopt_tools.cli.output import print_beside, print_json, print_table
from megaopt_tools.cli.parser import CommandParser
from megaopt_tools.cli.plugin_commands import PluginCommands

if TYPE_CHECKING:
    from megaopt_core.registry import LoadedPlugin

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the plugins.

    Args:
        args: `load`, `json`.

    Returns:
        0, or 2 if two plugins give one name, or the hook of one that adds commands fails.
    """
    registry = get_registry()
    commands = PluginCommands()
    wrong: list[MegaoptError] = []
    if args.load:
        with print_beside(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BrokenPluginWarning)  # the table says it
            registry.load()
        scratch = CommandParser().add_subparsers()
        for name in OWN_COMMANDS:
            scratch.add_parser(name)
        with print_beside():
            commands.add_all(registry, scratch)
        wrong = [*registry.conflicts(), *commands.failed, *commands.conflicts.values()]
    provided = {plugin.info: _provided(plugin, commands) for plugin in registry.loaded_plugins()}
    infos = registry.plugins()
    if args.json:
        print_json([_as_dict(info, provided.get(info)) for info in infos])
    else:
        header = ["plugin", "distribution", "version", "status", "provides" if args.load else "module"]
        print_table(header, [_row(info, provided.get(info, {}), load=args.load) for info in infos])
        for info in infos:
            if info.traceback:
                print(f"\n{info.name} failed to load:\n\n{info.traceback.rstrip()}")
    for words in registry.named_in_vain():
        print(f"megaopt: warning: {words}", file=sys.stderr)
    for error in wrong:
        print(f"megaopt: error: {error}", file=sys.stderr)
    return 2 if wrong else 0


def _row(info: PluginInfo, provided: dict[str, list[str]], *, load: bool) -> list[str]:
    last = info.module
    if load:
        last = "; ".join(f"{what}: {', '.join(names)}" for what, names in provided.items() if names) or "-"
    if info.status in (PluginStatus.BLOCKED, PluginStatus.BROKEN):
        last = info.error
    return [info.name, info.distribution or "-", info.version or "-", info.status.value, last]


def _as_dict(info: PluginInfo, provided: dict[str, list[str]] | None) -> dict[str, Any]:
    known = {**attrs.asdict(info), "status": info.status.value}
    return known if provided is None else {**known, "provides": provided}


def _provided(plugin: LoadedPlugin, commands: PluginCommands) -> dict[str, list[str]]:
    return {
        "optimizers": list(plugin.offers["optimizer"]),
        "strategies": list(plugin.offers["strategy"]),
        "schedules": list(plugin.offers["schedule"]),
        "precision policies": list(plugin.offers["precision"]),
        "commands": [name for name, owner in commands.owners.items() if owner == plugin.info],
        "other hooks": [
            hook for hook in ("megaopt_annotate_params", "megaopt_param_overrides") if plugin.has(hook)
        ],
    }
