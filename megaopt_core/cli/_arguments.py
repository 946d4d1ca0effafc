"""The core's commands and their arguments; nothing here imports torch, so that wrong ones are answered at once."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from megaopt_core.cli._assignments import add_set_option
from megaopt_core.cli._parser import examples
from megaopt_core.registry._catalogue import EXAMPLES

if TYPE_CHECKING:
    from megaopt_core.plugin_api._commands import Commands

__all__ = ["add_core_commands"]


def add_core_commands(commands: Commands) -> None:
    """Add the commands that the core brings.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    plugins = _add(commands, "plugins", "list the installed plugins", "; none is imported")
    plugins.add_argument(
        "--load", action="store_true", help="import them: what each provides, or why it is broken"
    )
    optimizers = _add(commands, "optimizers", "list the optimizers that the installed plugins bring")
    optimizers.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="show only those with this in their name, plugin or description",
    )
    explain = _add(
        commands, "explain", "show what each parameter of a model would get, and why", "; nothing is trained"
    )
    explain.add_argument("factory", metavar="MODULE:FACTORY", help="function or class that makes the model")
    explain.add_argument("--config", metavar="FILE", help="TOML file of settings and [[overrides]]")
    explain.add_argument("--optimizer", metavar="NAME", help="the optimizer; it wins over the file's")
    explain.add_argument("--lr", type=float, help="the learning rate; it wins over the file's")
    add_set_option(explain)
    explain.add_argument("--device", default="meta", help="where to make the model (default: %(default)s)")
    explain.add_argument(
        "--all", action="store_true", help="a row for every parameter; otherwise repeated layers share one"
    )
    explain.add_argument(
        "--html", metavar="PAGE", help="write one self-contained page: a table and a map of the model"
    )
    for parser in (plugins, optimizers, explain):
        parser.add_argument("--json", action="store_true", help="print JSON")


def _add(commands: Commands, name: str, about: str, more: str = "") -> ArgumentParser:
    """Add a command that its own module runs, which is imported then."""
    parser = commands.add_parser(
        name, help=about, description=f"{about.capitalize()}{more}.", epilog=examples(*EXAMPLES[name])
    )
    parser.set_defaults(run=partial(_run, f"megaopt_core.cli._{name}"))
    return parser


def _run(module: str, args: Namespace) -> int:
    return int(importlib.import_module(module).run(args))
