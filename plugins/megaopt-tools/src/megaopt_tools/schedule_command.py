"""`megaopt schedule`: draw a schedule before training with it."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction

from megaopt_tools.schedule_chart import add_schedule_arguments, run_schedule

__all__ = ["add_command"]


def add_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add `megaopt schedule`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "draw learning rate and weight decay over the steps"
    parser = commands.add_parser("schedule", help=about, description=f"{about.capitalize()}.")
    add_schedule_arguments(parser)
    parser.set_defaults(run=run_schedule)
