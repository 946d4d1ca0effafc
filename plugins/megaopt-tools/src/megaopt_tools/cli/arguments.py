"""The commands that look at plugins and models, and their arguments; nothing here imports torch."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from megaopt_tools.cli.parser import examples

if TYPE_CHECKING:
    from megaopt_core.plugin_api import Commands

__all__ = ["OWN_COMMANDS", "add_own_commands", "add_set_option"]

OWN_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plugins": ("megaopt plugins", "megaopt plugins --load"),
    "optimizers": ("megaopt optimizers", "megaopt optimizers muon"),
    "describe": (
        "megaopt describe",
        "megaopt describe clip_grad",
        "megaopt describe muon",
        "megaopt describe muon momentum",
    ),
    "explain": (
        "megaopt explain my_model.py:build --optimizer muon",
        "megaopt explain my_model:Model --config run.toml --set lr=3e-4",
    ),
}
"""Command to the examples at the end of its `--help`; no plugin can take its name."""


def add_own_commands(commands: Commands) -> None:
    """Add the commands that no plugin brings.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    plugins = _add(commands, "plugins", "list the installed plugins", "; none is imported")
    plugins.add_argument(
        "--load",
        action="store_true",
        help="import them, and show the contents of each, or the reason why it is broken",
    )
    _add_json(plugins)

    optimizers = _add(commands, "optimizers", "list the optimizers of the installed plugins")
    optimizers.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="show only optimizers with this text in their name, plugin or description",
    )
    _add_json(optimizers)

    describe = _add(commands, "describe", "explain every setting of an optimizer, or of the core")
    describe.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="an optimizer, setting, schedule or sharding strategy; without it, a short list of the core's settings",
    )
    describe.add_argument(
        "words", nargs="*", metavar="WORD", help="show only settings with this text in their name or meaning"
    )
    _add_json(describe)

    explain = _add(
        commands,
        "explain",
        "show the optimizer and settings of each parameter of a model, with the reason",
        "; nothing is trained",
    )
    explain.add_argument("factory", metavar="MODULE:FACTORY", help="function or class that makes the model")
    explain.add_argument("--config", metavar="FILE", help="TOML file of settings and [[overrides]]")
    explain.add_argument("--optimizer", metavar="NAME", help="the optimizer, in place of the file's")
    explain.add_argument("--lr", type=float, help="the learning rate, in place of the file's")
    add_set_option(explain)
    explain.add_argument("--device", default="meta", help="device of the model (default: %(default)s)")
    explain.add_argument(
        "--example",
        metavar="MODULE:FACTORY",
        help="function that makes a batch; one forward with it settles doubtful roles",
    )
    _add_json(explain)
    explain.add_argument(
        "--all",
        action="store_true",
        help="show one row for every parameter; by default repeated layers share a row",
    )
    explain.add_argument(
        "--html", metavar="PAGE", help="write one self-contained page: a table and a map of the model"
    )


def _add(commands: Commands, name: str, about: str, more: str = "") -> ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about.capitalize()}{more}.",
        epilog=examples(*OWN_COMMANDS[name]),
    )
    parser.set_defaults(run=partial(_run, name))
    return parser


def _add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(command: str, args: Namespace) -> int:
    """Import a command and run it; each stands in a module of its name."""
    status: int = importlib.import_module(f"megaopt_tools.inspection.{command}").run(args)
    return status


def add_set_option(parser: ArgumentParser) -> None:
    """Add `--set NAME=VALUE`, which may be given again and again.

    Args:
        parser: the command's parser.
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="NAME=VALUE",
        help="set a field of the configuration; may be repeated",
    )
