"""Entry point of megaopt-tools: the commands that it adds to megaopt."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction

from megaopt_core import hookimpl

__all__ = ["megaopt_api", "megaopt_commands"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add `train` and `compare`, and a picture to the core's `schedule`."""
    from megaopt_tools.compare_command import add_compare_command
    from megaopt_tools.schedule_png import offer_schedule_png
    from megaopt_tools.train_command import add_train_command

    add_train_command(commands)
    add_compare_command(commands)
    offer_schedule_png(commands)
