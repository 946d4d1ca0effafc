"""Entry point of megaopt-checkpoint: the commands that it adds to megaopt."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction

from megaopt_core.plugin_api import hookimpl

__all__ = ["megaopt_api", "megaopt_commands"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add `verify-checkpoint` and `convert`."""
    from megaopt_checkpoint import convert_command, verify_command

    verify_command.add_command(commands)
    convert_command.add_command(commands)
