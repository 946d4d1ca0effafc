"""The entry point of `megaopt`: parsing, plugins' commands, and how errors are shown."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megaopt_core.cli import _describe as describe
from megaopt_core.cli import _explain as explain
from megaopt_core.cli import _optimizers as optimizers
from megaopt_core.cli import _plugins as plugins
from megaopt_core.cli._plugin_commands import CORE_COMMANDS, PluginCommands
from megaopt_core.errors import BrokenPluginWarning, MegaoptError, PluginError
from megaopt_core.plugin_api._commands import Commands
from megaopt_core.registry._catalogue import COMMANDS
from megaopt_core.registry._missing import absent_plugin
from megaopt_core.registry._registry import get_registry

__all__ = ["CORE_COMMANDS", "build_parser", "main"]

_MODULES = (plugins, optimizers, describe, explain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megaopt`.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit status: 0 for success, 2 after an error that megaopt explains in a line.

    Raises:
        SystemExit: as argparse does after `--help` or for wrong arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    with _plain_warnings():
        theirs = PluginCommands()
        parser = build_parser(with_plugins=command != "plugins", plugin_commands=theirs)
        absent = None if command is None else _absent(parser, command)
        if absent is not None:
            print(f"megaopt: error: {absent}", file=sys.stderr)
            return 2
        try:
            theirs.require_one_owner(command or "")
        except MegaoptError as conflict:
            print(f"megaopt: error: {conflict}", file=sys.stderr)
            return 2
        parsed = parser.parse_args(arguments)
        if parsed.command is None:
            parser.print_help()
            return 0
        try:
            return theirs.run(parsed.command, parsed)
        except MegaoptError as error:
            if parsed.traceback:
                traceback.print_exc()
            print(f"megaopt: error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # `megaopt ... | head` closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KeyboardInterrupt:
            return 130


def build_parser(
    *, with_plugins: bool = True, plugin_commands: PluginCommands | None = None
) -> ArgumentParser:
    """Return the parser of `megaopt`.

    Args:
        with_plugins: load the plugins, and add their commands.
        plugin_commands: notes whose commands they are.
    """
    parser = ArgumentParser(
        prog="megaopt", description="Optimizers of large-model training, every one a plugin."
    )
    parser.add_argument("--version", action="version", version=f"megaopt-core {_version()}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for module in _MODULES:
        module.add_command(commands)
    if with_plugins:
        _add_plugin_commands(commands, PluginCommands() if plugin_commands is None else plugin_commands)
    return parser


def _absent(parser: ArgumentParser, command: str) -> PluginError | None:
    """Return the error for a command of ours whose distribution is missing, None for every other."""
    (commands,) = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    distribution = COMMANDS.get(command)
    if distribution is None or command in commands.choices:
        return None
    return absent_plugin(f"command {command!r}", command, distribution, get_registry().plugins())


def _add_plugin_commands(commands: Commands, theirs: PluginCommands) -> None:
    registry = get_registry()
    theirs.add_all(registry, commands)
    for failure in (*registry.conflicts(), *theirs.failed, *theirs.conflicts.values()):
        print(f"megaopt: warning: {failure}", file=sys.stderr)


def _version() -> str:
    try:
        return version("megaopt-core")
    except PackageNotFoundError:
        return "(not installed)"


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show the warning about a broken plugin as one line, not with a line of megaopt's own source."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", BrokenPluginWarning)
        as_usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, BrokenPluginWarning):
                print(f"megaopt: warning: {message}", file=sys.stderr)
            else:
                as_usual(message, category, *where, **options)

        warnings.showwarning = show  # what warnings documents for this; it is put back at the end
        yield
