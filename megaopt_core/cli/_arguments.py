"""The core's commands and their arguments; nothing here imports torch, so that wrong ones are answered at once."""

from __future__ import annotations

import importlib
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from megaopt_core.cli._parser import examples
from megaopt_core.errors import ConfigurationError
from megaopt_core.registry._catalogue import EXAMPLES

if TYPE_CHECKING:
    from megaopt_core.plugin_api._commands import Commands

__all__ = ["add_core_commands", "add_set_option", "parse_assignments"]

_WORDS = {"True": True, "False": False, "None": None}


def add_core_commands(commands: Commands) -> None:
    """Add the commands that the core brings.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    plugins = _add(commands, "plugins", "list the installed plugins", "; none is imported")
    plugins.add_argument(
        "--load", action="store_true", help="import them: what each provides, or why it is broken"
    )
    _add_json(plugins)

    optimizers = _add(commands, "optimizers", "list the optimizers that the installed plugins bring")
    optimizers.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="show only those with this in their name, plugin or description",
    )
    _add_json(optimizers)

    describe = _add(commands, "describe", "explain every setting of an optimizer, or of the core")
    describe.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="an optimizer, setting, schedule or sharding strategy; without it: a short list of what every run can set",
    )
    describe.add_argument(
        "words", nargs="*", metavar="WORD", help="show only the settings with this in their name or meaning"
    )
    _add_json(describe)

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
        "--example",
        metavar="MODULE:FACTORY",
        help="function that makes a batch, with which one forward is run: it settles what is doubtful",
    )
    _add_json(explain)
    explain.add_argument(
        "--all", action="store_true", help="a row for every parameter; otherwise repeated layers share one"
    )
    explain.add_argument(
        "--html", metavar="PAGE", help="write one self-contained page: a table and a map of the model"
    )


def _add(commands: Commands, name: str, about: str, more: str = "") -> ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about.capitalize()}{more}.",
        epilog=examples(*EXAMPLES[name]),
    )
    parser.set_defaults(run=partial(_run, name))
    return parser


def _add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(command: str, args: Namespace) -> int:
    """Import a command of the core and run it; each stands in a module of its name."""
    status: int = importlib.import_module(f"megaopt_core.cli._commands.{command}").run(args)
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


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Return settings from `NAME=VALUE`; a value is read as JSON or as True, False, None, else it is a string.

    Args:
        assignments: the arguments.

    Raises:
        ConfigurationError: one has no `=`.

    Example:
        >>> parse_assignments(["clip_grad=0.5", "bf16=true", "sharding=replicated"])
        {'clip_grad': 0.5, 'bf16': True, 'sharding': 'replicated'}
    """
    settings = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not (equals and name.strip()):
            raise ConfigurationError(
                f"--set {assignment}: write it as NAME=VALUE", setting=name, value=assignment
            )
        settings[name.strip()] = _value(text.strip())
    return settings


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
