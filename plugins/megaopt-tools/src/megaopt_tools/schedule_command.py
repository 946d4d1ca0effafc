"""`megaopt schedule`: draw a schedule before training with it."""

from __future__ import annotations

from megaopt_core.plugin_api import Commands
from megaopt_tools.schedule_chart import add_schedule_arguments, run_schedule

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Add `megaopt schedule`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "draw learning rate and weight decay over the steps"
    parser = commands.add_parser("schedule", help=about, description=f"{about.capitalize()}.")
    add_schedule_arguments(parser)
    parser.set_defaults(run=run_schedule)
