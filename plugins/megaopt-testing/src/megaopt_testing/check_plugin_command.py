"""`megaopt check-plugin`: the conformance kit against an installed plugin."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import attrs

from megaopt_core.cli import add_set_option, examples, parse_assignments, print_json
from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import Commands
from megaopt_core.registry import get_registry

if TYPE_CHECKING:
    from megaopt_testing import CheckResult

__all__ = ["add_command", "run"]


def add_command(commands: Commands) -> None:
    """Add `megaopt check-plugin`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "run the conformance kit against a plugin's optimizers"
    parser = commands.add_parser(
        "check-plugin",
        help=about,
        description=f"{about.capitalize()}.",
        epilog=examples(
            "megaopt check-plugin my_plugin",
            "megaopt check-plugin my_optimizer --set my_optimizer_beta=0.5",
        ),
    )
    parser.add_argument("name", metavar="NAME", help="a plugin, for all of its optimizers, or one optimizer")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Run every check, and print what came of it.

    Args:
        args: `name`, `assignments`, `json`.

    Returns:
        0 if no check failed, else 1.
    """
    from megaopt_testing.suite import bound_checks  # other commands need no conformance kit

    settings = parse_assignments(args.assignments)
    found = []
    for optimizer in _optimizers(args.name):
        if not args.json:
            print(f"{optimizer} ({get_registry().owner('optimizer', optimizer).source})")
        for check in bound_checks(optimizer, settings):
            result = check.run()
            found.append((optimizer, result))
            if not args.json:
                _print_result(result)
        if not args.json:
            print()
    failed = sum(not result.ok for _, result in found)
    if args.json:
        print_json([{"optimizer": optimizer, **attrs.asdict(result)} for optimizer, result in found])
    else:
        print(f"{len(found)} checks, {failed} failed")
    return 1 if failed else 0


def _optimizers(name: str) -> list[str]:
    """Return the optimizers of the plugin of this name, else the one optimizer of this name."""
    registry = get_registry()
    registry.require_one_owner("plugin", name)
    for plugin in registry.loaded_plugins():
        if plugin.info.goes_by(name):
            if not plugin.optimizers:
                raise PluginError(f"{plugin.info} offers no optimizer: there is nothing to check")
            return list(plugin.optimizers)
    registry.optimizer(name)
    return [name]


def _print_result(result: CheckResult) -> None:
    print(f"  {result.status.value:<8}{result.id:<26}{result.seconds:>6.1f} s  {result.summary}", flush=True)
    if result.message:
        print(f"          {result.message}")
    if result.traceback:
        print("".join(f"          {line}\n" for line in result.traceback.rstrip().splitlines()), end="")
