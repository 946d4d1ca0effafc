"""Entry point of megaopt-tools: the commands that it adds to megaopt."""

from __future__ import annotations

from megaopt_core import hookimpl
from megaopt_core.plugin_api import Commands

__all__ = ["megaopt_api", "megaopt_commands"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `train`, `compare`, `schedule` and `completion`, and a page to the core's `explain`."""
    from megaopt_tools.commands import add_compare_command, add_train_command
    from megaopt_tools.completion_command import add_completion_command
    from megaopt_tools.explain_page import offer_page
    from megaopt_tools.schedule_command import add_schedule_command
    from megaopt_tools.schedule_png import offer_schedule_png

    add_train_command(commands)
    add_compare_command(commands)
    add_schedule_command(commands)
    add_completion_command(commands)
    offer_schedule_png(commands)
    offer_page(commands)
