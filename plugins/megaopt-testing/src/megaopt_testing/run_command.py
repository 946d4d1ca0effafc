"""Commands of plugins, run without the program `megaopt`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from megaopt_core.errors import MegaoptError
from megaopt_core.plugin_api import Commands

__all__ = ["run_command", "run_parsed"]


def run_command(add_commands: Callable[[Commands], object], arguments: Sequence[str]) -> int:
    """Run a plugin's command as the program `megaopt` does, without megaopt-tools.

    Args:
        add_commands: the plugin's `megaopt_commands`, or a function that adds one command.
        arguments: the command's name, and what it is given.

    Returns:
        The exit status: 2 after an error that megaopt explains in a line on the error stream.

    Raises:
        SystemExit: as argparse does after `--help` or for wrong arguments.

    Example:
        >>> def add(commands):
        ...     parser = commands.add_parser("greet")
        ...     parser.set_defaults(run=lambda args: print("hello"))
        >>> run_command(add, ["greet"])
        hello
        0
    """
    parser = ArgumentParser(prog="megaopt")
    add_commands(parser.add_subparsers(required=True))
    return run_parsed(parser.parse_args(arguments))


def run_parsed(parsed: Namespace) -> int:
    """Run a command whose arguments are right, and show what goes wrong in a line.

    Args:
        parsed: its arguments, with the function `run`.
    """
    try:
        return int(parsed.run(parsed) or 0)
    except MegaoptError as error:
        print(f"megaopt: error: {error}", file=sys.stderr)
        return 2
