"""Entry point of megaopt-testing: the command that it adds to megaopt."""

from __future__ import annotations

from megaopt_core.plugin_api import Commands, hookimpl

__all__ = ["megaopt_api", "megaopt_commands"]

megaopt_api = "1"


@hookimpl
def megaopt_commands(commands: Commands) -> None:
    """Add `check-plugin`."""
    from megaopt_testing import check_plugin_command

    check_plugin_command.add_command(commands)
