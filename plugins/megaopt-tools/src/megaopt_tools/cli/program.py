"""The entry point of `megaopt`: parsing, plugins' commands, and how errors are shown."""

from __future__ import annotations

import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megaopt_core.errors import BrokenPluginWarning, MegaoptError, UnknownNameError
from megaopt_core.registry import get_registry
from megaopt_tools.cli.arguments import add_own_commands
from megaopt_tools.cli.output import any_output, print_beside, silence_output
from megaopt_tools.cli.parser import CommandParser
from megaopt_tools.cli.plugin_commands import PluginCommands

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS: Mapping[str, str] = {
    "check-plugin": "megaopt-testing",
    "compare": "megaopt-tools",
    "completion": "megaopt-tools",
    "convert": "megaopt-checkpoint",
    "new-plugin": "megaopt-testing",
    "schedule": "megaopt-tools",
    "suggest": "megaopt-tools",
    "train": "megaopt-tools",
    "verify-checkpoint": "megaopt-checkpoint",
    "calibrate": "megaopt-muon",
}
"""Command to the distribution whose plugin brings it."""


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
    with _plain_warnings(), any_output():
        try:
            try:
                return _main(arguments)
            finally:
                sys.stdout.flush()  # what cannot be written is told here, and not when the process ends
        except BrokenPipeError:  # `megaopt ... | head` closed the pipe
            silence_output()
            return 1
        except OSError as error:
            silence_output()
            return _failed(error, show_traceback="--traceback" in arguments)


def _main(arguments: list[str]) -> int:
    """Find the command, and run it."""
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    theirs = PluginCommands()
    try:
        parser = build_parser(with_plugins=command != "plugins", plugin_commands=theirs)
        if command is not None:
            _require_installed(parser, command)
            theirs.require_one_owner(command)
    except MegaoptError as error:
        return _failed(error, show_traceback=False)
    if command is not None:
        parser.refuse_unknown_command(command)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    return _run(parsed, theirs)


def _failed(error: Exception, *, show_traceback: bool) -> int:
    """Show an error in a line."""
    if show_traceback:
        traceback.print_exception(error)
    print(f"megaopt: error: {error}", file=sys.stderr)
    return 2


def _run(parsed: Namespace, theirs: PluginCommands) -> int:
    """Run a command whose arguments are right, and show what goes wrong in a line."""
    try:
        if parsed.command != "plugins":  # which tells of conflicts itself
            with print_beside():
                conflicts = get_registry().conflicts()
            for conflict in conflicts:
                print(f"megaopt: warning: {conflict}", file=sys.stderr)
        return theirs.run(parsed.command, parsed)
    except MegaoptError as error:
        return _failed(error, show_traceback=parsed.traceback)
    except KeyboardInterrupt:
        return 130


def build_parser(
    *, with_plugins: bool = True, plugin_commands: PluginCommands | None = None
) -> CommandParser:
    """Return the parser of `megaopt`.

    Args:
        with_plugins: import the plugins that bring commands, and add these.
        plugin_commands: notes whose commands they are.
    """
    parser = CommandParser(
        prog="megaopt",
        description="Optimizers for training large models; each one is a plugin.",
        epilog="`megaopt COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"megaopt-core {_version()}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    add_own_commands(commands)
    if with_plugins:
        theirs = PluginCommands() if plugin_commands is None else plugin_commands
        with print_beside():
            theirs.add_all(get_registry(), commands)
        for failure in (*theirs.failed, *theirs.conflicts.values()):
            print(f"megaopt: warning: {failure}", file=sys.stderr)
    return parser


def _require_installed(parser: CommandParser, command: str) -> None:
    """Raise for a command of ours whose distribution is missing."""
    distribution = COMMANDS.get(command)
    if distribution is None or command in parser.commands:
        return
    absent = get_registry().absent_plugin(f"command {command!r}", command, distribution)
    raise absent or UnknownNameError(
        f"command {command!r} should come with {distribution}, but what is installed does not bring it: "
        f"pip install --upgrade {distribution}",
        name=command,
    )


def _version() -> str:
    try:
        return version("megaopt-core")
    except PackageNotFoundError:
        return "(not installed)"


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show the warning about a broken plugin as one line, not with a line of megaopt's own source."""
    with warnings.catch_warnings():
        # Torch tells of a missing numpy at its own import; no command of ours needs numpy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
        warnings.simplefilter("default", BrokenPluginWarning)
        as_usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, BrokenPluginWarning):
                print(f"megaopt: warning: {message}", file=sys.stderr)
            else:
                as_usual(message, category, *where, **options)

        warnings.showwarning = show  # what warnings documents for this; it is put back at the end
        yield
