"""`megaopt new-plugin`: a complete package of one's own, whose tests pass at once."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megaopt_core.plugin_api import Commands

__all__ = ["KINDS", "add_command", "run"]

KINDS = ("optimizer", "strategy", "schedule", "roles")
"""What a new plugin may bring."""


def add_command(commands: Commands) -> None:
    """Add `megaopt new-plugin`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "write a package with a plugin, its tests, and a workflow that publishes it"
    parser = commands.add_parser(
        "new-plugin",
        help=about,
        description=f"{about.capitalize()}.",
        epilog="examples:\n  megaopt new-plugin my-opt\n  megaopt new-plugin falling --kind schedule",
    )
    parser.add_argument(
        "name", metavar="NAME", help="name for users, such as my-opt; the distribution is megaopt-NAME"
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="optimizer", help="kind of the plugin (default: optimizer)"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="folder to write; must be new or empty (default: megaopt-NAME)",
    )
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Write the package, and say what comes next.

    Args:
        args: `name`, `kind`, `into`.

    Returns:
        0.
    """
    from megaopt_testing.new_plugin import NewPlugin

    plugin = NewPlugin.named(args.name, args.kind)
    folder = args.into or Path(plugin.distribution)
    plugin.write(folder)
    print(f"{folder} holds {plugin.distribution}, with {plugin.what}.")
    print("Next:")
    for command in (
        f"cd {folder}",
        "pip install -e .[test]",
        "pytest",
        f"python -m megaopt_testing {plugin.name}",
    ):
        print(f"  {command}")
    print("README.md says how it is published.")
    return 0
