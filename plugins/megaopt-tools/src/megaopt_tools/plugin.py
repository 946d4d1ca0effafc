"""Entry point of megaopt-tools: the commands that it adds to the program, and advice on names that others use."""

from __future__ import annotations

from collections.abc import Sequence

from megaopt_core import hookimpl
from megaopt_core.plugin_api import Commands

__all__ = ["megaopt_advice", "megaopt_api", "megaopt_commands"]

megaopt_api = "1"


@hookimpl
def megaopt_advice(name: str, known: Sequence[str], optimizer: str | None, kind: str) -> str | None:
    """Say what a setting of another library, or a removed argument, is called here."""
    from megaopt_tools.advice import advice_on_argument, advice_on_override, advice_on_setting

    if kind == "argument":
        return advice_on_argument(name) or None
    if kind == "override":
        return advice_on_override(name, known) or None
    return advice_on_setting(name, known, optimizer) or None


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `train`, `compare`, `suggest`, `schedule` and `completion`."""
    from megaopt_tools.commands import add_compare_command, add_train_command
    from megaopt_tools.completion_command import add_completion_command
    from megaopt_tools.schedule_command import add_schedule_command
    from megaopt_tools.schedule_png import offer_schedule_png
    from megaopt_tools.suggest_command import add_suggest_command

    add_train_command(commands)
    add_compare_command(commands)
    add_suggest_command(commands)
    add_schedule_command(commands)
    add_completion_command(commands)
    offer_schedule_png(commands)
