"""Entry point of megaopt-tools: the commands that it adds to megaopt."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction

from megaopt_core.hookspecs import hookimpl
from megaopt_tools.schedule_png import offer_schedule_png

__all__ = ["megaopt_api", "megaopt_commands"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Draw the picture of `megaopt schedule --png FILE`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    offer_schedule_png(commands)
